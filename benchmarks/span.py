"""What many threads could gain, measured on few cores: ``python benchmarks/span.py [--threads 16] [--images 30]``.

Every parallel section of an operation is run item by item in one thread. With its items dealt to so many threads as the
library would, it would take as long as the busiest thread, if memory and locks held nobody up. What lies outside of
sections nobody shares. Times are processor seconds of this thread; the data are those of ``threads.py``. Torch's own
operations, which its threads may share, count as shared by nobody.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch

import segcal
from segcal.kernels import pieces_cpu
from segcal.synthetic import SpatialTemperature, scenes

CLASSES, IMAGE = 19, (256, 512)
FITS = ("ts", "ets", "dc", "cms-op", "isotonic")
APPLIED = ("ts", "dc", "cms-op", "isotonic", "trust")
# Sections listed of each operation, those that would take longest.
_LISTED = 5


@dataclass
class Section:
    """The calls of one parallel section: their items, the seconds of these, and of the busiest thread."""

    items: int = 0
    work: float = 0.0
    span: float = 0.0


@dataclass
class Recorder:
    """Its methods stand in for the functions of ``segcal.kernels.pieces_cpu`` of the same names."""

    threads: int
    sections: dict[str, Section] = field(default_factory=lambda: defaultdict(Section))
    _inside: bool = False

    def in_threads(self, work: Callable[[int], Any], count: int) -> list[Any]:
        """The work of every thread, one after the other."""
        return self._run(work, range(count), count)

    def in_turn(self, work: Callable[[Any], Any], items: Sequence[Any], threads: int | None = None) -> list[Any]:
        """The work of every item."""
        return self._run(work, items, min(threads or self.threads, len(items)))

    def in_ranges(self, work: Callable[[int, int], Any], length: int, threads: int | None = None) -> list[Any]:
        """The work of every range."""
        step = pieces_cpu._RANGE
        return self.in_turn(lambda start: work(start, min(start + step, length)), range(0, length, step), threads)

    def _run(self, work: Callable[[Any], Any], items: Sequence[Any], threads: int) -> list[Any]:
        if self._inside:
            return [work(item) for item in items]
        self._inside, found, busy = True, [], [0.0] * max(1, threads)
        section = self.sections[_caller()]
        for item in items:
            started = time.thread_time()
            found.append(work(item))
            took = time.thread_time() - started
            section.items, section.work = section.items + 1, section.work + took
            heapq.heapreplace(busy, busy[0] + took)  # the first thread that is free takes it
        section.span += max(busy)
        self._inside = False
        return found


def _caller() -> str:
    """The function outside of ``pieces_cpu`` and of this file that asked for threads, and the one that called it."""
    frame: FrameType | None = sys._getframe(1)
    names: list[str] = []
    while frame is not None and len(names) < 2:
        file = frame.f_code.co_filename
        if file not in (__file__, pieces_cpu.__file__):
            names.append(f"{file.rsplit('/', 1)[-1]}: {frame.f_code.co_name}")
        frame = frame.f_back
    return ", of ".join(names)


def record(threads: int) -> Recorder:
    """Let all of segcal's work be recorded, as if torch had so many threads."""
    recorder = Recorder(threads)
    for name in ("in_threads", "in_turn", "in_ranges"):
        plain = getattr(pieces_cpu, name)
        for module in [own for key, own in sys.modules.items() if key.startswith("segcal")]:
            if getattr(module, name, None) is plain:
                setattr(module, name, getattr(recorder, name))
    torch.get_num_threads = lambda: threads
    return recorder


def operations(images: int) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    some = scenes(min(images, 10), size=IMAGE, num_classes=CLASSES, plant=[SpatialTemperature()])
    times = -(-images // len(some))
    logits = torch.cat([case.logits for case in some]).repeat(times, 1, 1, 1)[:images]
    labels = torch.cat([case.labels for case in some]).repeat(times, 1, 1)[:images]
    found: dict[str, Callable[[], object]] = {
        "statistics": lambda: segcal.VoxelStatistics(CLASSES).update(logits, labels)
    }
    for method in FITS:
        found[f"{method} fit"] = partial(lambda own: own().fit(logits, labels), segcal.CALIBRATORS[method])
    for method in APPLIED:
        found[f"{method} apply"] = partial(segcal.CALIBRATORS[method]().fit(logits[:4], labels[:4]), logits)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--images", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wanted = operations(arguments.images)
    for operation in wanted.values():  # compiles
        operation()
    recorder = record(arguments.threads)
    print(f"segcal {segcal.__version__}, torch {torch.__version__}")
    print(f"{arguments.images} x {CLASSES} x {IMAGE[0]} x {IMAGE[1]} float32, processor seconds")
    print(f"{'':16}{'one thread':>12}{f'{arguments.threads} threads':>12}{'at most':>10}{'nobody shares':>15}")
    for name, operation in wanted.items():
        recorder.sections.clear()
        started = time.thread_time()
        operation()
        total = time.thread_time() - started
        alone = total - sum(section.work for section in recorder.sections.values())
        shared = alone + sum(section.span for section in recorder.sections.values())
        print(f"{name:16}{total:12.3f}{shared:12.3f}{total / shared:9.1f}x{alone:15.3f}", flush=True)
        for place, section in sorted(recorder.sections.items(), key=lambda own: -own[1].span)[:_LISTED]:
            print(f"    {section.work:8.3f} -> {section.span:6.3f}  {section.items:6,} items  {place}")


if __name__ == "__main__":
    main()
