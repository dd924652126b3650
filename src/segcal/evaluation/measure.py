"""All metrics of one case, with any number of calibrators, from one read of its scores."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segcal.cases.calibrated import AnyCalibrator, RowStream, as_calibrator
from segcal.cases.device import fewer_rows
from segcal.checks import checked_mask
from segcal.evaluation.plan import LOCAL, Plan
from segcal.evaluation.results import POOLED, Row
from segcal.evaluation.rows import CaseRows
from segcal.kernels import AffineMap
from segcal.metrics import METRICS, Column, Measure, SecondPass
from segcal.metrics.surfaces import class_mean, foreground, surface_distances
from segcal.parallel.threads import torch_threads
from segcal.regions import BANDS, Window, local_patches
from segcal.statistics import EVERYTHING, VoxelStatistics
from segcal.types import CHUNK_VALUES, Case, row_slices

# The second passes that metrics need, by the key of their column.
SecondPasses = dict[tuple[str, str], SecondPass]
# Voxels of a window, at most: labels, regions and distances take some 40 bytes of each.
_WINDOW = 2**22


class Piece(NamedTuple):
    """A window of a case.

    Attributes:
        window: Where it lies.
        logits: Uncalibrated scores ``(N, C, *window)``.
        labels: ``(N, *window)``.
        valid: Voxels that count, bool.
        regions: The voxels of every region, bool.
        distance: To the nearest boundary voxel, if it is needed.
        mapped: Calibrated scores, of calibrators that see more than a voxel.
    """

    window: Window
    logits: Tensor
    labels: Tensor
    valid: Tensor
    regions: Mapping[str, Tensor]
    distance: Tensor | None
    mapped: Tensor | None = None

    def inside(self, window: Window) -> Piece | None:
        """The part of it that lies in a window; None if nothing does."""
        if window == self.window:
            return self
        ends = zip(window, self.window, strict=True)
        both = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in ends)
        if any(part.stop <= part.start for part in both):
            return None
        within = zip(both, self.window, strict=True)
        index: Any = (..., *(slice(part.start - own.start, part.stop - own.start) for part, own in within))
        regions = {name: mask[index] for name, mask in self.regions.items()}
        logits, labels, valid = (one[index] for one in (self.logits, self.labels, self.valid))
        more = (None if one is None else one[index] for one in (self.distance, self.mapped))
        return Piece(both, logits, labels, valid, regions, *more)


class CaseVoxels:
    """The voxels of a case, window by window: labels, regions and distances, computed once for all calibrators.

    ``threads`` are for calibrators and kernels. All else is light work, which is faster on one thread.
    """

    def __init__(self, plan: Plan, case: Case, calibrators: Mapping[Any, AnyCalibrator], threads: int) -> None:
        self.plan, self.case, self.threads = plan, case, threads
        self.seed = zlib.crc32(case.id.encode()) ^ plan.seed
        self.shape = (case.shape[0], *case.shape[2:])
        self.window: Window = tuple(slice(0, size) for size in self.shape[1:])
        like = torch.empty((), dtype=torch.bool).expand(self.shape)
        self._masks = {name: checked_mask(mask(case), like, "region") for name, mask in plan.masks.items()}
        self.views = {name: CalibratedCase(self, calibrator) for name, calibrator in calibrators.items()}
        needed = "distance" in plan.needs or not set(BANDS).isdisjoint(plan.regions)
        self._rows = CaseRows(case, distances=needed, background=plan.background, threads=threads)

    def _piece(self, rows: slice) -> Piece:
        where, inner = self._rows.regions(rows)
        regions = {name: where.mask(name)[:, inner] for name in self.plan.regions if name not in self._masks}
        labels, valid, logits = where.labels[:, inner], where.valid[:, inner], self.case.rows("logits", rows)
        regions |= {name: mask[:, rows] & valid for name, mask in self._masks.items()}
        distance = where.distance[:, inner] if "distance" in self.plan.needs else None
        return Piece((rows, *self.window[1:]), logits, labels, valid, regions, distance)

    def pieces(self) -> Iterator[tuple[Any, CalibratedCase, Piece]]:
        """Every window with every calibrator, by name: the scores are read once for all of them."""
        for view in self.views.values():
            view.begin()
        for rows in row_slices(self.case.shape, min(CHUNK_VALUES, _WINDOW * self.case.shape[1])):
            piece = self._piece(rows)
            for name, view in self.views.items():
                yield name, view, view.seen(piece)

    def add_again(self, second: Mapping[str, SecondPasses]) -> None:
        """Add the whole case to the second passes of every calibrator."""
        for name, view, piece in self.pieces():
            view.add_again(second[name], piece)


class CalibratedCase:
    """The voxels of a case with one calibrator, in chunks if the calibrator allows it."""

    def __init__(self, voxels: CaseVoxels, calibrator: AnyCalibrator) -> None:
        # A circle of references would keep the labels and masks of many cases in memory, until Python looks for them.
        self.voxels: CaseVoxels = weakref.proxy(voxels)
        self.calibrator = None if calibrator is None else as_calibrator(calibrator)
        self.score_map = None if self.calibrator is None else self.calibrator.score_map
        self._stream: RowStream | None = None

    def begin(self) -> None:
        """Start with the first rows."""
        if self.calibrator is not None and self.score_map is None and self.calibrator.spatial:
            self._stream = RowStream(self.voxels.case, self.calibrator)

    def seen(self, piece: Piece) -> Piece:
        """The next piece, with calibrated scores if the calibrator sees more than a voxel."""
        if self._stream is None:
            return piece
        with torch_threads(self.voxels.threads):
            return piece._replace(mapped=self._stream.take(piece.window[0]))

    def scores(self, piece: Piece) -> tuple[Tensor, AffineMap | None, Tensor | None]:
        """The scores of a piece, the affine map still to be applied, and the argmax before.

        Affine maps are left to the pass over the voxels. The argmax before calibration is None if the scores are not
        calibrated yet.
        """
        if self.calibrator is None or self.score_map is not None:
            return piece.logits, self.score_map, None
        mapped = piece.mapped
        if mapped is None:
            with torch_threads(self.voxels.threads), torch.no_grad():
                mapped = self.calibrator(piece.logits)
        return mapped, None, piece.logits.argmax(1)

    def add_to(self, statistics: VoxelStatistics, piece: Piece) -> None:
        """Add the voxels of a piece, by halves where a GPU has too little memory."""
        try:
            self._add_to(statistics, piece)
            return
        except torch.OutOfMemoryError:
            halves = fewer_rows(piece.window[0])
        for rows in halves:
            half = piece.inside((rows, *piece.window[1:]))
            assert half is not None
            self.add_to(statistics, half)

    def _add_to(self, statistics: VoxelStatistics, piece: Piece) -> None:
        scores, score_map, uncalibrated = self.scores(piece)
        statistics.update(
            scores,
            piece.labels,
            ignore_index=None,  # The mask leaves out ignored voxels.
            mask=piece.valid,
            regions=piece.regions,
            distance=piece.distance,
            score_map=score_map,
            uncalibrated=uncalibrated,
        )

    def add_again(self, second: SecondPasses, piece: Piece) -> None:
        """Add the voxels of a piece to second passes, each in its region."""
        scores, score_map, _ = self.scores(piece)
        for one in second.values():
            inside = piece.valid if one.region == EVERYTHING else piece.valid & piece.regions[str(one.region)]
            one.update(scores, piece.labels, ignore_index=None, mask=inside, score_map=score_map)


def measure_case(
    plan: Plan, case: Case, calibrators: Mapping[str, AnyCalibrator], threads: int
) -> dict[str, tuple[list[Row], VoxelStatistics]]:
    """All rows and the statistics of a case, by calibrator. The scores are read once, or twice for exact bins."""
    voxels = CaseVoxels(plan, case, calibrators, threads)
    local = [replace(column, region=EVERYTHING) for column in plan.columns if column.region == LOCAL]
    # The whole case, and random patches (Ding et al.).
    windows = [voxels.window, *(local_patches(voxels.shape[1:], seed=voxels.seed) if local else ())]
    columns = [plan.columns_of("per-image"), *[local] * (len(windows) - 1)]
    statistics = {name: [plan.statistics(case.shape[1], threads) for _ in windows] for name in calibrators}
    surfaces = Surfaces(plan, voxels) if "surfaces" in plan.needs else None
    for name, view, piece in voxels.pieces():
        for own, part in zip(statistics[name], map(piece.inside, windows), strict=True):
            if part is not None:
                view.add_to(own, part)
        if surfaces is not None:
            surfaces.add(name, view, piece)
    second = {
        name: [second_passes(plan, *one) for one in zip(columns, own, strict=True)] for name, own in statistics.items()
    }
    if any(any(passes) for passes in second.values()):
        for name, view, piece in voxels.pieces():
            for passes, part in zip(second[name], map(piece.inside, windows), strict=True):
                if part is not None and passes:
                    view.add_again(passes, part)
    found = {}
    for name, (whole, *patches) in statistics.items():
        rows = reduced_rows(plan, case.id, whole, second[name][0])
        reduced = (_reduced(local, *one) for one in zip(patches, second[name][1:], strict=True))
        rows += _local_rows(case.id, local, list(reduced)) if local else []
        found[name] = [*rows, *(surfaces.rows(name) if surfaces else ())], whole
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


def _local_rows(case: str, columns: Sequence[Column], patches: Sequence[Sequence[Measure]]) -> list[Row]:
    """Mean and maximum over random patches (Ding et al.)."""
    rows = []
    for column, found in zip(columns, zip(*patches, strict=True), strict=True):
        mean = Measure.mean(found)
        largest = max((value for value in found if value == value), default=float("nan"))
        rows.append(Row(case, "local-mean", column.id, float(mean), mean.count))
        rows.append(Row(case, "local-max", column.id, float(largest), mean.count))
    return rows


class Surfaces:
    """The metrics of surfaces, which belong to a case as a whole: its labels and predictions are kept."""

    def __init__(self, plan: Plan, voxels: CaseVoxels) -> None:
        self.plan, self.case, self.shape = plan, voxels.case, voxels.shape
        self.labels, self.valid = (self._empty(dtype) for dtype in (torch.int16, torch.bool))
        self.predictions: dict[str, Tensor] = {}

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.shape, dtype=dtype, device=self.case.device)

    def add(self, name: str, view: CalibratedCase, piece: Piece) -> None:
        """Keep a piece as one calibrator has it."""
        index, (scores, score_map, _) = (slice(None), *piece.window), view.scores(piece)
        self.labels[index] = piece.labels.masked_fill(~piece.valid, 0)  # labels that do not count may be of any size
        self.valid[index] = piece.valid
        prediction = self.predictions.setdefault(name, self._empty(torch.int16))
        prediction[index] = (scores if score_map is None else score_map(scores)).argmax(1).short()

    def rows(self, name: str) -> list[Row]:
        """Means over the classes without the background."""
        classes, case, background = self.case.shape[1], self.case, self.plan.background
        options: dict[str, Any] = {"spacing": case.spacing, "ignore_index": None, "mask": self.valid}
        distances = surface_distances(self.predictions[name], self.labels, classes, **options)
        missed = int(foreground(distances.missed, background).sum())
        rows = []
        for column in self.plan.columns:
            spec = METRICS[column.metric]
            if "surfaces" in spec.needs:
                value = class_mean(spec.function(distances, **column.options), background)
                rows.append(Row(case.id, EVERYTHING, column.id, float(value), value.count, missed))
        return rows
