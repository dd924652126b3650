"""Expert maps as the papers train them: softplus for non-negative parameters, Adam, early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn

from segcal.fitting.data import FitData, Fitted
from segcal.fitting.expert_form import ExpertForm, Strengths
from segcal.fitting.first_pass import held_out_samples
from segcal.fitting.sampling import VoxelSample
from segcal.kernels import ExpertMap
from segcal.solvers import adam
from segcal.types import FloatArray

# Voxels to train on (and as many to validate on), and voxels in a batch.
_VOXELS, _BATCH = 100_000, 20_000
# Where the identity is zero, softplus starts at this.
_SMALL = 1e-6


def fit_by_adam(
    form: ExpertForm, strengths: Strengths, data: FitData, learning_rate: float, patience: int
) -> tuple[FloatArray, Fitted]:
    """The theta of the lowest validation NLL, and the report; there is no certificate of an optimum."""
    samples = held_out_samples(data, _VOXELS)
    sample = samples.train
    module = _Experts(form, strengths)
    weights = torch.from_numpy(sample.weights / sample.weights.mean()).float()

    def loss(index: Tensor) -> Tensor:
        log_probs = module.map()(sample.logits[index]).log_softmax(1)
        losses = nn.functional.nll_loss(log_probs, sample.labels[index], reduction="none")
        return (weights[index] * losses).mean() + module.penalty()

    def batches(generator: torch.Generator) -> Iterable[Tensor]:
        return torch.split(torch.randperm(len(sample), generator=generator), _BATCH)

    def validation() -> float:
        return _nll([samples.held_out], module.map())

    training = adam(module, loss, batches, validation, learning_rate=learning_rate, patience=patience, seed=data.seed)
    with torch.no_grad():
        before, after = _nll(samples.whole), _nll(samples.whole, module.map())
        theta = module.theta().double().numpy()
    notes = [training.message, *samples.notes]
    if form.basis is None:  # Adam does not know the upper bounds
        theta = np.clip(theta, *form.bounds)
    if after > before:
        notes.append("worse than the identity on the fit data, so the identity is kept")
        theta, after = form.identity, before
    return theta, Fitted(before, after, training.converged, math.nan, training.iterations, samples.voxels, notes)


def _nll(samples: Sequence[VoxelSample], mapping: ExpertMap | None = None) -> float:
    """The mean NLL of the samples, mapped or as they are."""
    total = 0.0
    for sample in samples:
        scores = sample.logits if mapping is None else mapping(sample.logits)
        losses = nn.functional.cross_entropy(scores, sample.labels, reduction="none")
        total += float(torch.from_numpy(sample.weights) @ losses.double())
    return total / float(sum(sample.weights.sum() for sample in samples))


class _Experts(nn.Module):
    """Raw parameters and the map that they define; the identity at the start."""

    def __init__(self, form: ExpertForm, strengths: Strengths) -> None:
        super().__init__()
        self.form, self.strengths = form, strengths
        self.centre = torch.from_numpy(form.identity).float()
        lower, upper = (torch.from_numpy(bound) for bound in form.bounds)
        self.free, self.floor = (lower < upper).float(), lower.clamp(min=0).float()
        self.basis = None if form.basis is None else _sparse(form.basis)
        experts = len(self.centre)
        penalised = strengths.off_diagonal or strengths.bias
        self.odir = [_sparse(form.odir(e, *strengths[:2])) for e in range(experts)] if penalised else []
        if form.constrained:  # so that softplus(raw) is the identity
            raw = torch.log(torch.expm1(self.centre.clamp(min=_SMALL).double())).float()
        else:
            raw = torch.zeros(experts, self.centre[0].numel() if self.basis is None else self.basis.shape[1])
        self.raw = nn.Parameter(raw)

    def theta(self) -> Tensor:
        if self.form.constrained:
            return self.free * (self.floor + nn.functional.softplus(self.raw))
        moved = self.raw if self.basis is None else torch.sparse.mm(self.basis, self.raw.T).T
        return self.centre + moved.view_as(self.centre)

    def map(self) -> ExpertMap:
        theta = self.theta()
        return ExpertMap(self.form.features, theta[:, :, :-1], theta[:, :, -1])

    def penalty(self) -> Tensor:
        if not any(self.strengths):
            return torch.zeros(())
        difference = (self.theta() - self.centre).flatten(1)
        roots = [torch.mv(root, part) for root, part in zip(self.odir, difference, strict=False)]
        own = sum((0.5 * root.square().sum() / len(self.centre) for root in roots), torch.zeros(()))
        return own + self.strengths.shrinkage * (difference.square() * self.free.flatten(1)).sum() / self.free.sum()


def _sparse(matrix: csr_array) -> Tensor:
    entries = matrix.tocoo()
    places, values = torch.from_numpy(np.stack(entries.coords)), torch.from_numpy(entries.data).float()
    return torch.sparse_coo_tensor(places, values, entries.shape, check_invariants=True).coalesce()
