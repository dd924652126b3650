"""Limited-memory BFGS on a box: for so many variables that no Hessian fits into memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from segcal.solvers.damped import Whole
from segcal.solvers.solution import Box, Solution, refuse_start
from segcal.types import FloatArray

#: Steps over which f must fall by no more than ``gain`` in the end: single steps may gain little in between.
WINDOW = 10


def limited_memory(
    whole: Whole,
    start: FloatArray,
    lower: ArrayLike | None = None,
    upper: ArrayLike | None = None,
    *,
    gain: float = 1e-7,
    max_evaluations: int = 1000,
    memory: int = 20,
) -> Solution[FloatArray]:
    """The minimum of a smooth convex function by L-BFGS-B (Byrd, Lu, Nocedal and Zhu, SIAM J. Sci. Comput. 16, 1995).

    Args:
        whole: ``x -> (value, gradient)``. Variables should have similar curvatures.
        start: Where to begin; moved into the box.
        lower: Lower bounds: None, a number, or one per component.
        upper: Upper bounds, likewise.
        gain: Converged when the last ten steps have lowered f by no more than this.
        max_evaluations: The most evaluations of f.
        memory: Steps and changes of the gradient that are kept, each as long as x.

    Examples:
        >>> def whole(x):
        ...     return float(np.sum(np.exp(x) - 3 * x)), np.exp(x) - 3
        >>> solution = limited_memory(whole, np.array([5.0, -2.0]), upper=1.0)
        >>> solution.value.round(3), solution.converged, solution.active
        (array([1., 1.]), True, array([1, 1], dtype=int8))
    """
    box = Box(lower, upper, len(start))
    value, slope = whole(box.project(start))
    if not (np.isfinite(value) and np.isfinite(slope).all()):
        raise refuse_start(value)
    history, settled = [float(value)], False

    def after_step(intermediate_result: Any) -> None:
        nonlocal settled
        history.append(float(intermediate_result.fun))
        settled = len(history) > WINDOW and history[-1 - WINDOW] - history[-1] <= gain
        if settled:
            raise StopIteration

    from scipy.optimize import minimize  # takes a third of a second to import

    found = minimize(
        whole,
        box.project(start),
        jac=True,
        method="L-BFGS-B",
        bounds=np.stack((box.lower, box.upper), 1),
        callback=after_step,
        options={"maxcor": memory, "maxfun": max_evaluations, "maxiter": max_evaluations, "ftol": 0.0, "gtol": 0.0},
    )
    x = box.project(found.x)
    certificate, active = box.certificate(x, found.jac), box.active(x)
    # A line search that fails has met the rounding of f: there is nothing left that could be gained.
    converged = settled or found.nfev < max_evaluations
    outcome = "converged" if converged else "not converged, as the evaluations ran out"
    message = f"{outcome}: projected gradient {certificate:.1e}, {np.count_nonzero(active)} bounds active"
    return Solution(
        value=x,
        objective=float(found.fun),
        converged=converged,
        certificate=certificate,
        iterations=len(history) - 1,
        evaluations=int(found.nfev) + 1,
        message=message,
        active=active,
        flat=False,
        history=tuple(history),
    )
