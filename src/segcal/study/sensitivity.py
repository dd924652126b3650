"""How much the findings depend on the number of calibration cases and of ensemble members."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from segcal.cases import CaseSet
from segcal.cases.caseset import Split
from segcal.metrics import Column
from segcal.study.fits import FitTask
from segcal.study.measuring import Evaluation
from segcal.study.methods import Method
from segcal.study.settings import UNCALIBRATED, Settings

#: Shares of the calibration cases.
SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)
_COLUMNS = [Column("nll"), Column("ece")]


@dataclass(frozen=True)
class _Point:
    """One curve point: fits by method, evaluated on the test part of the first repeat."""

    study: str
    number: str  # the name of what is varied
    value: int
    variant: str | None
    fits: Mapping[str, FitTask | None]


@dataclass(frozen=True)
class SensitivityPlan:
    """The fits that sensitivity studies need, all on the first repeat."""

    points: Sequence[_Point]

    @classmethod
    def make(
        cls,
        cases: CaseSet,
        settings: Settings,
        split: Split,
        methods: Sequence[Method],
        variant: Callable[[Method], str | None],
        task: Callable[[str, str | None, int, CaseSet | None], FitTask],
    ) -> SensitivityPlan:
        """List them; ``task(method, variant, repeat, calibration)`` makes one."""
        points = []
        if "size" in settings.sensitivity:
            for some in subsets(split.calibration, settings.seed):
                for own in dict.fromkeys(map(variant, methods)):
                    group = [m for m in methods if variant(m) == own]
                    fits = {m.key: None if m.id == UNCALIBRATED else task(m.id, own, 0, some) for m in group}
                    points.append(_Point("size", "cases", len(some), own, fits))
        if "members" in settings.sensitivity:
            assert cases.num_members is not None
            for size in range(1, cases.num_members + 1):
                own = f"members-{size}"
                tasks = {id: task(id, own, 0, None) for id in settings.methods}
                points.append(_Point("members", "members", size, own, {UNCALIBRATED: None, **tasks}))
        return cls(points)

    @property
    def tasks(self) -> list[FitTask]:
        """All fits."""
        return [task for point in self.points for task in point.fits.values() if task is not None]

    @property
    def evaluations(self) -> int:
        """How many methods are evaluated, over all points."""
        return sum(len(point.fits) for point in self.points)

    def rows(
        self, fitted: Set[str], evaluate: Callable[..., Mapping[str, Evaluation]]
    ) -> dict[str, list[dict[str, Any]]]:
        """Means over the test cases for every point; methods whose fit failed have none."""
        found: dict[str, list[dict[str, Any]]] = {}
        for point in self.points:
            fits = {key: task and task.key for key, task in point.fits.items() if task is None or task.key in fitted}
            what = f"testing with {point.value} {point.number}"
            evaluations = evaluate(what, fits, _COLUMNS, point.variant)
            for key in fits:
                if key in evaluations:
                    means = {metric: _mean(evaluations[key].values(metric).values()) for metric in ("nll", "ece")}
                    found.setdefault(point.study, []).append({"method": key, point.number: point.value, **means})
        return found


def subsets(calibration: CaseSet, seed: int) -> list[CaseSet]:
    """Growing random subsets of the calibration cases, each in the next.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> [len(some) for some in subsets(scenes(12, size=(32, 40)), seed=0)]
        [2, 3, 6, 12]
    """
    names = list(calibration.ids)
    np.random.default_rng(seed).shuffle(names)
    sizes = sorted({max(1, round(len(names) * share)) for share in SHARES})
    return [calibration.select([case for case in calibration.ids if case in set(names[:size])]) for size in sizes]


def _mean(values: Iterable[float]) -> float:
    defined = [value for value in values if not math.isnan(value)]
    return math.fsum(defined) / len(defined) if defined else math.nan
