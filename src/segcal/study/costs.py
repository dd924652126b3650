"""Measured costs of pieces of work, and the sizes of files that commands write.

Times are seconds of one thread of the machine that ``benchmarks/results/cost.txt`` names, without reading files. Most
pieces of work go through all voxels once or several times; fits also work on voxels that they draw, up to a limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from segcal.calibrators import CALIBRATORS
from segcal.cases import CaseSet
from segcal.cases.caseset import CaseRef
from segcal.cases.disk import DiskCase
from segcal.errors import InputError, naming
from segcal.study.results.browser import CASES, PIXELS, SLICES
from segcal.types import Case

# Cases that are opened to learn their shapes; the shapes of others are taken from the sizes of their files.
_OPENED = 64


@dataclass(frozen=True)
class DataSize:
    """How large cases are.

    Attributes:
        cases: How many there are.
        voxels: Of all cases, and all channels of multi-label data.
        largest: Voxels of the largest case.
        classes: Two in each channel of multi-label data.
        planes: Images in the largest case: the slices of a volume.
        stored: Bytes of the files of scores; 0 if there are none.
        format: Type and format of the scores of a case, such as ``float16 npy``.
        ratio: Bytes of the files by bytes of the scores they hold: below 1 if they are compressed.
    """

    cases: int
    voxels: int
    largest: int
    classes: int
    planes: int = 1
    stored: int = 0
    format: str = "in memory"
    ratio: float = 1.0

    @classmethod
    def of(cls, cases: CaseSet) -> DataSize:
        """The size of cases, from the headers of some of them and the sizes of all files."""
        if not len(cases):
            raise InputError("no cases", where="cases", expected="at least one")
        refs = sorted(cases.refs, key=lambda ref: -ref.size)
        seen = [refs[place * len(refs) // _OPENED] for place in range(_OPENED)] if len(refs) > _OPENED else refs
        opened = [opened_case(ref) for ref in seen]
        voxels = [case.shape[0] * math.prod(case.shape[2:]) for case in opened]
        stored, sampled = (sum(ref.size for ref in some) for some in (refs, seen))
        total = round(sum(voxels) * (stored / sampled if sampled else len(refs) / len(seen)))
        largest = opened[voxels.index(max(voxels))]
        planes = math.prod(largest.shape[2:-2])
        size = cls(len(cases), total, max(voxels), cases.num_classes, planes, stored)
        source = opened[0].source
        if not isinstance(source, DiskCase):
            return size
        kept = source.members[0]
        held = kept.file.dtype.itemsize * math.prod(kept.shape) * len(source.members)
        form = f"{kept.file.dtype} {source.suffix.lower().lstrip('.')}"
        return replace(size, format=form, ratio=seen[0].size / held if seen[0].size > 0 else 1.0)

    def part(self, cases: float) -> DataSize:
        """The size of some of the cases, if all were alike."""
        return replace(self, cases=round(cases), voxels=round(self.voxels * cases / self.cases))


def opened_case(ref: CaseRef) -> Case:
    """A case; errors name it."""
    with naming(case=ref.id):
        return ref.open()


class Cost(NamedTuple):
    """The time of a piece of work, and the memory that it holds besides the cases.

    Attributes:
        fixed: Seconds, whatever the data.
        case: Seconds for a case.
        voxel: Seconds for 10^9 voxels, on one thread.
        copied: Seconds for 10^9 scores (voxels times classes), on one thread.
        score: Seconds for 10^9 scores, shared by all threads, or on the GPU.
        drawn: Seconds for 10^6 voxels that are drawn, times the classes to ``power``; shared by all threads.
        most: At most so many millions are drawn.
        power: How that grows with the classes.
        reads: How often the files are read.
        memory: Bytes for each score of the voxels that are drawn.
    """

    fixed: float = 0.0
    case: float = 0.0
    voxel: float = 0.0
    copied: float = 0.0
    score: float = 0.0
    drawn: float = 0.0
    most: float = 0.0
    power: float = 1.0
    reads: int = 1
    memory: float = 0.0

    def seconds(self, size: DataSize) -> tuple[float, float, float]:
        """On one thread of the reference: what is not shared, passes over scores, and work on drawn voxels."""
        voxels = size.voxels / 1e9
        alone = self.fixed + self.case * size.cases + (self.voxel + self.copied * size.classes) * voxels
        drawn = self.drawn * min(size.voxels / 1e6, self.most) * size.classes**self.power
        return alone, self.score * size.classes * voxels, drawn

    def held(self, size: DataSize) -> float:
        """Bytes of the voxels that are drawn."""
        return self.memory * min(size.voxels, self.most * 1e6) * size.classes


#: Classes and voxels of the probe's pass, and its seconds on one thread of the reference machine.
PASS_SHAPE, PASS = (8, 2**19), 0.028
#: Cases that ``fit`` holds out, by default.
HELD_OUT = 0.3

#: Starting Python, importing torch, loading compiled loops.
START = Cost(fixed=4.5, reads=0)
#: ``evaluate`` with its default metrics and regions; and one more calibrator on the same cases, without its map.
EVALUATE = Cost(fixed=0.1, case=0.006, voxel=45, score=4)
EVALUATE_AGAIN = Cost(fixed=0.1, case=0.005, voxel=30, score=1, reads=0)
#: Seconds for 10^9 voxels that distances in volumes take beyond those in images.
VOLUME = Cost(voxel=15, reads=0)
#: Writing calibrated probabilities and reading them back.
WRITE = Cost(case=0.005, copied=45)
#: Summaries, pictures and the page of a study.
REPORT = Cost(fixed=10, voxel=20, reads=0)
#: What choosing the strength adds to the fit of an expert map.
TUNING = Cost(drawn=1.0, most=0.4, power=1.43)

# One pass that checks scores and labels and draws a sample.
_FIRST = Cost(fixed=0.2, case=0.006, voxel=20, score=5)
# Networks train on crops until the held-out loss stops falling, so their times vary.
_LOCAL = Cost(fixed=0.5, voxel=100, score=15, drawn=2.2, most=2.1, power=0.8, reads=3, memory=8)
# Newton's method: the curvature of one matrix has C^4 numbers, and experts share the voxels.
_MATRIX = _FIRST._replace(drawn=0.025, most=0.4, power=2.65, memory=45)
#: Fits by method.
FITS: dict[str, Cost] = {
    "ts": _FIRST._replace(reads=2),
    "ets": _FIRST._replace(drawn=0.5, most=0.4, power=0.5, memory=45),
    "vs": _FIRST._replace(drawn=0.21, most=0.4, power=0.9, memory=45),
    **dict.fromkeys(("ms", "ms-c", "dc"), _MATRIX),
    "cdc": _MATRIX._replace(drawn=0.14, power=2.4),
    "cms-ap": _MATRIX._replace(drawn=0.15, power=1.7),
    "cms-op": _MATRIX._replace(drawn=0.086, power=2.0),
    **dict.fromkeys(("lts", "lts-ti", "ibts"), _LOCAL),
    "selective": _FIRST._replace(fixed=2, voxel=100, score=20, drawn=10, most=0.2, power=0.6, reads=3, memory=20),
    "ensemble": _FIRST,
    "meta-cal": _FIRST._replace(drawn=0.85, most=0.4, power=0.76, reads=2, memory=20),
    "isotonic": _FIRST._replace(fixed=0.2, voxel=100, score=10),
    "histogram": _FIRST._replace(fixed=0.3, voxel=100, score=10),
    "trust": Cost(case=0.01, voxel=400, score=15, drawn=22, most=0.3, power=0.5, reads=6, memory=60),
}
# An affine map or a table, by compiled loops.
_SIMPLE = Cost(voxel=20, score=4)
#: Maps by method: calibrating the scores of cases.
MAPS: dict[str, Cost] = {
    **dict.fromkeys(("ts", "vs", "ms", "ms-c", "dc", "cdc", "cms-ap", "cms-op", "histogram", "ensemble"), _SIMPLE),
    **dict.fromkeys(("lts", "lts-ti", "ibts"), Cost(voxel=40, score=20, reads=2)),
    "ets": Cost(voxel=40, score=8),
    "selective": Cost(voxel=80, score=30),
    "meta-cal": Cost(voxel=80, score=18),
    "isotonic": Cost(voxel=30, score=6),
    "trust": Cost(voxel=240, score=3, reads=2),
}
#: Methods whose networks train on the GPU where there is one.
TRAINED = ("lts", "lts-ti", "ibts", "selective", "trust")

#: Memory of a process with everything loaded, and what pictures and the page of a study add.
BASE_BYTES, REPORT_BYTES = 470e6, 100e6
#: Bytes that ``evaluate`` holds of a voxel besides its scores (label, regions, distance), and of how many at most.
VOXEL_BYTES, MOST_VOXELS = 30.0, 2**22


def results_bytes(size: DataSize) -> float:
    """``evaluate -o``: rows and bins of every case, bins of every class."""
    return 10e3 + 5.7e3 * size.cases + 3.7e3 * size.classes


def calibrator_bytes(id: str, classes: int) -> float:
    """``fit``: a header, and the parameters in float64 or float32."""
    return 1e3 + 8.0 * sum(math.prod(shape) for shape in CALIBRATORS[id]().shapes(classes).values())


def study_bytes(size: DataSize, methods: int, repeats: int, tested: int) -> float:
    """``compare``: figures, the page, pictures (twice, one of them as text), what was measured of every method."""
    pixels = min(size.largest / size.planes, PIXELS**2) * min(size.planes, SLICES) * min(size.cases, CASES)
    pictures = 8 * 0.5 * pixels  # panels of a picture, and bytes of a pixel when compressed
    kept = (methods + 1) * (repeats * (5e3 + 3.7e3 * size.classes) + 4.9e3 * tested)
    results = (methods + 1) * (40e3 + 0.8e3 * size.cases + 1.3e3 * size.classes)
    return 600e3 + 2.33 * pictures + kept + results
