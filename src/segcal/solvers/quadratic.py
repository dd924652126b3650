"""Quadratic functions on a box: the model whose minimum the Newton policies aim at."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dpotrf, dpotrs

from segcal.solvers.solution import Box
from segcal.types import FloatArray

# Where curvatures are 1: far too small to matter, and far above the rounding that stops a Cholesky factorisation.
_RIDGE = 1e-12
_FLOOR = 1e-16  # relative to the largest curvature: a component with less is measured as if it had this
_MAX_STEPS = 500
_DECREASE = 1e-4  # share of the decrease predicted by the slope that a clipped step must reach
_ROUNDING = 1e-12  # relative change of the model that may be rounding
_LARGE = 64  # variables from which on compiled loops are worth it
_LONGER = 1.02  # square of a length, relative to another's, that is more than rounding


def minimise_quadratic(
    hessian: FloatArray, gradient: FloatArray, point: FloatArray, box: Box, noise: float = 0.0
) -> FloatArray:
    """The t in the box with the least ``g.(t - x) + (t - x)'H(t - x) / 2``, x being ``point`` and H semidefinite.

    Components held at a bound stay there. The others take their own Newton step, clipped to the box if that lowers the
    model (Bertsekas, Projected Newton methods for optimization problems with simple constraints, SIAM J. Control Optim.
    20, 1982), and cut at the first bound in its way if not. A component that meets a bound is held from then on. A step
    that meets none leads to the minimum over the free components; then those held components are released whose
    derivative points into the box. Every such round lowers the model, so it ends at the exact minimum; after five
    hundred steps the result is merely lower than at x.

    Components are measured in units in which their curvature is 1, so that the user's units do not matter. A ridge of
    1e-12 (Levenberg, Marquardt) makes a singular H invertible; one refinement undoes its effect on the other
    directions. Along directions without curvature the step is the gradient's rounding divided by the ridge. It is left
    out, which gives the step of least norm, unless it predicts a decrease of more than ``noise``.

    Examples:
        >>> hessian, gradient = np.array([[2.0, 1.0], [1.0, 2.0]]), np.array([-2.0, 1.0])
        >>> minimise_quadratic(hessian, gradient, np.zeros(2), Box(None, None, 2)).round(6)
        array([ 1.666667, -1.333333])
        >>> minimise_quadratic(hessian, gradient, np.zeros(2), Box(0.0, None, 2)).round(6)
        array([1., 0.])
        >>> minimise_quadratic(np.ones((2, 2)), np.array([-2.0, -2.0]), np.zeros(2), Box(None, None, 2)).round(6)
        array([1., 1.])
    """
    largest = float(hessian.diagonal().max(initial=0.0))
    unit = 1 / np.sqrt(np.maximum(hessian.diagonal(), _FLOOR * largest)) if largest > 0 else np.ones_like(point)
    ridge = _RIDGE if largest > 0 else 0.0
    # From here on in those units, and relative to x.
    lower, upper = (box.lower - point) / unit, (box.upper - point) / unit
    slope = gradient * unit
    loops = _loops() if len(point) >= _LARGE else None
    if loops is None:
        target = _minimise(hessian, slope, lower, upper, unit, ridge, noise)
    else:
        limits = _MAX_STEPS, _DECREASE, _ROUNDING, _LONGER
        given = np.ascontiguousarray(hessian)  # numba compiles the loops again for another order
        target = loops.minimise(given, slope, lower, upper, unit, ridge, noise, *limits)
    at_bound = np.where(target <= lower, box.lower, np.where(target >= upper, box.upper, point + unit * target))
    return np.asarray(np.minimum(np.maximum(at_bound, box.lower), box.upper))


def model_minimum(hessian: FloatArray, gradient: FloatArray, point: FloatArray, box: Box) -> tuple[FloatArray, float]:
    """The minimum of ``minimise_quadratic``, and how much lower the model is there."""
    target = minimise_quadratic(hessian, gradient, point, box)
    step = target - point
    return target, -_change_of_model(gradient, step, hessian @ step)


def _minimise(
    hessian: FloatArray, slope: FloatArray, lower: FloatArray, upper: FloatArray, unit: FloatArray, ridge: float,
    noise: float,
) -> FloatArray:  # fmt: skip
    """``minimise_quadratic`` from 0, in units in which the curvatures are 1; ``quadratic_loops`` is its twin."""
    fixed, target, model = lower == upper, np.zeros_like(slope), 0.0
    held, reached = _outward(target, slope, lower, upper) | fixed, np.inf
    for _ in range(_MAX_STEPS):
        free = (~held).nonzero()[0]
        if len(free):
            # Only free components move, and most are held: the other rows of H are not needed.
            rows, low, high = hessian[free] * unit * unit[free, None], lower[free], upper[free]
            here, own_slope = target[free], slope[free]
            newton, ridge = _newton_step(rows[:, free], own_slope, ridge, noise)
            wanted = here + newton
            trial = np.minimum(np.maximum(wanted, low), high)
            met = trial != wanted
            clipped = bool(met.any())
            change = (trial - here) @ rows
            fall = _change_of_model(own_slope, trial - here, change[free])
            if clipped and fall > _DECREASE * float(own_slope @ (trial - here)):
                trial, met = _up_to_the_first_bound(here, newton, low, high)
                change = (trial - here) @ rows
                fall = _change_of_model(own_slope, trial - here, change[free])
            target[free], slope, model = trial, slope + change, model + fall
            if clipped:
                held[free] = met
                continue
        released = held & ~(_outward(target, slope, lower, upper) | fixed)
        if not released.any() or reached - model <= _ROUNDING * abs(model):
            break
        held, reached = held & ~released, model
    return target


def _loops() -> ModuleType | None:
    """``segcal.solvers.quadratic_loops``; None without numba, which has no wheel for every platform."""
    try:
        from segcal.solvers import quadratic_loops
    except ImportError:
        return None
    return quadratic_loops


def _outward(x: FloatArray, slope: FloatArray, lower: FloatArray, upper: FloatArray) -> NDArray[np.bool_]:
    """Whether a component is at a bound, and its derivative does not point into the box."""
    return np.asarray((x <= lower) & (slope >= 0) | (x >= upper) & (slope <= 0))


def _change_of_model(slope: FloatArray, step: FloatArray, change: FloatArray) -> float:
    """How much a step changes the model, ``change`` being that of its slope."""
    return float((slope + 0.5 * change) @ step)


def _up_to_the_first_bound(
    x: FloatArray, step: FloatArray, lower: FloatArray, upper: FloatArray
) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Where a step leaves the box, and which components do."""
    bound = np.where(step > 0, upper, lower)
    shares = np.divide(bound - x, step, out=np.full_like(x, np.inf), where=step != 0)
    met = shares <= shares.min()
    return np.where(met, bound, np.minimum(np.maximum(x + shares.min() * step, lower), upper)), met


def _newton_step(hessian: FloatArray, slope: FloatArray, ridge: float, noise: float) -> tuple[FloatArray, float]:
    """The step and the ridge it took, which is higher where rounding has made H indefinite."""
    if ridge == 0:  # without curvature no length of step is right: take 1 for the steepest component
        return -slope / (np.abs(slope).max() or 1.0), ridge
    while True:
        regular = hessian.copy(order="F")
        regular.T.flat[:: len(slope) + 1] += ridge
        factor, problem = dpotrf(regular, lower=True, clean=False, overwrite_a=True)
        if problem:
            ridge *= 100.0
            continue
        step = -_solved(factor, slope)
        step -= _solved(factor, slope + hessian @ step)
        # (ridge (H + ridge)^-1)^2 keeps the part of the step in the null space of H, and nothing else.
        null = ridge**2 * _solved(factor, _solved(factor, step))
        if not null @ null > _LONGER * (step @ step):  # longer only where H + ridge is tiny
            return (step - null if -slope @ null <= noise else step), ridge
        ridge *= 100.0


def _solved(factor: FloatArray, right: FloatArray) -> FloatArray:
    """LL' x = right. These systems are small: SciPy's checks would take longer than LAPACK."""
    found, _ = dpotrs(factor, right, lower=True)
    return np.asarray(found)
