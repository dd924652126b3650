"""CRaC's penalty on the CPU in one pass over labels and logits; torch's operations would take thirty."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from segcal.kernels.compiled import ONE, ZERO, elementwise
from segcal.kernels.pieces_cpu import in_threads

_HALF = np.float32(0.5)
_NO_GRADIENT = np.empty((0, 0, 0, 0, 0), np.float32)


def add_phr(
    value: Tensor,
    gradient: Tensor | None,
    logits: Tensor,
    codes: Tensor,
    tables: tuple[Tensor, Tensor],
    *,
    margin: float,
    patch: int,
    scale: float,
) -> None:
    """Add ``scale sum_k lambda h + rho h^2 / 2`` of every voxel to ``value (B, *S)``, its slope to ``gradient``.

    ``logits`` and ``gradient`` are ``(B, C, *S)``, contiguous; ``codes (B, *S)`` uint8 hold C where a label is ignored;
    ``tables`` are lambda and rho ``(2, C)``.
    """
    images, classes, *space = logits.shape
    depth, height, width = (1, *space)[-3:]
    planes, volumes = (images, depth, height, width), (images, classes, depth, height, width)
    multipliers, rho = (np.ascontiguousarray(table.detach().cpu().numpy(), np.float32) for table in tables)
    arrays = logits.view(volumes).numpy(), codes.view(planes).numpy()
    totals = value.view(planes).numpy(), _NO_GRADIENT if gradient is None else gradient.view(volumes).numpy()
    lines, threads = images * depth * height, torch.get_num_threads()
    depth_radius, radius = (patch // 2 if len(space) == 3 else 0), patch // 2

    def work(turn: int) -> None:
        first, last = lines * turn // threads, lines * (turn + 1) // threads
        add_phr_lines(
            *arrays, first, last, depth_radius, radius, multipliers, rho, np.float32(margin), np.float32(scale), *totals
        )

    in_threads(work, threads)


@elementwise
def add_phr_lines(z, codes, first, last, depth_radius, radius, multipliers, rho, margin, scale, value, gradient):
    """Add the scaled penalty of lines ``first..last`` to value and, unless that is empty, gradient.

    Lines are numbered through all images: ``z`` and ``gradient (B, C, D, H, W)``, ``value`` and ``codes (B, D, H, W)``.
    Codes are labels in uint8; codes that are no class are not counted. ``multipliers`` and ``rho (2, C)`` are for
    patches of one label and for mixed ones.
    """
    _, classes, depth, height, width = z.shape
    column = np.zeros(width + 2 * radius, np.uint8)  # 0 beyond the border
    counts, total, most = np.empty((classes, width), np.uint8), np.empty(width, np.uint8), np.empty(width, np.uint8)
    share, outer = np.empty(width, np.float32), np.empty(width, np.bool_)
    slopes = np.empty(width, np.float32)
    for line in range(first, last):
        image, place = line // (depth * height), line % (depth * height)
        layer, row = place // height, place % height
        total[:] = 0
        most[:] = 0
        for k in range(classes):
            inside, own, code = column[radius : radius + width], counts[k], np.uint8(k)
            inside[:] = 0
            for d in range(max(layer - depth_radius, 0), min(layer + depth_radius + 1, depth)):
                for h in range(max(row - radius, 0), min(row + radius + 1, height)):
                    codes_here = codes[image, d, h]
                    for v in range(width):
                        inside[v] = np.uint8(inside[v] + np.uint8(codes_here[v] == code))
            own[:] = column[:width]
            for shift in range(1, 2 * radius + 1):
                shifted = column[shift : shift + width]
                for v in range(width):
                    own[v] = np.uint8(own[v] + shifted[v])
            for v in range(width):
                total[v] = np.uint8(total[v] + own[v])
                most[v] = max(most[v], own[v])
        for v in range(width):
            outer[v] = most[v] != total[v]
            each = ONE / np.float32(max(total[v], np.uint8(1)))
            share[v] = each if outer[v] else each * margin
        sums = value[image, layer, row]
        for k in range(classes):
            own, scores = counts[k], z[image, k, layer, row]
            inner_lambda, outer_lambda = multipliers[0, k], multipliers[1, k]
            inner_rho, outer_rho = rho[0, k], rho[1, k]
            for v in range(width):
                gap = scores[v] - np.float32(own[v]) * share[v]
                own_lambda = outer_lambda if outer[v] else inner_lambda
                linear = own_lambda if gap > ZERO else (-own_lambda if gap < ZERO else ZERO)
                slope = (outer_rho if outer[v] else inner_rho) * gap + linear
                sums[v] += scale * (_HALF * gap * (slope + linear))  # h (lambda + rho h / 2)
                slopes[v] = slope
            if gradient.shape[0] > 0:
                target = gradient[image, k, layer, row]
                for v in range(width):
                    target[v] += scale * slopes[v]
