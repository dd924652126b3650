"""``segcal.calibrators.trust`` on the CPU: compiled twins of its torch definitions.

Between the loops there is no torch operation on whole images: its threads would go on spinning for a while, on the
cores that those of the loops need.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from segcal.kernels.grid import LIMIT, WIDTH
from segcal.kernels.pieces_cpu import in_threads, in_turn
from segcal.kernels.trust_loops import (
    correct_range,
    count_changes,
    describe_range,
    distance_rows,
    level_range,
    odds_range,
    window_rows,
)

# Rows of a plane that are worth a thread: windows begin half their side above them.
_BAND = 32


def _in_parts(voxels: int, loop: Callable[[int, int, int], None]) -> None:
    """Run ``loop(start, stop, thread)`` on all threads, each with its part of the voxels."""
    threads = torch.get_num_threads()
    in_threads(lambda turn: loop(voxels * turn // threads, voxels * (turn + 1) // threads, turn), threads)


def describe(
    logits: Tensor, beta: float, lowest: float, widest: float, unit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of float32 logits ``(N, C, *spatial)``: winner, point features, two of them in units.

    Then sums over each image: voxels by predicted class, features in units, changes of the prediction along rows.
    """
    z = logits.contiguous().flatten(2).numpy()
    images, classes, voxels = z.shape
    winner, point = np.empty((images, voxels), np.int64), np.empty((images, 5, voxels), np.float32)
    rounded, threads = np.empty((images, 2, voxels), np.int32), torch.get_num_threads()
    predicted, sums = np.zeros((images, threads, classes), np.int64), np.zeros((images, threads, 5), np.int64)
    bounds = np.float32(beta), np.float32(lowest), np.float32(widest), unit

    def work(start: int, stop: int, turn: int) -> None:
        for n in range(images):
            own = winner[n], point[n], rounded[n], predicted[n, turn], sums[n, turn]
            describe_range(z[n], start, stop, *bounds, *own)

    _in_parts(voxels, work)
    changes = np.zeros(images, np.int64)
    count_changes(winner.reshape(images, -1, logits.shape[-1]), changes)
    maps = (torch.from_numpy(own).view(*own.shape[:-1], *logits.shape[2:]) for own in (winner, point, rounded))
    return *maps, *(torch.from_numpy(own) for own in (predicted.sum(1), sums.sum(1), changes))  # type: ignore[return-value]


def features(
    point: Tensor, winner: Tensor, rounded: Tensor, image: tuple[Tensor, Tensor], sides: tuple[int, ...], unit: int,
    reach: int,
) -> Tensor:  # fmt: skip
    """Point features ``(N, 5, *spatial)`` and after them distances, those of windows, and those of the ``image``.

    ``rounded (N, 2, *spatial)`` are ``log(1 - p1)`` and p1 in units; ``image`` has the classes' shares ``(N, C)`` and
    two means ``(N, 2)``.
    """
    shape = len(winner), -1, *winner.shape[-2:]  # images, slices, planes
    who, values, own = (maps.contiguous().numpy() for maps in (winner, rounded, point))
    who, values, own = who.reshape(shape), values.reshape(len(who), 2, *shape[1:]), own.reshape(len(who), 5, *shape[1:])
    shares, means = (numbers.float().numpy() for numbers in image)
    slices, height, width = who.shape[1:]
    out = np.empty((len(who), 9 + 3 * len(sides), slices, height, width), np.float32)
    bands = max(1, min(-(-torch.get_num_threads() // (len(who) * slices)), height // _BAND))

    def work(task: tuple[int, int, int]) -> None:
        n, d, band = task
        start, stop = height * band // bands, height * (band + 1) // bands
        rows, labels, found = slice(start, stop), who[n, d], out[n, :, d]
        found[:5, rows] = own[n, :, d, rows]
        distance_rows(labels, reach, start, stop, found[5])
        for s, side in enumerate(sides):
            maps = found[6 + 3 * s], found[7 + 3 * s], found[8 + 3 * s]
            window_rows(labels, values[n, 1, d], values[n, 0, d], side, unit, start, stop, *maps)
        found[-3, rows] = shares[n][labels[rows]]
        found[-2:, rows] = means[n, :, None, None]

    in_turn(work, list(itertools.product(range(len(who)), range(slices), range(bands))))
    return torch.from_numpy(out).view(len(who), -1, *winner.shape[1:])


def level(scores: Tensor, odds: Tensor, winner: Tensor, below: float) -> Tensor:
    """Log-probabilities in place of the losers' scores ``(N, C, *spatial)``; returns where they were levelled."""
    z, who, o = scores.flatten(2).numpy(), winner.contiguous().flatten(1).numpy(), odds.contiguous().flatten(1).numpy()
    levelled = np.zeros(who.shape, np.bool_)

    def work(start: int, stop: int, _: int) -> None:
        for n in range(len(z)):
            level_range(z[n], start, stop, who[n], o[n], math.log1p(-below), 2 * below, levelled[n])

    _in_parts(z.shape[2], work)
    return torch.from_numpy(levelled).view(winner.shape)


def correct(features: Tensor, winner: Tensor, weights: tuple[Tensor, ...], widest: float) -> Tensor:
    """The mean correction of the networks ``(N, *spatial)`` for ``features (N, J, *spatial)`` float32.

    ``weights`` are mean, scale, first, classes, second, second_bias and last of a ``TrustNetwork``.
    """
    mean, scale, first, classes, second, bias, last = (np.asarray(own.detach().cpu().numpy()) for own in weights)
    first = np.pad(first[:, : features.shape[1]], ((0, 0), (0, 1), (0, 0)))  # classes are its biases
    layers = (np.ascontiguousarray(layer.transpose(0, 2, 1)) for layer in (first, np.concatenate((second, bias), 1)))
    tables = (*layers, classes, last[:, :, 0])
    x, who = features.contiguous().flatten(2).numpy(), winner.contiguous().flatten(1).numpy()
    out = np.empty(who.shape, np.float32)

    def work(start: int, stop: int, _: int) -> None:
        for n in range(len(x)):
            correct_range(x[n], start, stop, who[n], mean, scale, np.float32(widest), *tables, out[n])

    _in_parts(x.shape[2], work)
    return torch.from_numpy(out).view(winner.shape)


def odds(
    features: Tensor, winner: Tensor, correction: Tensor | None, maps: tuple[Tensor, Tensor, Tensor], share: float,
    known: Tensor,
) -> Tensor:  # fmt: skip
    """Log-odds of the winner ``(N, *spatial)`` float32, from all features and the networks' correction.

    ``maps`` are both rising maps and the linear ones; ``known (N,)`` is how far each image is judged by them.
    """
    x, who = features.contiguous().flatten(2).numpy(), winner.contiguous().flatten(1).numpy()
    added = x[:, 0] if correction is None else correction.contiguous().flatten(1).numpy()
    tables, out = tuple(own.cpu().numpy() for own in maps), np.empty(who.shape, np.float32)

    def work(start: int, stop: int, _: int) -> None:
        for n, judged in enumerate(known.tolist()):
            odds_range(x[n], who[n], added[n], start, stop, *tables, share, judged, LIMIT - WIDTH / 2, WIDTH, out[n])

    _in_parts(who.shape[1], work)
    return torch.from_numpy(out).view(winner.shape)
