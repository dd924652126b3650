"""Pieces of CPU logits for compiled loops, and the threads that take them.

Loops run without the interpreter lock; ``segcal.kernels.cpu`` explains why the threads are not numba's.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.errors import InputError
from segcal.kernels.voxels import PIECE_VOXELS, Piece, Voxels

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
State = TypeVar("State", bound=tuple[Any, ...])
Item = TypeVar("Item")
Result = TypeVar("Result")

# Voxels in a piece of many, and pieces that each thread gets then: a piece costs a call, in which threads wait for each
# other. With 16 threads, pieces of 2^15 voxels made a pass over 4 million voxels slower than with 8.
_LONG_PIECE, _TURNS = 2**17, 2
# Voxels in a piece of few, where a thread keeps no sums of its own: 16 threads share an image of 512 x 256.
SHORT_PIECE = 2**13
# Rows that a thread takes at a time.
_RANGE = 2**13
# Threads are kept: on busy cores, starting a new one takes as long as a small image.
_POOLS: dict[int, ThreadPoolExecutor] = {}
if hasattr(os, "register_at_fork"):  # a forked process has none of the threads
    os.register_at_fork(after_in_child=_POOLS.clear)


class Given(NamedTuple):
    """What is given of each voxel of a piece besides its logits; arrays are empty where there is nothing."""

    labels: NDArray[np.int64]
    ignored: int  # the label of voxels that do not count
    mask: NDArray[np.bool_]
    slots: NDArray[np.uint8]
    uncalibrated: NDArray[np.int64]
    offset: int  # flat index of the first voxel

    @classmethod
    def of(cls, voxels: Voxels, piece: Piece) -> Given:
        """What is given of a piece. Where no label is ignored, ``ignored`` is a number that is no label."""
        ignored = int(np.iinfo(np.int64).min) if voxels.ignore_index is None else voxels.ignore_index
        labels, uncalibrated = (flat(voxels, one, piece, np.int64) for one in (voxels.labels, voxels.uncalibrated))
        mask, slots = flat(voxels, voxels.mask, piece, np.bool_), flat(voxels, voxels.slots, piece, np.uint8)
        return cls(labels, ignored, mask, slots, uncalibrated, piece.offset)


def as_voxels(logits: Tensor, labels: Tensor | None = None, valid: Tensor | None = None) -> Voxels:
    """The voxels of logits ``(N, C, *spatial)``, to be taken piece by piece."""
    if logits.device.type != "cpu" or logits.dtype not in FLOATS:
        raise InputError(f"logits are {logits.dtype} on {logits.device}", expected="float32 or less on the CPU")
    return Voxels(logits, logits.select(1, 0) if labels is None else labels, mask=valid)


def matrix(voxels: Voxels, piece: Piece) -> tuple[NDArray[Any], int, int]:
    """A C-contiguous float32 matrix ``(C, V)``, the logits themselves where possible, and where the piece lies in it.

    These are its first column and the one after its last.
    """
    scores, columns = voxels.scores(piece)
    if scores.dtype != torch.float32 or not scores.is_contiguous():
        scores, columns = scores[:, columns].float().contiguous(), slice(0, columns.stop - columns.start)
    return scores.numpy(), columns.start, columns.stop


def flat(voxels: Voxels, tensor: Tensor | None, piece: Piece, dtype: type[np.generic]) -> NDArray[Any]:
    """The piece's part of an ``(N, *spatial)`` tensor as a contiguous array; empty for None."""
    return np.empty(0, dtype) if tensor is None else np.ascontiguousarray(voxels.flat(tensor, piece).numpy(), dtype)


def block_size(classes: int, scores: int = 20480) -> int:
    """Voxels in a block of about ``scores`` numbers, 128 to 1024; six such matrices fit most second-level caches."""
    return max(128, min(1024, scores // classes // 64 * 64))


def workers(voxels: Voxels | Sequence[Voxels], threads: int | None = None, least: int = PIECE_VOXELS) -> int:
    """The number of threads, at most one per piece of ``least`` voxels; None means torch's number."""
    pieces = math.ceil(_count(as_list(voxels)) / least)
    return max(1, min(threads or torch.get_num_threads(), pieces))


def as_list(voxels: Voxels | Sequence[Voxels]) -> Sequence[Voxels]:
    """Several of them, whether one or several are given."""
    return [voxels] if isinstance(voxels, Voxels) else voxels


def _count(several: Sequence[Voxels]) -> int:
    return sum(voxels.labels.numel() for voxels in several)


def piece_size(voxels: Voxels, threads: int, count: int | None = None, least: int = PIECE_VOXELS) -> int:
    """Voxels of a piece: 2^15, and more, or fewer down to ``least``, of images that need no copy, so that all get some.

    ``count`` voxels are shared by the threads, or just these if it is None.
    """
    if voxels.logits.dtype != torch.float32:
        return PIECE_VOXELS
    share = max(least, min(_LONG_PIECE, (count or voxels.labels.numel()) // (_TURNS * threads)))
    if share <= PIECE_VOXELS:
        return share
    per_image = math.prod(voxels.logits.shape[2:])
    return math.ceil(per_image / max(1, round(per_image / share)))


def sweep(
    voxels: Voxels | Sequence[Voxels],
    loop: Any,
    new_state: Callable[[int], State],
    threads: int | None = None,
    groups: int = 1,
) -> list[State]:
    """Let each thread take its share of the pieces through a loop; the states, in a fixed order.

    ``loop(x, start, stop, given, *state)`` takes a piece's ``matrix`` and ``Given`` and the thread's own state, and
    returns the first unfit voxel in the piece, or -1. The error for the first unfit voxel of all is raised. ``groups``
    threads each take the same pieces.
    """
    several, threads = as_list(voxels), workers(voxels, threads)
    shares, count = threads // groups, _count(several)
    pieces = [(n, piece) for n, own in enumerate(several) for piece in own.pieces(piece_size(own, shares, count))]

    def work(turn: int) -> tuple[State, tuple[int, int] | None]:
        state = new_state(turn)
        for n, piece in itertools.islice(pieces, turn // groups, None, shares):
            bad = loop(*matrix(several[n], piece), Given.of(several[n], piece), *state)
            if bad >= 0:
                return state, (n, piece.offset + bad)
        return state, None

    results = in_threads(work, threads)
    unfit = [place for _, place in results if place is not None]
    if unfit:
        n, place = min(unfit)
        raise several[n].bad_voxel(place)
    return [state for state, _ in results]


def _pool(threads: int) -> ThreadPoolExecutor:
    if threads not in _POOLS:
        _POOLS.setdefault(threads, ThreadPoolExecutor(threads, "segcal"))
    return _POOLS[threads]


def in_threads(work: Callable[[int], Result], count: int) -> list[Result]:
    """Results of ``work(0)`` to ``work(count - 1)``, which run at the same time, the first in this thread."""
    others = [_pool(count - 1).submit(work, turn) for turn in range(1, count)]
    return [work(0), *(other.result() for other in others)]


def in_turn(work: Callable[[Item], Result], items: Sequence[Item], threads: int | None = None) -> list[Result]:
    """``work`` of every item, in their order; a thread that is done takes the next item. None means torch's number."""
    found: dict[int, Result] = {}
    numbers = itertools.count()  # whose next number two threads never get both

    def take(_: int) -> None:
        while (number := next(numbers)) < len(items):
            found[number] = work(items[number])

    in_threads(take, max(1, min(threads or torch.get_num_threads(), len(items))))
    return [found[number] for number in range(len(items))]


def in_ranges(work: Callable[[int, int], Result], length: int, threads: int | None = None) -> list[Result]:
    """``work(start, stop)`` of ranges that divide ``range(length)``, whatever the number of threads that share them."""
    return in_turn(lambda start: work(start, min(start + _RANGE, length)), range(0, length, _RANGE), threads)
