"""``evaluate``: cases x calibrator x regions x metrics, in one pass over the scores, as a table of tidy rows."""

from __future__ import annotations

import multiprocessing
import platform
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segcal.cases import CaseSet
from segcal.errors import InputError, SegcalError
from segcal.kernels import AffineMap
from segcal.metrics import Column, Measure, MetricSpec, reliability
from segcal.metrics.diagnosis import diagnose
from segcal.metrics.surfaces import class_mean, surface_distances
from segcal.plan import DEFAULT_BINS, LOCAL, Plan, metric_spec
from segcal.regions import CaseRegions, Window
from segcal.results import POOLED, Results, Row
from segcal.statistics import EVERYTHING, VoxelStatistics
from segcal.threads import torch_threads
from segcal.types import Case, row_slices

DEFAULT_METRICS = ("nll", "brier", "ece", "mce", "ace", "cece", "ba-ece", "dsc", "accuracy", "confidence-balance")

# Logits to log-probabilities. A ``score_map`` attribute (an AffineMap) is fused into the pass, and ``spatial = False``
# promises that every voxel is mapped on its own, so that a case may be mapped in chunks.
Calibrator = Callable[[Tensor], Tensor]


def evaluate(
    cases: CaseSet,
    calibrator: Calibrator | None = None,
    *,
    metrics: Sequence[str | Column] = DEFAULT_METRICS,
    regions: Sequence[str] = (EVERYTHING,),
    masks: Mapping[str, Callable[[Case], Tensor]] | None = None,
    workers: int = 1,
    seed: int = 0,
    progress: Callable[[str], None] = lambda case: None,
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
        workers: Processes; each takes a share of the cases.
        seed: Of the local patches; every case has its own.
        progress: Called with the name of each case before it is read; only with one worker.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(3, size=(32, 40), plant=[segcal.synthetic.Temperature(2.0)])
        >>> results = evaluate(cases, metrics=("nll", "ece"), regions=("everything", "boundary"))
        >>> results.value("ece") < results.value("ece", region="boundary")
        True
    """
    plan = Plan.make(metrics, regions, masks or {}, seed)
    if workers < 1:
        raise InputError(f"workers is {workers}", expected="at least 1")
    if not len(cases):
        raise InputError("no cases", where="cases", expected="at least one")
    if workers == 1:
        shares = [_evaluate_share(plan, cases, calibrator, progress)]
    else:
        shares = list(_in_processes(plan, cases, calibrator, min(workers, len(cases))))
    pooled = plan.statistics(cases.num_classes)
    for share in shares:
        pooled.merge(share.pooled)
    order = {name: index for index, name in enumerate(cases.ids)}
    rows = sorted((row for share in shares for row in share.rows), key=lambda row: order[row.case])
    rows += _rows(plan, POOLED, pooled)
    per_case = {name: bins for share in shares for name, bins in share.reliability.items()}
    by_case = Results(tuple(rows))
    return Results(
        rows=tuple(rows),
        about=_about(plan, cases, calibrator),
        reliability=_reliability(pooled, per_case),
        diagnosis=diagnose(
            pooled,
            balances=by_case.values("confidence-balance"),
            spreads=by_case.values("free-energy-std"),
            class_names=cases.class_names,
        ),
    )


class _Share(NamedTuple):
    rows: list[Row]
    reliability: dict[str, dict[str, Any]]  # case, region
    pooled: VoxelStatistics


def _in_processes(plan: Plan, cases: CaseSet, calibrator: Calibrator | None, workers: int) -> Iterator[_Share]:
    # Spawned, not forked: a forked copy of a process that has used OpenMP or numba threads may hang.
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // workers)
    with ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        shares = (cases.shard(rank, workers) for rank in range(workers))
        yield from pool.map(_evaluate_share, *zip(*((plan, share, calibrator) for share in shares), strict=True))


def _evaluate_share(
    plan: Plan, cases: CaseSet, calibrator: Calibrator | None, progress: Callable[[str], None] = lambda case: None
) -> _Share:
    share = _Share([], {}, plan.statistics(cases.num_classes))
    threads = torch.get_num_threads()
    for case in cases:
        progress(case.id)
        try:
            with torch_threads(1):
                rows, statistics = _evaluate_case(plan, _CaseVoxels(plan, case, calibrator, threads))
        except SegcalError as error:
            raise error.at(case=case.id) from None
        share.rows.extend(rows)
        share.reliability[case.id] = {region: _bins(statistics, region) for region in (EVERYTHING, *plan.regions)}
        share.pooled.merge(statistics)
        del case  # Otherwise it would live on while the next one is awaited.
    return share


def _evaluate_case(plan: Plan, voxels: _CaseVoxels) -> tuple[list[Row], VoxelStatistics]:
    case = voxels.case
    statistics = plan.statistics(case.shape[1], voxels.threads)
    for rows in row_slices(case.shape):
        voxels.add_to(statistics, (rows, *voxels.columns))
    measures = _rows(plan, case.id, statistics)
    if any(column.region == LOCAL for column in plan.columns):
        measures += _local_rows(plan, voxels)
    if "surfaces" in plan.needs:
        measures += _surface_rows(plan, voxels)
    return measures, statistics


class _CaseVoxels:
    """The voxels of a case: regions found once, scores calibrated in chunks where the calibrator allows it.

    ``threads`` are for the calibrator and the kernel; all else here is light work, which is quicker on one.
    """

    def __init__(self, plan: Plan, case: Case, calibrator: Calibrator | None, threads: int) -> None:
        self.case, self.calibrator, self.threads = case, calibrator, threads
        self.score_map: AffineMap | None = getattr(calibrator, "score_map", None)
        self.spatial = calibrator is not None and self.score_map is None and getattr(calibrator, "spatial", True)
        self.columns = tuple(slice(0, size) for size in case.shape[3:])
        self.where = CaseRegions(
            case.labels,
            spacing=case.spacing,
            ignore_index=case.ignore_index,
            mask=case.mask,
            seed=zlib.crc32(case.id.encode()) ^ plan.seed,
        )
        self.masks = {
            name: self.where.mask(plan.masks[name](case) if name in plan.masks else name) for name in plan.regions
        }
        self.distance = self.where.distance if "distance" in plan.needs else None

    def add_to(self, statistics: VoxelStatistics, window: Window) -> None:
        """Add the voxels of a window."""
        index = (slice(None), *window)
        logits, score_map, uncalibrated = self.scores(window)
        statistics.update(
            logits,
            self.where.labels[index],
            ignore_index=None,  # Ignored voxels are not valid, and the mask says so.
            mask=self.where.valid[index],
            regions={name: mask[index] for name, mask in self.masks.items()},
            distance=None if self.distance is None else self.distance[index],
            score_map=score_map,
            uncalibrated=uncalibrated,
        )

    def _calibrated(self, logits: Tensor) -> Tensor:
        assert self.calibrator is not None
        with torch_threads(self.threads), torch.no_grad():
            return self.calibrator(logits)

    @cached_property
    def _whole(self) -> Tensor:
        pieces = getattr(self.calibrator, "pieces", None)
        if pieces is None:  # a plain function
            return self._calibrated(self.case.logits)
        with torch_threads(self.threads), torch.no_grad():
            return torch.cat([log_probs for _, log_probs in pieces(self.case)], 2)

    def scores(self, window: Window) -> tuple[Tensor, AffineMap | None, Tensor | None]:
        """Scores in a window, the map to apply to them, and the uncalibrated argmax where they are mapped already."""
        columns = (slice(None), slice(None), slice(None), *window[1:])
        logits = self.case.chunk(window[0]).logits[columns]
        if self.calibrator is None or self.score_map is not None:
            return logits, self.score_map, None
        mapped = self._whole[:, :, window[0]][columns] if self.spatial else self._calibrated(logits)
        return mapped, None, logits.argmax(1)

    def prediction(self) -> Tensor:
        """The predicted labels ``(N, *spatial)``."""
        parts = (self.scores((rows, *self.columns)) for rows in row_slices(self.case.shape))
        return torch.cat([(z if score_map is None else score_map(z)).argmax(1) for z, score_map, _ in parts], 1)


def _rows(plan: Plan, case: str, statistics: VoxelStatistics) -> list[Row]:
    """All metrics that are reductions of the statistics."""
    rows = []
    for column in plan.columns:
        spec = metric_spec(column.metric)
        if column.region != LOCAL and "surfaces" not in spec.needs:
            value = _compute(spec, statistics, column.options, region=column.region)
            rows.append(Row(case, column.region, _name(column), float(value), value.count))
    return rows


def _local_rows(plan: Plan, voxels: _CaseVoxels) -> list[Row]:
    """Mean and maximum over random patches (Ding et al.)."""
    columns = [column for column in plan.columns if column.region == LOCAL]
    values: list[list[float]] = [[] for _ in columns]
    for part in voxels.where.parts(LOCAL):
        statistics = plan.statistics(voxels.case.shape[1], voxels.threads)
        voxels.add_to(statistics, part.window)
        for column, found in zip(columns, values, strict=True):
            found.append(_compute(metric_spec(column.metric), statistics, column.options))
    rows = []
    for column, found in zip(columns, values, strict=True):
        mean = Measure.mean(found)
        largest = max((value for value in found if value == value), default=float("nan"))
        rows.append(Row(voxels.case.id, "local-mean", _name(column), float(mean), mean.count))
        rows.append(Row(voxels.case.id, "local-max", _name(column), float(largest), mean.count))
    return rows


def _surface_rows(plan: Plan, voxels: _CaseVoxels) -> list[Row]:
    """Metrics of surfaces, which belong to a case as a whole: the mean over the classes but the background."""
    case = voxels.case
    distances = surface_distances(
        voxels.prediction(),
        case.labels,
        case.shape[1],
        spacing=case.spacing,
        ignore_index=case.ignore_index,
        mask=case.mask,
    )
    rows = []
    for column in plan.columns:
        spec = metric_spec(column.metric)
        if "surfaces" in spec.needs:
            value = class_mean(_compute(spec, distances, column.options))
            rows.append(Row(case.id, EVERYTHING, _name(column), float(value), value.count))
    return rows


def _compute(spec: MetricSpec, data: Any, options: Mapping[str, Any], **more: Any) -> Any:
    try:
        return spec.function(data, **options, **more)
    except TypeError as error:
        raise InputError(
            f"options {dict(options)} of '{spec.id}': {error}", expected="options the metric has"
        ) from None


def _name(column: Column) -> str:
    options = ",".join(f"{name}={value}" for name, value in sorted(column.options.items()))
    return f"{column.metric}[{options}]" if options else column.metric


def _reliability(pooled: VoxelStatistics, per_case: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """For every region: 15 bins of the top label, of each predicted class, and of the top label in every case."""
    return {
        region: {
            "top": _bins(pooled, region),
            "classes": [_bins(pooled, region, k) for k in range(pooled.num_classes)],
            "cases": {name: bins[region] for name, bins in per_case.items()},
        }
        for region in (EVERYTHING, *pooled.regions)
    }


def _bins(statistics: VoxelStatistics, region: str, predicted: int | None = None) -> dict[str, list[float]]:
    bins = reliability(statistics, DEFAULT_BINS, region=region, predicted=predicted)
    return {name: getattr(bins, name).tolist() for name in ("count", "confidence", "correct")}


def _about(plan: Plan, cases: CaseSet, calibrator: Calibrator | None) -> dict[str, Any]:
    return {
        "cases": len(cases),
        "num_classes": cases.num_classes,
        "class_names": list(cases.class_names) if cases.class_names else None,
        "ignore_index": cases.ignore_index,
        "calibrator": None if calibrator is None else getattr(calibrator, "id", type(calibrator).__name__),
        "columns": [f"{_name(column)} in {column.region}" for column in plan.columns],
        "seed": plan.seed,
        "versions": {
            "segcal": version("segcal"),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy")},
        },
    }
