"""More voxels than any disk here holds: ``python benchmarks/huge.py [--voxels 1e10]``.

A lazy source makes volumes of 10^7 voxels and two classes when they are read, and ``evaluate`` goes through them. The
number of voxels is beyond 2^32, so a count in 32 bits would show. Memory is that of the process after each tenth of the
cases. The counts must be exactly those that the source implies.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import segcal
from segcal.cases.caseset import CaseRef, CaseSet
from segcal.types import Case, CaseSource

SHAPE = (100, 200, 500)


class Lazy(CaseSource):
    """A volume whose rows are made when they are read: every fourth voxel is predicted wrong."""

    batch, num_classes, spatial, spacing, ignore_index, sliceable = 1, 2, SHAPE, None, 255, True

    def __init__(self, id: str) -> None:
        self.id = id

    def labels(self, rows: slice) -> Tensor:  # noqa: D102
        plane = torch.arange(SHAPE[1] * SHAPE[2]).view(1, 1, *SHAPE[1:])
        return (plane % 4 == 0).long().expand(1, rows.stop - rows.start, *SHAPE[1:])

    def logits(self, rows: slice) -> Tensor:  # noqa: D102
        z = torch.zeros(1, 2, rows.stop - rows.start, *SHAPE[1:])
        z[:, 0] = 1.5
        return z


def memory() -> float:
    """Resident memory of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--voxels", type=float, default=1e10)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    per_case = SHAPE[0] * SHAPE[1] * SHAPE[2]
    count = max(10, round(arguments.voxels / per_case))
    names = [f"volume-{n:05}" for n in range(count)]
    cases = CaseSet([CaseRef(name, partial(Case, Lazy(name))) for name in names], num_classes=2)
    seen, seconds = 0, time.perf_counter()

    def progress(_: str) -> None:
        nonlocal seen
        if seen % (count // 10) == 0:
            print(
                f"  {seen * per_case:16,} voxels, {memory():6.0f} MB, {time.perf_counter() - seconds:6.0f} s",
                flush=True,
            )
        seen += 1

    print(f"segcal {segcal.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    results = segcal.evaluate(
        cases, metrics=("nll", "ece", "accuracy"), regions=("everything",), device=arguments.device, progress=progress
    )
    bins = results.reliability["everything"]["top"]
    total, right = int(sum(bins["count"])), int(sum(bins["correct"]))
    print(f"  {total:,} voxels counted, {right:,} right, {memory():.0f} MB, {time.perf_counter() - seconds:.0f} s")
    expected = count * per_case
    assert total == expected, f"{expected:,} expected"
    assert right == expected // 4 * 3, f"{expected // 4 * 3:,} expected"
    print(f"  both exact; 2^32 is {2**32:,}; NLL {results.value('nll'):.6f}")


if __name__ == "__main__":
    main()
