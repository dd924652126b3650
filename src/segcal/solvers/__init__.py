"""Solvers: they minimise functions and know nothing of calibration.

Functions are opaque and expensive (one evaluation is a pass over all data), so the solvers count evaluations and never
ask twice at the same point. What they return says whether, and how well, the minimum was reached.
"""

from __future__ import annotations

from segcal.solvers.damped import damped_newton
from segcal.solvers.lbfgs import projected_lbfgs
from segcal.solvers.newton import Hessian, Problem, projected_newton
from segcal.solvers.sampled import Whole, sampled_newton
from segcal.solvers.scalar import newton_1d
from segcal.solvers.solution import Solution
from segcal.solvers.stochastic import Epoch, Training, adam

__all__ = [
    "Epoch",
    "Hessian",
    "Problem",
    "Solution",
    "Training",
    "Whole",
    "adam",
    "damped_newton",
    "newton_1d",
    "projected_lbfgs",
    "projected_newton",
    "sampled_newton",
]
