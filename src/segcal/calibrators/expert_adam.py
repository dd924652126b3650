"""Expert maps as the papers train them: softplus for what must not be negative, Adam, early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from segcal.calibrators.base import FitData, Fitted
from segcal.calibrators.held_out import held_out_samples
from segcal.calibrators.penalty import odir
from segcal.kernels import ExpertMap, Features
from segcal.solvers import adam

if TYPE_CHECKING:
    from segcal.calibrators.experts import ExpertCalibrator

_VOXELS, _BATCH = 100_000, 20_000  # as many to validate on
_SMALL = 1e-6  # what softplus makes of the zeros of the identity


def fit_by_adam(calibrator: ExpertCalibrator, data: FitData) -> Fitted:
    """Set the calibrator to the state of the lowest validation NLL; there is no certificate of an optimum."""
    first, held_out, notes = samples = held_out_samples(data, _VOXELS)
    module = _Experts(calibrator, first.num_classes)
    sample = first.sample
    weights, held_out_weights = (
        torch.from_numpy(own.weights / own.weights.mean()).float() for own in (sample, held_out)
    )

    def loss(index: Tensor) -> Tensor:
        log_probs = module.map()(sample.logits[index]).log_softmax(1)
        losses = nn.functional.nll_loss(log_probs, sample.labels[index], reduction="none")
        return (weights[index] * losses).mean() + module.penalty()

    def batches(generator: torch.Generator) -> Iterator[Tensor]:
        return iter(torch.split(torch.randperm(len(sample), generator=generator), _BATCH))

    def nll(logits: Tensor, labels: Tensor, own: Tensor) -> float:
        log_probs = module.map()(logits).log_softmax(1)
        return float((own * nn.functional.nll_loss(log_probs, labels, reduction="none")).double().mean())

    training = adam(
        module,
        loss,
        batches,
        lambda: nll(held_out.logits, held_out.labels, held_out_weights),
        rate=calibrator.rate,
        patience=calibrator.patience,
        seed=data.seed,
    )
    with torch.no_grad():
        mapping = module.map()
        after = nll(sample.logits, sample.labels, weights)
        theta = torch.cat((mapping.weight, mapping.bias[:, :, None]), 2).double().numpy()
    identity = nn.functional.cross_entropy(sample.logits, sample.labels, reduction="none")
    before = float((weights * identity).double().mean())
    notes = [training.message, *notes]
    if calibrator.basis(first.num_classes) is None:  # Adam knows no upper bounds
        theta = np.clip(theta, *calibrator.bounds(first.num_classes, len(theta)))
    if after > before:
        notes.append("worse than the identity on the fit data, which is kept")
        theta, after = calibrator.identity(first.num_classes), before
    calibrator.set_parameters(theta)
    return Fitted(
        nll_before=before,
        nll_after=after,
        converged=training.converged,
        certificate=math.nan,
        iterations=training.iterations,
        voxels_used=samples.voxels,
        notes=notes,
    )


class _Experts(nn.Module):
    """Raw parameters, and the map that they stand for; the identity at the start."""

    free: Tensor
    floor: Tensor
    centre: Tensor
    basis: Tensor | None
    odir: Tensor

    def __init__(self, calibrator: ExpertCalibrator, num_classes: int) -> None:
        super().__init__()
        self.features: Features = calibrator.features
        self.constrained = calibrator.constrained
        self.strengths = calibrator.off_diagonal, calibrator.bias_penalty, calibrator.shrinkage
        identity = torch.from_numpy(calibrator.identity(num_classes)).float()
        basis = calibrator.basis(num_classes)
        lower, upper = calibrator.bounds(num_classes, len(identity))
        self.register_buffer("free", torch.from_numpy(lower < upper).float())
        self.register_buffer("floor", torch.from_numpy(np.maximum(lower, 0.0)).float())
        self.register_buffer("centre", identity)
        self.register_buffer("basis", None if basis is None else torch.from_numpy(basis).float())
        if self.constrained:  # softplus(raw) = identity, and _SMALL where that is zero
            raw = torch.log(torch.expm1(identity.clamp(min=_SMALL).double())).float()
        else:
            raw = torch.zeros(len(identity), identity[0].numel() if basis is None else basis.shape[1])
        self.raw = nn.Parameter(raw)
        penalties = [
            odir(num_classes, self.features, e, *self.strengths[:2]) / len(identity) for e in range(len(identity))
        ]
        self.register_buffer("odir", torch.from_numpy(np.stack(penalties)).float())

    def theta(self) -> Tensor:
        if self.constrained:
            return self.free * (self.floor + nn.functional.softplus(self.raw))
        moved = self.raw if self.basis is None else self.raw @ self.basis.T
        return self.centre + moved.view_as(self.centre)

    def map(self) -> ExpertMap:
        theta = self.theta()
        return ExpertMap(self.features, theta[:, :, :-1], theta[:, :, -1])

    def penalty(self) -> Tensor:
        if not any(self.strengths):
            return torch.zeros(())
        difference = (self.theta() - self.centre).flatten(1)
        own = 0.5 * torch.einsum("ep,epq,eq->", difference, self.odir, difference)
        return own + self.strengths[2] * (difference.square() * self.free.flatten(1)).sum() / self.free.sum()
