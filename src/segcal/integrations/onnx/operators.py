"""Operations of torch that ONNX lacks, or that PyTorch's exporter writes with a loss of digits.

Each takes and returns values of a graph that is being built. What accumulates along an axis, of classes or of a table,
knows its length: a scan takes steps that double, and a search halves its range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

try:
    from onnxscript import opset18 as op
except ImportError:  # ``export`` names the extra
    op = None

# In float32, x (1 - this) rounds to the next number below a positive x, and x (1 + this) to that below a negative one:
# it is a little more than half of the distance between neighbours at 1 (Rump, Ogita and Oishi 2009).
_NEXT = 2.0**-24 * (1 + 2.0**-23)
_INT64 = 7  # ONNX's number of this type

Value = Any


def log1p(x: Value) -> Value:
    """``log(1 + x)`` of a finite x: what rounding ``1 + x`` loses cancels in ``log(1 + x) x / ((1 + x) - 1)``."""
    one = op.CastLike(1.0, x)
    rounded = op.Add(x, one)
    tiny, change = op.Equal(rounded, one), op.Sub(rounded, one)
    return op.Where(tiny, x, op.Mul(op.Log(rounded), op.Div(x, op.Where(tiny, one, change))))


def log_sigmoid(x: Value) -> Value:
    """``min(x, 0) - log1p(exp(-|x|))``."""
    return op.Sub(op.Min(x, op.CastLike(0.0, x)), log1p(op.Exp(op.Neg(op.Abs(x)))))


def softplus(x: Value) -> Value:
    """``max(x, 0) + log1p(exp(-|x|))``."""
    return op.Add(op.Max(x, op.CastLike(0.0, x)), log1p(op.Exp(op.Neg(op.Abs(x)))))


def logaddexp(x: Value, y: Value) -> Value:
    """``log(exp(x) + exp(y))``, from the larger one; -inf if both are."""
    high, low = op.Max(x, y), op.Min(x, y)
    impossible = op.IsInf(high)
    gap = op.Where(impossible, op.CastLike(0.0, high), op.Sub(low, high))
    return op.Where(impossible, high, op.Add(high, log1p(op.Exp(gap))))


def nextafter(x: Value, _: Value) -> Value:
    """The next smaller float32 number, which is what segcal asks for, and never near zero."""
    return op.Sub(x, op.Mul(op.Abs(x), _NEXT))


def sort(x: Value, *, stable: bool = True, dim: int = -1, descending: bool = False) -> tuple[Value, Value]:
    """Of equal values, ONNX's TopK has the one with the lower index first: it is stable."""
    values, order = op.TopK(x, [x.shape[dim]], axis=dim, largest=int(descending), sorted=1)
    return values, order


def logcumsumexp(x: Value, dim: int) -> Value:
    """Running ``logsumexp``; without a common maximum, so that no small term is lost."""
    return _scan(x, dim, logaddexp, -math.inf)


def cummax(x: Value, dim: int) -> tuple[Value, Value]:
    """Running maxima; segcal does not use their indices, which are not found."""
    found = _scan(x, dim, op.Max, -math.inf)
    return found, op.Cast(found, to=_INT64)


def cummin(x: Value, dim: int) -> tuple[Value, Value]:
    """Running minima; segcal does not use their indices, which are not found."""
    found = _scan(x, dim, op.Min, math.inf)
    return found, op.Cast(found, to=_INT64)


def _scan(x: Value, dim: int, combine: Callable[[Value, Value], Value], neutral: float) -> Value:
    step, length = 1, x.shape[dim]
    while step < length:
        shifted = op.Pad(x, [step, 0], op.CastLike(neutral, x), [dim])
        x, step = combine(x, op.Slice(shifted, [0], [length], [dim])), 2 * step
    return x


def searchsorted(edges: Value, x: Value) -> Value:
    """How many of the rising ``edges (n,)`` are below each x; or of ``edges (rows, n)``, for ``x (rows, m)``."""
    length = edges.shape[-1]
    found = op.Expand([0], op.Shape(x))
    if not length:
        return found
    table, step = op.Reshape(edges, [-1]), 1 << (length.bit_length() - 1)
    starts = range(0, math.prod(edges.shape), length)
    row = op.Reshape(op.Constant(value_ints=list(starts)), [-1, 1]) if len(edges.shape) > 1 else 0
    while step:
        tried = op.Add(found, step)
        last = op.Min(op.Sub(tried, 1), op.Constant(value_int=length - 1))
        below = op.Less(op.Gather(table, op.Add(last, row)), x)
        found = op.Where(op.And(below, op.LessOrEqual(tried, length)), tried, found)
        step //= 2
    return found


_ATEN = torch.ops.aten
#: What PyTorch's exporter is to write for each operation.
TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    _ATEN.log1p.default: log1p,
    _ATEN.log_sigmoid.default: log_sigmoid,
    _ATEN.softplus.default: softplus,
    _ATEN.logaddexp.default: logaddexp,
    _ATEN.nextafter.default: nextafter,
    _ATEN.sort.stable: sort,
    _ATEN.logcumsumexp.default: logcumsumexp,
    _ATEN.cummax.default: cummax,
    _ATEN.cummin.default: cummin,
    _ATEN.searchsorted.Tensor: searchsorted,
}
