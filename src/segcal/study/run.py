"""One run of a study: which fits and evaluations it takes, and doing them, or finding them done."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from segcal.calibrators import Calibrator
from segcal.cases import CaseSet
from segcal.cases.caseset import Split
from segcal.metrics import Column
from segcal.parallel.threads import torch_threads
from segcal.study.cache import Store, fingerprints
from segcal.study.fits import FitTask, run_fits
from segcal.study.measuring import Evaluation, Group, evaluate_group
from segcal.study.methods import Method, study_methods, variant_of
from segcal.study.progress import Meter, Step
from segcal.study.sensitivity import SensitivityPlan
from segcal.study.settings import UNCALIBRATED, Settings
from segcal.study.shifted import ShiftedSet
from segcal.study.splits import counted_once
from segcal.study.summarise import Columns, Repeats, Table

# Scores (of all methods and cases) from which on evaluating in processes saves more time than starting them takes.
_MANY_SCORES = 2**27
#: Reasons by method, where something went wrong.
Failures = dict[str, str]


@dataclass
class Run:
    """A study at work. ``failures`` are the methods that a fit or an evaluation of the study's own parts excluded,
    ``same`` those that are the same map as a simpler one."""

    cases: CaseSet
    settings: Settings
    splits: Sequence[Split]
    moved: Sequence[ShiftedSet]
    folder: Path
    store: Store
    workers: int
    progress: Callable[[Step], None]
    failures: Failures = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    fits: dict[str, dict[str, Any]] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)

    # -- what there is to do -------------------------------------------------------------------------------------------

    @cached_property
    def known(self) -> dict[str, str]:
        """The fingerprints of the cases."""
        return fingerprints(self.cases)

    @cached_property
    def deployed(self) -> str | None:
        """The pooling of the cases as they are, where it is among those compared."""
        own = self.cases[0].pooling
        return own if own in self.settings.pooling else None

    @cached_property
    def methods(self) -> list[Method]:
        """All methods, uncalibrated first."""
        return study_methods(self.settings)

    def method(self, key: str) -> Method:
        """The method of this name."""
        return next(method for method in self.methods if method.key == key)

    def variant(self, method: Method) -> str | None:
        """What scores a method gets; uncalibrated shares those of its own pooling, so that they are read once."""
        return method.pooling or self.deployed

    def task(self, method: str, variant: str | None, repeat: int, calibration: CaseSet | None = None) -> FitTask:
        """The fit of a method in a repeat, to its calibration part or to fewer cases."""
        split = self.splits[repeat]
        return FitTask.make(
            self.known,
            variant,
            method=method,
            calibration=variant_of(calibration or split.calibration, variant),
            validation=variant_of(split.validation, variant),
            tune=self.settings.tune,
            select=self.settings.select,
            seed=self.settings.seed + repeat,
        )

    @cached_property
    def tasks(self) -> dict[tuple[str, int], FitTask]:
        """Method and repeat to the fit."""
        return {
            (method.key, repeat): self.task(method.id, self.variant(method), repeat)
            for repeat in range(len(self.splits))
            for method in self.methods
            if method.id != UNCALIBRATED
        }

    @cached_property
    def sensitivity(self) -> SensitivityPlan:
        """The fits of the sensitivity studies."""
        return SensitivityPlan.make(self.cases, self.settings, self.splits[0], self.methods, self.variant, self.task)

    @property
    def all_tasks(self) -> list[FitTask]:
        """The fits of everything, each once: the largest calibration size is the study's own."""
        tasks = (*self.tasks.values(), *self.sensitivity.tasks)
        return list({task.key: task for task in tasks}.values())

    @cached_property
    def meter(self) -> Meter:
        """How much is done of how much."""
        evaluated = sum(len(split.validation) + len(split.test) for split in self.splits)
        evaluated += sum(len(one.left(split)) for one in self.moved for split in self.splits)
        work = sum(len(task.calibration) for task in self.all_tasks) + evaluated * len(self.methods)
        return Meter(self.progress, work + len(self.splits[0].test) * self.sensitivity.evaluations)

    # -- doing it ------------------------------------------------------------------------------------------------------

    def fit_all(self) -> None:
        """All fits of the study."""
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

    def evaluate_parts(
        self, what: str, parts: Sequence[CaseSet], columns: Sequence[Column]
    ) -> list[dict[str, Evaluation]]:
        """All methods on a part of the cases for each repeat; those that cannot do it have failed."""
        found, failures = self._evaluate_repeats(what, parts, columns, self.known, self.workers)
        self.failures.update(failures)
        return found

    def evaluate_shifted(self, one: ShiftedSet) -> tuple[list[dict[str, Evaluation]], Failures]:
        """All methods, as fitted in each repeat, on shifted cases; failing there does not exclude from the study."""
        parts = [one.left(split) for split in self.splits]
        found, failures = self._evaluate_repeats(
            f"testing on {one.name}", parts, self.settings.measured, one.known, one.workers(self.workers)
        )
        return [{key: own for key, own in repeat.items() if key not in failures} for repeat in found], failures

    def evaluate_sensitivity(self) -> dict[str, list[dict[str, Any]]]:
        """The curves of calibration size and ensemble size."""
        fitted = {key for key, fit in self.fits.items() if fit["status"] == "ok"}

        def evaluate(what: str, fits: Mapping[str, str | None], columns: Sequence[Column], variant: str | None) -> Any:
            test = self.splits[0].test
            return self._evaluate(what, test, test.ids, fits, columns, variant, self.known, self.workers)[0]

        return self.sensitivity.rows(fitted, evaluate)

    def _evaluate_repeats(
        self, what: str, parts: Sequence[CaseSet], columns: Sequence[Column], known: Mapping[str, str], workers: int
    ) -> tuple[list[dict[str, Evaluation]], Failures]:
        failures: Failures = {}
        repeats = []
        counted = counted_once(parts)
        for repeat, part in enumerate(parts):
            found: dict[str, Evaluation] = {}
            for variant in dict.fromkeys(map(self.variant, self.methods)):
                group = [m for m in self.methods if self.variant(m) == variant and m.key not in self.failures]
                fits = {m.key: None if m.id == UNCALIBRATED else self.tasks[m.key, repeat].key for m in group}
                name = f"{what}, repeat {repeat + 1}"
                own, failed = self._evaluate(name, part, counted[repeat], fits, columns, variant, known, workers)
                found.update(own)
                failures.update(failed)
            repeats.append(self.in_order(found))
        return repeats, failures

    def _evaluate(
        self,
        what: str,
        part: CaseSet,
        counted: Sequence[str],
        fits: Mapping[str, str | None],
        columns: Sequence[Column],
        variant: str | None,
        known: Mapping[str, str],
        workers: int,
    ) -> tuple[dict[str, Evaluation], Failures]:
        left = len(part) * len(fits)

        def step(case: str) -> None:
            nonlocal left
            self.meter.next(f"{what}: {case}")
            self.meter.add(min(left, len(fits)))
            left -= min(left, len(fits))

        self.meter.next(what)
        group = Group(variant_of(part, variant), counted, fits, columns, variant, known, self.settings.seed)
        # Of the group and not of what is left of it: a study that goes on adds up in the order it would have.
        many = left * math.prod(self.cases[0].shape) >= _MANY_SCORES
        with nullcontext() if many else self._one_share():
            found, failures = evaluate_group(group, self.store, workers if many else 1, step)
        self.meter.add(left)
        for key, evaluation in found.items():
            self.seconds[key] = self.seconds.get(key, 0.0) + evaluation.seconds
        return found, {key: f"{what}: {reason}" for key, reason in failures.items()}

    def _one_share(self) -> AbstractContextManager[None]:
        """As many threads as each of the processes has: torch's threads wait for each other where cores are taken."""
        return torch_threads(max(1, torch.get_num_threads() // self.workers))

    def table(self, repeats: Repeats, columns: Columns, cases: CaseSet | None = None) -> Table:
        """The values of the study's cases, or of others."""
        groups = (cases or self.cases).about_groups()
        return Table.of(repeats, columns, groups and groups["cases"], self.same)

    def in_order(self, found: Mapping[str, Evaluation]) -> dict[str, Evaluation]:
        """In the order of the methods, without those that failed."""
        return {m.key: found[m.key] for m in self.methods if m.key in found and m.key not in self.failures}

    def calibrator(self, key: str, repeat: int = 0) -> Calibrator:
        """A method as fitted in a repeat."""
        calibrator = self.store.load(self.tasks[key, repeat].key)
        assert calibrator is not None, "fitted a moment ago"
        return calibrator

    def refit(self, key: str) -> Calibrator:
        """A method, its strengths as tuned in the first repeat, fitted to all that this repeat does not test on."""
        method, tuned, split = self.method(key), self.calibrator(key), self.splits[0]
        seen, variant = {*split.calibration.ids, *split.validation.ids}, self.variant(self.method(key))
        task = FitTask.make(
            self.known,
            variant,
            method=method.id,
            calibration=variant_of(self.cases.select([case for case in self.cases.ids if case in seen]), variant),
            validation=None,
            tune="none",
            select=self.settings.select,
            seed=self.settings.seed,
            arguments=[own.arguments() for own in tuned.per_channel or (tuned,)],
        )
        self.meter.next(f"fitting {key} to all calibration and validation cases")
        with self._one_share():
            run_fits([task], self.store, 1, lambda task: None)
        return self.store.load(task.key) or tuned

    def timings(self) -> dict[str, Any]:
        """Seconds and memory of every method, over all repeats."""
        found = {}
        for method in self.methods:
            own = [self.fits[task.key] for (key, _), task in self.tasks.items() if key == method.key]
            found[method.key] = {
                "fit_seconds": sum(fit.get("seconds", 0.0) for fit in own),
                "evaluate_seconds": self.seconds.get(method.key, 0.0),
                "peak_memory_mb": max((fit.get("peak_memory_mb", 0.0) for fit in own), default=0.0),
            }
        return found
