"""A set of cases: lazy, re-iterable, sliceable; split by patient, sharded over machines, read ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import torch

from segcal.cases.splits import PARTS, Groups, by_group, check_splits, draw_parts, group_of, part_sizes, some
from segcal.errors import InputError, SegcalError, check_name, check_seed
from segcal.types import Case, Kind, check_members, check_pooling, no_members

# Cases above this size are not read ahead whole: they are meant to be walked through with Case.chunks().
PREFETCH_BYTES = 256 * 2**20

#: The two classes of a channel of multi-label data.
CHANNEL_CLASSES = ("outside", "inside")


@dataclass(frozen=True)
class CaseRef:
    """A case that has not been opened: its name, and how to open it."""

    id: str
    open: Callable[[], Case]


class Split(NamedTuple):
    """Three disjoint parts of a ``CaseSet``."""

    calibration: CaseSet
    validation: CaseSet
    test: CaseSet


@dataclass(frozen=True)
class CaseSet(Sequence[Case]):
    """Cases of one dataset, opened when asked for.

    Iterating opens each case anew and reads the next one in the background; nothing is kept once the caller lets go.
    ``cases[3]`` is a case, ``cases[2:5]`` and ``cases.select(ids)`` are case sets.

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
    """The class that metrics of the foreground leave out; None where every class is one like any other."""
    num_members: int | None = None
    """How many ensemble members the logits are pooled from; None for a single model."""
    folders: tuple[Path, ...] = ()
    """The folders that the cases are read from, where nothing may be written."""
    notes: tuple[str, ...] = ()
    """What whoever opened the files should know: some belong to no case, some chunks are not stored."""
    channel_names: tuple[str, ...] | None = None
    """The channels of multi-label data, each a two-class problem of its own; None for ordinary data."""

    def __post_init__(self) -> None:
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
        if not self.refs:
            return
        with _background() as submit:
            ahead = submit(self.refs[0])
            for following in self.refs[1:]:
                case = ahead.result()
                ahead = submit(following)
                yield case
                del case  # Otherwise it would live on while the next one is awaited.
            yield ahead.result()

    @property
    def case_groups(self) -> dict[str, str]:
        """The group of every case; without groups, its own name."""
        return {name: group_of(name, self.groups) for name in self.ids}

    def about_groups(self) -> dict[str, Any] | None:
        """What results say of groups: the pattern, if it is one, and the group of every case; None without groups."""
        if self.groups is None:
            return None
        return {"pattern": self.groups if isinstance(self.groups, str) else None, "cases": self.case_groups}

    def select(self, ids: Sequence[str]) -> CaseSet:
        """The cases with these names, in the order given."""
        known = {ref.id: ref for ref in self.refs}
        missing = [name for name in ids if name not in known]
        if missing:
            raise InputError(f"no case named {some(missing)}", where="ids", expected=f"one of {some(self.ids)}")
        return self._keep(tuple(known[name] for name in ids))

    def _keep(self, refs: Sequence[CaseRef]) -> CaseSet:
        """Some of the cases; the declared parts keep those of them that are theirs."""
        kept = {ref.id for ref in refs}
        splits = {part: tuple(name for name in names if name in kept) for part, names in self.splits.items()}
        return replace(self, refs=refs, splits=splits)

    def part(self, name: str) -> CaseSet:
        """The cases of a part that ``segcal.toml`` declares under ``[splits]``."""
        check_name("part", name, PARTS)
        if name not in self.splits:
            raise InputError(
                f"the dataset declares no {name} part",
                where="splits",
                expected=f"{name} = [...] under [splits] in segcal.toml",
            )
        return self.select(self.splits[name])

    @property
    def undeclared(self) -> tuple[str, ...]:
        """Cases that no declared part names; none where no parts are declared."""
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
        """The same cases as fewer members see them; one of them is a single model, pooled with nothing.

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
        refs = tuple(CaseRef(ref.id, partial(_open_pooled, ref, chosen, space)) for ref in self.refs)
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
        refs = tuple(CaseRef(ref.id, partial(_open_channel, ref, index)) for ref in self.refs)
        return replace(self, refs=refs, channel_names=None)

    def shard(self, rank: int, world: int) -> CaseSet:
        """Every ``world``-th case from ``rank`` on: the share of one of ``world`` processes."""
        if not 0 <= rank < world:
            raise InputError(f"rank {rank} of world {world}", where="shard", expected="0 <= rank < world")
        return self._keep(self.refs[rank::world])

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

        Without sizes, the parts declared in ``segcal.toml`` are returned or, where there are none, 50/20/30 percent.
        ``groups`` keeps cases together that belong together (one patient's volumes): a function of the case name, a
        mapping, or a regular expression whose first group (or whole match) is the group's name. Which groups go into
        which part is random; the sizes are as near to the wanted ones as that allows. The order of the files does not
        matter: the same names and seed give the same parts.
        """
        check_seed(seed)
        if calibration is validation is test is None:
            if self.splits:
                return Split(*(self.select(self.splits.get(part, ())) for part in PARTS))
            calibration, validation, test = 0.5, 0.2, 0.3
        wanted = (calibration or 0, validation or 0, test or 0)
        sizes = part_sizes(wanted, len(self))
        members = by_group(self.ids, groups or self.groups)
        # A share of single cases that rounds to none is none; groups do not meet their shares, but each part has one.
        asked = [size > 0 for size in (wanted if len(members) < len(self) else sizes)]
        parts = draw_parts(members, sizes, asked, seed)
        for part, expected, chosen in zip(PARTS, asked, parts, strict=True):
            if expected and not chosen:
                raise InputError(
                    f"{len(self)} cases in {len(members)} groups leave the {part} part empty",
                    where="split",
                    expected="at least one group for every part asked for",
                    fix="use fewer parts, other sizes, or smaller groups",
                )
        order = {name: position for position, name in enumerate(self.ids)}
        return Split(
            *(self.select(sorted((i for name in part for i in members[name]), key=order.__getitem__)) for part in parts)
        )

    def folds(self, count: int, *, seed: int = 0, groups: Groups | None = None) -> list[tuple[CaseSet, CaseSet]]:
        """(The others, the fold) for each of ``count`` parts of nearly equal size, groups kept together as in split."""
        check_seed(seed)
        members = by_group(self.ids, groups or self.groups)
        if not 2 <= count <= len(members):
            raise InputError(
                f"{count} folds of {len(members)} groups", where="folds", expected="at least 2, and a group for each"
            )
        sizes = [len(self) // count + (part < len(self) % count) for part in range(count)]
        parts = draw_parts(members, sizes, [True] * count, seed)
        fold_of = {case: part for part, chosen in enumerate(parts) for name in chosen for case in members[name]}
        return [
            (
                self.select([case for case in self.ids if fold_of[case] != part]),
                self.select([case for case in self.ids if fold_of[case] == part]),
            )
            for part in range(count)
        ]


def numbered_channels(count: int) -> tuple[str, ...]:
    """Names for channels that have none."""
    return tuple(f"channel {index}" for index in range(count))


def _open_pooled(ref: CaseRef, members: tuple[int, ...], space: Kind | None) -> Case:
    return ref.open().pooled(space, members)


def _open_channel(ref: CaseRef, index: int) -> Case:
    return ref.open().channel(index)


@contextmanager
def _background() -> Iterator[Callable[[CaseRef], Future[Case]]]:
    """One thread that opens cases ahead.

    It computes on one core: two pools of threads that spin on the same cores slow each other down badly. torch
    gives the setting of one thread to all threads born later, so it is put back at the end.
    """
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(1, "segcal-prefetch", initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            yield lambda ref: pool.submit(_open_ahead, ref)
        finally:
            torch.set_num_threads(threads)


def _open_ahead(ref: CaseRef) -> Case:
    """Open a case and read it unless it is huge. Read errors are left for whoever asks for the tensor."""
    case = ref.open()
    with suppress(SegcalError):
        if 4 * int(np.prod(case.shape, dtype=np.int64)) <= PREFETCH_BYTES:
            case.load()
    return case
