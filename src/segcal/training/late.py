"""Numbers that are read from a GPU some steps after they were asked for, so that no step waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

# How many steps later a number is read from a GPU. On a CPU it is read at once.
LATE_STEPS = 8


class LateNumbers:
    """The numbers of consecutive steps, in order, each ``steps`` steps late.

    Examples:
        >>> numbers = LateNumbers(steps=1)
        >>> [list(numbers.add(torch.tensor(value))) for value in (1.0, 2.0)], list(numbers.rest())
        ([[], [1.0]], [2.0])
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._waiting: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def add(self, number: Tensor) -> Iterator[float]:
        """Ask for a number of this step; yields those that are due."""
        event = None
        if number.device.type == "cuda":
            stream = torch.cuda.current_stream(number.device)
            host = torch.empty((), dtype=number.dtype, pin_memory=True)
            number = host.copy_(number, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            event.record(stream)
        self._waiting.append((number, event))
        return self._read(self.steps)

    def rest(self) -> Iterator[float]:
        """All numbers not yet read."""
        return self._read(0)

    def _read(self, keep: int) -> Iterator[float]:
        while len(self._waiting) > keep:
            number, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            yield float(number)
