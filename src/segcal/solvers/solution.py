"""What every solver of this package returns, and the box all of them stay in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from segcal.errors import InputError
from segcal.types import FloatArray

Value = TypeVar("Value", float, FloatArray)

# A function is flat where a step leaves more than this share of the slope, and is longer than this share of 1 + |x|.
# Near a minimum a Newton step leaves next to nothing of the slope; where f falls forever like exp(-x) it leaves 1/e.
_FLAT_SLOPE, _FLAT_STEP = 0.1, 1e-3


@dataclass(frozen=True, eq=False)
class Solution(Generic[Value]):
    """The outcome of a minimisation of f over the box l <= x <= u.

    The certificate is the infinity norm of the projected gradient, ``max_i |clip(x_i - g_i, l_i, u_i) - x_i|``: zero
    exactly at a minimum of a convex f, in the units of f per unit of x. Let f be a mean, not a sum, so that a tolerance
    means the same for any number of data.

    Attributes:
        value: The minimiser found: a float in one dimension, else a float64 array.
        objective: f there.
        converged: Whether the certificate is within the tolerance (or the value is right to the last bit); where not,
            ``message`` says why.
        certificate: The norm above.
        iterations: Steps taken.
        evaluations: Calls of f, the one at the start and those at refused trial points included.
        message: The outcome in words.
        active: int8 of the shape of ``value``: -1 at the lower bound, 1 at the upper, 0 in between and where the bounds
            are equal.
        flat: Whether f is constant or falls forever along some direction: ``objective`` is then as good as it gets, but
            ``value`` is not determined (it may lie at infinity).
        history: The objective at the start and after each step.

    Examples:
        >>> from segcal.solvers import newton_1d
        >>> solution = newton_1d(lambda x: ((x - 3.0) ** 2, 2.0 * (x - 3.0), 2.0), start=0.0, bounds=(-10.0, 10.0))
        >>> solution.value, solution.certificate, solution.evaluations
        (3.0, 0.0, 2)
        >>> solution.message
        'converged: derivative 0.0e+00'
    """

    value: Value
    objective: float
    converged: bool
    certificate: float
    iterations: int
    evaluations: int
    message: str
    active: NDArray[np.int8]
    flat: bool
    history: tuple[float, ...]


class Box:
    """Bounds ``l <= x <= u`` of a vector; None means unbounded and a number holds for all components.

    Examples:
        >>> box = Box(0.0, None, 3)
        >>> x, gradient = np.array([0.0, 0.0, 2.0]), np.array([1.0, -1.0, 0.5])
        >>> box.certificate(x, gradient)
        1.0
        >>> box.active(x)
        array([-1, -1,  0], dtype=int8)
    """

    def __init__(self, lower: ArrayLike | None, upper: ArrayLike | None, size: int) -> None:
        self.lower = _bound("lower", -np.inf if lower is None else lower, size)
        self.upper = _bound("upper", np.inf if upper is None else upper, size)
        crossed = np.flatnonzero(self.lower > self.upper)
        if crossed.size:
            places = ", ".join(map(str, crossed[:3])) + (", ..." if crossed.size > 3 else "")
            raise InputError(f"lower exceeds upper at {places}", expected="lower <= upper everywhere")

    def __getitem__(self, index: Any) -> Box:
        lower, upper = self.lower[index], self.upper[index]
        return Box(lower, upper, lower.size)

    def project(self, x: FloatArray) -> FloatArray:
        """The point of the box nearest to x."""
        return np.clip(x, self.lower, self.upper)

    def certificate(self, x: FloatArray, gradient: FloatArray) -> float:
        """The infinity norm of ``clip(x - g, l, u) - x``, computed without cancellation."""
        return float(np.abs(np.clip(-gradient, self.lower - x, self.upper - x)).max(initial=0.0))

    def active(self, x: FloatArray) -> NDArray[np.int8]:
        """-1 where x is at the lower bound, 1 at the upper, 0 in between and where the bounds are equal."""
        return (x >= self.upper).astype(np.int8) - (x <= self.lower).astype(np.int8)


def falls_on(step: FloatArray, x: FloatArray, left: float) -> bool:
    """Whether f seems to fall forever: the step from x is long, and a step ``left`` much of its slope."""
    longest, size = (float(np.abs(vector).max(initial=0.0)) for vector in (step, x))
    return left > _FLAT_SLOPE and longest > _FLAT_STEP * (1 + size)


def refuse_start(value: object) -> InputError:
    """The error for a function that is not finite where the solver starts."""
    return InputError(
        f"the function or a derivative is not finite at the start (its value is {value})",
        expected="finite numbers",
        fix="look for NaN or infinite data, or start elsewhere",
    )


def _bound(name: str, bound: ArrayLike, size: int) -> FloatArray:
    values = np.asarray(bound, np.float64)
    if values.shape not in ((), (size,)) or np.isnan(values).any():
        raise InputError(
            f"{name} has shape {values.shape} and {np.isnan(values).sum()} NaN",
            expected=f"None, a number or {size} numbers",
        )
    return np.broadcast_to(values, (size,))
