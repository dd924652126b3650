"""Work on cases that several processes share: ranks of a torchrun job, or worker processes."""

from __future__ import annotations

import operator
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from segcal.cases.caseset import CaseSet
from segcal.cases.splits import some
from segcal.errors import DataError
from segcal.parallel.ranks import Progress, crew
from segcal.parallel.workers import in_workers

T = TypeVar("T")


def in_shares(
    function: Callable[..., T],
    cases: CaseSet,
    *arguments: Any,
    merge: Callable[[T, T], T],
    workers: int = 1,
    progress: Progress | None = None,
) -> T:
    """``function(share, *arguments)`` of every process's share of the cases, merged; of all cases if there is only one.

    The processes are the ranks of the job or, without one, ``workers``. Function and arguments are sent to them, so the
    function must be at the top of its module.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> in_shares(len, scenes(3, size=(32, 40)), merge=added)
        3
    """
    count = min(crew(workers), len(cases))
    shares = cases.shards(count) if count > 1 else [cases]
    return in_workers(function, [(share, *arguments) for share in shares], merge, progress)


def added(mine: T, other: T) -> T:
    """Two answers as one: numbers and arrays are added, lists joined, mappings united, tuples taken item by item.

    Examples:
        >>> added((1, [2], {"a": 3}), (4, [5], {"b": 6}))
        (5, [2, 5], {'a': 3, 'b': 6})
    """
    both: Any = (mine, other)
    if not isinstance(mine, tuple):
        return operator.or_(*both) if isinstance(mine, dict) else operator.add(*both)  # type: ignore[no-any-return]
    make: Any = getattr(type(mine), "_make", tuple)
    return make(map(added, *both))  # type: ignore[no-any-return]


def check_same(cases: CaseSet) -> None:
    """Raise unless all ranks see the same files: the same names and sizes."""
    ranks = crew()
    if ranks == 1:
        return
    mine = sizes(cases)
    found = in_workers(_seen_elsewhere, [(cases, mine)] * ranks, operator.add)
    for host, wrong in found:
        raise DataError(
            f"{len(wrong)} cases differ in size on {host}, or are missing there: {some(wrong)}",
            where="torchrun",
            expected="the same dataset on all ranks",
            fix="use a folder that all machines share, or copy the dataset again",
        )


def sizes(cases: CaseSet) -> dict[str, int]:
    """The size of every case, as this machine sees it."""
    return {ref.id: ref.size for ref in cases.refs}


def _seen_elsewhere(cases: CaseSet, expected: dict[str, int]) -> list[tuple[str, list[str]]]:
    """This machine and the cases whose size differs here, if any."""
    wrong = [name for name, size in sizes(cases).items() if size != expected[name]]
    return [(socket.gethostname(), wrong)] if wrong else []
