"""All metrics of one case, with any number of calibrators, from one read of its scores."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from segcal.cases.calibrated import AnyCalibrator, as_calibrator, case_scores
from segcal.evaluation.plan import LOCAL, Plan
from segcal.evaluation.results import POOLED, Row
from segcal.kernels import AffineMap
from segcal.metrics import METRICS, Column, Measure, SecondPass
from segcal.metrics.surfaces import class_mean, foreground, surface_distances
from segcal.parallel.threads import torch_threads
from segcal.regions import CaseRegions, Window
from segcal.statistics import EVERYTHING, VoxelStatistics
from segcal.types import Case, fewer_rows, row_slices

# The second passes that metrics need, by the key of their column.
SecondPasses = dict[tuple[str, str], SecondPass]


class CaseVoxels:
    """The voxels of a case: labels, regions and distances, computed once for all calibrators.

    ``threads`` are for calibrators and kernels. All else is light work, which is faster on one thread.
    """

    def __init__(self, plan: Plan, case: Case, calibrators: Mapping[Any, AnyCalibrator], threads: int) -> None:
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
        self.views = {name: CalibratedCase(self, calibrator) for name, calibrator in calibrators.items()}

    def windows(self) -> Iterator[tuple[Window, Tensor]]:
        """The whole case in pieces of some rows each, with their logits."""
        columns = tuple(slice(0, size) for size in self.case.shape[3:])
        for rows in row_slices(self.case.shape):
            window = (rows, *columns)
            yield window, self.logits(window)

    def pieces(self) -> Iterator[tuple[Any, CalibratedCase, Window, Tensor]]:
        """Every window with every calibrator, by name: the scores are read once for all of them."""
        for window, logits in self.windows():
            for name, view in self.views.items():
                yield name, view, window, logits

    def logits(self, window: Window) -> Tensor:
        """The uncalibrated scores in a window."""
        index = (..., *window[1:])
        return self.case.rows("logits", window[0])[index]  # type: ignore[no-any-return]

    def add_again(self, second: Mapping[str, SecondPasses]) -> None:
        """Add the whole case to the second passes of every calibrator."""
        for name, view, window, logits in self.pieces():
            view.add_again(second[name], window, logits)


def _narrow_labels(case: Case) -> Tensor:
    """The labels ``(N, *spatial)`` of a case, as int16 unless some do not fit."""
    fits, parts = torch.iinfo(torch.int16), []
    for rows in row_slices(case.shape):
        labels: Tensor = case.rows("labels", rows)
        low, high = (int(value) for value in labels.aminmax())
        if low < fits.min or high > fits.max:
            return case.labels
        parts.append(labels.to(torch.int16))
    return torch.cat(parts, 1)


class CalibratedCase:
    """The voxels of a case with one calibrator, in chunks if the calibrator allows it."""

    def __init__(self, voxels: CaseVoxels, calibrator: AnyCalibrator) -> None:
        # A circle of references would keep the labels and masks of many cases in memory, until Python looks for them.
        self.voxels: CaseVoxels = weakref.proxy(voxels)
        self.calibrator = None if calibrator is None else as_calibrator(calibrator)
        self.score_map = None if self.calibrator is None else self.calibrator.score_map

    def scores(self, window: Window, logits: Tensor) -> tuple[Tensor, AffineMap | None, Tensor | None]:
        """The scores of a window with these logits, the affine map still to be applied, and the argmax before.

        Affine maps are left to the pass over the voxels. The argmax before calibration is None if the scores are not
        calibrated yet.
        """
        if self.calibrator is None or self.score_map is not None:
            return logits, self.score_map, None
        if self.calibrator.spatial:
            index = (slice(None), slice(None), *window)
            mapped = self._whole[index]
        else:
            with torch_threads(self.voxels.threads), torch.no_grad():
                mapped = self.calibrator(logits)
        return mapped, None, logits.argmax(1)

    @cached_property
    def _whole(self) -> Tensor:
        with torch_threads(self.voxels.threads):
            return case_scores(self.voxels.case, self.calibrator)

    def add_to(self, statistics: VoxelStatistics, window: Window, logits: Tensor) -> None:
        """Add the voxels of a window with these logits, by halves where a GPU has too little memory."""
        try:
            self._add_to(statistics, window, logits)
            return
        except torch.OutOfMemoryError:
            halves = fewer_rows(window[0])
        for rows in halves:
            own = logits.narrow(2, rows.start - window[0].start, rows.stop - rows.start)
            self.add_to(statistics, (rows, *window[1:]), own)

    def _add_to(self, statistics: VoxelStatistics, window: Window, logits: Tensor) -> None:
        index, voxels = (slice(None), *window), self.voxels
        scores, score_map, uncalibrated = self.scores(window, logits)
        statistics.update(
            scores,
            voxels.where.labels[index],
            ignore_index=None,  # The mask leaves out ignored voxels.
            mask=voxels.where.valid[index],
            regions={name: mask[index] for name, mask in voxels.masks.items()},
            distance=None if voxels.distance is None else voxels.distance[index],
            score_map=score_map,
            uncalibrated=uncalibrated,
        )

    def add_again(self, second: SecondPasses, window: Window, logits: Tensor) -> None:
        """Add the voxels of a window to second passes, each in its region."""
        index, voxels = (slice(None), *window), self.voxels
        scores, score_map, _ = self.scores(window, logits)
        labels, valid = voxels.where.labels[index], voxels.where.valid[index]
        for one in second.values():
            inside = valid if one.region == EVERYTHING else valid & voxels.masks[str(one.region)][index]
            one.update(scores, labels, ignore_index=None, mask=inside, score_map=score_map)


def measure_case(
    plan: Plan, case: Case, calibrators: Mapping[str, AnyCalibrator], threads: int
) -> dict[str, tuple[list[Row], VoxelStatistics]]:
    """All rows and the statistics of a case, by calibrator. The scores are read once, or twice for exact bins."""
    voxels = CaseVoxels(plan, case, calibrators, threads)
    statistics = {name: plan.statistics(case.shape[1], threads) for name in calibrators}
    for name, view, window, logits in voxels.pieces():
        view.add_to(statistics[name], window, logits)
    second = {name: second_passes(plan, plan.columns_of("per-image"), own) for name, own in statistics.items()}
    if any(second.values()):
        voxels.add_again(second)
    found = {}
    for name, view in voxels.views.items():
        rows = reduced_rows(plan, case.id, statistics[name], second[name])
        found[name] = [*rows, *_local_rows(plan, view), *_surface_rows(plan, view)], statistics[name]
    return found


def second_passes(plan: Plan, columns: Sequence[Column], statistics: VoxelStatistics) -> SecondPasses:
    """Empty second passes for the columns that need one to be exact, if the plan asks for exact values."""
    found = {}
    for column in columns if plan.exact else ():
        make = METRICS[column.metric].second_pass
        one = None if make is None else make(statistics, region=column.region, **column.options)
        if one is not None:
            found[column.key] = one
    return found


def reduced_rows(plan: Plan, case: str | None, statistics: VoxelStatistics, second: SecondPasses) -> list[Row]:
    """The metrics that are computed from statistics."""
    columns = plan.columns_of("pooled" if case is POOLED else "per-image")
    values = zip(columns, _reduced(columns, statistics, second), strict=True)
    return [Row(case, column.region, column.id, float(value), value.count) for column, value in values]


def _reduced(columns: Sequence[Column], statistics: VoxelStatistics, second: SecondPasses) -> list[Measure]:
    found = []
    for column in columns:
        exact = {"exact": second[column.key]} if column.key in second else {}
        function = METRICS[column.metric].function
        found.append(function(statistics, region=column.region, **column.options, **exact))
    return found


def _local_rows(plan: Plan, view: CalibratedCase) -> list[Row]:
    """Mean and maximum over random patches (Ding et al.)."""
    columns = [replace(column, region=EVERYTHING) for column in plan.columns if column.region == LOCAL]
    if not columns:
        return []
    voxels, patches = view.voxels, []
    for part in voxels.where.parts(LOCAL):
        statistics, logits = plan.statistics(voxels.case.shape[1], voxels.threads), voxels.logits(part.window)
        view.add_to(statistics, part.window, logits)
        if second := second_passes(plan, columns, statistics):
            view.add_again(second, part.window, logits)
        patches.append(_reduced(columns, statistics, second))
    rows = []
    for column, found in zip(columns, zip(*patches, strict=True), strict=True):
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
        index, (scores, score_map, _) = (slice(None), *window), view.scores(window, logits)
        prediction[index] = (scores if score_map is None else score_map(scores)).argmax(1)
    # The mask leaves out ignored voxels.
    spacing = case.spacing
    distances = surface_distances(prediction, labels, case.shape[1], spacing=spacing, ignore_index=None, mask=valid)
    missed = int(foreground(distances.missed, plan.background).sum())
    rows = []
    for column in plan.columns:
        spec = METRICS[column.metric]
        if "surfaces" in spec.needs:
            value = class_mean(spec.function(distances, **column.options), plan.background)
            rows.append(Row(case.id, EVERYTHING, column.id, float(value), value.count, missed))
    return rows
