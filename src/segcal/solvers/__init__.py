"""Solvers: they minimise functions and know nothing of calibration.

One evaluation of a function is a pass over all data, so the solvers count evaluations and never repeat one. The
solution says whether, and how well, the minimum was reached. ``minimise`` runs any of the step policies ``Newton``,
``SampledNewton`` and ``DampedNewton``; ``segcal.solvers.driver`` says when each is taken. ``newton_1d`` is for one
variable, ``adam`` for networks.
"""

from __future__ import annotations

from segcal.solvers.damped import DampedNewton
from segcal.solvers.driver import Policy, minimise
from segcal.solvers.newton import Newton, Problem
from segcal.solvers.sampled import SampledNewton
from segcal.solvers.scalar import newton_1d
from segcal.solvers.solution import Solution
from segcal.solvers.stochastic import Training, adam

__all__ = [
    "DampedNewton",
    "Newton",
    "Policy",
    "Problem",
    "SampledNewton",
    "Solution",
    "Training",
    "adam",
    "minimise",
    "newton_1d",
]
