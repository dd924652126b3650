"""Scores that went through rounding steps get the order of the logits back, by compiled loops on the CPU."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from segcal.kernels.compiled import ZERO, elementwise
from segcal.kernels.expert_cpu import sorting_pairs
from segcal.kernels.pool import in_threads
from segcal.kernels.tiles import exchange_rows

# Voxels sorted at a time, so that the keys stay in the first-level cache.
_SORTED = 128
_MAGNITUDE, _LOW = np.int32(0x7FFFFFFF), np.int64(0xFFFFFFFF)


def keep_order(scores: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 scores whose falling order is that of the logits, both ``(N, C, *spatial)``, and the argmax of these.

    A score above that of a class with a larger logit is lowered to it; the others stay as they are.

    Examples:
        >>> keep_order(torch.tensor([[-1.0, -3.0, -2.9]]), torch.tensor([[5.0, 2.0, 1.0]]))
        (tensor([[-1., -3., -3.]]), tensor([0]))
    """
    classes = logits.shape[1]
    x, s = (tensor.movedim(1, 0).reshape(classes, -1).float().contiguous() for tensor in (logits, scores))
    pairs, winner = sorting_pairs(classes), torch.zeros(x.shape[1], dtype=torch.int64)
    threads = torch.get_num_threads()
    share = -(-x.shape[1] // (threads * _SORTED)) * _SORTED

    def work(turn: int) -> None:
        keys, last = np.zeros((classes, _SORTED), np.int64), np.zeros(_SORTED, np.float32)
        stop = min((turn + 1) * share, x.shape[1])
        _lower(x.numpy(), turn * share, stop, pairs, keys, last, s.numpy(), winner.numpy())

    in_threads(work, threads)
    batch, _, *spatial = logits.shape
    return s.view(classes, batch, *spatial).movedim(0, 1), winner.view(batch, *spatial)


@elementwise
def _lower(x, start, stop, pairs, keys, last, scores, winner):
    """Lower the scores of columns ``start..stop``. A key holds the bits of the logit, as an integer, and the class."""
    classes = x.shape[0]
    for begin in range(start, stop, keys.shape[1]):
        size = min(keys.shape[1], stop - begin)
        for k in range(classes):
            row, key, index = x[k, begin : begin + size], keys[k], np.int64(classes - 1 - k)
            for v in range(size):
                bits = np.float32(row[v] + ZERO).view(np.int32)  # + 0 turns -0 into 0
                key[v] = (np.int64(bits ^ ((bits >> 31) & _MAGNITUDE)) << 32) | index
        for n in range(pairs.shape[0]):
            exchange_rows(keys, pairs[n, 0], pairs[n, 1])
        for v in range(size):
            last[v] = np.float32(np.inf)
            winner[begin + v] = classes - 1 - (keys[0, v] & _LOW)
        for k in range(classes):
            key = keys[k]
            for v in range(size):
                own = classes - 1 - (key[v] & _LOW)
                value = scores[own, begin + v]
                last[v] = last[v] if value > last[v] else value
                scores[own, begin + v] = last[v]
