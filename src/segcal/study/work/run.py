"""One run of a study: which fits and evaluations it takes, and doing them, or finding them done."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from segcal.calibrators import Calibrator
from segcal.cases import CaseSet
from segcal.cases.caseset import Split
from segcal.metrics import Column
from segcal.parallel.ranks import alone, current_ranks
from segcal.parallel.threads import torch_threads
from segcal.study.settings import UNCALIBRATED, Method, Settings
from segcal.study.splits import ShiftedSet, counted_once
from segcal.study.work.store import Store, fingerprints
from segcal.study.work.tasks import Evaluation, FitTask, Group, run_fits

# From this many scores (of all methods and cases) on, worker processes save more time than they take to start.
_MANY_SCORES = 2**27
# Shares of the calibration cases in the sensitivity study.
_SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)
#: Reasons by method.
Failures = dict[str, str]
#: Evaluations by method, one mapping for each repeat.
Repeats = Sequence[Mapping[str, Evaluation]]


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


@dataclass(frozen=True)
class Point:
    """A point of a sensitivity curve: fits by method, evaluated on the test part of the first repeat.

    ``study`` is what varies (calibration ``size`` or ensemble ``members``), ``value`` how many ``unit`` there are.
    """

    study: str
    unit: str
    value: int
    variant: str | None
    fits: Mapping[str, FitTask | None]


@dataclass
class Run:
    """A study at work. ``failures`` are the methods that failed on the study's own cases and are excluded."""

    cases: CaseSet
    settings: Settings
    splits: Sequence[Split]
    moved: Sequence[ShiftedSet]
    folder: Path
    workers: int
    progress: Callable[[Step], None]
    failures: Failures = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    fits: dict[str, dict[str, Any]] = field(default_factory=dict)

    # -- what there is to do -------------------------------------------------------------------------------------------

    @cached_property
    def store(self) -> Store:
        """What is finished."""
        return Store(self.folder / "work")

    @cached_property
    def known(self) -> dict[str, str]:
        """The fingerprints of the cases."""
        return fingerprints(self.cases)

    @cached_property
    def deployed(self) -> str | None:
        """The pooling that the dataset itself uses, if it is among those compared."""
        own = self.cases[0].pooling
        return own if own in self.settings.pooling else None

    @cached_property
    def methods(self) -> dict[str, Method]:
        """All methods by their key: uncalibrated first, then each method; with pooling spaces, both in each of them."""
        ids = self.settings.methods
        spaces = [Method(id, space) for space in self.settings.pooling for id in (UNCALIBRATED, *ids)]
        return {method.key: method for method in (Method(UNCALIBRATED), *(spaces or map(Method, ids)))}

    def variant(self, key: str) -> str | None:
        """How a method pools the ensemble. Uncalibrated shares the deployed pooling, so that it is read only once."""
        return self.methods[key].pooling or self.deployed

    @cached_property
    def variants(self) -> dict[str | None, list[str]]:
        """The methods of every variant."""
        variants = {key: self.variant(key) for key in self.methods}
        return {variant: [key for key in variants if variants[key] == variant] for variant in variants.values()}

    def task(self, id: str, variant: str | None, repeat: int = 0, **changes: Any) -> FitTask:
        """The fit of a calibrator in a repeat, or one with some fields of the task changed."""
        split, settings = self.splits[repeat], self.settings
        parts = {"calibration": split.calibration, "validation": split.validation}
        how = {"tune": settings.tune, "select": settings.select, "seed": settings.seed + repeat}
        return FitTask.make(self.known, variant, **{"method": id, **parts, **how, **changes})

    @cached_property
    def tasks(self) -> dict[tuple[str, int], FitTask]:
        """The fit of every method and repeat."""
        return {
            (key, repeat): self.task(method.id, self.variant(key), repeat)
            for repeat in range(len(self.splits))
            for key, method in self.methods.items()
            if method.id != UNCALIBRATED
        }

    @cached_property
    def points(self) -> list[Point]:
        """The points of the sensitivity curves, all of the first repeat."""
        found = []
        if "size" in self.settings.sensitivity:
            for some in subsets(self.splits[0].calibration, self.settings.seed):
                for variant, keys in self.variants.items():
                    fitted = [key for key in keys if self.methods[key].id != UNCALIBRATED]
                    tasks = {key: self.task(self.methods[key].id, variant, calibration=some) for key in fitted}
                    found.append(Point("size", "cases", len(some), variant, {key: tasks.get(key) for key in keys}))
        if "members" in self.settings.sensitivity:
            for size in range(1, (self.cases.num_members or 0) + 1):
                variant = f"members-{size}"
                tasks = {id: self.task(id, variant) for id in self.settings.methods}
                found.append(Point("members", "members", size, variant, {UNCALIBRATED: None, **tasks}))
        return found

    @cached_property
    def all_tasks(self) -> list[FitTask]:
        """All fits, each once: the largest calibration size is the study's own."""
        more = [task for point in self.points for task in point.fits.values() if task is not None]
        return list({task.key: task for task in (*self.tasks.values(), *more)}.values())

    @cached_property
    def meter(self) -> Meter:
        """How much of the work is done."""
        evaluated = sum(len(split.validation) + len(split.test) for split in self.splits)
        evaluated += sum(len(one.left(split)) for one in self.moved for split in self.splits)
        work = sum(len(task.calibration) for task in self.all_tasks) + evaluated * len(self.methods)
        return Meter(self.progress, work + len(self.splits[0].test) * sum(len(point.fits) for point in self.points))

    # -- doing it ------------------------------------------------------------------------------------------------------

    def fit_all(self) -> None:
        """Run all fits of the study."""
        names = {task.key: f"{key}, repeat {repeat + 1}" for (key, repeat), task in self.tasks.items()}
        self.meter.next(f"fitting {len(self.all_tasks)} calibrators")

        def done(task: FitTask) -> None:
            self.meter.add(len(task.calibration))
            self.meter.next(f"fitted {names.get(task.key, f'{task.method}, for sensitivity')}")

        self.fits = run_fits(self.all_tasks, self.store, self.workers, done)
        for (key, repeat), task in self.tasks.items():
            document = self.fits[task.key]
            if document["status"] == "failed":
                self.failures.setdefault(key, f"repeat {repeat + 1}: {document['reason']}")

    def evaluate_parts(self, what: str, parts: Sequence[CaseSet], columns: Sequence[Column]) -> Repeats:
        """All methods on one part of the cases for each repeat. Methods that fail are excluded from the study."""
        found, failures = self._evaluate_repeats(what, parts, columns, self.known, self.workers)
        self.failures.update(failures)
        return found

    def evaluate_shifted(self, one: ShiftedSet) -> tuple[Repeats, Failures]:
        """All methods, as fitted in each repeat, on shifted cases. Methods that fail there stay in the study."""
        parts = [one.left(split) for split in self.splits]
        # A model uses all cores itself, and may not work in another process.
        workers = 1 if one.modelled else self.workers
        return self._evaluate_repeats(f"testing on {one.name}", parts, self.settings.measured, one.known, workers)

    def evaluate_sensitivity(self) -> Iterator[tuple[Point, dict[str, Evaluation]]]:
        """Every point of the sensitivity curves with its evaluations; methods whose fit failed have none."""
        test = self.splits[0].test
        for point in self.points:
            tasks = {k: task for k, task in point.fits.items() if task is None or self.fits[task.key]["status"] == "ok"}
            columns = [Column("nll"), Column("ece")]
            group = Group(test, test.ids, tasks, columns, point.variant, self.known, self.settings.seed)
            yield point, self._evaluate(f"testing with {point.value} {point.unit}", group, self.workers)[0]

    def _evaluate_repeats(
        self, what: str, parts: Sequence[CaseSet], columns: Sequence[Column], known: Mapping[str, str], workers: int
    ) -> tuple[Repeats, Failures]:
        failures: Failures = {}
        repeats: list[dict[str, Evaluation]] = [{} for _ in parts]
        for repeat, (part, counted) in enumerate(zip(parts, counted_once(parts), strict=True)):
            for variant, keys in self.variants.items():
                tasks = {key: self.tasks.get((key, repeat)) for key in keys if key not in self.failures}
                group = Group(part, counted, tasks, columns, variant, known, self.settings.seed)
                own, failed = self._evaluate(f"{what}, repeat {repeat + 1}", group, workers)
                repeats[repeat] |= own
                failures |= failed
        return self.in_order(repeats, failures), failures

    def _evaluate(self, what: str, group: Group, workers: int) -> tuple[dict[str, Evaluation], Failures]:
        left = len(group.part) * len(group.tasks)

        def step(case: str) -> None:
            nonlocal left
            self.meter.next(f"{what}: {case}")
            work = min(left, len(group.tasks))
            self.meter.add(work)
            left -= work

        self.meter.next(what)
        # This depends on the whole group, not on what is left of it: a resumed study adds up in the same order.
        many = left * math.prod(self.cases[0].shape) >= _MANY_SCORES
        workers = workers if many else 1
        with nullcontext() if many else self._one_share(), nullcontext() if workers > 1 else alone():
            found, failures = group.evaluate(self.store, workers, step)
        self.meter.add(left)
        for key, evaluation in found.items():
            self.seconds[key] = self.seconds.get(key, 0.0) + evaluation.about["seconds"]
        return found, {key: f"{what}: {reason}" for key, reason in failures.items()}

    def _one_share(self) -> AbstractContextManager[None]:
        """As many torch threads as one worker process has: more would only wait for each other."""
        return torch_threads(max(1, torch.get_num_threads() // (1 if current_ranks() else self.workers)))

    # -- what came of it -----------------------------------------------------------------------------------------------

    def in_order(self, repeats: Repeats, failures: Failures) -> list[dict[str, Evaluation]]:
        """Evaluations in the order of the methods, without those that failed in any repeat."""
        left = [key for key in self.methods if key not in failures]
        return [{key: found[key] for key in left if key in found} for found in repeats]

    def parameters(self, key: str) -> int | None:
        """The number of parameters of a method, None for uncalibrated and for methods that failed."""
        task = self.tasks.get((key, 0))
        return None if task is None or key in self.failures else self.fits[task.key]["parameters"]

    def calibrator(self, key: str, repeat: int = 0) -> Calibrator:
        """A method as fitted in a repeat."""
        return self.store.fitted(self.tasks[key, repeat].key)

    def refit(self, key: str) -> tuple[Calibrator, str | None]:
        """A method with the strengths tuned in the first repeat, fitted to all cases that repeat does not test on.

        If that fails, the map of the first repeat, and the reason.
        """
        tuned, split = self.calibrator(key), self.splits[0]
        seen = {*split.calibration.ids, *split.validation.ids}
        part = self.cases.select([i for i in self.cases.ids if i in seen])
        how = {"tune": "none", "arguments": [own.arguments() for own in tuned.per_channel or (tuned,)]}
        task = self.task(self.methods[key].id, self.variant(key), 0, calibration=part, validation=None, **how)
        self.meter.next(f"fitting {key} to all calibration and validation cases")
        with self._one_share(), alone():
            found = run_fits([task], self.store, 1, lambda task: None)
        return self.store.load(task.key) or tuned, found[task.key].get("reason")

    def timings(self) -> dict[str, Any]:
        """Seconds and memory of every method, over all repeats."""
        found = {}
        for method in self.methods:
            own = [self.fits[task.key] for (key, _), task in self.tasks.items() if key == method]
            found[method] = {
                "fit_seconds": sum(fit.get("seconds", 0.0) for fit in own),
                "evaluate_seconds": self.seconds.get(method, 0.0),
                "peak_memory_mb": max((fit.get("peak_memory_mb", 0.0) for fit in own), default=0.0),
            }
        return found


def subsets(calibration: CaseSet, seed: int) -> list[CaseSet]:
    """Growing random subsets of the calibration cases, each contained in the next.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> [len(some) for some in subsets(scenes(12, size=(32, 40)), seed=0)]
        [2, 3, 6, 12]
    """
    names = list(calibration.ids)
    np.random.default_rng(seed).shuffle(names)
    sizes = sorted({max(1, round(len(names) * share)) for share in _SHARES})
    return [calibration.select([case for case in calibration.ids if case in set(names[:size])]) for size in sizes]
