"""Fitting: calibrators on calibration parts, in several processes, each kept in the store when done."""

from __future__ import annotations

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
from segcal.study.settings import Select, Tune, variant_of
from segcal.study.tuning import tune
from segcal.study.work.store import Store, class_key, content_key


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
    here = ((task, run_fit(task, store.folder)) for task in pending)
    for task, document in _in_processes(pending, store, workers) if workers > 1 else here:
        found[task.key] = document
        progress(task)
    return found


def _in_processes(tasks: Sequence[FitTask], store: Store, workers: int) -> Iterator[tuple[FitTask, dict[str, Any]]]:
    # Each process has its share of torch's threads, however few tasks are left: a resumed study gives the same numbers.
    left = list(tasks)
    together = True
    while left:
        # After a process died, the next task runs alone. If its process dies too, the task is at fault.
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
    """Fit and store. A failed fit gives its reason and is not stored: it may succeed next time."""
    store = Store(folder)
    started = time.perf_counter()
    reset_peak_memory()
    try:
        calibrator = _fitted(task)
    except Exception as error:  # One method must not end the study.
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
    # The papers train by Adam and search its settings; the path needs the exact solver.
    calibrator = cls(solver="adam") if task.tune == "paper" and issubclass(cls, ExpertCalibrator) else cls()
    exact = isinstance(calibrator, ExpertCalibrator) and calibrator.solver == "exact"
    if (task.tune == "path" and exact) or (task.tune == "paper" and calibrator.search_space):
        return tune(calibrator, task.calibration, task.validation, select=task.select, seed=task.seed)
    return calibrator.fit(task.calibration, validation=task.validation, seed=task.seed)


def reset_peak_memory() -> None:
    """Restart the measurement of peak memory, if the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


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
