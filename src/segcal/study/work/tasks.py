"""The pieces of work of a study, each kept in the store when done.

``FitTask`` fits one calibrator, in one of several processes. ``Group`` evaluates all calibrators on the same cases,
from one read of them.
"""

from __future__ import annotations

import math
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.calibrators import CALIBRATORS, Calibrator
from segcal.calibrators.experts import ExpertCalibrator
from segcal.cases import CaseSet
from segcal.errors import OutputError, RankError, SegcalError, UnreachableError, WorkerError
from segcal.evaluation.evaluate import evaluate_many
from segcal.evaluation.plan import Plan
from segcal.evaluation.results import POOLED, Results
from segcal.files.plain import packed, unpacked
from segcal.files.versions import RESULTS
from segcal.metrics import Column
from segcal.parallel.workers import in_turn
from segcal.statistics import EVERYTHING
from segcal.study.settings import Select, Tune, variant_of
from segcal.study.tuning import tune
from segcal.study.work.store import Store, class_key, content_key

# No method's own fault: whatever comes next would fail, too, so these end the study.
_ENDING = (WorkerError, RankError, UnreachableError)


@dataclass(frozen=True)
class FitTask:
    """One calibrator to fit; ``key`` names the result in the store.

    With ``arguments`` (one mapping per channel) the calibrator is built from them and fitted without tuning.
    """

    method: str
    calibration: CaseSet
    validation: CaseSet | None
    tune: Tune
    select: Select
    seed: int
    key: str
    arguments: Sequence[Mapping[str, Any]] | None = None

    @classmethod
    def make(cls, known: Mapping[str, str], variant: str | None, **fields: Any) -> FitTask:
        """A task with its key; ``known`` are the fingerprints of the cases, ``variant`` how members are pooled."""
        parts = {name: fields[name] and variant_of(fields[name], variant) for name in ("calibration", "validation")}
        content = {
            **fields,
            **{name: part and [(i, known[i]) for i in part.ids] for name, part in parts.items()},
            "variant": variant,
            "defaults": CALIBRATORS[fields["method"]]().arguments(),
            "classes": class_key(parts["calibration"]),
        }
        return cls(**{**fields, **parts}, key=content_key(**content))


def run_fits(
    tasks: Sequence[FitTask], store: Store, workers: int, progress: Callable[[FitTask], None]
) -> dict[str, dict[str, Any]]:
    """The documents of all tasks by key, from the store where possible; ``progress`` is called after each."""
    found: dict[str, dict[str, Any]] = {}
    pending: list[FitTask] = []
    for task in tasks:
        kept = store.read("fit", task.key)
        if kept is None or store.load(task.key) is None:
            pending.append(task)
        else:
            found[task.key] = kept
            progress(task)
    calls = [(task, store.folder) for task in pending]
    for turn, document in in_turn(run_fit, calls, workers, lambda turn: progress(pending[turn])).items():
        if isinstance(document, WorkerError):
            document = {"status": "failed", "reason": str(document)}
        found[pending[turn].key] = document
    return found


def run_fit(task: FitTask, folder: Path) -> dict[str, Any]:
    """Fit and store. A failed fit gives its reason and is not stored: it may succeed next time."""
    if not folder.parent.is_dir():
        problem = f"is missing on {socket.gethostname()}"
        raise OutputError(problem, where=str(folder.parent), expected="an output folder that all machines share")
    store = Store(folder)
    started = time.perf_counter()
    with suppress(OSError):  # Restart the measurement of peak memory, if the system can.
        Path("/proc/self/clear_refs").write_text("5")
    try:
        calibrator = _fitted(task)
    except _ENDING:
        raise
    except Exception as error:  # One method must not end the study.
        return {"status": "failed", "reason": str(error) if isinstance(error, SegcalError) else repr(error)}
    report = calibrator.fit_report
    assert report is not None
    fit = {name: value for name, value in asdict(report).items() if name not in ("seconds", "fitted")}
    document = {
        "status": "ok",
        "reason": None,
        "fit": {**fit, "tuning": [asdict(trial) for trial in calibrator.tuning] or None},
        "parameters": calibrator.size(),
        "seconds": time.perf_counter() - started,
        "peak_memory_mb": peak_memory(),
    }
    store.save(task.key, calibrator)
    return store.write("fit", task.key, document)


def _fitted(task: FitTask) -> Calibrator:
    cls = CALIBRATORS[task.method]
    if task.arguments is not None:
        names, maps = task.calibration.channel_names, [cls(**own) for own in task.arguments]
        start = maps[0] if names is None else cls().take_channels(names, maps)
        return start.fit(task.calibration, validation=task.validation, seed=task.seed)
    # The papers train by Adam and search its settings; the path needs the exact solver.
    calibrator = cls(solver="adam") if task.tune == "paper" and issubclass(cls, ExpertCalibrator) else cls()
    exact = isinstance(calibrator, ExpertCalibrator) and calibrator.solver == "exact"
    if (task.tune == "path" and exact) or (task.tune == "paper" and calibrator.search_space):
        return tune(calibrator, task.calibration, task.validation, select=task.select, seed=task.seed)
    return calibrator.fit(task.calibration, validation=task.validation, seed=task.seed)


def peak_memory() -> float:
    """The peak memory of this process in MB since the reset, or since its start if the system cannot reset it."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    try:
        import resource
    except ImportError:  # not a Unix
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 1024


class Evaluation(Results):
    """One method on one set of cases. ``about`` has the cases ``counted`` in the voxel counts, and the ``seconds``."""

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Evaluation:
        """The evaluation that ``stored`` wrote."""
        sums = {(channel, region, metric): unpacked(own) for channel, region, metric, own in content.get("sums", ())}
        return replace(super().from_dict(content), sums=sums)

    @cached_property
    def by_channel(self) -> dict[str, Evaluation]:
        """The same for each channel of multi-label data; empty for other data."""
        return {name: self.channel(name) for name in self.channels}

    @property
    def parts(self) -> list[Evaluation]:
        """The channels of multi-label data, or this evaluation: voxels are counted within one of them."""
        return list(self.by_channel.values()) or [self]

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Metric and region of all rows, in order."""
        return [(metric, region) for channel, region, metric in self._columns if not channel]

    def pooled(self, metric: str, region: str = EVERYTHING) -> tuple[float, int]:
        """The pooled value and its count; NaN and 0 if the metric has none."""
        row = self._columns["", region, metric].get(POOLED)
        return (math.nan, 0) if row is None else (row.value, row.count)

    def case_sums(self, metric: str, region: str = EVERYTHING) -> tuple[list[str], NDArray[np.float64]] | None:
        """The cases, and what each adds to the pooled value, by channel if there are several; None if not kept."""
        own = [self.sums.get((channel, region, metric)) for channel in self.channels or ("",)]
        kept = [sums for sums in own if sums is not None]
        if not kept:
            return None
        return list(self.values(metric, region)), np.stack(kept, 1) if self.channels else kept[0]

    def counted(self, metric: str, region: str = EVERYTHING) -> tuple[float, int]:
        """A mean over voxels as a sum, and its count, over the cases that this repeat counts."""
        rows = self._columns["", region, metric]
        own = [rows[case] for case in self.about["counted"] if rows[case].count]
        return math.fsum(row.value * row.count for row in own), sum(row.count for row in own)


class Group(NamedTuple):
    """Methods to evaluate together. ``tasks`` has the fit of each method, None for uncalibrated.

    ``counted`` are the cases in the voxel counts: a case that several repeats test is counted in one of them.
    """

    part: CaseSet
    counted: Sequence[str]
    tasks: Mapping[str, FitTask | None]
    columns: Sequence[Column]
    variant: str | None
    known: Mapping[str, str]
    seed: int

    def key(self, method: str) -> str:
        """The name of a method's evaluation in the store."""
        task = self.tasks[method]
        return content_key(
            fit=task and task.key,
            cases=[(i, self.known[i]) for i in self.part.ids],
            counted=self.counted,
            classes=class_key(self.part),
            columns=[column.key for column in self.columns],
            format=RESULTS,
            variant=self.variant,
            seed=self.seed,
        )

    def evaluate(
        self, store: Store, workers: int, progress: Callable[[str], None]
    ) -> tuple[dict[str, Evaluation], dict[str, str]]:
        """Evaluations by method, and the reason for every method that failed; each case is read once for all of them.

        ``progress`` is called with the name of each case before it is read.
        """
        stopped = False

        def callback(case: str) -> None:
            nonlocal stopped
            try:
                progress(case)
            except BaseException:  # The caller wants to stop: no method has failed.
                stopped = True
                raise

        def measure(some: Mapping[str, Calibrator | None]) -> None:
            started = time.perf_counter()
            results = evaluate_many(plan, cases, some, workers=workers, progress=callback, counted=self.counted)
            about = {"counted": list(self.counted), "seconds": (time.perf_counter() - started) / len(some)}
            for method, own in results.items():
                found[method] = store.write("evaluation", self.key(method), stored(own, about))

        plan = Plan.make(self.columns, (), seed=self.seed, background=self.part.background)
        cases = variant_of(self.part, self.variant)
        kept = {method: store.read("evaluation", self.key(method)) for method in self.tasks}
        found = {method: document for method, document in kept.items() if document is not None}
        left = {method: task for method, task in self.tasks.items() if method not in found}
        calibrators = {method: None if task is None else store.fitted(task.key) for method, task in left.items()}
        failures: dict[str, str] = {}
        try:
            if calibrators:
                measure(calibrators)
        except Exception as error:
            if stopped or isinstance(error, _ENDING):
                raise
            # A method cannot evaluate these cases. Run alone, each one shows whether it is the one that fails.
            for method, calibrator in calibrators.items():
                try:
                    measure({method: calibrator})
                except Exception as error:
                    # Without a calibrator, the scores themselves are at fault.
                    if stopped or calibrator is None or isinstance(error, _ENDING):
                        raise
                    failures[method] = str(error) if isinstance(error, SegcalError) else repr(error)
        return {method: Evaluation.from_dict(document) for method, document in found.items()}, failures


def stored(results: Results, about: Mapping[str, Any]) -> dict[str, Any]:
    """Results with this ``about``, with what each case adds to pooled values, as a study needs them again.

    Without the reliability data of single cases, which a study does not show.
    """

    def short(bins: Mapping[str, Any]) -> dict[str, Any]:
        return {region: {name: own[name] for name in ("top", "classes")} for region, own in bins.items()}

    bins = {name: short(results.reliability[name]) for name in results.channels} or short(results.reliability)
    short_results = replace(results, reliability=bins, about={"channels": results.channels, **about})
    return {**short_results.to_dict(), "sums": [[*key, packed(own)] for key, own in results.sums.items()]}
