"""``segcal.calibrators.trust`` on a CUDA device: the functions of ``trust_cpu``, by triton.

Voxels of a window with the prediction of its centre are counted one by one: the cost does not depend on the number of
classes, and the processors of a GPU do 1681 comparisons a voxel in the time that its logits take to be read twice.
Sums over windows and images are sums of integers, as in the definitions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from segcal.kernels import cuda_trust_loops as loops
from segcal.kernels.cuda_walk import launch
from segcal.kernels.grid import LIMIT, LOGIT_BINS, WIDTH

# Voxels of a tile of classes, of a row and of the networks, that a program takes at once.
_BLOCK, _ROW, _FEW = 32, 256, 64
# Rows of a tile of classes that one warp can hold.
_ROWS = 64
# Programs that share an image where its sums are made.
_PROGRAMS = 1024
# The point features, and all that follow them: the distance, three for each of three windows, three of the image.
_POINTS, _OTHERS = 5, 13
# Units and inputs of the networks are rounded up to this: the sides of matrix products.
_PADDED = 32


def _tile(classes: int) -> dict[str, int]:
    rows = max(8, 1 << (classes - 1).bit_length())
    return {"CP": rows, "BLOCK": _BLOCK, "num_warps": max(1, rows // _ROWS)}


def describe(
    logits: Tensor, beta: float, lowest: float, widest: float, unit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of float32 logits ``(N, C, *spatial)``: winner, point features, two of them in units, sums over each image."""
    z = logits.contiguous().flatten(2)
    images, classes, voxels = z.shape
    shape, winner = logits.shape[2:], z.new_empty((images, *logits.shape[2:]), dtype=torch.int64)
    point = z.new_empty((images, _POINTS, *shape))
    rounded = z.new_empty((images, 2, *shape), dtype=torch.int32)
    predicted, sums = (z.new_zeros((images, columns), dtype=torch.int64) for columns in (classes, _POINTS))
    programs = min(-(-voxels // _BLOCK), _PROGRAMS)
    launch(
        loops.describe_loop, images * programs,
        z, winner, point, rounded, predicted, sums, programs, voxels, classes, 0, beta, lowest, widest, unit,
        **_tile(classes),
    )  # fmt: skip
    changes = (winner[..., 1:] != winner[..., :-1]).flatten(1).sum(1)
    return winner, point, rounded, predicted, sums, changes


def features(
    point: Tensor, winner: Tensor, rounded: Tensor, image: tuple[Tensor, Tensor], sides: tuple[int, ...], unit: int,
    reach: int,
) -> Tensor:  # fmt: skip
    """Point features ``(N, 5, *spatial)`` and after them distances, those of windows, and those of the ``image``."""
    shares, means = (numbers.float().contiguous() for numbers in image)
    height, width = winner.shape[-2:]
    voxels, everything, classes = winner[0].numel(), winner.numel(), shares.shape[1]
    narrow = torch.int16 if classes < 2**15 else torch.int32
    who = F.pad(winner.reshape(-1, height, width).to(narrow), (reach,) * 4, value=-1)
    sums, along = (who.new_empty((columns, everything), dtype=torch.int32) for columns in (6, 1))
    out = point.new_empty((len(winner), _POINTS + _OTHERS, *winner.shape[1:]))
    out[:, :_POINTS] = point
    programs, where = -(-everything // _ROW), (height, width, voxels, everything, who.shape[2])
    first, second, third = (side // 2 for side in sides)
    halves = {"FIRST": first, "SECOND": second, "THIRD": third, "REACH": reach, "BLOCK": _ROW}
    launch(loops.rows_loop, programs, who, rounded.contiguous(), sums, along, *where, **halves)
    launch(
        loops.around_loop, programs, who, sums, along, shares, means, out, *where, classes, out.shape[1], unit,
        POINTS=_POINTS, **halves,
    )  # fmt: skip
    return out


def correct(features: Tensor, winner: Tensor, weights: tuple[Tensor, ...], widest: float) -> Tensor:
    """The mean correction of the networks ``(N, *spatial)`` for ``features (N, J, *spatial)`` float32.

    ``weights`` are mean, scale, first, classes, second, second_bias and last of a ``TrustNetwork``.
    """
    x = features.contiguous().flatten(2)
    images, inputs, voxels = x.shape
    mean, scale, first, classes, second, bias, last = (own.detach().to(x) for own in weights)
    more, units = _PADDED - inputs, _PADDED - second.shape[1]
    tables = (
        F.pad(mean[:inputs], (0, more)), F.pad(scale[:inputs], (0, more), value=1.0),
        F.pad(first[:, :inputs], (0, units, 0, more)), F.pad(classes, (0, units)),
        F.pad(second, (0, units, 0, units)), F.pad(bias[:, 0], (0, units)), F.pad(last[:, :, 0], (0, units)),
    )  # fmt: skip
    out, programs = x.new_empty(winner.shape), -(-voxels // _FEW)
    launch(
        loops.correct_loop, images * programs,
        x, winner.contiguous(), out, *tables, programs, voxels, inputs, classes.shape[1], widest,
        NETWORKS=len(first), JP=_PADDED, UP=_PADDED, BLOCK=_FEW,
    )  # fmt: skip
    return out


def odds(
    features: Tensor, winner: Tensor, correction: Tensor | None, maps: tuple[Tensor, Tensor, Tensor], share: float,
    known: Tensor,
) -> Tensor:  # fmt: skip
    """Log-odds of the winner ``(N, *spatial)`` float32, from all features and the networks' correction.

    ``maps`` are both rising maps and the linear ones; ``known (N,)`` is how far each image is judged by them.
    """
    x = features.contiguous().flatten(2)
    images, inputs, voxels = x.shape
    tables = (own.to(x.device, torch.float64).contiguous() for own in maps)
    out, programs = x.new_empty(winner.shape), -(-voxels // _ROW)
    launch(
        loops.odds_loop, images * programs,
        x, winner.contiguous(), x if correction is None else correction.contiguous(), *tables,
        known.double().contiguous(), out, programs, voxels, inputs, share, BINS=LOGIT_BINS, ORIGIN=LIMIT - WIDTH / 2,
        WIDTH=WIDTH, CORRECTED=share > 0, POINTS=_POINTS, BLOCK=_ROW,
    )  # fmt: skip
    return out


def level(scores: Tensor, odds: Tensor, winner: Tensor, below: float) -> Tensor:
    """Log-probabilities in place of the losers' scores ``(N, C, *spatial)``; returns where they were levelled."""
    images, classes, voxels = scores.flatten(2).shape
    levelled, programs = scores.new_empty(winner.shape, dtype=torch.int8), -(-voxels // _BLOCK)
    launch(
        loops.level_loop, images * programs,
        scores, odds.contiguous(), winner.contiguous(), levelled, programs, voxels, classes, 0,
        BELOW=math.log1p(-below), LEAST=2 * below, **_tile(classes),
    )  # fmt: skip
    return levelled.view(torch.bool)
