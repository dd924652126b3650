"""Solvers: they minimise functions and know nothing of calibration.

One evaluation of a function is a pass over all data, so the solvers count evaluations and never repeat one. The
solution says whether, and how well, the minimum was reached. ``minimise`` runs any of the step policies ``Newton``,
``SampledNewton`` and ``DampedNewton``; ``segcal.solvers.driver`` says when each is taken. ``limited_memory`` is for
variables so many that no Hessian fits into memory, ``newton_1d`` for one variable, ``newton_of_blocks`` for many small
problems on a GPU, ``adam`` for networks.
"""

from __future__ import annotations

from segcal.solvers.batched import newton_of_blocks as newton_of_blocks
from segcal.solvers.damped import DampedNewton as DampedNewton
from segcal.solvers.driver import Policy as Policy
from segcal.solvers.driver import minimise as minimise
from segcal.solvers.limited import limited_memory as limited_memory
from segcal.solvers.newton import Newton as Newton
from segcal.solvers.newton import Problem as Problem
from segcal.solvers.sampled import SampledNewton as SampledNewton
from segcal.solvers.scalar import newton_1d as newton_1d
from segcal.solvers.solution import Solution as Solution
from segcal.solvers.stochastic import Training as Training
from segcal.solvers.stochastic import adam as adam
