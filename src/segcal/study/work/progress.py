"""How far a study has got."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Step(NamedTuple):
    """The next step, and how much work is done. One unit of work is one case fitted or evaluated by one method."""

    name: str
    done: int
    total: int


class Meter:
    """Counts work and reports it to a callback.

    Examples:
        >>> meter = Meter(print, total=4)
        >>> meter.next("fitting ts"); meter.add(3); meter.next("evaluating")
        Step(name='fitting ts', done=0, total=4)
        Step(name='evaluating', done=3, total=4)
    """

    def __init__(self, callback: Callable[[Step], None], total: int) -> None:
        self._callback, self._total, self._done = callback, total, 0

    def next(self, name: str) -> None:
        """Announce the next step."""
        self._callback(Step(name, self._done, self._total))

    def add(self, work: int) -> None:
        """Record finished work."""
        self._done = min(self._total, self._done + work)
