"""All metrics of one case, with any number of calibrators, from one read of its scores."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from segcal.cases.calibrated import AnyCalibrator, as_calibrator, case_scores
from segcal.evaluation.plan import LOCAL, Plan, metric_spec
from segcal.evaluation.results import POOLED, Row
from segcal.kernels import AffineMap
from segcal.metrics import METRICS, Aggregation, Column, Measure, SecondPass
from segcal.metrics.surfaces import class_mean, foreground, surface_distances
from segcal.parallel.threads import torch_threads
from segcal.regions import CaseRegions, Window
from segcal.statistics import EVERYTHING, VoxelStatistics
from segcal.types import Case, row_slices

# The second passes that metrics need, by the number of their column.
SecondPasses = dict[int, SecondPass]


class CaseVoxels:
    """The voxels of a case: labels, regions and distances, computed once for all calibrators.

    ``threads`` are for calibrators and kernels. All else is light work, which is faster on one thread.
    """

    def __init__(self, plan: Plan, case: Case, threads: int) -> None:
        self.case, self.threads = case, threads
        self.where = CaseRegions(
            _narrow_labels(case),
            spacing=case.spacing,
            ignore_index=case.ignore_index,
            mask=case.mask,
            background=plan.background,
            seed=zlib.crc32(case.id.encode()) ^ plan.seed,
        )
        self.masks = {
            name: self.where.mask(plan.masks[name](case) if name in plan.masks else name) for name in plan.regions
        }
        self.distance = self.where.distance if "distance" in plan.needs else None

    def windows(self) -> Iterator[tuple[Window, Tensor]]:
        """The whole case in pieces of some rows each, with their logits."""
        columns = tuple(slice(0, size) for size in self.case.shape[3:])
        for rows in row_slices(self.case.shape):
            window = (rows, *columns)
            yield window, self.logits(window)

    def logits(self, window: Window) -> Tensor:
        """The uncalibrated scores in a window."""
        columns = (slice(None), slice(None), slice(None), *window[1:])
        return self.case.rows("logits", window[0])[columns]  # type: ignore[no-any-return]


def _narrow_labels(case: Case) -> Tensor:
    """The labels ``(N, *spatial)`` of a case, as int16 unless some do not fit."""
    fits, labels = torch.iinfo(torch.int16), None
    for rows in row_slices(case.shape):
        some: Tensor = case.rows("labels", rows)
        if labels is None:
            labels = torch.empty(case.shape[:1] + case.shape[2:], dtype=torch.int16, device=some.device)
        low, high = (int(value) for value in some.aminmax())
        if low < fits.min or high > fits.max:
            return case.labels
        labels[:, rows] = some
    assert labels is not None, "cases have rows"
    return labels


class Scores(NamedTuple):
    """Scores in a window, the map still to be applied to them, and the uncalibrated argmax if none is."""

    values: Tensor
    score_map: AffineMap | None
    uncalibrated: Tensor | None

    @property
    def prediction(self) -> Tensor:
        """The predicted labels ``(N, *window)``."""
        return (self.values if self.score_map is None else self.score_map(self.values)).argmax(1)


class CalibratedCase:
    """The voxels of a case with one calibrator, in chunks if the calibrator allows it."""

    def __init__(self, voxels: CaseVoxels, calibrator: AnyCalibrator) -> None:
        self.voxels, self.calibrator = voxels, None if calibrator is None else as_calibrator(calibrator)
        self.score_map = None if self.calibrator is None else self.calibrator.score_map

    def scores(self, window: Window, logits: Tensor) -> Scores:
        """The calibrated scores of a window with these logits; affine maps are left to the pass over the voxels."""
        if self.calibrator is None or self.score_map is not None:
            return Scores(logits, self.score_map, None)
        if self.calibrator.spatial:
            columns = (slice(None), slice(None), slice(None), *window[1:])
            mapped = self._whole[:, :, window[0]][columns]
        else:
            with torch_threads(self.voxels.threads), torch.no_grad():
                mapped = self.calibrator(logits)
        return Scores(mapped, None, logits.argmax(1))

    @cached_property
    def _whole(self) -> Tensor:
        with torch_threads(self.voxels.threads):
            return case_scores(self.voxels.case, self.calibrator)

    def add_to(self, statistics: VoxelStatistics, window: Window, logits: Tensor) -> None:
        """Add the voxels of a window with these logits."""
        index = (slice(None), *window)
        scores, voxels = self.scores(window, logits), self.voxels
        statistics.update(
            scores.values,
            voxels.where.labels[index],
            ignore_index=None,  # The mask leaves out ignored voxels.
            mask=voxels.where.valid[index],
            regions={name: mask[index] for name, mask in voxels.masks.items()},
            distance=None if voxels.distance is None else voxels.distance[index],
            score_map=scores.score_map,
            uncalibrated=scores.uncalibrated,
        )

    def add_again(self, second: SecondPasses, window: Window, logits: Tensor) -> None:
        """Add the voxels of a window to second passes, each in its region."""
        index = (slice(None), *window)
        scores, voxels = self.scores(window, logits), self.voxels
        for one in second.values():
            inside = voxels.where.valid[index]
            one.update(
                scores.values,
                voxels.where.labels[index],
                ignore_index=None,
                mask=inside if one.region == EVERYTHING else inside & voxels.masks[str(one.region)][index],
                score_map=scores.score_map,
            )


def measure_case(
    plan: Plan, case: Case, calibrators: Mapping[str, AnyCalibrator], threads: int
) -> dict[str, tuple[list[Row], VoxelStatistics]]:
    """All rows and the statistics of a case, by calibrator. The scores are read once, or twice for exact bins."""
    voxels = CaseVoxels(plan, case, threads)
    views = {name: CalibratedCase(voxels, calibrator) for name, calibrator in calibrators.items()}
    statistics = {name: plan.statistics(case.shape[1], threads) for name in views}
    for window, logits in voxels.windows():
        for name, view in views.items():
            view.add_to(statistics[name], window, logits)
    second = {name: second_passes(plan, own, "per-image") for name, own in statistics.items()}
    if any(second.values()):
        _add_again(voxels, views, second)
    return {
        name: (
            [
                *reduced_rows(plan, case.id, statistics[name], second[name]),
                *_local_rows(plan, view),
                *_surface_rows(plan, view),
            ],
            statistics[name],
        )
        for name, view in views.items()
    }


def second_passes(plan: Plan, statistics: VoxelStatistics, how: Aggregation) -> SecondPasses:
    """Empty second passes for the columns that need one, if the plan asks for exact values."""
    found = {
        number: second_pass(column, statistics, column.region)
        for number, column in (plan.columns_of(how) if plan.exact else ())
        if column.region != LOCAL
    }
    return {number: one for number, one in found.items() if one is not None}


def second_pass(column: Column, statistics: VoxelStatistics, region: str) -> SecondPass | None:
    """The empty second pass that makes a column exact, or None where its metric is exact already."""
    make = METRICS[column.metric].second_pass
    return None if make is None else make(statistics, region=region, **column.options)


def add_case_again(
    plan: Plan, case: Case, calibrators: Mapping[str, AnyCalibrator], second: Mapping[str, SecondPasses], threads: int
) -> None:
    """Add a case to the second passes of every calibrator."""
    voxels = CaseVoxels(plan, case, threads)
    views = {name: CalibratedCase(voxels, calibrator) for name, calibrator in calibrators.items()}
    _add_again(voxels, views, second)


def _add_again(voxels: CaseVoxels, views: Mapping[str, CalibratedCase], second: Mapping[str, SecondPasses]) -> None:
    for window, logits in voxels.windows():
        for name, view in views.items():
            view.add_again(second[name], window, logits)


def reduced_rows(plan: Plan, case: str | None, statistics: VoxelStatistics, second: SecondPasses) -> list[Row]:
    """The metrics that are computed from statistics."""
    rows = []
    for number, column in plan.columns_of("pooled" if case is POOLED else "per-image"):
        spec = metric_spec(column.metric)
        if column.region != LOCAL and "surfaces" not in spec.needs:
            exact = {"exact": second[number]} if number in second else {}
            value = spec.function(statistics, region=column.region, **column.options, **exact)
            rows.append(Row(case, column.region, column.id, float(value), value.count))
    return rows


def _local_rows(plan: Plan, view: CalibratedCase) -> list[Row]:
    """Mean and maximum over random patches (Ding et al.)."""
    columns = [column for column in plan.columns if column.region == LOCAL]
    if not columns:
        return []
    voxels = view.voxels
    values: list[list[float]] = [[] for _ in columns]
    for part in voxels.where.parts(LOCAL):
        statistics, logits = plan.statistics(voxels.case.shape[1], voxels.threads), voxels.logits(part.window)
        view.add_to(statistics, part.window, logits)
        for column, found in zip(columns, values, strict=True):
            exact = {}
            if plan.exact and (one := second_pass(column, statistics, EVERYTHING)):
                view.add_again({0: one}, part.window, logits)
                exact = {"exact": one}
            found.append(metric_spec(column.metric).function(statistics, **column.options, **exact))
    rows = []
    for column, found in zip(columns, values, strict=True):
        mean = Measure.mean(found)
        largest = max((value for value in found if value == value), default=float("nan"))
        rows.append(Row(voxels.case.id, "local-mean", column.id, float(mean), mean.count))
        rows.append(Row(voxels.case.id, "local-max", column.id, float(largest), mean.count))
    return rows


def _surface_rows(plan: Plan, view: CalibratedCase) -> list[Row]:
    """The metrics of surfaces, which belong to a case as a whole: means over the classes without the background."""
    if "surfaces" not in plan.needs:
        return []
    case = view.voxels.case
    labels, valid = view.voxels.where.labels, view.voxels.where.valid
    prediction = torch.empty_like(labels)
    for window, logits in view.voxels.windows():
        index = (slice(None), *window)
        prediction[index] = view.scores(window, logits).prediction
    # The mask leaves out ignored voxels.
    spacing = case.spacing
    distances = surface_distances(prediction, labels, case.shape[1], spacing=spacing, ignore_index=None, mask=valid)
    rows = []
    for column in plan.columns:
        spec = metric_spec(column.metric)
        if "surfaces" in spec.needs:
            value = class_mean(spec.function(distances, **column.options), plan.background)
            missed = int(foreground(distances.missed, plan.background).sum())
            rows.append(Row(case.id, EVERYTHING, column.id, float(value), value.count, missed))
    return rows
