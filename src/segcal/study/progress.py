"""How far a study is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Step(NamedTuple):
    """What comes next, and how much of the work is done; its unit is a case fitted or evaluated by one method."""

    name: str
    done: int
    total: int


class Meter:
    """Counts work and tells a callback.

    Examples:
        >>> meter = Meter(print, total=4)
        >>> meter.next("fitting ts"); meter.add(3); meter.next("evaluating")
        Step(name='fitting ts', done=0, total=4)
        Step(name='evaluating', done=3, total=4)
    """

    def __init__(self, callback: Callable[[Step], None], total: int) -> None:
        self._callback, self._total, self._done = callback, total, 0

    def next(self, name: str) -> None:
        """Say what comes next."""
        self._callback(Step(name, self._done, self._total))

    def add(self, work: int) -> None:
        """Note work that is done."""
        self._done = min(self._total, self._done + work)
