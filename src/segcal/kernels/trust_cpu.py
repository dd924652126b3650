"""``segcal.calibrators.trust`` on the CPU: compiled twins of its torch definitions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from segcal.kernels.grid import LIMIT, WIDTH
from segcal.kernels.pieces_cpu import in_threads
from segcal.kernels.trust_loops import (
    correct_range,
    describe_range,
    distance_plane,
    level_range,
    odds_range,
    window_plane,
)


def _in_parts(voxels: int, loop: Callable[[int, int, int], None]) -> None:
    """Run ``loop(start, stop, thread)`` on all threads, each with its part of the voxels."""
    threads = torch.get_num_threads()
    in_threads(lambda turn: loop(voxels * turn // threads, voxels * (turn + 1) // threads, turn), threads)


def describe(
    logits: Tensor, beta: float, lowest: float, widest: float, unit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of float32 logits ``(N, C, *spatial)``: winner, point features, two of them in units, sums over each image."""
    z = logits.contiguous().flatten(2).numpy()
    images, classes, voxels = z.shape
    winner, point = np.empty((images, voxels), np.int32), np.empty((images, 5, voxels), np.float32)
    rounded, threads = np.empty((images, 2, voxels), np.int32), torch.get_num_threads()
    predicted, sums = np.zeros((images, threads, classes), np.int64), np.zeros((images, threads, 5), np.int64)
    bounds = np.float32(beta), np.float32(lowest), np.float32(widest), unit

    def work(start: int, stop: int, turn: int) -> None:
        for n in range(images):
            own = winner[n], point[n], rounded[n], predicted[n, turn], sums[n, turn]
            describe_range(z[n], start, stop, *bounds, *own)

    _in_parts(voxels, work)
    maps = (torch.from_numpy(own).view(*own.shape[:-1], *logits.shape[2:]) for own in (winner, point, rounded))
    return *maps, torch.from_numpy(predicted.sum(1)), torch.from_numpy(sums.sum(1))  # type: ignore[return-value]


def planes(winner: Tensor, values: Tensor, sides: tuple[int, ...], unit: int, reach: int) -> Tensor:
    """Distances and window features ``(B, 1 + 3 S, H, W)`` of ``winner (B, H, W)``, ``values (B, 2, H, W)`` int32."""
    labels, sums = winner.contiguous().numpy(), values.contiguous().numpy()
    out = np.empty((len(labels), 1 + 3 * len(sides), *labels.shape[1:]), np.float32)
    threads, lengths = min(torch.get_num_threads(), len(labels) * (1 + len(sides))), np.array(sides)

    def work(turn: int) -> None:
        for task in range(turn, len(labels) * (1 + len(sides)), threads):
            b, s = divmod(task, 1 + len(sides))
            if s == len(sides):
                distance_plane(labels[b], reach, out[b, 0])
                continue
            own = out[b, 1 + 3 * s : 4 + 3 * s][None]
            window_plane(labels[b], sums[b], lengths[s : s + 1], unit, own)

    in_threads(work, threads)
    return torch.from_numpy(out)


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
    tables = (
        np.ascontiguousarray(first[:, : features.shape[1]].transpose(0, 2, 1)), classes,
        np.ascontiguousarray(second.transpose(0, 2, 1)), bias[:, 0], last[:, :, 0],
    )  # fmt: skip
    x, who = features.contiguous().flatten(2).numpy(), winner.contiguous().flatten(1).numpy()
    out = np.empty(who.shape, np.float32)

    def work(start: int, stop: int, _: int) -> None:
        for n in range(len(x)):
            correct_range(x[n], start, stop, who[n], mean, scale, np.float32(widest), *tables, out[n])

    _in_parts(x.shape[2], work)
    return torch.from_numpy(out).view(winner.shape)


def odds(rest: Tensor, correction: Tensor | None, maps: tuple[Tensor, Tensor], share: float, known: Tensor) -> Tensor:
    """Log-odds of the winner ``(N, *spatial)`` float32; ``known (N,)`` is how far each image is judged by the maps."""
    x = rest.contiguous().flatten(1).numpy()
    added = x if correction is None else correction.contiguous().flatten(1).numpy()
    tables, out = tuple(own.cpu().numpy() for own in maps), np.empty(x.shape, np.float32)

    def work(start: int, stop: int, _: int) -> None:
        for n, judged in enumerate(known.tolist()):
            odds_range(x[n], added[n], start, stop, *tables, share, judged, LIMIT - WIDTH / 2, WIDTH, out[n])

    _in_parts(x.shape[1], work)
    return torch.from_numpy(out).view(rest.shape)
