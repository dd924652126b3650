"""The networks that judge predictions by their neighbourhood: one for each fold of cases, alike in shape."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from segcal.kernels import trust_maps
from segcal.parallel.threads import torch_threads

#: Units of both hidden layers.
HIDDEN = 24
# Standardised features are cut off here, so that an odd image is no stranger than the oddest that was fitted to.
_WIDEST = 4.0
#: The smallest standard deviation that a feature is divided by.
SMALLEST_SCALE = 1e-3
# Training: epochs, voxels in a batch of each network, peak learning rate of AdamW, weight decay, dropout.
_EPOCHS, _BATCH, _RATE, _DECAY, _DROPOUT = 12, 4096, 4e-3, 1e-3, 0.1
# Threads of the CPU that train. Steps are short; with sixteen, beside other work, a fit to 24 images took 42 minutes of
# processor time. Other numbers were not compared.
_THREADS = 2


class TrustNetwork(nn.Module):
    """Corrections ``(F, n)`` of the log-odds that predictions are right, by F networks of two hidden layers.

    The predicted class chooses the bias of the first layer, which is what one-hot features would do.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, features: int, num_classes: int, folds: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        self.first = nn.Parameter(torch.zeros(folds, features, HIDDEN))
        self.classes = nn.Parameter(torch.zeros(folds, num_classes, HIDDEN))
        self.second = nn.Parameter(torch.zeros(folds, HIDDEN, HIDDEN))
        self.second_bias = nn.Parameter(torch.zeros(folds, 1, HIDDEN))
        self.last = nn.Parameter(torch.zeros(folds, HIDDEN, 1))

    def reset(self, seed: int) -> None:
        """Random weights; the corrections are zero at first."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in (self.first, self.second):
                weight.copy_(torch.randn(weight.shape, generator=generator) * (2 / weight.shape[1]) ** 0.5)

    def forward(self, features: Tensor, winner: Tensor, *, dropout: Tensor | None = None) -> Tensor:
        """Of ``features (n, J)``, or ``(F, n, J)`` with a batch for each network, and ``winner (n,)`` or ``(F, n)``."""
        inputs, device = features.shape[-1], features.device  # what is missing is at its mean
        mean, scale = self.mean[:inputs].to(device), self.scale[:inputs].to(device)
        x = ((features - mean) / scale).clamp(-_WIDEST, _WIDEST)
        folds = torch.arange(len(self.classes), device=device)[:, None]
        hidden = (x @ self.first[:, :inputs].to(device) + self.classes.to(device)[folds, winner]).relu()
        if dropout is not None:
            hidden = hidden * dropout
        hidden = (hidden @ self.second.to(device) + self.second_bias.to(device)).relu()
        return (hidden @ self.last.to(device)).squeeze(-1)

    def correction(self, features: Tensor, winner: Tensor, fold: int | None = None) -> Tensor:
        """The mean over the networks, or that of one, ``(N, *spatial)`` for ``features (N, J, *spatial)``."""
        found: Tensor
        if (kernels := trust_maps(features)) is not None:
            own = slice(None) if fold is None else slice(fold, fold + 1)
            weights = (self.first, self.classes, self.second, self.second_bias, self.last)
            found = kernels.correct(features, winner, (self.mean, self.scale, *(w[own] for w in weights)), _WIDEST)
            return found
        rows = features.movedim(1, -1).reshape(-1, features.shape[1]).to(self.mean.dtype)
        found = self(rows, winner.flatten())
        return (found.mean(0) if fold is None else found[fold]).view(winner.shape)


def network_shapes(features: int, num_classes: int, folds: int) -> dict[str, tuple[int, ...]]:
    """The shapes of its tensors, found without allocating."""
    with torch.device("meta"):
        return {name: tuple(own.shape) for name, own in TrustNetwork(features, num_classes, folds).state_dict().items()}


class Sample(NamedTuple):
    """Voxels to train on: ``features (n, J)``, and of each ``(n,)`` the winner, the log-odds that are corrected,
    whether the prediction is right (0 or 1), how many voxels it stands for, and the fold of its case."""

    features: Tensor
    winner: Tensor
    offset: Tensor
    right: Tensor
    weights: Tensor
    folds: Tensor


def train(network: TrustNetwork, sample: Sample, offsets: Tensor, seed: int) -> None:
    """Fit network f to all voxels but those of fold f, by weighted binary cross-entropy; they take steps together.

    ``offsets (F, n)`` are the log-odds that each network adds to. Without voxels in more than one fold there is nothing
    to fit to, and the corrections stay zero.
    """
    count = len(network.last)
    folds = sample.folds.cpu()
    own = [(folds != fold).nonzero().squeeze(1) for fold in range(count)]
    size = min(_BATCH, min(len(part) for part in own))
    if not size:
        return
    device, inputs = sample.features.device, sample.features.shape[1]
    network.to(device).reset(seed)
    network.requires_grad_(True)
    average = sample.weights / sample.weights.sum()
    mean = average @ sample.features
    network.mean[:inputs] = mean
    network.scale[:inputs] = (average @ (sample.features - mean).square()).sqrt().clamp_(min=SMALLEST_SCALE)
    generator = torch.Generator().manual_seed(seed)
    # a GPU draws its own: those of the CPU would take longer than the step
    noise = generator if device.type == "cpu" else torch.Generator(device).manual_seed(seed)
    steps = -(-max(len(part) for part in own) // size)
    turns = torch.arange(steps * size)
    optimiser = torch.optim.AdamW(network.parameters(), _RATE, weight_decay=_DECAY, fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, _RATE, total_steps=_EPOCHS * steps)
    weights = sample.weights / sample.weights.mean()
    with torch.enable_grad(), torch_threads(min(_THREADS, torch.get_num_threads())):
        for _ in range(_EPOCHS):
            orders = [part[torch.randperm(len(part), generator=generator)] for part in own]
            chosen = torch.stack([order[turns % len(order)] for order in orders]).to(device)
            for index in torch.split(chosen, size, 1):
                kept = (torch.rand(count, size, HIDDEN, generator=noise, device=device) >= _DROPOUT) / (1 - _DROPOUT)
                odds = offsets.gather(1, index) + network(sample.features[index], sample.winner[index], dropout=kept)
                losses = nn.functional.binary_cross_entropy_with_logits(odds, sample.right[index], reduction="none")
                optimiser.zero_grad()
                (weights[index] * losses).mean(1).sum().backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                schedule.step()
    network.requires_grad_(False).cpu()


def held_out_loss(network: TrustNetwork, sample: Sample, offsets: Tensor) -> float:
    """Weighted binary cross-entropy of the sample, each voxel by the network that did not see its case."""
    with torch.no_grad():
        odds = (offsets + network(sample.features, sample.winner)).gather(0, sample.folds[None])[0]
    losses = nn.functional.binary_cross_entropy_with_logits(odds, sample.right, reduction="none")
    return float(sample.weights.double() @ losses.double() / sample.weights.double().sum())
