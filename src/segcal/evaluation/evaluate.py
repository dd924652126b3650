"""``evaluate``: cases x calibrator x regions x metrics, in one pass over the scores, as a table of tidy rows."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple, TypeVar

import torch

from segcal.cases import CaseSet
from segcal.cases.calibrated import AnyCalibrator, check_classes, of_channel
from segcal.errors import InputError, SegcalError, check_seed, check_whole
from segcal.evaluation.measure import (
    CaseResult,
    SecondPasses,
    add_case_again,
    case_views,
    measure_case,
    reduced_rows,
    second_passes,
)
from segcal.evaluation.plan import DEFAULT_BINS, Plan
from segcal.evaluation.results import POOLED, Results, Row, mean_over_channels
from segcal.metrics import Column, Reliability, confidence_balance, free_energy_std, predicted_reliability, reliability
from segcal.metrics.diagnosis import diagnose, diagnose_channels
from segcal.parallel.threads import torch_threads
from segcal.parallel.workers import in_workers
from segcal.statistics import EVERYTHING, VoxelStatistics
from segcal.types import Case

DEFAULT_METRICS = ("nll", "brier", "ece", "mce", "ace", "cece", "ba-ece", "dsc", "accuracy", "confidence-balance")

Progress = Callable[[str], None]
_Calibrators = Mapping[str, AnyCalibrator]
_T = TypeVar("_T")


def evaluate(
    cases: CaseSet,
    calibrator: AnyCalibrator = None,
    *,
    metrics: Sequence[str | Column] = DEFAULT_METRICS,
    regions: Sequence[str] = (EVERYTHING,),
    masks: Mapping[str, Callable[[Case], torch.Tensor]] | None = None,
    exact: bool = False,
    workers: int = 1,
    seed: int = 0,
    progress: Progress = lambda case: None,
) -> Results:
    """Measure scores against labels.

    Every case is read once, in chunks, whatever is asked for; memory does not grow with the number of cases.

    Args:
        cases: What to evaluate.
        calibrator: A map from logits to log-probabilities, or None for the scores as they are.
        metrics: Ids of ``segcal.METRICS``, with options where wanted (``"ece[num_bins=50]"``), each taken in every
            region; or ``segcal.metrics.Column`` objects, which say where, such as a preset's.
        regions: Ids of ``segcal.REGIONS``. ``local`` gives ``local-mean`` and ``local-max`` over random patches.
        masks: Regions of your own, by name: functions from a case to a bool mask ``(N, *spatial)``.
        exact: Equal-mass bins (``ace-adaptive``, ``tace``) have their edges found to the resolution of float32, by
            reading every case a second time; in one pass the edges lie within 1/4096 of where they should.
        workers: Processes; each takes a share of the cases.
        seed: Of the local patches; every case has its own.
        progress: Called with the name of each case before it is read.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(3, size=(32, 40), plant=[segcal.synthetic.Temperature(2.0)])
        >>> results = evaluate(cases, metrics=("nll", "ece"), regions=("everything", "boundary"))
        >>> results.value("ece") < results.value("ece", region="boundary")
        True
    """
    only = {"": calibrator}
    return evaluate_many(
        cases, only, metrics=metrics, regions=regions, masks=masks,
        exact=exact, workers=workers, seed=seed, progress=progress,
    )[""]  # fmt: skip


def evaluate_many(
    cases: CaseSet,
    calibrators: _Calibrators,
    *,
    metrics: Sequence[str | Column] = DEFAULT_METRICS,
    regions: Sequence[str] = (EVERYTHING,),
    masks: Mapping[str, Callable[[Case], torch.Tensor]] | None = None,
    exact: bool = False,
    workers: int = 1,
    seed: int = 0,
    progress: Progress = lambda case: None,
    counted: Collection[str] | None = None,
) -> dict[str, Results]:
    """``evaluate`` through several calibrators, by name, from the same one read of every case.

    ``counted`` are the names of the cases in the pooled reliability data, None for all: where several evaluations are
    added up that share cases, each case should be in one of them.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(3, size=(32, 40), plant=[segcal.synthetic.Temperature(2.0)])
        >>> ts = segcal.calibrators.TemperatureScaling().fit(cases)
        >>> found = evaluate_many(cases, {"before": None, "after": ts}, metrics=("nll",))
        >>> found["after"].value("nll") < found["before"].value("nll")
        True
    """
    check_seed(seed)
    check_whole("workers", workers, 1)
    plan = Plan.make(metrics, regions, masks or {}, seed, exact, cases.background)
    if not len(cases):
        raise InputError("no cases", where="cases", expected="at least one")
    groups = cases.about_groups()  # Cases without a group are an error before the work, not after it.
    for calibrator in calibrators.values():
        check_classes(cases, calibrator)
    run = _Run(plan, cases, calibrators, min(workers, len(cases)), progress)
    shares = run.over_cases(_first_share, frozenset(cases.ids if counted is None else counted))
    pooled = {key: _merged([share[key].pooled for share in shares]) for key in shares[0]}
    second = {key: second_passes(plan, own, "pooled") for key, own in pooled.items()}
    if any(second.values()):
        for share in run.over_cases(_second_share, second):
            for key, passes in share.items():
                for number, one in passes.items():
                    second[key][number].merge(one)
    found = {
        key: _results(plan, cases, [share[key] for share in shares], pooled[key], second[key]) for key in shares[0]
    }
    about = {name: {**_about(plan, cases, own), "groups": groups} for name, own in calibrators.items()}
    if cases.channel_names is None:
        return {name: replace(found[name, 0], about=about[name]) for name in calibrators}
    return {
        name: _of_channels({c: found[name, k] for k, c in enumerate(cases.channel_names)}, about[name])
        for name in calibrators
    }


def _results(
    plan: Plan, cases: CaseSet, parts: Sequence[_Share], pooled: VoxelStatistics, second: SecondPasses
) -> Results:
    order = {name: index for index, name in enumerate(cases.ids)}
    rows = sorted((row for part in parts for row in part.rows), key=lambda row: order[str(row.case)])
    rows += reduced_rows(plan, POOLED, pooled, second)
    return Results(
        rows=tuple(rows),
        reliability=_reliability(
            _merged([part.counted for part in parts]),
            {case: bins for part in parts for case, bins in part.reliability.items()},
        ),
        diagnosis=diagnose(
            pooled,
            balances=[value for part in parts for value in part.balances],
            spreads=[value for part in parts for value in part.spreads],
            class_names=cases.class_names,
        ),
    )


def _of_channels(channels: Mapping[str, Results], about: Mapping[str, Any]) -> Results:
    """Means over the channels of multi-label data, and the results of each; no histogram mixes their voxels."""
    rows = mean_over_channels([own.rows for own in channels.values()])
    rows += [row._replace(channel=name) for name, own in channels.items() for row in own.rows]
    return Results(
        rows=tuple(rows),
        about=about,
        reliability={name: own.reliability for name, own in channels.items()},
        diagnosis=diagnose_channels({name: own.diagnosis for name, own in channels.items()}),
    )


class _Run(NamedTuple):
    """Cases, and the processes they are shared by."""

    plan: Plan
    cases: CaseSet
    calibrators: _Calibrators
    workers: int
    progress: Progress

    def over_cases(self, function: Callable[..., _T], *arguments: Any) -> list[_T]:
        """``function(plan, cases, calibrators, *arguments)`` of every share of the cases."""
        if self.workers == 1:
            return [function(self.plan, self.cases, self.calibrators, *arguments, progress=self.progress)]
        shares = [self.cases.shard(rank, self.workers) for rank in range(self.workers)]
        calls = [(self.plan, share, self.calibrators, *arguments) for share in shares]
        return in_workers(function, calls, self.progress)


# A calibrator's name, and a channel of multi-label data; of ordinary data the only one.
_Key = tuple[str, int]


class _Share(NamedTuple):
    """What some cases gave through one calibrator, in one channel."""

    rows: list[Row]
    balances: list[float]
    spreads: list[float]
    reliability: dict[str, dict[str, Any]]  # case, region
    pooled: VoxelStatistics
    counted: VoxelStatistics  # the same object where all cases are


def _first_share(
    plan: Plan,
    cases: CaseSet,
    calibrators: _Calibrators,
    counted: frozenset[str],
    *,
    progress: Progress,
) -> dict[_Key, _Share]:
    found: dict[_Key, _Share] = {}
    for key in itertools.product(calibrators, range(len(cases.channel_names or ("",)))):
        pooled = plan.statistics(cases.num_classes)
        found[key] = _Share([], [], [], {}, pooled, pooled if counted >= set(cases.ids) else pooled.empty_like())
    for case in cases:
        progress(case.id)
        for k, own, maps in _channels(cases, case, calibrators):
            with _at(cases, case, k) as threads:
                results = measure_case(plan, own, maps, threads)
            for name, result in results.items():
                _add(found[name, k], case.id, result, plan, counted)
        del case, own  # Otherwise it would live on while the next one is awaited.
    return found


def _channels(
    cases: CaseSet, case: Case, calibrators: _Calibrators
) -> Iterator[tuple[int, Case, dict[str, AnyCalibrator]]]:
    """The channels of a case, with what calibrates them; an ordinary case is the only one of its own."""
    if cases.channel_names is None:
        yield 0, case, dict(calibrators)
        return
    if not case.source.sliceable:
        _ = case.logits  # Once for all channels.
    for k in range(len(cases.channel_names)):
        yield k, case.channel(k), {name: of_channel(calibrator, k) for name, calibrator in calibrators.items()}


def _add(share: _Share, case: str, result: CaseResult, plan: Plan, counted: frozenset[str]) -> None:
    statistics = result.statistics
    share.rows.extend(result.rows)
    share.balances.append(confidence_balance(statistics))
    share.spreads.append(free_energy_std(statistics))
    share.reliability[case] = {region: _bins(statistics, region) for region in (EVERYTHING, *plan.regions)}
    share.pooled.merge(statistics)
    if share.counted is not share.pooled and case in counted:
        share.counted.merge(statistics)


def _second_share(
    plan: Plan,
    cases: CaseSet,
    calibrators: _Calibrators,
    second: Mapping[_Key, SecondPasses],
    *,
    progress: Progress,
) -> dict[_Key, SecondPasses]:
    found = {key: {number: one.empty_like() for number, one in passes.items()} for key, passes in second.items()}
    for case in cases:
        progress(case.id)
        for k, own, maps in _channels(cases, case, calibrators):
            with _at(cases, case, k) as threads:
                add_case_again(case_views(plan, own, maps, threads), {name: found[name, k] for name in calibrators})
        del case, own
    return found


@contextmanager
def _at(cases: CaseSet, case: Case, channel: int) -> Iterator[int]:
    """Torch on one thread, for light work; gives the number of threads for heavy work. Errors name case and channel."""
    threads = torch.get_num_threads()
    try:
        with torch_threads(1):
            yield threads
    except SegcalError as error:
        where = f"channel '{cases.channel_names[channel]}'" if cases.channel_names else None
        raise error.at(case=case.id, where=where) from None


def _merged(parts: Sequence[VoxelStatistics]) -> VoxelStatistics:
    whole = parts[0].empty_like()
    for part in parts:
        whole.merge(part)
    return whole


def _reliability(pooled: VoxelStatistics, per_case: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """For every region: 15 bins of the top label, of each predicted class, and of the top label in every case."""
    return {
        region: {
            "top": _bins(pooled, region),
            "classes": [_plain(bins) for bins in predicted_reliability(pooled, DEFAULT_BINS, region=region)],
            "cases": {name: bins[region] for name, bins in per_case.items()},
        }
        for region in (EVERYTHING, *pooled.regions)
    }


def _bins(statistics: VoxelStatistics, region: str) -> dict[str, list[float]]:
    return _plain(reliability(statistics, DEFAULT_BINS, region=region))


def _plain(bins: Reliability) -> dict[str, list[float]]:
    return {name: getattr(bins, name).tolist() for name in ("count", "confidence", "correct")}


def _about(plan: Plan, cases: CaseSet, calibrator: AnyCalibrator) -> dict[str, Any]:
    return {
        "cases": len(cases),
        "num_classes": cases.num_classes,
        "class_names": list(cases.class_names) if cases.class_names else None,
        "channels": list(cases.channel_names) if cases.channel_names else None,
        "ignore_index": cases.ignore_index,
        "background": cases.background,
        "without_background": list(plan.without_background),
        "calibrator": None if calibrator is None else getattr(calibrator, "id", type(calibrator).__name__),
        "columns": [f"{column.id} in {column.region}" for column in plan.columns],
        "bins": DEFAULT_BINS,
        "exact": plan.exact,
        "seed": plan.seed,
        "versions": dict(versions()),
    }


@cache
def versions() -> Mapping[str, str]:
    """The versions that decide the numbers; looking them up takes milliseconds, once."""
    libraries = {name: version(name) for name in ("torch", "numpy")}
    return {"segcal": version("segcal"), "python": platform.python_version(), **libraries}
