"""Confidence and accuracy against the distance to the nearest label boundary."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.errors import InputError
from segcal.evaluation.maps import checked_parts
from segcal.parallel.threads import torch_threads
from segcal.plots import style
from segcal.regions import BAND_EDGES
from segcal.regions.boundary import valid_voxels

#: The distance bands of ``ba-ece``, as plots name them.
BAND_NAMES = [f"{low:g}–{high:g}" if high < math.inf else f"≥{low:g}" for low, high in pairwise(BAND_EDGES)]


class BoundaryProfile:
    """Sums by distance to the boundary, which add up over chunks, cases and machines.

    Bin b holds the distances ``[b width, (b + 1) width)``. The last bin holds all distances from ``num_bins * width``
    on, and the voxels of images without a boundary, whose distance is infinite. Counts are int64, sums float64, all
    ``(num_bins + 1,)``.

    Args:
        num_bins: Number of bins before the last.
        width: Width of a bin, in voxels or in the unit of the spacing that distances were measured with.

    Attributes:
        count: Number of voxels.
        correct: Number of correctly predicted voxels.
        confidence: Sum of the confidences.
        distance: Sum of the finite distances.

    Examples:
        >>> from segcal.regions import boundary_distance
        >>> labels = torch.tensor([[0, 0, 0, 1]])
        >>> logits = torch.tensor([[[2.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0]]])
        >>> profile = BoundaryProfile(2).update(logits, labels, boundary_distance(labels))
        >>> profile.count, profile.accuracy
        (array([2, 1, 1]), array([1., 1., 1.]))
    """

    def __init__(self, num_bins: int = 24, width: float = 1.0) -> None:
        if num_bins < 1 or not width > 0:
            raise InputError(f"num_bins is {num_bins} and width is {width}", expected="at least 1, and positive")
        self.width = float(width)
        self.count, self.correct = np.zeros((2, num_bins + 1), np.int64)
        self.confidence, self.distance = np.zeros((2, num_bins + 1), np.float64)

    @torch_threads(1)
    def update(
        self, logits: Tensor, labels: Tensor, distance: Tensor, *, ignore_index: int = 255, mask: Tensor | None = None
    ) -> BoundaryProfile:
        """Add voxels. Nothing changes if this raises.

        Args:
            logits: Logits or log-probabilities ``(N, C, *spatial)``.
            labels: Integers ``(N, *spatial)``.
            distance: Distance to the boundary ``(N, *spatial)``, from ``segcal.regions.boundary_distance``.
            ignore_index: Voxels with this label are left out.
            mask: ``(N, *spatial)`` bool, True where a voxel counts.
        """
        if distance.shape != labels.shape:
            raise InputError(
                f"distance has shape {tuple(distance.shape)}", expected=f"{tuple(labels.shape)} as the labels have"
            )
        size = len(self.count)
        added = BoundaryProfile(size - 1, self.width)
        for part in checked_parts(logits, labels, valid_voxels(labels, ignore_index=ignore_index, mask=mask)):
            scores = part.columns
            right = scores.max(0).indices == part.labels[part.valid]
            confidence = scores.log_softmax(0).amax(0).exp()
            away = part.of(distance).to(confidence)[part.valid]
            if bool((away < 0).any() | away.isnan().any()):
                raise InputError("distance is negative or NaN", expected="distances of boundary_distance")
            # Distances are float32: 0.7 must not be rounded down, out of the bin that begins at 0.7.
            index = (away / self.width + 1e-6).clamp(max=size - 1).long()
            index, confidence, right, away = (tensor.cpu() for tensor in (index, confidence, right, away))
            added.count += torch.bincount(index, minlength=size).numpy()
            added.correct += torch.bincount(index[right], minlength=size).numpy()
            added.confidence += torch.bincount(index, weights=confidence, minlength=size).numpy()
            added.distance += torch.bincount(index, weights=away.nan_to_num(posinf=0.0), minlength=size).numpy()
        return self.merge(added)

    def merge(self, other: BoundaryProfile) -> BoundaryProfile:
        """Add the sums of ``other``, which must have the same bins."""
        if (len(self.count), self.width) != (len(other.count), other.width):
            raise InputError(
                f"{len(self.count) - 1} bins of {self.width:g} and {len(other.count) - 1} of {other.width:g}",
                expected="profiles made with the same arguments",
            )
        for name in ("count", "correct", "confidence", "distance"):
            getattr(self, name).__iadd__(getattr(other, name))
        return self

    def __repr__(self) -> str:
        return f"BoundaryProfile(voxels={self.count.sum()})"

    @property
    def edges(self) -> NDArray[np.float64]:
        """Lower edges of the bins ``(num_bins + 1,)``."""
        return self.width * np.arange(len(self.count), dtype=np.float64)

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """The accuracy of each bin, NaN for empty bins."""
        return style.ratio(self.correct, self.count)

    @property
    def mean_confidence(self) -> NDArray[np.float64]:
        """The mean confidence of each bin, NaN for empty bins."""
        return style.ratio(self.confidence, self.count)

    def band_gap(self, low: float, high: float) -> float:
        """Confidence - accuracy of the voxels at distances ``[low, high)``, both bin edges; NaN without voxels."""
        middles = self.edges + self.width / 2
        where = (middles > low) & (middles < high)
        count = self.count[where].sum()
        return float((self.confidence[where].sum() - self.correct[where].sum()) / count) if count else math.nan


def boundary_curve(
    profile: BoundaryProfile, *, unit: str = "voxels", title: str | None = None, figure: style.FigureBase | None = None
) -> style.Figure:
    """Confidence and accuracy against the distance to the boundary, the gap between them, and the share of voxels.

    The numbers at the top are the gaps (confidence - accuracy) in the bands of ``ba-ece``, which are shaded. A band has
    no number if its edges are not edges of the profile's bins. The last mark, apart from the lines, stands for all
    larger distances.

    Args:
        profile: The sums to plot.
        unit: The unit of the distances, for the axis.
        title: Title of the figure.
        figure: A figure or subfigure to draw on; a new one by default.

    Examples:
        >>> from segcal.regions import boundary_distance
        >>> from segcal.synthetic import demo_scenes
        >>> profile = BoundaryProfile()
        >>> for case in demo_scenes()[0][:2]:
        ...     profile.update(case.logits, case.labels, boundary_distance(case.labels))
        BoundaryProfile(voxels=20070)
        BoundaryProfile(voxels=40140)
        >>> figure = boundary_curve(profile)
    """
    canvas = style.canvas(figure, 5.6, 4.2)
    top, bottom = canvas.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    edges, width = profile.edges, profile.width
    _mark_bands(top, bottom, profile)
    total = int(profile.count.sum())
    if total:
        _draw_curves(top, profile)
        bottom.bar(
            edges + width / 2, profile.count / total, width=0.92 * width, color=style.MUTED, linewidth=0, label="_share"
        )
    else:
        style.message(top, "no valid voxels")
    style.tidy(top, ylabel="confidence and accuracy")
    style.tidy(bottom, xlabel=f"distance to the boundary ({unit})", ylabel="share")
    ticks = edges[:-1][:: max(1, round(len(edges) / 8))]
    ticks = ticks[ticks <= edges[-1] - 2 * width]
    bottom.set(xlim=(-0.4 * width, edges[-1] + width), xticks=[*ticks, edges[-1] + width / 2])
    bottom.set_xticklabels([*(f"{tick:g}" for tick in ticks), f"≥{edges[-1]:g}"])
    bottom.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    return style.titled(canvas, title)


def _draw_curves(ax: style.Axes, profile: BoundaryProfile) -> None:
    """Lines through the mean distance of each bin. The last bin has no mean and is drawn apart."""
    x = style.ratio(profile.distance, profile.count)
    x[-1] = profile.edges[-1] + profile.width / 2
    confidence, accuracy = profile.mean_confidence, profile.accuracy
    for wrong, colour in ((confidence > accuracy, style.OVER), (confidence < accuracy, style.UNDER)):
        ax.fill_between(
            x[:-1], accuracy[:-1], confidence[:-1], where=wrong[:-1], interpolate=True, color=colour, alpha=0.4,
            linewidth=0,
        )  # fmt: skip
        ax.vlines(
            x[-1:][wrong[-1:]], accuracy[-1:][wrong[-1:]], confidence[-1:][wrong[-1:]], colour, alpha=0.4, linewidth=4
        )
    for values, mark, face, name in (
        (confidence, "s", "white", "confidence"),
        (accuracy, "o", style.INK, "accuracy"),
    ):
        ax.plot(x[:-1], values[:-1], color=style.INK, linewidth=1)
        ax.plot(
            x, values, mark, color=style.INK, markersize=3.5, markerfacecolor=face, markeredgewidth=0.9, clip_on=False,
            label=name,
        )  # fmt: skip
    lowest = float(np.nanmin([confidence, accuracy]))
    ax.set_ylim(min(0.9, math.floor(10 * lowest - 0.5) / 10), 1.0)
    ax.legend(loc="lower right", **style.LEGEND)


def _mark_bands(top: style.Axes, bottom: style.Axes, profile: BoundaryProfile) -> None:
    """Shade every second band and write the gap of each above it."""
    look: dict[str, Any] = {"va": "bottom", "fontsize": style.SMALL, "transform": top.get_xaxis_transform()}
    top.text(-0.6 * profile.width, 1.01, "band\ngap", ha="right", color=style.INK, **look)
    end = profile.edges[-1] + profile.width
    for index, (name, (low, high)) in enumerate(zip(BAND_NAMES, pairwise(BAND_EDGES), strict=True)):
        if low >= end:
            break
        for ax in (top, bottom) if index % 2 == 0 else ():
            ax.axvspan(low, min(high, end), color="#F3F3F3", linewidth=0, zorder=-2)
        is_edge = [edge == math.inf or np.isclose(profile.edges, edge).any() for edge in (low, high)]
        gap = profile.band_gap(low, high) if all(is_edge) else math.nan
        colour = style.OVER if gap >= 0.0005 else style.UNDER if gap <= -0.0005 else style.INK
        number = "" if math.isnan(gap) else f"{round(gap, 3) + 0.0:+.3f}".replace("-", "−")
        top.text((low + min(high, end)) / 2, 1.01, f"{name}\n{number}", ha="center", color=colour, **look)
