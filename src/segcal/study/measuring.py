"""Evaluating: all calibrators of a group on the same cases, from one read of them, kept when done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from segcal.calibrators import Calibrator
from segcal.cases import CaseSet
from segcal.errors import SegcalError, WorkerError
from segcal.evaluation.evaluate import evaluate_many
from segcal.evaluation.plan import Plan
from segcal.evaluation.results import POOLED, Results, Row
from segcal.files.plain import number
from segcal.metrics import Column
from segcal.statistics import EVERYTHING
from segcal.study.cache import Store, class_key, content_key


class Evaluation:
    """One method on one set of cases: what the store holds of ``segcal.evaluate``."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document

    @cached_property
    def _rows(self) -> dict[tuple[str, str], dict[str | None, tuple[float, int]]]:
        found: dict[tuple[str, str], dict[str | None, tuple[float, int]]] = {}
        for row in self._rows_of(""):
            found.setdefault((row.metric, row.region), {})[row.case] = (number(row.value), row.count)
        return found

    def _rows_of(self, channel: str) -> Iterator[Row]:
        return (row for row in (Row(*raw) for raw in self.document["rows"]) if row.channel == channel)

    @cached_property
    def channels(self) -> dict[str, Evaluation]:
        """The same for each channel of multi-label data, whose own values are means over these; else none."""
        return {
            name: Evaluation(
                {
                    "rows": [row._replace(channel="") for row in self._rows_of(name)],
                    "reliability": self.document["reliability"][name],
                    "diagnosis": self.document["diagnosis"]["channels"][name],
                    "seconds": self.document["seconds"],
                    "counted": self.document["counted"],
                    "channels": [],
                }
            )
            for name in self.document.get("channels", ())
        }

    @property
    def parts(self) -> list[Evaluation]:
        """The channels of multi-label data, or the only one of ordinary data: what voxels may be counted in."""
        return list(self.channels.values()) or [self]

    def missed(self, metric: str) -> int:
        """Classes that a metric of surfaces found in one of prediction and labels only, in all cases together."""
        return sum(row.missed for row in self._rows_of("") if row.metric == metric)

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Metric and region of all rows, in order."""
        return list(self._rows)

    def values(self, metric: str, region: str = EVERYTHING) -> dict[str, float]:
        """The value of every case."""
        rows = self._rows[metric, region]
        return {case: value for case, (value, _) in rows.items() if case is not POOLED}

    def pooled(self, metric: str, region: str = EVERYTHING) -> tuple[float, int]:
        """The value of all cases together and its count; NaN and 0 where that has no meaning."""
        return self._rows[metric, region].get(POOLED, (float("nan"), 0))

    def counted(self, metric: str, region: str = EVERYTHING) -> tuple[float, int]:
        """A mean over voxels as a sum, and its count, over the cases that this repeat counts."""
        rows = self._rows[metric, region]
        own = [rows[case] for case in self.document["counted"] if rows[case][1]]
        return math.fsum(value * count for value, count in own), sum(count for _, count in own)

    @property
    def reliability(self) -> Mapping[str, Any]:
        """Region to bins, of the top label and of every predicted class, of the cases that this repeat counts.

        Of multi-label data the same for each channel by its name.
        """
        bins: Mapping[str, Any] = self.document["reliability"]
        return bins

    @property
    def diagnosis(self) -> Mapping[str, Any]:
        """The findings."""
        found: Mapping[str, Any] = self.document["diagnosis"]
        return found

    @property
    def seconds(self) -> float:
        """This method's share of the time."""
        return float(self.document["seconds"])


class Group(NamedTuple):
    """Methods to evaluate together: on which cases, what, and which fits; ``fits`` has None for uncalibrated.

    ``counted`` are the cases whose voxels are in the reliability data: a case that several repeats test is in one.
    """

    cases: CaseSet
    counted: Sequence[str]
    fits: Mapping[str, str | None]
    columns: Sequence[Column]
    variant: str | None
    known: Mapping[str, str]
    seed: int

    def key(self, method: str) -> str:
        """The name of a method's evaluation in the store."""
        return content_key(
            fit=self.fits[method],
            cases=[(i, self.known[i]) for i in self.cases.ids],
            counted=self.counted,
            classes=class_key(self.cases),
            columns=[column.key for column in self.columns],
            rows=Row._fields,
            variant=self.variant,
            seed=self.seed,
        )


def evaluate_group(
    group: Group, store: Store, workers: int, progress: Callable[[str], None]
) -> tuple[dict[str, Evaluation], dict[str, str]]:
    """Evaluations by method, and the reason for every method that failed; cases are read once for all of them.

    ``progress`` is called with the name of each case before it is read.
    """
    found = {method: store.read("evaluation", group.key(method)) for method in group.fits}
    pending = [method for method, document in found.items() if document is None]
    calibrators = {method: _calibrator(store, group.fits[method]) for method in pending}
    told = _Told(progress)
    failures: dict[str, str] = {}
    try:
        found.update(_evaluated(group, calibrators, store, workers, told))
    except Exception as error:
        if told.raised or isinstance(error, WorkerError):  # stopped from outside
            raise
        # One of them cannot do these cases; alone, it says so, and the others go on.
        for method, calibrator in calibrators.items():
            try:
                found.update(_evaluated(group, {method: calibrator}, store, workers, told))
            except Exception as error:
                # Stopped from outside, or the scores themselves are at fault.
                if told.raised or calibrator is None or isinstance(error, WorkerError):
                    raise
                failures[method] = str(error) if isinstance(error, SegcalError) else repr(error)
    return {method: Evaluation(doc) for method, doc in found.items() if doc is not None}, failures


class _Told:
    """A callback that remembers whether it raised, which is the caller's wish to stop and no method's failure."""

    def __init__(self, callback: Callable[[str], None]) -> None:
        self._callback, self.raised = callback, False

    def __call__(self, name: str) -> None:
        try:
            self._callback(name)
        except BaseException:
            self.raised = True
            raise


def _calibrator(store: Store, fit: str | None) -> Calibrator | None:
    if fit is None:
        return None
    calibrator = store.load(fit)
    assert calibrator is not None, "a fit that was read or made a moment ago"
    return calibrator


def _evaluated(
    group: Group,
    calibrators: Mapping[str, Calibrator | None],
    store: Store,
    workers: int,
    progress: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    if not calibrators:
        return {}
    started = time.perf_counter()
    plan = Plan.make(group.columns, (), seed=group.seed, background=group.cases.background)
    results = evaluate_many(plan, group.cases, calibrators, workers=workers, progress=progress, counted=group.counted)
    share = (time.perf_counter() - started) / len(calibrators)
    return {
        method: store.write("evaluation", group.key(method), _document(result, group, share))
        for method, result in results.items()
    }


def _document(results: Results, group: Group, seconds: float) -> dict[str, Any]:
    wanted = {column.key for column in group.columns}
    rows = [list(row) for row in results.rows if _asked(row.metric, row.region, wanted)]
    bins = {name: _bins(results.channel(name)) for name in results.channels} or _bins(results)
    return {
        "rows": rows,
        "counted": list(group.counted),
        "reliability": bins,
        "diagnosis": results.diagnosis,
        "seconds": seconds,
        "channels": list(results.channels),
    }


def _bins(results: Results) -> dict[str, Any]:
    return {region: {"top": b["top"], "classes": b["classes"]} for region, b in results.reliability.items()}


def _asked(metric: str, region: str, wanted: set[tuple[str, str]]) -> bool:
    return (metric, "local" if region in ("local-mean", "local-max") else region) in wanted
