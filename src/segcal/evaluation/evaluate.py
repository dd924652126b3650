"""``evaluate``: cases x calibrator x regions x metrics, in one pass over the scores, as a table of tidy rows."""

from __future__ import annotations

import pickle
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from segcal.cases import CaseSet, Source, cases_from
from segcal.cases.calibrated import AnyCalibrator, check_classes, of_channel
from segcal.cases.device import Device
from segcal.cases.shares import in_shares
from segcal.errors import InputError, check_whole, naming
from segcal.evaluation.classes import class_rows
from segcal.evaluation.measure import CaseVoxels, SecondPasses, measure_case, reduced_rows, second_passes
from segcal.evaluation.plan import DEFAULT_BINS, DEFAULT_REGIONS, Plan
from segcal.evaluation.pooled import case_sums, intervals, summed_columns
from segcal.evaluation.results import POOLED, Results, Row, mean_over_channels
from segcal.evaluation.unfinished import Unfinished
from segcal.files.plain import packed, unpacked
from segcal.files.versions import SEGCAL
from segcal.metrics import Column, Reliability, confidence_balance, free_energy_std, predicted_reliability, reliability
from segcal.metrics.diagnosis import diagnose, diagnose_channels
from segcal.parallel.ranks import Progress
from segcal.parallel.threads import torch_threads
from segcal.statistics import EVERYTHING, VoxelStatistics
from segcal.types import Case

DEFAULT_METRICS = ("nll", "brier", "ece", "mce", "ace", "cece", "ba-ece", "dsc", "accuracy", "confidence-balance")

_Calibrators = Mapping[str, AnyCalibrator]
# The name of a calibrator, and the index of a channel of multi-label data (0 for ordinary data).
_Key = tuple[str, int]


def evaluate(
    cases: Source,
    calibrator: AnyCalibrator = None,
    *,
    metrics: Sequence[str | Column] = DEFAULT_METRICS,
    regions: Sequence[str] = DEFAULT_REGIONS,
    masks: Mapping[str, Callable[[Case], torch.Tensor]] | None = None,
    exact: bool = False,
    workers: int = 1,
    device: Device | None = None,
    seed: int = 0,
    progress: Progress = lambda case: None,
    unfinished: Unfinished | None = None,
) -> Results:
    """Measure scores against labels.

    Every case is read once, in chunks, however many metrics and regions there are. Of a case, only some kilobytes of
    sums are kept, however many voxels it has.

    Args:
        cases: What to evaluate: cases, or anything else that ``segcal.cases_from`` takes, such as a DataLoader.
        calibrator: A map from logits to log-probabilities, or None to evaluate the scores as they are.
        metrics: Ids of ``segcal.METRICS``, optionally with options (``"ece[num_bins=50]"``), each in every region; or
            ``segcal.metrics.Column`` objects, which name their region, such as those of a preset.
        regions: Ids of ``segcal.REGIONS``. ``local`` gives ``local-mean`` and ``local-max`` over random patches.
        masks: Regions of your own, by name: functions from a case to a bool mask ``(N, *spatial)``.
        exact: Find the edges of equal-mass bins (``ace-adaptive``, ``tace``) to the precision of float32, by reading
            every case a second time. In one pass they are within 1/4096 of the exact ones.
        workers: Number of processes, which share the cases. In a torchrun job, its ranks share them instead.
        device: Where to compute: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``; None for where the cases are.
        seed: Seed of the local patches, combined with the name of the case.
        progress: Called with the name of each case before it is read.
        unfinished: Where to keep what is measured so far, and to go on from what is there.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(3, size=(32, 40), plant=[segcal.synthetic.Temperature(2.0)])
        >>> results = evaluate(cases, metrics=("nll", "ece"), regions=("everything", "boundary"))
        >>> results.value("ece") < results.value("ece", region="boundary")
        True
    """
    cases = cases_from(cases)
    plan = Plan.make(metrics, regions, masks, seed=seed, exact=exact, background=cases.background)
    options: dict[str, Any] = {"workers": workers, "progress": progress, "unfinished": unfinished}
    return evaluate_many(plan, cases.on(device), {"": calibrator}, **options)[""]


def evaluate_many(
    plan: Plan,
    cases: CaseSet,
    calibrators: _Calibrators,
    *,
    workers: int = 1,
    progress: Progress = lambda case: None,
    counted: Collection[str] | None = None,
    unfinished: Unfinished | None = None,
) -> dict[str, Results]:
    """``evaluate`` with several calibrators, by name, from one read of every case.

    ``counted`` names the cases that enter the pooled reliability data; None means all. Where several evaluations that
    share cases are added up, each case should be counted in one of them.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(3, size=(32, 40), plant=[segcal.synthetic.Temperature(2.0)])
        >>> ts = segcal.calibrators.TemperatureScaling().fit(cases)
        >>> found = evaluate_many(Plan.make(("nll",)), cases, {"before": None, "after": ts})
        >>> found["after"].value("nll") < found["before"].value("nll")
        True
    """
    check_whole("workers", workers, 1)
    if not len(cases):
        raise InputError("no cases", where="cases", expected="at least one")
    groups = cases.about_groups()  # A case without a group is an error before the work, not after it.
    for calibrator in calibrators.values():
        check_classes(cases, calibrator)
    if workers > 1:
        _check_sendable("calibrator", calibrators)
        _check_sendable("mask", plan.masks)
        _check_sendable("groups", {"": cases.groups})
    some = None if counted is None or set(counted) >= set(cases.ids) else frozenset(counted)
    shared = partial(in_shares, workers=workers, progress=progress)
    sums = shared(_measure_share, cases, plan, calibrators, some, unfinished, merge=_merged)
    second = {key: second_passes(plan, plan.columns_of("pooled"), own.pooled) for key, own in sums.items()}
    if any(second.values()):
        second = shared(_second_share, cases, plan, calibrators, second, merge=_merged_again)
    found = {key: _results(plan, cases, own, second[key]) for key, own in sums.items()}
    of_cases = None if groups is None else [groups["cases"][case] for case in cases.ids]
    about = {name: {**_about(plan, cases, own), "groups": groups} for name, own in calibrators.items()}
    if cases.channel_names is None:
        whole = {name: replace(found[name, 0], about=about[name]) for name in calibrators}
    else:
        whole = {
            name: _of_channels({c: found[name, k] for k, c in enumerate(cases.channel_names)}, about[name])
            for name in calibrators
        }
    return {name: replace(own, pooled_intervals=intervals(own.sums, of_cases)) for name, own in whole.items()}


def _check_sendable(kind: str, functions: Mapping[str, Any]) -> None:
    """Raise if worker processes cannot be sent one of these functions, by name."""
    for name, function in functions.items():
        try:
            pickle.dumps(function)
        except Exception as error:
            raise InputError(
                f"{f'the {kind} {name}'.strip()} cannot be sent to worker processes ({error})",
                expected="a function that can be pickled",
                fix="workers=1, or functions and classes at the top of a module",
            ) from None


@dataclass
class _Sums:
    """What some cases gave with one calibrator, in one channel."""

    pooled: VoxelStatistics
    counted: VoxelStatistics  # the same object as ``pooled`` if all cases are counted
    rows: list[Row] = field(default_factory=list)
    balances: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    reliability: dict[str, dict[str, Any]] = field(default_factory=dict)  # by case and region
    sums: dict[str, dict[tuple[str, str], NDArray[np.float64]]] = field(default_factory=dict)  # by case and column

    @classmethod
    def of(
        cls, case: str, rows: list[Row], statistics: VoxelStatistics, counted: bool, summed: Sequence[Column]
    ) -> _Sums:
        """What one case gave."""
        balance, spread = confidence_balance(statistics), free_energy_std(statistics)
        bins = {region: _bins(statistics, region) for region in (EVERYTHING, *statistics.regions)}
        used = statistics if counted else statistics.empty_like()
        own = case_sums(summed, statistics)
        return cls(statistics, used, rows, [balance], [spread], {case: bins}, {case: own})

    def merge(self, other: _Sums) -> None:
        """Add other cases."""
        self.rows += other.rows
        self.balances += other.balances
        self.spreads += other.spreads
        self.reliability |= other.reliability
        self.sums |= other.sums
        self.pooled.merge(other.pooled)
        if self.counted is not self.pooled:
            self.counted.merge(other.counted)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it, exact to the bit."""
        return {
            "pooled": self.pooled.to_dict(),
            "counted": None if self.counted is self.pooled else self.counted.to_dict(),
            "rows": self.rows,
            "balances": self.balances,
            "spreads": self.spreads,
            "reliability": self.reliability,
            "sums": {case: [[*key, packed(own)] for key, own in sums.items()] for case, sums in self.sums.items()},
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> _Sums:
        """The inverse of ``to_dict``."""
        pooled = VoxelStatistics.from_dict(content["pooled"])
        return cls(
            pooled=pooled,
            counted=VoxelStatistics.from_dict(content["counted"]) if content["counted"] else pooled,
            rows=[Row(*row) for row in content["rows"]],
            balances=content["balances"],
            spreads=content["spreads"],
            reliability=content["reliability"],
            sums={
                case: {(metric, region): unpacked(own) for metric, region, own in sums}
                for case, sums in content["sums"].items()
            },
        )


def _measure_share(
    cases: CaseSet,
    plan: Plan,
    calibrators: _Calibrators,
    counted: frozenset[str] | None,
    unfinished: Unfinished | None,
    *,
    progress: Progress,
) -> dict[_Key, _Sums]:
    sums: dict[_Key, _Sums] = {}
    for key in product(calibrators, range(len(cases.channel_names or ("",)))):
        pooled = plan.statistics(cases.num_classes)
        sums[key] = _Sums(pooled, pooled if counted is None else pooled.empty_like())
    summed = summed_columns(plan, plan.statistics(cases.num_classes))
    done, kept = (0, None) if unfinished is None else unfinished.read(cases.ids)
    if kept is not None:
        sums = {key: _Sums.from_dict(own) for key, own in zip(sums, kept, strict=True)}
    for name in cases.ids[:done]:
        progress(name)
    for channel, case, own in _channels(cases[done:], calibrators, progress):
        with _at(cases, case, channel) as threads:
            for name, (rows, statistics) in measure_case(plan, case, own, threads).items():
                one = _Sums.of(case.id, rows, statistics, counted is None or case.id in counted, summed)
                sums[name, channel].merge(one)
        if channel == len(cases.channel_names or ("",)) - 1:
            done += 1
            if unfinished is not None:
                unfinished.write(cases.ids, done, lambda: [own.to_dict() for own in sums.values()])
        del case  # Otherwise it would stay in memory while the next one is read.
    return sums


def _merged(mine: dict[_Key, _Sums], other: dict[_Key, _Sums]) -> dict[_Key, _Sums]:
    for key, own in other.items():
        mine[key].merge(own)
    return mine


def _merged_again(mine: dict[_Key, SecondPasses], other: dict[_Key, SecondPasses]) -> dict[_Key, SecondPasses]:
    for key, passes in other.items():
        for column, one in passes.items():
            mine[key][column].merge(one)
    return mine


def _second_share(
    cases: CaseSet, plan: Plan, calibrators: _Calibrators, second: Mapping[_Key, SecondPasses], *, progress: Progress
) -> dict[_Key, SecondPasses]:
    found = {key: {column: one.empty_like() for column, one in passes.items()} for key, passes in second.items()}
    for channel, case, own in _channels(cases, calibrators, progress):
        with _at(cases, case, channel) as threads:
            CaseVoxels(plan, case, own, threads).add_again({name: found[name, channel] for name in own})
        del case
    return found


def _channels(
    cases: CaseSet, calibrators: _Calibrators, progress: Progress
) -> Iterator[tuple[int, Case, _Calibrators]]:
    """Every case and its calibrators or, in multi-label data, each of its channels and theirs."""
    for case in cases:
        progress(case.id)
        if cases.channel_names is None:
            yield 0, case, calibrators
        elif not case.source.sliceable:
            _ = case.logits  # Decoded once for all channels.
        for k in range(len(cases.channel_names or ())):
            yield k, case.channel(k), {name: of_channel(calibrator, k) for name, calibrator in calibrators.items()}
        del case


@contextmanager
def _at(cases: CaseSet, case: Case, channel: int) -> Iterator[int]:
    """One torch thread for light work; gives the number for heavy work. Errors name the case and the channel."""
    threads = torch.get_num_threads()
    where = f"channel '{cases.channel_names[channel]}'" if cases.channel_names else None
    with naming(case=case.id, where=where), torch_threads(1):
        yield threads


def _results(plan: Plan, cases: CaseSet, sums: _Sums, second: SecondPasses) -> Results:
    order = {name: index for index, name in enumerate(cases.ids)}
    rows = sorted(sums.rows, key=lambda row: order[str(row.case)])
    return Results(
        rows=(*rows, *reduced_rows(plan, POOLED, sums.pooled, second)),
        # Of every region: 15 bins of the top label, of each predicted class, and of the top label in every case.
        reliability={
            region: {
                "top": _bins(sums.counted, region),
                "classes": [_plain(bins) for bins in predicted_reliability(sums.counted, DEFAULT_BINS, region=region)],
                "cases": {name: sums.reliability[name][region] for name in cases.ids},
            }
            for region in (EVERYTHING, *sums.counted.regions)
        },
        diagnosis=diagnose(sums.pooled, balances=sums.balances, spreads=sums.spreads, class_names=cases.class_names),
        classes=class_rows(sums.pooled, cases.class_names),
        sums={
            ("", region, metric): np.stack([sums.sums[case][metric, region] for case in cases.ids])
            for metric, region in next(iter(sums.sums.values()))
        },
    )


def _of_channels(channels: Mapping[str, Results], about: Mapping[str, Any]) -> Results:
    """Means over the channels of multi-label data, and the results of each. No histogram mixes their voxels."""
    rows = mean_over_channels([own.rows for own in channels.values()])
    rows += [row._replace(channel=name) for name, own in channels.items() for row in own.rows]
    return Results(
        rows=tuple(rows),
        about=about,
        reliability={name: own.reliability for name, own in channels.items()},
        diagnosis=diagnose_channels({name: own.diagnosis for name, own in channels.items()}),
        classes=tuple(own.classes[1]._replace(name=name) for name, own in channels.items()),
        sums={(name, *key[1:]): sums for name, own in channels.items() for key, sums in own.sums.items()},
    )


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
    """Versions of what computes the numbers. Looked up once, as this takes milliseconds."""
    libraries = {name: version(name) for name in ("torch", "numpy")}
    return {"segcal": SEGCAL, "python": platform.python_version(), **libraries}
