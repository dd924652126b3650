"""Training the network of local temperature scaling on crops of the cases, on the device of the cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.calibrators.local_crops import IGNORED, Crops, CropSource, crop_sides
from segcal.calibrators.local_network import (
    Inputs,
    Prefix,
    TemperatureTree,
    exact_convolutions,
    network_inputs,
    temperature,
)
from segcal.fitting.data import FitData, Fitted
from segcal.fitting.measured import compared, mean_loss
from segcal.solvers import adam

# Epochs without improvement before training stops.
_PATIENCE = 12
# The learning rate is reduced for kernels with more inputs than this.
_INPUTS = 100
# Impossible classes get this logit, relative to the best: -inf would make the gradient by beta NaN.
_DEEPEST = -1e6


@dataclass(frozen=True)
class Recipe:
    """How to train: the network's inputs, whether an image has one temperature, and the options of Adam."""

    inputs: Inputs
    per_image: bool
    epochs: int
    learning_rate: float
    weight_decay: float


def fit_network(network: TemperatureTree, beta: float, data: FitData, recipe: Recipe) -> Fitted:
    """Train the network in place; it ends in the state of the lowest validation NLL.

    The report holds the validation NLL, before with one temperature and after with the network. Its certificate is the
    norm of the gradient of the mean loss at the end.

    ``data.validation`` is None if there is only one case, of which a part is held out.

    The loss is the mean NLL of ``S(beta z / factor)``, where the factor is the network's output. Adam's first steps
    move every weight by the learning rate, and because neighbouring inputs are similar, these moves add up. So the rate
    falls with the number of inputs of a kernel, and training starts with an epoch at a tenth of it.
    """
    sides = crop_sides(data.cases, network.kernel_axes)
    train = CropSource(data, beta, sides, network, recipe.per_image, share=1.0)
    notes = []
    if data.validation is None:
        train, held_out, note = train.divided()
        notes.append(note)
    else:
        mean_loss(data.validation)  # refuses what no loss can be computed of
        own = data._replace(cases=data.validation)
        held_out = CropSource(own, beta, sides, network, recipe.per_image, share=0.25)
    device = train.device
    network.to(device)
    with exact_convolutions(device):
        found = _trained(network, beta, train, held_out, data.seed, recipe)
    network.cpu()
    if device.type != "cpu":
        notes.append(f"trained on {device}")
    return found._replace(notes=[*notes, *found.notes])


def _trained(
    network: TemperatureTree, beta: float, train: CropSource, held_out: CropSource, seed: int, recipe: Recipe
) -> Fitted:
    """``fit_network`` once its crops have been cut."""
    moments: dict[Prefix, _Moments] = {"": _Moments(), "image_": _Moments()}
    for crops in train.batches():
        moments[""].add(network_inputs(crops.scores, recipe.inputs))
        if crops.image is not None:
            moments["image_"].add(crops.image)
    for prefix, own in moments.items():
        if own.count:
            network.standardise_by(*own.result(), prefix)

    def losses(crops: Crops) -> Tensor:
        temperatures = temperature(network(network_inputs(crops.scores, recipe.inputs), crops.image), beta)
        if recipe.per_image:
            temperatures = _image_means(temperatures, crops)
        return _nll(crops, 1 / temperatures)

    def loss(crops: Crops) -> Tensor:
        return losses(crops) / crops.weigh(crops.labels != IGNORED)

    def mean(losses: Callable[[Crops], Tensor]) -> float:
        """Over the validation voxels; a GPU is waited for only once."""
        return float(sum(torch.stack([losses(crops) for crops in held_out.batches()]).tolist())) / held_out.total

    single = mean(lambda crops: _nll(crops, torch.tensor(beta)))
    rate, decay = recipe.learning_rate * min(1.0, _INPUTS / network.weight[0].numel()), recipe.weight_decay
    train_at = partial(
        adam, network, loss, train.epoch, lambda: mean(losses), weight_decay=decay, patience=_PATIENCE, seed=seed
    )
    network.requires_grad_(True)
    train_at(learning_rate=rate / 10, max_epochs=1)
    training = train_at(learning_rate=rate, max_epochs=recipe.epochs)
    network.zero_grad()
    for crops in train.batches():
        (losses(crops) / train.total).backward()  # type: ignore[no-untyped-call]
    gradient = math.sqrt(sum(float(p.grad.square().sum()) for p in network.parameters() if p.grad is not None))
    network.zero_grad()
    network.requires_grad_(False)
    after = training.objective
    outcome = "" if after < single else ": no better, so this is ts"
    note = f"{training.message}; validation NLL {compared(after, single)} that with one temperature{outcome}"
    voxels = train.voxels + (0 if held_out is train else held_out.voxels)
    return Fitted(single, after, training.converged, gradient, training.iterations, voxels, [note])


def _nll(crops: Crops, beta: Tensor) -> Tensor:
    """The NLL of ``S(beta z)``, summed over labelled voxels of all windows; beta is ``(n, *sides)`` or a scalar."""
    z = crops.scores
    for axis, side in enumerate(crops.labels.shape[1:], start=2):
        z = z.narrow(axis, (z.shape[axis] - side) // 2, side)
    z = z.masked_fill((crops.labels == IGNORED).unsqueeze(1), 0.0)  # ignored voxels may be NaN
    gaps = (z - z.amax(1, keepdim=True)).clamp(min=_DEEPEST)
    scores = gaps * (beta.unsqueeze(1) if beta.ndim else beta)
    return crops.weigh(F.cross_entropy(scores, crops.labels, ignore_index=IGNORED, reduction="none"))


def _image_means(temperatures: Tensor, crops: Crops) -> Tensor:
    """Temperatures ``(n, *sides)``, replaced by the mean over all crops of the same image."""
    axes = tuple(range(1, temperatures.ndim))
    weight = crops.weight.float()
    total = torch.where(crops.inside, temperatures, 0.0).sum(axes) * weight
    count = crops.inside.sum(axes) * weight
    if total.is_cuda:  # a product needs no wait for the number of images, and is the same every time
        same = (crops.owner == crops.owner[:, None]).float()
        means = (same @ total) / (same @ count)
    else:
        _, owner = torch.unique(crops.owner, return_inverse=True)
        sums = (total.new_zeros(int(owner.max()) + 1).index_add(0, owner, own) for own in (total, count))
        means = torch.div(*sums)[owner]
    return means.view(-1, *[1] * len(axes)).expand_as(temperatures)


class _Moments:
    """Running mean and variance of each channel, in float64, relative to the mean of the first batch."""

    def __init__(self) -> None:
        self.count, self.shift, self.sums, self.squares = 0, torch.zeros(1), torch.zeros(1), torch.zeros(1)

    def add(self, x: Tensor) -> None:
        flat = x.movedim(1, 0).flatten(1).double()
        flat = flat[:, torch.isfinite(flat).all(0)]
        if not self.count and flat.numel():
            self.shift = flat.mean(1, keepdim=True)
        flat = flat - self.shift.to(flat)
        self.count += flat.shape[1]
        self.sums, self.squares = self.sums.to(flat) + flat.sum(1), self.squares.to(flat) + flat.square().sum(1)

    def result(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel."""
        mean = self.sums / self.count
        variance = (self.squares / self.count - mean**2).clamp(min=0)
        return (self.shift.flatten() + mean).float(), variance.sqrt().float()
