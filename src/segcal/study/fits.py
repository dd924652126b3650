"""Fitting: one calibrator on one calibration part, kept when done; many of them in several processes."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from segcal.calibrators import CALIBRATORS, Calibrator
from segcal.calibrators.experts import ExpertCalibrator
from segcal.cases import CaseSet
from segcal.errors import SegcalError, WorkerError
from segcal.parallel.workers import worker_pool
from segcal.study.cache import Store, class_key, content_key
from segcal.study.settings import Select, Tune
from segcal.study.tuning import tune


@dataclass(frozen=True)
class FitTask:
    """A calibrator to fit: which, to what, and how; ``key`` names the result in the store.

    With ``arguments`` the calibrator is built with them, each channel with its own, and fitted without tuning.
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
        parts = {name: fields[name] for name in ("calibration", "validation")}
        calibration: CaseSet = parts["calibration"]
        content = {
            **{name: value for name, value in fields.items() if name not in parts},
            **{name: part and [(i, known[i]) for i in part.ids] for name, part in parts.items()},
            "variant": variant,
            "defaults": CALIBRATORS[fields["method"]]().arguments(),
            "classes": class_key(calibration),
        }
        return cls(**fields, key=content_key(**content))


def run_fits(
    tasks: Sequence[FitTask], store: Store, workers: int, progress: Callable[[FitTask], None]
) -> dict[str, dict[str, Any]]:
    """The documents of all tasks by their key, from the store where they are there; ``progress`` after each."""
    found: dict[str, dict[str, Any]] = {}
    pending: list[FitTask] = []
    for task in tasks:
        kept = store.read("fit", task.key)
        if kept is None or store.load(task.key) is None:
            pending.append(task)
        else:
            found[task.key] = kept
            progress(task)
    for task, document in _in_processes(pending, store, workers) if workers > 1 else _here(pending, store):
        found[task.key] = document
        progress(task)
    return found


def _here(tasks: Sequence[FitTask], store: Store) -> Iterator[tuple[FitTask, dict[str, Any]]]:
    for task in tasks:
        yield task, run_fit(task, store.folder)


def _in_processes(tasks: Sequence[FitTask], store: Store, workers: int) -> Iterator[tuple[FitTask, dict[str, Any]]]:
    # The processes share torch's threads however few tasks are left, so that a study that goes on computes what it
    # would have computed.
    left = list(tasks)
    together = True
    while left:
        # After a process died, a task has a pool of its own, which shows whether the fault was its.
        some = left if together else left[:1]
        try:
            with worker_pool(workers) as pool:
                waiting = {pool.submit(run_fit, task, store.folder): task for task in some}
                for future in as_completed(waiting):
                    task, document = waiting[future], future.result()
                    left.remove(task)
                    yield task, document
        except BrokenProcessPool:
            if not together:
                yield left.pop(0), {"status": "failed", "reason": str(WorkerError())}
            together = not together


def run_fit(task: FitTask, folder: Path) -> dict[str, Any]:
    """Fit and keep. A fit that fails gives its reason and is not kept: it may succeed another time."""
    store = Store(folder)
    started = time.perf_counter()
    reset_peak_memory()
    try:
        calibrator = _fitted(task)
    except Exception as error:  # whatever goes wrong in one method must not end the study
        return {"status": "failed", "reason": str(error) if isinstance(error, SegcalError) else repr(error)}
    report = calibrator.fit_report
    assert report is not None
    fit = {name: value for name, value in asdict(report).items() if name != "seconds"}
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
    # The papers train by Adam and search its settings; the path is that of the exact solver.
    calibrator = cls(solver="adam") if task.tune == "paper" and issubclass(cls, ExpertCalibrator) else cls()
    exact = isinstance(calibrator, ExpertCalibrator) and calibrator.solver == "exact"
    if (task.tune == "path" and exact) or (task.tune == "paper" and calibrator.search_space):
        return tune(calibrator, task.calibration, task.validation, select=task.select, seed=task.seed)
    return calibrator.fit(task.calibration, validation=task.validation, seed=task.seed)


def method_name(id: str) -> str:
    """The name of a calibrator in words.

    Examples:
        >>> method_name("ts"), method_name("cms-op")
        ('Temperature scaling', 'CMS order preserving')
    """
    if id == "meta-cal":
        return "Meta-Cal"
    first, *rest = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+", CALIBRATORS[id].__name__)
    return " ".join((first, *(word if word.isupper() or word == "Dirichlet" else word.lower() for word in rest)))


def reset_peak_memory() -> None:
    """Start measuring the peak anew, where the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> float:
    """The largest memory of this process in MB since the reset, or since its start where there is no reset."""
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
