"""The CPU twin of ``segcal.kernels.experts``: the maps' parameters in the form of the loops, and sums for fitting.

Every voxel is described by its margins ``m_k = z_winner - z_k >= 0``. Up to a constant per voxel, which no softmax
sees, logits and log-probabilities are ``a - m`` with one common number a, so ``W x = -W m + a W 1``, and of the row
sums ``W 1`` only the differences count: an offset of the logits costs no precision. Gaps are differences of neighbours.

A block's voxels are multiplied by their expert's (winner's) matrix tile by tile: where they are, if neighbours mostly
have one expert, else, and always for gradients, ordered by expert. Gaps are sorted by a network of comparisons, each
done for all voxels of a block at once.
Features, scores and slopes of a voxel are float32; sums over up to 1024 voxels are float32, the rest float64.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from segcal.kernels import expert_loops as loops
from segcal.kernels import gradient_loops, vector_loops
from segcal.kernels.experts import ExpertMap, Features
from segcal.kernels.pieces_cpu import as_voxels, block_size, flat, in_threads, matrix, workers
from segcal.kernels.scratch import new_block
from segcal.kernels.softmax_loops import Block
from segcal.kernels.vector_loops import Vector

FloatArray = NDArray[np.float64]

# Pieces are summed up in this many parts (fewer if these would take more numbers, 64 MB), which are added up in order:
# the result does not depend on the number of threads.
_PARTS, _NUMBERS = 8, 2**23


def pack(expert_map: ExpertMap, classes: int) -> loops.Experts:
    """The map as ``weight (E, K, J)``, with columns for margins or gaps, then the common number, then the bias."""
    expert_map.check_classes(classes)
    weight = expert_map.weight.detach().double().cpu().numpy()
    bias = expert_map.bias.detach().double().cpu().numpy()[:, :, None]
    if expert_map.features in ("margins", "gaps"):
        columns = np.concatenate((-weight, -bias), 2)
    else:
        columns = np.concatenate((-weight, expert_map.tilt.detach().cpu().numpy()[:, :, None], bias), 2)
    experts, outputs, inputs = columns.shape
    packed = np.zeros((experts, loops.padded(outputs), inputs), np.float32)
    packed[:, :outputs] = columns
    pairs = sorting_pairs(classes if expert_map.features == "gaps" else 0)
    return loops.Experts(loops.FEATURES.index(expert_map.features), packed, pairs)


def sorting_pairs(length: int) -> NDArray[np.int64]:
    """Pairs of places to compare and exchange in turn, to sort numbers: Batcher's merge exchange (TAOCP 5.2.2 M).

    Examples:
        >>> sorting_pairs(3).tolist()
        [[0, 2], [0, 1], [1, 2]]
    """
    pairs: list[tuple[int, int]] = []
    top = 1 << max(0, (length - 1).bit_length() - 1)
    bit = top
    while bit > 0:
        jump, remainder, distance = top, 0, bit
        while True:
            pairs += [(i, i + distance) for i in range(length - distance) if i & bit == remainder]
            if jump == bit:
                break
            distance, jump, remainder = jump - bit, jump // 2, bit
        bit //= 2
    return np.array(pairs, np.int64).reshape(-1, 2)


def expert_gradient(
    logits: Tensor, labels: Tensor, valid: Tensor, expert_map: ExpertMap, threads: int | None = None
) -> tuple[FloatArray, FloatArray]:
    """NLL ``(E,)`` and its gradient ``(E, K, J + 1)`` by weights and bias, sums over the valid voxels of each expert.

    Of logits ``(N, C, *spatial)``, ``labels`` and ``valid (N, *spatial)``; labels of valid voxels are classes.

    Examples:
        >>> import torch
        >>> identity = ExpertMap("logits", torch.eye(2)[None], torch.zeros(1, 2))
        >>> everywhere = torch.ones(1, dtype=torch.bool)
        >>> nll, gradient = expert_gradient(torch.zeros(1, 2), torch.tensor([1]), everywhere, identity)
        >>> nll.round(4), gradient[0, :, -1]
        (array([0.6931]), array([ 0.5, -0.5]))
    """
    classes, size = logits.shape[1], block_size(logits.shape[1])
    experts: Any
    if expert_map.features == "own-logit":
        experts, shape, loop = Vector.of(expert_map, classes), (1, classes, 2), vector_loops.gradient_range
    else:
        experts, loop = pack(expert_map, classes), gradient_loops.gradient_range
        shape = (*experts.weight.shape[:2], loops.padded(experts.weight.shape[2]))
    voxels = as_voxels(logits, labels, valid)
    parts = max(1, min(_PARTS, _NUMBERS // int(np.prod(shape))))
    threads = min(workers(voxels, threads), parts)

    def work(turn: int) -> list[tuple[FloatArray, FloatArray]]:
        vector = isinstance(experts, Vector)
        scratch = new_block(Block, classes, size) if vector else loops.new_scratch(classes, experts, size)
        sums = []
        for part in range(turn, parts, threads):
            nll, total = np.zeros(shape[0]), np.zeros(shape)
            for piece in itertools.islice(voxels.pieces(), part, None, parts):
                counted = flat(voxels, valid, piece, np.bool_)
                given = flat(voxels, labels, piece, np.int64), counted[:0] if counted.all() else counted
                loop(*matrix(voxels, piece), *given, experts, scratch, nll, total)
            sums.append((nll, total))
        return sums

    by_thread = in_threads(work, threads)
    in_order = [by_thread[part % threads][part // threads] for part in range(parts)]
    nll, total = np.sum([nll for nll, _ in in_order], 0), np.sum([total for _, total in in_order], 0)
    if isinstance(experts, Vector):
        return nll, total
    return nll, _gradient(total[:, : expert_map.weight.shape[1], : experts.weight.shape[2]], expert_map.features)


def _gradient(total: FloatArray, features: Features) -> FloatArray:
    """The gradient by the map's own parameters, from the sums of slope times what stands in the loops' columns."""
    if features in ("margins", "gaps"):
        return -total
    margins, common, ones = total[:, :, :-2], total[:, :, -2:-1], total[:, :, -1:]
    return np.concatenate((common - margins, ones), 2)
