"""Metrics as torchmetrics modules, for code that logs with torchmetrics or Lightning. Needs the extra ``torchmetrics``.

A module's state is a few tensors of sums, so its size does not depend on how many voxels it has seen, and adding two
states is exact: over batches, over processes (one all-gather per tensor), with ``merge_state``. Values are pooled over
all voxels since the last reset, 0-dim, float64, and NaN where there was nothing to average.

Counts are int64 and sums float64 on purpose (float32 cannot count beyond 2^24). They stay so under ``half()``,
``to(dtype)`` and ``set_dtype``, which only ever move them; Apple's MPS has no float64, so there they stay on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from segcal.checks import checked_labels
from segcal.errors import InputError, MissingExtraError, check_name, did_you_mean
from segcal.metrics import METRICS, MetricSpec, options_of, reliability
from segcal.regions.boundary import valid_voxels
from segcal.scores import KINDS, canonical_logits
from segcal.statistics import Layout, VoxelStatistics
from segcal.types import Kind

try:
    from torchmetrics import Metric  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    raise MissingExtraError("torchmetrics", "torchmetrics", "segcal.metrics.modules") from None

__all__ = ["Calibration", "MulticlassCalibrationError"]

Norm = Literal["l1", "l2", "max"]

# The only atom without regions, with energies about 0, so that states can be added up. Squares about 0 instead of about
# the data lose 2^-53 of F^2, less than the rounding of float32 logits.
_LAYOUT = Layout((0,), 0.0)


class _Sums(Metric):  # type: ignore[misc, unused-ignore]
    """A metric whose states are all sums, of a dtype that never changes."""

    is_differentiable = False
    full_state_update = False

    def _add_states(self, zeros: Mapping[str, Tensor], kind: str, ignore_index: int | None) -> None:
        for name, tensor in zeros.items():
            self.add_state(name, tensor, dist_reduce_fx="sum")
        # A ``MetricCollection`` updates one of two metrics whose states have the same names and, after one batch, the
        # same values. Those that read their input in different ways have different names, so that it never does.
        reading = f"{kind}_without_{ignore_index}".replace("-", "minus_")
        self.add_state(reading, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def _accumulate(self, batch: Mapping[str, Tensor]) -> None:
        for name, added in batch.items():
            state = getattr(self, name)
            setattr(self, name, state + added.to(state.device))

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        def move(tensor: Tensor) -> Tensor:
            device = fn(torch.empty(0, device=tensor.device)).device
            return tensor if device.type == "mps" else tensor.to(device)

        moved: nn.Module = super()._apply(move, exclude_state)
        return moved


class MulticlassCalibrationError(_Sums):
    """Top-label calibration error, in place of ``torchmetrics.classification.MulticlassCalibrationError``.

    With ``gap_b = |acc_b - conf_b|`` in bin b of equal width and n voxels in all (Naeini 2015, Guo 2017, Kumar 2019):
    ``l1`` is ``sum_b |B_b| / n gap_b``, ``l2`` is ``sqrt(sum_b |B_b| / n gap_b^2)`` and ``max`` is ``max_b gap_b``. The
    state is three tensors ``(n_bins,)`` and a zero.

    Values are those of torchmetrics, with these differences:

    - Bins are ``(lo, hi]``. Torchmetrics takes ``[lo, hi)`` and puts a confidence of exactly 1 into a bin of its own.
    - The float32 counts of torchmetrics stop growing at 2^24 voxels in a bin; these do not.
    - Softmax and sums are taken in float32 or better also for half precision, and the value is float64.
    - Where all voxels are ignored, ``l2`` and ``max`` are NaN as ``l1`` is, not 0.
    - Input that has no meaning is an ``segcal.errors.InputError`` (a ValueError): NaN, labels outside the
      classes, and values within [0, 1] that do not sum to 1, which torchmetrics would take for probabilities.

    Args:
        num_classes: C, at least 2.
        n_bins: Number of equal-width bins; ``num_bins`` elsewhere in segcal, but this is torchmetrics' name.
        norm: ``l1`` (ECE), ``l2`` (root mean square) or ``max`` (MCE).
        ignore_index: Voxels with this label do not count.
        validate_args: For drop-in use only; the input is always checked, at no cost.
        kind: ``logits`` or ``probs`` says what ``preds`` are. ``auto`` decides batch by batch as torchmetrics does:
            probabilities if no counting voxel has a value outside [0, 1]. That can fail (a value of 1.0000001 is
            enough), so declare the kind if you know it.
        kwargs: Those of ``torchmetrics.Metric``.

    Examples:
        >>> metric = MulticlassCalibrationError(num_classes=3, n_bins=3)
        >>> preds = torch.tensor([[0.25, 0.20, 0.55], [0.55, 0.05, 0.40], [0.10, 0.30, 0.60], [0.90, 0.05, 0.05]])
        >>> metric(preds, torch.tensor([0, 1, 2, 0]))
        tensor(0.2000, dtype=torch.float64)
    """

    higher_is_better = False

    count: Tensor
    confidence: Tensor
    correct: Tensor

    def __init__(
        self,
        num_classes: int,
        n_bins: int = 15,
        norm: Norm = "l1",
        ignore_index: int | None = None,
        validate_args: bool = True,
        *,
        kind: Kind | Literal["auto"] = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_name("norm", norm, get_args(Norm))
        check_name("kind", kind, ("auto", *KINDS))
        self.num_classes, self.n_bins, self.norm = num_classes, n_bins, norm
        self.ignore_index, self.validate_args, self.kind = ignore_index, validate_args, kind
        self._nothing = VoxelStatistics(num_classes, (n_bins,), classwise=False)
        self._add_states(_bins(self._nothing, n_bins), kind, ignore_index)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """``preds (N, C, ...)``, logits or probabilities, integers ``target (N, ...)`` or ``(N, 1, ...)``."""
        target = checked_labels(preds, target)
        logits = _logits(preds, target, self.kind, self.ignore_index)
        stats = self._nothing.empty_like().update(logits, target, ignore_index=self.ignore_index)
        self._accumulate(_bins(stats, self.n_bins))

    def compute(self) -> Tensor:
        """The calibration error of all voxels since the last reset."""
        total = self.count.sum()
        excess = (self.confidence - self.correct).abs()
        gap = excess / self.count.clamp(min=1)
        if self.norm == "l1":
            return excess.sum() / total
        if self.norm == "l2":
            return ((excess * gap).sum() / total).sqrt()
        return torch.where(total > 0, gap.max(), math.nan)


class Calibration(_Sums):
    """Any metrics of ``segcal.METRICS`` from one pass over each batch, as a dict of 0-dim tensors by their ids.

    They are the reductions of ``segcal.statistics.VoxelStatistics`` that the metrics document. In a
    ``MetricCollection`` the ids appear beside the other metrics. With Lightning, call ``update`` in
    ``validation_step``, and ``self.log_dict(calibration.compute())`` and ``reset`` in ``on_validation_epoch_end``.

    Args:
        num_classes: C, at least 2.
        metrics: Ids. Those that need distances or surfaces are not for modules; see ``segcal.evaluate``.
        num_bins: Equal-width bins of the metrics that have bins.
        ignore_index: Voxels with this label do not count.
        kind: What ``preds`` are, ``logits`` (or log-probabilities) or ``probs``.
        kwargs: Those of ``torchmetrics.Metric``.

    Examples:
        >>> calibration = Calibration(num_classes=2, metrics=("brier", "ece"))
        >>> calibration.update(torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]]), torch.tensor([0, 0, 255]))
        >>> {name: round(float(value), 4) for name, value in calibration.compute().items()}
        {'brier': 0.79, 'ece': 0.3808}
    """

    higher_is_better = None

    confusion: Tensor

    def __init__(
        self,
        num_classes: int,
        metrics: Sequence[str] = ("nll", "brier", "ece"),
        num_bins: int = 15,
        ignore_index: int | None = 255,
        *,
        kind: Kind = "logits",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_name("kind", kind, KINDS)
        specs = [_spec(id) for id in metrics]
        self.num_classes, self.metrics, self.num_bins = num_classes, tuple(metrics), num_bins
        self.ignore_index, self.kind = ignore_index, kind
        classwise = any("classwise" in spec.needs for spec in specs)
        self._nothing = VoxelStatistics(num_classes, (num_bins,), classwise=classwise).align(_LAYOUT)
        self._add_states(self._nothing.tensors(), kind, ignore_index)

    def update(self, preds: Tensor, target: Tensor, uncalibrated: Tensor | None = None) -> None:
        """Add voxels: ``preds (N, C, ...)``, ``target (N, ...)`` or ``(N, 1, ...)`` integers.

        ``uncalibrated (N, ...)``, the argmax before calibration, is what ``flip`` compares with.
        """
        target = checked_labels(preds, target)
        logits = _logits(preds, target, self.kind, self.ignore_index)
        stats = self._nothing.empty_like()
        stats.update(logits, target, ignore_index=self.ignore_index, uncalibrated=uncalibrated)
        self._accumulate(stats.align(_LAYOUT).tensors())

    def compute(self) -> dict[str, Tensor]:
        """All metrics of all voxels since the last reset."""
        stats = self._nothing.empty_like().align(_LAYOUT)
        for name, tensor in stats.tensors().items():
            tensor.copy_(getattr(self, name))
        values = {id: _spec(id).function(stats, **self._options(_spec(id))) for id in self.metrics}
        device = self.confusion.device
        return {id: torch.tensor(float(value), dtype=torch.float64, device=device) for id, value in values.items()}

    def _options(self, spec: MetricSpec) -> dict[str, int]:
        return {"num_bins": self.num_bins} if "num_bins" in options_of(spec.function) else {}


def _spec(id: str) -> MetricSpec:
    usable = [spec.id for spec in METRICS.values() if set(spec.needs) <= {"classwise", "uncalibrated"}]
    if id not in usable:
        needs = f", which needs {' and '.join(METRICS[id].needs)}" if id in METRICS else ""
        raise InputError(f"metric {id!r}{needs}", expected=f"some of {', '.join(usable)}", fix=did_you_mean(id, usable))
    return METRICS[id]


def _bins(stats: VoxelStatistics, num_bins: int) -> dict[str, Tensor]:
    bins = reliability(stats, num_bins)
    return {name: torch.from_numpy(getattr(bins, name)) for name in ("count", "confidence", "correct")}


def _logits(preds: Tensor, target: Tensor, kind: Kind | Literal["auto"], ignore_index: int | None) -> Tensor:
    """``preds`` as logits: as they are, or the logarithm of probabilities, where an ignored voxel may hold anything."""
    if kind == "logits":
        return preds
    ignored = ~valid_voxels(target, ignore_index=ignore_index)
    if kind == "auto" and not _look_like_probabilities(preds, ignored):
        return preds
    try:
        return canonical_logits(preds.masked_fill(ignored.unsqueeze(1), 1 / preds.shape[1]), "probs")
    except InputError as error:
        if kind == "auto":
            error.fix = "say kind='logits' if these are logits, and apply the softmax if they are not"
        raise


def _look_like_probabilities(preds: Tensor, ignored: Tensor) -> bool:
    """Whether no counting voxel has a value outside [0, 1]."""
    scores = preds.movedim(1, -1)

    def inside(part: tuple[slice, ...]) -> bool:
        here = scores[part]
        return bool((((here >= 0) & (here <= 1)).all(-1) | ignored[part]).all())

    # A few voxels usually show that these are logits, which then need not be read twice.
    middle = tuple(slice(size // 2, size // 2 + 8) for size in ignored.shape)
    return inside(middle) and inside(())
