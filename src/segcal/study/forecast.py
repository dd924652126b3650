"""What every command will cost, before it starts: ``plan``.

The time of a command is a sum of pieces of work, each with its own measured constants (``segcal.study.costs``), scaled
by a probe of this machine that takes some seconds. Memory and disk follow from the sizes of the data alone.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from segcal.calibrators import CALIBRATORS
from segcal.calibrators.experts import ExpertCalibrator
from segcal.cases import CaseSet, Source, cases_from
from segcal.cases.caseset import PREFETCH_BYTES
from segcal.cases.device import Device, resolved
from segcal.errors import InputError, check_whole, naming
from segcal.files.plain import plain
from segcal.fitting.cost import available_memory
from segcal.parallel.threads import torch_threads
from segcal.statistics import VoxelStatistics
from segcal.study import costs
from segcal.study.costs import Cost, DataSize, opened_case
from segcal.study.settings import Settings, resolve_methods
from segcal.study.splits import split_cases
from segcal.types import CHUNK_VALUES, row_slices

# The probe stops reading after so many scores or seconds.
_READ, _LONG = 2**24, 1.0
# Times that the probe's pass is run; the fastest counts.
_RUNS = 3
# Nanoseconds that a thread has run, and that it has waited for a core.
_WAITED = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True)
class Machine:
    """What the probe found.

    Attributes:
        device: Where commands will compute.
        threads: Threads of torch.
        memory: Bytes that are free.
        disk: Bytes that are free in the current folder.
        read: Scores per second that are read from the files.
        alone: Seconds of the probe's pass on one thread, over those of the reference machine.
        together: The same on all threads.
        passes: The same where passes over scores run: on all threads, or on the GPU.
    """

    device: str
    threads: int
    memory: float
    disk: float
    read: float
    alone: float
    together: float
    passes: float

    def seconds(self, cost: Cost, size: DataSize) -> float:
        """The time of a piece of work on data of this size."""
        work = zip(cost.seconds(size), (self.alone, self.passes, self.together), strict=True)
        return sum(seconds * slower for seconds, slower in work) + cost.reads * size.voxels * size.classes / self.read


def probe(cases: CaseSet, device: Device = "cpu") -> Machine:
    """Read parts of some cases, and run a pass over voxels on one thread and on all."""
    there, cpu = resolved(device), torch.device("cpu")
    threads = torch.get_num_threads()
    alone, together = (_pass_seconds(cpu, count) / costs.PASS for count in (1, threads))
    together = min(alone, together)  # the clock does not see how long other threads wait for busy cores
    passes = together if there.type == "cpu" else _pass_seconds(there, None) / costs.PASS
    free = float(shutil.disk_usage(Path.cwd()).free)
    return Machine(str(there), threads, available_memory(), free, _read_rate(cases.on(there)), alone, together, passes)


def _read_rate(cases: CaseSet) -> float:
    """Scores per second, from some cases of middle sizes: a part of each if it can be read in parts."""
    refs = sorted(cases.refs, key=lambda ref: ref.size)
    refs = refs[len(refs) // 4 :] or refs  # Those that are decoded as a whole may take long: not the largest first.
    seconds, scores = 0.0, 0
    for number, ref in enumerate(refs):
        case = opened_case(ref)
        started = _clock()
        with naming(case=case.id), torch_threads(1):  # as files are read ahead
            rows = next(row_slices(case.shape, _READ)) if case.source.sliceable else slice(0, case.shape[2])
            read = case.rows("logits", rows).numel()
        if number or len(refs) == 1:  # The first one also loads libraries.
            seconds, scores = seconds + _clock() - started, scores + read
        if seconds > _LONG or scores > _READ:
            break
    return scores / max(seconds, 1e-9)


def _pass_seconds(device: torch.device, threads: int | None) -> float:
    """The fastest of some passes over voxels that are always the same."""
    random = torch.Generator().manual_seed(0)
    classes, voxels = costs.PASS_SHAPE
    logits = torch.randn((1, classes, voxels), generator=random).mul_(3).to(device)
    labels = torch.randint(classes, (1, voxels), generator=random).to(device)
    times = []
    for _ in range(1 + _RUNS):  # The first one loads the compiled loops.
        statistics = VoxelStatistics(classes, threads=threads)
        started = _clock()
        statistics.update(logits, labels)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(_clock() - started)
    return min(times[1:])


def _clock() -> float:
    """Seconds, less those that this thread could have run but other programs had the cores, where Linux tells them."""
    now = time.perf_counter()
    try:
        return now - 1e-9 * int(_WAITED.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return now


@dataclass(frozen=True)
class Row:
    """The cost of a command: seconds, bytes of memory at the peak, bytes written; or why it would be refused."""

    command: str
    seconds: float
    memory: float
    disk: float
    refused: str | None = None


@dataclass(frozen=True)
class Forecast:
    """What ``plan`` returns: the data, the machine, a row for every command, and notes.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> forecast = plan(scenes(6, size=(16, 20)), methods=("ts",))
        >>> [row.command for row in forecast.rows]
        ['evaluate', 'fit ts', 'apply ts', 'compare ts']
    """

    data: DataSize
    machine: Machine
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def row(self, command: str) -> Row:
        """The row of a command, such as ``"fit ts"``."""
        found = {row.command: row for row in self.rows}
        if command not in found:
            raise InputError(f"no command {command!r}", expected=f"one of {', '.join(found)}")
        return found[command]

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain JSON types."""
        return dict(plain(asdict(self)))


def plan(
    cases: Source,
    methods: str | Sequence[str] = ("trust", "ts", "lts-ti", "cms-op"),
    repeats: int | None = None,
    *,
    device: Device | None = None,
    machine: Machine | None = None,
) -> Forecast:
    """Expected time, memory and disk of ``evaluate``, ``fit``, ``apply`` and ``compare`` before they start.

    Each with its default options, as one process, on a machine that does nothing else. What happens is within a factor
    of two for data that look like those of the measurements (``docs/cost.md``): times are those of a machine measured
    once, scaled by a probe of this one.

    Args:
        cases: The dataset, or anything else that ``segcal.cases_from`` takes, such as a DataLoader.
        methods: Those of ``compare``, each with a row for its fit and one for its use.
        repeats: Those of ``compare``.
        device: Where the commands would compute: ``auto``, ``cpu``, ``cuda``; None for ``cpu``.
        machine: What an earlier probe found, to be used again.

    Examples:
        >>> import segcal
        >>> forecast = plan(segcal.synthetic.scenes(8, size=(32, 40)), ("ts",), repeats=2)
        >>> [row.command for row in forecast.rows]
        ['evaluate', 'fit ts', 'apply ts', 'compare ts']
    """
    cases = cases_from(cases)
    ids = resolve_methods(methods, members=cases.num_members is not None)
    if repeats is not None:
        check_whole("repeats", repeats, 1)
    size = DataSize.of(cases)
    found = machine or probe(cases, device or "cpu")
    model = Model(size, found)
    rows = [model.evaluate(), *(model.fit(id) for id in ids), *(model.apply(id) for id in ids)]
    fits = {row.command: row for row in rows}
    fitted = tuple(id for id in ids if fits[f"fit {id}"].refused is None)
    try:
        splits, origin, notes = split_cases(cases, repeats, Settings(ids).fractions, Settings(ids).seed)
    except InputError as error:  # one large case can be calibrated, but not divided
        rows.append(Row(f"compare {','.join(ids)}", 0.0, 0.0, 0.0, error.problem))
        notes = []
    else:
        rows.append(model.compare(ids, fitted, [tuple(len(part) for part in split) for split in splits]))
        notes = [f"compare: {origin}", *notes]
    if found.device != "cpu" and (trained := [id for id in ids if id in costs.TRAINED]):
        notes.append(f"the networks of {', '.join(trained)} train on the GPU, faster than on the CPU as shown")
    most, written = max(row.memory for row in rows), max(row.disk for row in rows)
    if most > found.memory:
        notes.append(f"{most / 1e9:,.1f} GB of memory are needed, and {found.memory / 1e9:,.1f} GB are free")
    if written > found.disk:
        notes.append(f"{written / 1e9:,.1f} GB are written, and {found.disk / 1e9:,.1f} GB are free in this folder")
    return Forecast(size, found, tuple(rows), tuple(notes))


@dataclass(frozen=True)
class Model:
    """The costs of commands on data of a size, on a machine."""

    size: DataSize
    machine: Machine

    @property
    def _start(self) -> float:
        return self.machine.seconds(costs.START, self.size)

    def evaluate(self) -> Row:
        """All cases, without a calibrator."""
        seconds = self._start + self._evaluations((), self.size)
        return Row("evaluate", seconds, self._memory(costs.EVALUATE, costs.VOXEL_BYTES), costs.results_bytes(self.size))

    def fit(self, id: str) -> Row:
        """Seven tenths of the cases are fitted to, and the others evaluated before and after."""
        held_out = self.size.part(costs.HELD_OUT * self.size.cases)
        seconds = self._start + self._fit(id, self.size.part(self.size.cases - held_out.cases))
        seconds += self._evaluations((id,), held_out)
        disk = costs.calibrator_bytes(id, self.size.classes)
        return Row(f"fit {id}", seconds, self._memory(costs.FITS[id], costs.VOXEL_BYTES), disk, self._refused(id))

    def apply(self, id: str) -> Row:
        """All cases, in the format of the input."""
        seconds = self._start + sum(self.machine.seconds(cost, self.size) for cost in (costs.MAPS[id], costs.WRITE))
        disk = 4 * self.size.voxels * self.size.classes * self.size.ratio
        return Row(f"apply {id}", seconds, self._memory(costs.MAPS[id]), disk, self._refused(id))

    def compare(self, ids: Sequence[str], fitted: Sequence[str], parts: Sequence[Sequence[int]]) -> Row:
        """Every repeat fits all methods, then evaluates all of them on the validation and on the test cases."""
        seconds = self._start + self.machine.seconds(costs.REPORT, self.size)
        for calibration, validation, test in parts:
            own = self.size.part(calibration)
            seconds += sum(self._fit(id, own, tuned=True) for id in fitted)
            seconds += sum(self._evaluations(fitted, self.size.part(some)) for some in (validation, test))
        # The recommended method is fitted once more, to all but the test cases; on average it costs what all do.
        again = self.size.part(sum(parts[0][:2]))
        seconds += sum(self._fit(id, again) for id in fitted) / max(1, len(fitted))
        memory = max((self._memory(costs.FITS[id], costs.VOXEL_BYTES) for id in fitted), default=0.0)
        memory = max(memory, self._memory(costs.EVALUATE, costs.VOXEL_BYTES)) + costs.REPORT_BYTES
        disk = costs.study_bytes(self.size, len(fitted), len(parts), sum(test for *_, test in parts))
        return Row(f"compare {','.join(ids)}", seconds, memory, disk)

    def _fit(self, id: str, size: DataSize, *, tuned: bool = False) -> float:
        seconds = self.machine.seconds(costs.FITS[id], size)
        if tuned and issubclass(CALIBRATORS[id], ExpertCalibrator):
            seconds += self.machine.seconds(costs.TUNING, size)
        return seconds

    def _evaluations(self, ids: Sequence[str], size: DataSize) -> float:
        """Uncalibrated scores and all methods on the same cases, from one read of them."""
        again = len(ids) * self.machine.seconds(costs.EVALUATE_AGAIN, size)
        maps = sum(self.machine.seconds(costs.MAPS[id], size) for id in ids)
        volume = self.machine.seconds(costs.VOLUME, size) if size.planes > 1 else 0.0
        return self.machine.seconds(costs.EVALUATE, size) + volume + again + maps

    def _memory(self, cost: Cost, kept: float = 0.0) -> float:
        """The peak: what is loaded, two cases or pieces of a large one, and ``kept`` bytes of each voxel of a piece."""
        scores = 4 * self.size.largest * self.size.classes
        case = 2 * (scores + 8 * self.size.largest) if scores <= PREFETCH_BYTES else 2 * 4 * CHUNK_VALUES
        return costs.BASE_BYTES + case + kept * min(self.size.largest, costs.MOST_VOXELS) + cost.held(self.size)

    def _refused(self, id: str) -> str | None:
        calibrator = CALIBRATORS[id]()
        try:
            calibrator.check_size(self.size.classes)
        except InputError as error:
            return error.problem
        return None
