"""The penalties of an exact expert fit: those the user asked for, and those that keep rare classes well-behaved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from segcal.fitting.expert_form import ExpertForm
from segcal.fitting.expert_problem import ExpertProblem
from segcal.fitting.first_pass import FirstPass
from segcal.fitting.penalty import Quadratic, Strengths, odir
from segcal.solvers import Newton
from segcal.types import FloatArray

# Voxels per parameter below which an expert is shrunk toward the map of all voxels.
_ENOUGH = 10
# Curvature of equal shifts of all classes. The softmax does not see them; without a penalty they would drift.
_SHIFT_CURVATURE = 1e-2
# Voxels that the map of all voxels is fitted to; as many as the start of the experts' own fit.
_POOLED_VOXELS = 100_000 // 3
# Class names that a note lists.
_LISTED = 20


def expert_penalties(
    form: ExpertForm, strengths: Strengths, first: FirstPass, centre: FloatArray
) -> tuple[list[Quadratic], list[str]]:
    """The penalty of each expert, and notes for the user; ``centre`` is temperature scaling as a theta."""
    experts, outputs, columns = form.shape
    free, basis = np.less(*form.bounds), form.basis
    size = int(free[0].sum()) if basis is None else basis.shape[1]
    voxels = first.predicted if experts > 1 else np.array([first.total])
    few = np.flatnonzero(voxels < _ENOUGH * size)
    absent = np.flatnonzero((first.true == 0) & (form.features != "gaps"))
    parents, notes = centre, []
    if len(few) and experts > 1:
        parents = _pooled(form, first)
        listed = _listed([f"{first.class_names[e]} ({voxels[e]:,})" for e in few])
        notes.append(f"predicted too rarely for an expert of its own, so shrunk toward the pooled map: {listed}")
    elif len(few):
        few_voxels = f"{first.total:,} voxels are few for {size} parameters"
        notes.append(f"{few_voxels}, so the map is shrunk toward temperature scaling")
    if len(absent):
        listed = _listed([first.class_names[k] for k in absent])
        notes.append(f"never true, so their part of the map is shrunk toward temperature scaling: {listed}")
    penalties = []
    for e, parent in enumerate(parents.reshape(experts, -1)):
        penalty = Quadratic(outputs * columns)
        if e in few:
            strength = _ENOUGH * size / max(int(voxels[e]), 1) - 1
            penalty.add(np.full(outputs * columns, strength / first.total), parent)
        if len(absent):
            never_true = np.zeros((outputs, columns))
            never_true[absent] = 1 / first.total
            penalty.add(never_true.ravel(), parent)
        if strengths.shrinkage:
            penalty.add((free[e] * (2 * strengths.shrinkage / free[e].sum() / experts)).ravel(), centre[e].ravel())
        if strengths.off_diagonal or strengths.bias:
            matrix = odir(form.num_classes, form.features, e, strengths.off_diagonal, strengths.bias) / experts
            penalty.add(matrix, form.identity[e].ravel())
        if not form.constrained and not strengths.shrinkage:
            penalty.add(_shift_penalty(form, strengths), centre[e].ravel())
        penalties.append(penalty)
    return penalties, notes


def _shift_penalty(form: ExpertForm, strengths: Strengths) -> FloatArray:
    """The matrix that penalises equal shifts of all classes, one for each column of theta that nothing else fixes."""
    _, outputs, columns = form.shape
    shifts = np.kron(np.ones((outputs, 1)), np.eye(columns))
    fixed = np.full(columns, strengths.off_diagonal > 0 or form.features == "own-logit")
    fixed[-1] = strengths.bias > 0
    basis = form.basis
    if basis is not None:  # a shift outside the basis would change the map
        outside = shifts - basis @ np.linalg.lstsq(basis, shifts, rcond=None)[0]
        fixed |= np.abs(outside).max(0) > 1e-9
    return np.asarray(_SHIFT_CURVATURE / outputs * (shifts * ~fixed) @ shifts.T)


def _pooled(form: ExpertForm, first: FirstPass) -> FloatArray:
    """One map fitted to all voxels, as the parent of every expert ``(E, K, J + 1)``."""
    pooled = replace(form, routed=False)
    start = pooled.scaled_identity(first.beta())
    penalty = Quadratic(start.size)
    penalty.add(np.full(start.size, _ENOUGH * start.size / first.total**2), start.ravel())
    problem = ExpertProblem(pooled, first, [penalty])
    found = problem.solve(Newton(problem.on(first.sample.thin(_POOLED_VOXELS))), start.ravel(), tolerance=1e-6)
    return np.clip(np.broadcast_to(problem.theta(found.value), form.shape), *form.bounds)


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
