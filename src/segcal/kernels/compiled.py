"""How loops are compiled, and an exp and a log that the compiler can vectorise; ``cpu`` states their precision."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numba
import numpy as np

from segcal import scores

# All that compiled code depends on. Numba only checks a function's own file, and would reuse cached code after loops or
# constants of another file have changed.
_SOURCES = (*sorted(Path(__file__).parent.glob("*.py")), Path(scores.__file__))
_CONTENTS = (numba.__version__.encode(), *(path.read_bytes() for path in _SOURCES if path.exists()))
_STAMP = hashlib.sha256(b"".join(_CONTENTS)).hexdigest()


def _compiled(*fastmath: str) -> Any:
    # With numpy's error model a division has no branch for zero, which would prevent vectorised loops.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath)}

    def decorate(function: Any) -> Any:
        try:
            compiled = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no folder to cache compiled code in: every process compiles again
            return numba.njit(**options)(function)
        cache_file = getattr(getattr(compiled, "_cache", None), "_cache_file", None)  # None with NUMBA_DISABLE_JIT
        if cache_file is not None:
            # Numba reads no further in an index of another version, which may name types that no longer exist.
            cache_file._source_stamp = cache_file._version = _STAMP
        return compiled

    return decorate


# No reassociation: it would undo the two-step range reduction and the rounding trick of exp.
elementwise = _compiled("contract")
# Sums over a block may be split into vector lanes, which is also more accurate.
reduction = _compiled("contract", "reassoc", "nsz")
inlined = numba.njit(inline="always")

ZERO, ONE, MINUS_INF = np.float32(0), np.float32(1), np.float32(-np.inf)
#: Classes this far below the best are impossible.
DEEP = np.float32(scores.DEPTH)
#: Arguments of compiled functions that numba does not take for literals: for each of those it compiles another one.
FIRST, YES, NO = np.int64(0), np.bool_(True), np.bool_(False)
Index = np.uint32  # unsigned indices spare numba the test for negative ones

_LOG2E = np.float32(1 / math.log(2))
_LN2_HIGH = np.float32(0.693145751953125)  # exact in 14 bits, so n * _LN2_HIGH is exact
_LN2_LOW = np.float32(math.log(2) - 0.693145751953125)
_ROUND = np.float32(1.5 * 2**23)  # adding this leaves the nearest integer in the low bits of the mantissa
SMALLEST = np.float32(-87.0)  # exp(-87) = 1.6e-38 is the smallest normal number; below -87, exp is constant
# Minimax coefficients of exp(r) = 1 + r + r^2 (c2 + ...) on [-ln 2 / 2, ln 2 / 2].
_C2, _C3, _C4 = np.float32(0.49999993444134244), np.float32(0.16666520268703539), np.float32(0.041668384075685905)
_C5, _C6 = np.float32(0.00836875833600612), np.float32(0.001381510372868473)
_EXPONENT_ONE, _EXPONENT_SHIFT = np.int32(0x3F800000), np.int32(23)
_ROOT_HALF_BITS, _MANTISSA_BITS = np.int64(0x3FE6A09E667F3BCD), np.int64(52)
_LN2 = math.log(2)
# The same for float64: exp(-708) is the smallest normal number, n * _LN2_HIGH_64 is exact for n down to -1022, and the
# series up to r^13 / 13! is within 4e-18 of exp(r).
_SMALLEST_64, _ROUND_64 = -708.0, 1.5 * 2**52
_LN2_HIGH_64, _LN2_LOW_64 = float.fromhex("0x1.62e42fefa0000p-1"), float.fromhex("0x1.cf79abc9e3b39p-40")
_SERIES = tuple(1 / math.factorial(k) for k in range(13, -1, -1))
_EXPONENT_ONE_64, _EXPONENT_SHIFT_64 = np.int64(0x3FF0000000000000), np.int64(52)


@inlined
def exp(x):
    """exp of a float32 in [-inf, 0]; NaN stays NaN."""
    x = SMALLEST if x < SMALLEST else x
    shifted = np.float32(x * _LOG2E + _ROUND)
    n = shifted - _ROUND
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _C5 + r * _C6
    p = _C4 + r * p
    p = _C3 + r * p
    p = _C2 + r * p
    p = ONE + r * p
    p = ONE + r * p
    scale = np.int32((shifted.view(np.int32) << _EXPONENT_SHIFT) + _EXPONENT_ONE)
    return p * scale.view(np.float32)


@inlined
def exp64(x):
    """exp of a float64 in [-inf, 0], precise to its last digits; NaN stays NaN."""
    x = _SMALLEST_64 if x < _SMALLEST_64 else x
    shifted = x * (1 / _LN2) + _ROUND_64
    n = shifted - _ROUND_64
    r = x - n * _LN2_HIGH_64
    r = r - n * _LN2_LOW_64
    p = 0.0
    for term in _SERIES:
        p = term + r * p
    scale = np.int64((np.float64(shifted).view(np.int64) << _EXPONENT_SHIFT_64) + _EXPONENT_ONE_64)
    return p * scale.view(np.float64)


@inlined
def log1p(x):
    """log(1 + x) of a float64 >= 0; relative error below 2e-12 down to x = 0."""
    return _log(1.0 + x, x)


@inlined
def log(x):
    """log of a normal float64 > 0; relative error below 2e-12."""
    return _log(x, x - 1.0)


@inlined
def _log(x, above_one):
    """By the series of 2 artanh; ``above_one`` is x - 1, which serves where x is about one."""
    bits = np.float64(x).view(np.int64)
    exponent = (bits - _ROOT_HALF_BITS) >> _MANTISSA_BITS
    fraction = np.int64(bits - (exponent << _MANTISSA_BITS)).view(np.float64)
    above_one = above_one if exponent == 0 else fraction - 1.0
    t = above_one / (2.0 + above_one)
    s = t * t
    series = 1.0 + s * (1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9 + s * (1 / 11 + s * (1 / 13))))))
    return 2.0 * t * series + exponent * _LN2
