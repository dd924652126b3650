"""A set of cases, from files or tensors: lazy, re-iterable, sliceable, split by patient, sharded, read ahead."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import torch

from segcal.cases.device import Device, resolved
from segcal.cases.splits import PARTS, Groups, by_group, check_splits, draw_parts, group_of, part_sizes, some
from segcal.errors import InputError, check_name, check_seed, left_for_later
from segcal.files.atomic import file_size
from segcal.parallel.threads import torch_threads
from segcal.transfer import received
from segcal.types import Case, Kind, check_members, check_pooling, no_members

# Larger cases are not read ahead as a whole: they are read piece by piece with Case.chunks().
PREFETCH_BYTES = 256 * 2**20

#: The two classes of a channel of multi-label data.
CHANNEL_CLASSES = ("outside", "inside")


@dataclass(frozen=True)
class CaseRef:
    """A case that has not been opened: its name, how to open it, and the files of its scores, if it has any.

    ``memory`` is ``cpu`` or ``cuda`` if its tensors lie there already: there is nothing to read.
    """

    id: str
    open: Callable[[], Case]
    files: tuple[Path, ...] = ()
    memory: str | None = None

    def then(self, method: str, *arguments: Any) -> CaseRef:
        """The case that a method of this one returns."""
        return replace(self, open=partial(_open_and_call, self, method, *arguments))

    @property
    def size(self) -> int:
        """Bytes of its files, as this machine sees them; 0 without files on it, -1 if one is missing."""
        sizes = [file_size(path) for path in self.files]
        return -1 if None in sizes else sum(size or 0 for size in sizes)


class Split(NamedTuple):
    """Three disjoint parts of a ``CaseSet``."""

    calibration: CaseSet
    validation: CaseSet
    test: CaseSet


@dataclass(frozen=True)
class CaseSet(Sequence[Case]):
    """Cases of one dataset, opened when used.

    Iterating opens every case again and reads the next one in the background; nothing is kept. ``cases[3]`` is a case,
    ``cases[2:5]`` and ``cases.select(ids)`` are case sets.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> cases = scenes(10, size=(32, 40))
        >>> [len(part) for part in cases.split(calibration=0.5, validation=0.2, test=0.3, seed=1)]
        [5, 2, 3]
    """

    refs: Sequence[CaseRef]
    num_classes: int
    ignore_index: int = 255
    class_names: tuple[str, ...] | None = None
    groups: Groups | None = None
    splits: Mapping[str, Sequence[str]] = field(default_factory=dict)
    background: int | None = 0
    """The class that metrics of the foreground leave out; None if there is no background."""
    num_members: int | None = None
    """How many ensemble members the logits are pooled from; None for a single model."""
    folders: tuple[Path, ...] = ()
    """The folders that the cases are read from, where nothing may be written."""
    notes: tuple[str, ...] = ()
    """What the user should know, for example files that belong to no case, or chunks that are not stored."""
    channel_names: tuple[str, ...] | None = None
    """The channels of multi-label data, each a two-class problem of its own; None for ordinary data."""

    def __post_init__(self) -> None:
        if self.ignore_index == 255 < self.num_classes:  # the default was meant for fewer classes
            raise InputError(
                f"label 255 is ignored, and is one of the {self.num_classes} classes",
                expected="another label for voxels to be ignored",
                fix="set ignore_index = -1, as an argument or in segcal.toml",
            )
        if self.splits:
            check_splits(self.splits, self.ids, self.groups)

    @property
    def ids(self) -> tuple[str, ...]:
        """The names of the cases, in order."""
        return tuple(ref.id for ref in self.refs)

    def __len__(self) -> int:
        return len(self.refs)

    @overload
    def __getitem__(self, index: int) -> Case: ...
    @overload
    def __getitem__(self, index: slice) -> CaseSet: ...
    def __getitem__(self, index: int | slice) -> Case | CaseSet:
        if isinstance(index, slice):
            return self._keep(self.refs[index])
        return self.refs[index].open()

    def __iter__(self) -> Iterator[Case]:
        if all(ref.memory for ref in self.refs):
            yield from (ref.open() for ref in self.refs)
            return
        # The thread that reads ahead computes on one core: two pools of threads that spin on the same cores slow each
        # other down. Torch passes its thread count on to all threads started later, so it is restored at the end.
        reader = ThreadPoolExecutor(1, "segcal-prefetch", initializer=torch.set_num_threads, initargs=(1,))
        with torch_threads(torch.get_num_threads()), reader:
            ahead = reader.submit(_open_ahead, self.refs[0])
            for following in self.refs[1:]:
                case = _received(ahead.result())
                ahead = reader.submit(_open_ahead, following)
                yield case
                del case  # Otherwise it would stay in memory while the next one is read.
            yield _received(ahead.result())

    @property
    def on_gpu(self) -> bool:
        """Whether all tensors lie on a GPU already."""
        return all(ref.memory == "cuda" for ref in self.refs)

    @property
    def case_groups(self) -> dict[str, str]:
        """The group of every case; without groups, the name of the case."""
        return {name: group_of(name, self.groups) for name in self.ids}

    def about_groups(self) -> dict[str, Any] | None:
        """The groups as results record them: the pattern, if any, and the group of every case; None without groups."""
        if self.groups is None:
            return None
        return {"pattern": self.groups if isinstance(self.groups, str) else None, "cases": self.case_groups}

    def select(self, ids: Sequence[str]) -> CaseSet:
        """The cases with these names, in the order given."""
        known = {ref.id: ref for ref in self.refs}
        if missing := [name for name in ids if name not in known]:
            raise InputError(f"no case named {some(missing)}", where="ids", expected=f"one of {some(self.ids)}")
        return self._keep(tuple(known[name] for name in ids))

    def _keep(self, refs: Sequence[CaseRef]) -> CaseSet:
        """Some of the cases, and their part of the declared splits."""
        kept = {ref.id for ref in refs}
        splits = {part: tuple(name for name in names if name in kept) for part, names in self.splits.items()}
        return replace(self, refs=refs, splits=splits)

    def part(self, name: str) -> CaseSet:
        """The cases of a part that ``segcal.toml`` declares under ``[splits]``."""
        check_name("part", name, PARTS)
        if name not in self.splits:
            expected = f"{name} = [...] under [splits] in segcal.toml"
            raise InputError(f"the dataset declares no {name} part", where="splits", expected=expected)
        return self.select(self.splits[name])

    @property
    def undeclared(self) -> tuple[str, ...]:
        """Cases that are in no declared part; empty if no parts are declared."""
        named = {name for names in self.splits.values() for name in names}
        return tuple(name for name in self.ids if name not in named) if self.splits else ()

    def pooled(self, space: Kind) -> CaseSet:
        """The same cases with their ensemble members pooled in this space: ``"logits"`` or ``"probs"``.

        Examples:
            >>> from segcal.synthetic import scenes
            >>> scenes(2, size=(32, 40), members=3).pooled("probs")[0].logits.exp().sum(1).mean()
            tensor(1.)
        """
        return self._pooled(None, check_pooling(space))

    def members(self, indices: Sequence[int]) -> CaseSet:
        """The same cases with only some of their ensemble members.

        Examples:
            >>> from segcal.synthetic import scenes
            >>> cases = scenes(2, size=(32, 40), members=3)
            >>> [cases.members(range(size)).num_members for size in (1, 2, 3)]
            [1, 2, 3]
        """
        return self._pooled(indices, None)

    def _pooled(self, members: Sequence[int] | None, space: Kind | None) -> CaseSet:
        if self.num_members is None:
            raise no_members()
        chosen = check_members(members, self.num_members)
        refs = tuple(ref.then("pooled", space, chosen) for ref in self.refs)
        return replace(self, refs=refs, num_members=len(chosen))

    def channel(self, index: int) -> CaseSet:
        """One channel of multi-label data, as ordinary cases of two classes: outside and inside.

        Examples:
            >>> from dataclasses import replace
            >>> from segcal.synthetic import scenes
            >>> cases = replace(scenes(2, size=(32, 40), num_classes=2), channel_names=("tumour",))
            >>> cases.channel(0).channel_names, cases.channel(0)[0].shape
            (None, (1, 2, 32, 40))
        """
        count = len(self.channel_names or ())
        if not 0 <= index < count:
            expected = f"0..{count - 1}" if count else "multi-label data, which these are not"
            raise InputError(f"channel {index}", where="cases", expected=expected)
        return replace(self, refs=tuple(ref.then("channel", index) for ref in self.refs), channel_names=None)

    def on(self, device: Device | None) -> CaseSet:
        """The same cases, whose tensors are on this device: ``cpu``, ``cuda``, or ``auto`` for a GPU if there is one.

        None leaves them where they are.

        Examples:
            >>> from segcal.synthetic import scenes
            >>> scenes(1, size=(32, 40)).on("cpu")[0].logits.device
            device(type='cpu')
        """
        if device is None:
            return self
        there = resolved(device)
        return replace(self, refs=tuple(replace(ref.then("on", there), memory=None) for ref in self.refs))

    def shard(self, rank: int, world: int) -> CaseSet:
        """The share of process ``rank`` of ``world``: shares are of nearly equal size in bytes, or in cases."""
        if not 0 <= rank < world:
            raise InputError(f"rank {rank} of world {world}", where="shard", expected="0 <= rank < world")
        return self.shards(world)[rank]

    def shards(self, world: int) -> list[CaseSet]:
        """The shares of all processes. The largest cases are dealt first, each to the share that has least so far."""
        sizes = [max(ref.size, 1) for ref in self.refs]
        shares: list[list[int]] = [[] for _ in range(world)]
        totals = [(0, 0, rank) for rank in range(world)]
        for index in sorted(range(len(self)), key=lambda index: -sizes[index]):
            total, count, rank = heapq.heappop(totals)
            shares[rank].append(index)
            heapq.heappush(totals, (total + sizes[index], count + 1, rank))
        return [self._keep([self.refs[index] for index in sorted(share)]) for share in shares]

    def split(
        self,
        calibration: float | int | None = None,
        validation: float | int | None = None,
        test: float | int | None = None,
        *,
        seed: int = 0,
        groups: Groups | None = None,
    ) -> Split:
        """Disjoint random parts, as fractions of the cases or as whole numbers of cases.

        Without sizes, the parts declared in ``segcal.toml`` are returned or, if there are none, 50/20/30 percent.
        ``groups`` keeps cases together that belong together, such as the volumes of a patient: a function of the case
        name, a mapping, or a regular expression whose first group (or whole match) is the name of the group. Groups
        are assigned to parts at random, with sizes as close to the wanted ones as whole groups allow. The same names
        and seed give the same parts, whatever the order of the files.
        """
        check_seed(seed)
        if calibration is validation is test is None:
            if self.splits:
                return Split(*(self.select(self.splits.get(part, ())) for part in PARTS))
            calibration, validation, test = 0.5, 0.2, 0.3
        wanted = (calibration or 0, validation or 0, test or 0)
        sizes = part_sizes(wanted, len(self))
        members = by_group(self.ids, groups or self.groups)
        # A part of single cases may round to none. Groups cannot meet sizes exactly, but every part gets at least one.
        asked = [size > 0 for size in (wanted if len(members) < len(self) else sizes)]
        parts = draw_parts(members, sizes, asked, seed)
        for part, expected, drawn in zip(PARTS, asked, parts, strict=True):
            if expected and not drawn:
                raise InputError(
                    f"{len(self)} cases in {len(members)} groups leave the {part} part empty",
                    where="split",
                    expected="at least one group for every part asked for",
                    fix="use fewer parts, other sizes, or smaller groups",
                )
        return Split(*(self._keep([ref for ref in self.refs if ref.id in part]) for part in parts))

    def folds(self, count: int, *, seed: int = 0, groups: Groups | None = None) -> list[tuple[CaseSet, CaseSet]]:
        """(The others, the fold) for each of ``count`` parts of nearly equal size. Groups stay together as in split."""
        check_seed(seed)
        members = by_group(self.ids, groups or self.groups)
        if not 2 <= count <= len(members):
            problem = f"{count} folds of {len(members)} groups"
            raise InputError(problem, where="folds", expected="at least 2, and one group for each")
        sizes = [len(self) // count + (part < len(self) % count) for part in range(count)]
        parts = draw_parts(members, sizes, [True] * count, seed)
        others = [self._keep([ref for ref in self.refs if ref.id not in part]) for part in parts]
        folds = [self._keep([ref for ref in self.refs if ref.id in part]) for part in parts]
        return list(zip(others, folds, strict=True))


def numbered_channels(count: int) -> tuple[str, ...]:
    """Names of channels that were given none."""
    return tuple(f"channel {index}" for index in range(count))


def _open_and_call(ref: CaseRef, method: str, *arguments: Any) -> Case:
    case: Case = getattr(ref.open(), method)(*arguments)
    return case


def _received(case: Case) -> Case:
    """A case that was opened ahead, on this thread's stream."""
    everything = slice(0, case.source.spatial[0])
    received(case.rows(name, everything) for name in ("logits", "labels", "mask") if case.has_read(name))
    return case


def _open_ahead(ref: CaseRef) -> Case:
    """Open a case, and read it unless it is huge. Errors of reading are raised again when the tensor is used."""
    case = ref.open()
    with left_for_later():
        if 4 * int(np.prod(case.shape, dtype=np.int64)) <= PREFETCH_BYTES:
            case.load()
    return case
