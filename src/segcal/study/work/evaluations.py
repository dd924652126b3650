"""Evaluating: all calibrators of a group on the same cases, from one read of them, kept in the store when done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from segcal.calibrators import Calibrator
from segcal.cases import CaseSet
from segcal.errors import SegcalError, WorkerError
from segcal.evaluation.evaluate import evaluate_many
from segcal.evaluation.plan import Plan
from segcal.evaluation.results import POOLED, Results
from segcal.files.versions import RESULTS
from segcal.metrics import Column
from segcal.statistics import EVERYTHING
from segcal.study.settings import variant_of
from segcal.study.work.store import Store, class_key, content_key


class Evaluation(Results):
    """One method on one set of cases. ``about`` has the cases ``counted`` in the voxel counts, and the ``seconds``."""

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

    def missed(self, metric: str) -> int:
        """Classes found only in the prediction or only in the labels, over all cases, for a surface metric."""
        return sum(row.missed for row in self.rows if (row.metric, row.channel) == (metric, ""))

    def pooled(self, metric: str, region: str = EVERYTHING) -> tuple[float, int]:
        """The pooled value and its count; NaN and 0 if the metric has none."""
        row = self._columns["", region, metric].get(POOLED)
        return (math.nan, 0) if row is None else (row.value, row.count)

    def counted(self, metric: str, region: str = EVERYTHING) -> tuple[float, int]:
        """A mean over voxels as a sum, and its count, over the cases that this repeat counts."""
        rows = self._columns["", region, metric]
        own = [rows[case] for case in self.about["counted"] if rows[case].count]
        return math.fsum(row.value * row.count for row in own), sum(row.count for row in own)


class Group(NamedTuple):
    """Methods to evaluate together. ``fits`` has the key of each method's fit, None for uncalibrated.

    ``counted`` are the cases in the voxel counts: a case that several repeats test is counted in one of them.
    """

    part: CaseSet
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

        def measure(some: Mapping[str, Calibrator | None]) -> None:
            started = time.perf_counter()
            results = evaluate_many(plan, cases, some, workers=workers, progress=callback, counted=self.counted)
            about = {"counted": list(self.counted), "seconds": (time.perf_counter() - started) / len(some)}
            for method, own in results.items():
                document = _without_cases(own, about).to_dict()
                found[method] = store.write("evaluation", self.key(method), document)

        plan = Plan.make(self.columns, (), seed=self.seed, background=self.part.background)
        cases = variant_of(self.part, self.variant)
        kept = {method: store.read("evaluation", self.key(method)) for method in self.fits}
        found = {method: document for method, document in kept.items() if document is not None}
        calibrators = {method: store.fitted(fit) for method, fit in self.fits.items() if method not in found}
        callback = _Callback(progress)
        failures: dict[str, str] = {}
        try:
            if calibrators:
                measure(calibrators)
        except Exception as error:
            if callback.raised or isinstance(error, WorkerError):  # stopped from outside
                raise
            # A method cannot evaluate these cases. Run alone, each one shows whether it is the one that fails.
            for method, calibrator in calibrators.items():
                try:
                    measure({method: calibrator})
                except Exception as error:
                    # Without a calibrator, the scores themselves are at fault.
                    if callback.raised or calibrator is None or isinstance(error, WorkerError):
                        raise
                    failures[method] = str(error) if isinstance(error, SegcalError) else repr(error)
        return {method: Evaluation.from_dict(document) for method, document in found.items()}, failures


class _Callback:
    """A callback that remembers whether it raised: then the caller wants to stop, and no method has failed."""

    def __init__(self, callback: Callable[[str], None]) -> None:
        self._callback, self.raised = callback, False

    def __call__(self, name: str) -> None:
        try:
            self._callback(name)
        except BaseException:
            self.raised = True
            raise


def _without_cases(results: Results, about: Mapping[str, Any]) -> Results:
    """Results with this ``about``, and without the reliability data of single cases, which a study does not show."""

    def short(bins: Mapping[str, Any]) -> dict[str, Any]:
        return {region: {name: own[name] for name in ("top", "classes")} for region, own in bins.items()}

    bins = {name: short(results.reliability[name]) for name in results.channels} or short(results.reliability)
    return replace(results, reliability=bins, about={"channels": results.channels, **about})
