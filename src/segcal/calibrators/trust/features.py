"""What a voxel's neighbourhood says about its prediction: features that no logit offset changes.

Everything is made from ``log p``, the temperature-scaled log-probabilities. Sums over windows and images are sums of
integers (values are rounded to 2^-20), so that they do not depend on tiles, on the order of summation or on mirroring.
Windows and distances lie in the plane: in volumes ``(z, y, x)`` every slice is a plane.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from segcal.kernels import recording, trust_maps
from segcal.regions.boundary import label_boundary
from segcal.scores import at_least_float32, log_probabilities, only_possible

#: Sides of the windows, in voxels.
WINDOWS = (5, 15, 41)
#: Distances to the predicted boundary are cut off here, in voxels. No feature sees further within a plane.
REACH = 32
# log(1 - p) below this, and gaps between log-probabilities above it, say no more.
_LOWEST, _WIDEST = -20.0, 20.0
# Values are rounded to multiples of 1 / _UNIT before they are summed.
_UNIT = 2**20

#: Names of the features, in order; the predicted class is one more, which the network takes as an index, and the
#: disagreement of the members of an ensemble may follow.
NAMES = (
    "log(1 - p1)",
    "p1",
    "log p1/p2",
    "log p2/p3",
    "entropy",
    "log(1 + distance to the predicted boundary)",
    *(f"{what} within {side}" for side in WINDOWS for what in ("share of the prediction", "p1", "log(1 - p1)")),
    "share of the predicted class in the image",
    "p1 of the image",
    "log(1 - p1) of the image",
)
#: How many of them, the first ones, are point features: what a voxel alone says.
POINT = 5


# Shares of changes below this are all alike.
_FEW_CHANGES = 1e-4
#: Numbers in ``ImageTotals.summary``.
SUMMARY = 6


class ImageTotals(NamedTuple):
    """Additive sums over images, int64: voxels by predicted class ``(N, C)``, point features in units ``(N, 5)``, and
    how often the prediction changes from a voxel to the next one in its row ``(N,)``."""

    predicted: Tensor
    sums: Tensor
    changes: Tensor

    def means(self) -> Tensor:
        """Means of the point features ``(N, 5)`` float64."""
        return self.sums.double() / (self.predicted.sum(1, keepdim=True) * _UNIT)

    def summary(self) -> Tensor:
        """What the guard sees of an image ``(N, 6)``: those means, and the logarithm of the share of changes."""
        share = self.changes.double() / self.predicted.sum(1)
        return torch.cat((self.means(), torch.log(share + _FEW_CHANGES).unsqueeze(1)), 1)


class VoxelMaps(NamedTuple):
    """What voxels alone say.

    Attributes:
        winner: The predicted class ``(N, *spatial)`` int64.
        point: The point features, the first five of all, ``(N, 5, *spatial)``.
        rounded: The first two of them in units ``(N, 2, *spatial)`` int32.
        totals: Sums over these rows.
    """

    winner: Tensor
    point: Tensor
    rounded: Tensor
    totals: ImageTotals


def voxel_maps(logits: Tensor, beta: Tensor, size: int | None = None) -> VoxelMaps:
    """Of ``S(beta z)``, for logits z ``(N, C, *spatial)`` that are part of ``size`` values.

    That number decides whether compiled loops are used, so that all parts of an image are rounded alike. Voxels without
    a softmax (NaN, infinite), which a mask may hide, count as undecided between all classes.
    """
    exact = at_least_float32(logits)
    if not recording():
        found = _voxel_maps(exact, beta, size)
        if int(found.totals.predicted.sum()) == found.winner.numel():
            return found
    return _voxel_maps(exact.masked_fill(~exact.amax(1, keepdim=True).isfinite(), 0.0), beta, size)


def _voxel_maps(exact: Tensor, beta: Tensor, size: int | None) -> VoxelMaps:
    if (kernels := trust_maps(exact, size)) is not None:
        winner, point, rounded, *over_image = kernels.describe(exact, float(beta), _LOWEST, _WIDEST, _UNIT)
        return VoxelMaps(winner, point, rounded, ImageTotals(*over_image))
    winner, point = _point(only_possible(exact), beta)
    units, flat = (point.double() * _UNIT).round().long(), winner.flatten(1)
    predicted = torch.zeros(exact.shape[:2], dtype=torch.int64, device=exact.device)
    predicted.scatter_add_(1, flat, (~point[:, 1].isnan()).flatten(1).long())
    totals = ImageTotals(predicted, units.flatten(2).sum(2), _changes(winner))
    return VoxelMaps(winner, point, units[:, :2].int(), totals)


def _changes(winner: Tensor) -> Tensor:
    return (winner[..., 1:] != winner[..., :-1]).flatten(1).sum(1)


def _point(logits: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Winner and point features, as they are defined."""
    winner = logits.argmax(1)
    index = winner.unsqueeze(1)
    log_p = log_probabilities((logits - logits.gather(1, index)) * beta.to(logits))
    top = log_p.gather(1, index)
    others = log_p.scatter(1, index, -torch.inf)
    rest = others.logsumexp(1, keepdim=True).clamp(min=_LOWEST)
    ranked = others.topk(min(2, logits.shape[1] - 1), 1).values
    first = (top - ranked[:, :1]).clamp(max=_WIDEST)
    second = (ranked[:, :1] - ranked[:, 1:2]).nan_to_num(nan=_WIDEST).clamp(max=_WIDEST)
    if logits.shape[1] == 2:
        second = torch.zeros_like(first)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(1, keepdim=True)
    return winner, torch.cat((rest, top.exp(), first, second, entropy), 1)


def disagreement(members: Iterable[Tensor]) -> Tensor:
    """Mutual information of class and member ``(N, 1, *spatial)``: the entropy of the mean less the mean entropy.

    Examples:
        >>> sure, opposite = torch.tensor([[9.0, -9.0]]), torch.tensor([[-9.0, 9.0]])
        >>> disagreement([sure, sure]), disagreement([sure, opposite])
        (tensor([[0.]]), tensor([[0.6931]]))
    """
    mean, entropy, count = torch.zeros(()), torch.zeros(()), 0
    for logits in members:
        p = log_probabilities(at_least_float32(logits)).exp()
        mean, entropy, count = mean.to(p) + p, entropy.to(p) - torch.xlogy(p, p).sum(1, keepdim=True), count + 1
    mean = mean / count
    return (-torch.xlogy(mean, mean).sum(1, keepdim=True) - entropy / count).clamp_(min=0)


def features(maps: VoxelMaps, totals: ImageTotals, size: int | None = None) -> Tensor:
    """All features ``(N, len(NAMES), *spatial)`` of whole planes, in the type of the log-probabilities.

    Without a plane, ``(N, C, L)``, every voxel is taken for an image of its own.
    """
    like, winner = maps.point, maps.winner
    if winner.ndim < 3:
        alone = maps.rounded[:, [1, 0]].to(like.dtype) / _UNIT
        one, far = torch.ones_like(alone[:, :1]), torch.full_like(alone[:, :1], REACH).log1p()
        around = torch.cat((one, alone), 1)
        return torch.cat((like, far, *[around] * len(WINDOWS), around), 1)
    share, means = totals.predicted / totals.predicted.sum(1, keepdim=True), totals.means()[:, [1, 0]]
    if (kernels := trust_maps(like, size)) is not None:
        found: Tensor = kernels.features(like, winner, maps.rounded, (share, means), WINDOWS, _UNIT, REACH)
        return found
    planes = winner.reshape(-1, *winner.shape[-2:])
    sums = maps.rounded[:, [1, 0]].movedim(1, -3).reshape(-1, 2, *winner.shape[-2:])
    around = _around(planes, sums, totals.predicted.shape[1]).to(like.dtype)
    around = around.reshape(*winner.shape[:-2], around.shape[1], *winner.shape[-2:]).movedim(-3, 1)
    own = share.gather(1, winner.flatten(1)).view(winner.shape).unsqueeze(1)
    means = means.view(-1, 2, *[1] * (winner.ndim - 1)).expand(-1, -1, *winner.shape[1:])
    return torch.cat((like, around, own.to(like.dtype), means.to(like.dtype)), 1)


def log_odds(found: Tensor) -> Tensor:
    """``log p1 / (1 - p1)`` of features, or of point features ``(N, J, ...)``."""
    rest = found[:, 0]
    return torch.log1p(-rest.clamp(max=-1e-6).exp()) - rest


def _around(winner: Tensor, sums: Tensor, classes: int) -> Tensor:
    """The features of windows ``(B, 1 + 3 windows, H, W)``, from ``winner (B, H, W)`` and ``sums (B, 2, H, W)``."""
    parts = [boundary_distance(winner).log1p().unsqueeze(1)]
    for side in WINDOWS:
        count = window_size(winner, side)
        parts += [
            (same_count(winner, side, classes) / count).unsqueeze(1),
            window_sum(sums.long(), side) / (count * _UNIT),
        ]
    return torch.cat([part.float() for part in parts], 1)


def window_sum(values: Tensor, side: int) -> Tensor:
    """Sums of integers ``(..., H, W)`` over the window of this side around every voxel, cut off at the border.

    Examples:
        >>> window_sum(torch.ones(1, 3, 4, dtype=torch.int64), 3)
        tensor([[[4, 6, 6, 4],
                 [6, 9, 9, 6],
                 [4, 6, 6, 4]]])
    """
    half = side // 2
    for axis in (-2, -1):
        beyond = (half + 1, half) if axis == -1 else (0, 0, half + 1, half)
        total = nn.functional.pad(values, beyond).cumsum(axis, dtype=values.dtype)
        length = values.shape[axis]
        values = total.narrow(axis, side, length) - total.narrow(axis, 0, length)
    return values


def window_size(winner: Tensor, side: int) -> Tensor:
    """How many voxels the window of this side around each of ``winner (..., H, W)`` has: ``(H, W)`` int64."""
    spans = []
    for length in winner.shape[-2:]:
        here = torch.arange(length, device=winner.device)
        spans.append((here + side // 2).clamp(max=length - 1) - (here - side // 2).clamp(min=0) + 1)
    return spans[0].unsqueeze(1) * spans[1]


def same_count(winner: Tensor, side: int, classes: int) -> Tensor:
    """How many voxels of the window around each have its own prediction ``(B, H, W)`` int64."""
    if recording():  # which classes there are is not known: all at once, in as much memory as the logits take
        each = torch.arange(classes, device=winner.device).view(-1, 1, 1)
        counts = window_sum((winner.unsqueeze(1) == each).int(), side)
        return counts.gather(1, winner.unsqueeze(1)).squeeze(1).long()
    found = torch.zeros_like(winner)
    for label in torch.unique(winner).tolist():
        own = winner == label
        found = torch.where(own, window_sum(own.long(), side), found)
    return found


def boundary_distance(winner: Tensor) -> Tensor:
    """Distance of every voxel to the nearest one beside another prediction, at most ``REACH``: ``(B, H, W)`` float32.

    Exact and the same on every device: along rows by steps that double, then over the nearest rows.

    Examples:
        >>> boundary_distance(torch.tensor([[[0, 0, 0, 1, 1]]]))
        tensor([[[2., 1., 0., 0., 1.]]])
    """
    edge = label_boundary(winner, torch.ones_like(winner, dtype=torch.bool))
    along = torch.where(edge, 0, REACH)
    for step in (1, 2, 4, 8, 16):  # every distance below REACH = 32 is a sum of some of them
        padded = nn.functional.pad(along, (step, step), value=REACH)
        along = torch.minimum(along, _lesser(padded, -1, (0, 2 * step), winner.shape[-1]) + step)
    nearest = along = along.square()
    steps = REACH - 1 if recording() else min(REACH, winner.shape[-2]) - 1
    padded = nn.functional.pad(along, (0, 0, steps, steps), value=REACH**2)
    for step in range(1, steps + 1):
        beside = _lesser(padded, -2, (steps - step, steps + step), winner.shape[-2])
        nearest = torch.minimum(nearest, beside + step * step)
    return nearest.float().sqrt()


def _lesser(values: Tensor, axis: int, starts: tuple[int, int], length: int) -> Tensor:
    """The lesser of two stretches of one length.

    The length is given: one computed from padded values would be a longer expression in every node of a recorded graph.
    """
    return torch.minimum(*(values.narrow(axis, start, length) for start in starts))
