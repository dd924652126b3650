"""The distribution of the logits of each class (Murugesan et al., NACL Fig. 2, CRaC Fig. 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.errors import InputError
from segcal.evaluation.maps import checked_parts
from segcal.parallel.threads import torch_threads
from segcal.plots import style
from segcal.regions.boundary import valid_voxels

# The histograms reach from -_LIMIT to _LIMIT, in bins of _WIDTH.
_LIMIT, _WIDTH = 64.0, 0.25
_BINS = int(2 * _LIMIT / _WIDTH)
_EDGES: NDArray[np.float64] = np.linspace(-_LIMIT, _LIMIT, _BINS + 1)


class LogitHistogram:
    """Histograms of the logits of every class, which add up over chunks, cases and machines.

    Bins are 0.25 wide, from -64 to 64; values beyond fall into the first or last bin. Counts are int64, sums float64.

    Args:
        num_classes: C, at least 2.

    Attributes:
        own: ``(C, bins)``: the logit of class k at voxels labelled k.
        other: ``(C, bins)``: the logit of class k at voxels with another label.
        margin: ``(C, bins)``: ``z_k - max of the other logits`` at voxels labelled k; negative if the prediction is
            wrong.
        magnitude: ``(C, C)``: sum of ``|z_k|`` over the voxels of each label (rows).

    Examples:
        >>> histogram = LogitHistogram(2).update(torch.tensor([[3.0, 1.0], [0.0, 2.0]]), torch.tensor([0, 0]))
        >>> histogram.mean_magnitude[0], histogram.own.sum(1)
        (array([1.5, 1.5]), array([2, 0]))
        >>> edges = histogram.edges
        >>> edges[:-1][histogram.margin[0] > 0]
        array([-2.,  2.])
    """

    def __init__(self, num_classes: int) -> None:
        if num_classes < 2:
            raise InputError(f"num_classes is {num_classes}", expected="at least 2")
        self.own, self.other, self.margin = np.zeros((3, num_classes, _BINS), np.int64)
        self.magnitude = np.zeros((num_classes, num_classes), np.float64)

    @torch_threads(1)
    def update(
        self, logits: Tensor, labels: Tensor, *, ignore_index: int = 255, mask: Tensor | None = None
    ) -> LogitHistogram:
        """Add voxels: ``logits (N, C, *spatial)``, ``labels`` and ``mask (N, *spatial)``. An error adds nothing."""
        classes = len(self.own)
        if logits.ndim < 2 or logits.shape[1] != classes:
            raise InputError(f"logits have shape {tuple(logits.shape)}", expected=f"(N, {classes}, *spatial)")
        added = LogitHistogram(classes)
        for part in checked_parts(logits, labels, valid_voxels(labels, ignore_index=ignore_index, mask=mask)):
            z, y = part.columns.cpu(), part.labels[part.valid].cpu()
            own = z.gather(0, y[None])[0]
            rival = z.scatter(0, y[None], -torch.inf).amax(0)
            every = _counts(torch.arange(classes)[:, None].expand_as(z), z, classes)
            mine = _counts(y, own, classes)
            added.own += mine
            added.other += every - mine
            added.margin += _counts(y, own - rival, classes)
            for k in range(classes):
                added.magnitude[:, k] += torch.bincount(y, weights=z[k].abs(), minlength=classes).numpy()
        return self.merge(added)

    def merge(self, other: LogitHistogram) -> LogitHistogram:
        """Add the counts of ``other``, which must have as many classes."""
        if len(self.own) != len(other.own):
            raise InputError(f"histograms of {len(self.own)} and {len(other.own)} classes", expected="the same")
        for name in ("own", "other", "margin", "magnitude"):
            getattr(self, name).__iadd__(getattr(other, name))
        return self

    def __repr__(self) -> str:
        return f"LogitHistogram(num_classes={len(self.own)}, voxels={self.own.sum()})"

    @property
    def edges(self) -> NDArray[np.float64]:
        """Bin edges ``(bins + 1,)``."""
        return np.array(_EDGES)

    @property
    def mean_magnitude(self) -> NDArray[np.float64]:
        """``(C, C)``: mean ``|z_k|`` (columns) over the voxels of each label (rows); NaN for absent labels."""
        return style.ratio(self.magnitude, self.own.sum(1, keepdims=True))


def _counts(group: Tensor, values: Tensor, groups: int) -> NDArray[np.int64]:
    """``(groups, bins)``: the number of values of each group in each bin."""
    bins = ((values.clamp(-_LIMIT, _LIMIT) + _LIMIT) / _WIDTH).long().clamp(max=_BINS - 1)
    counts: NDArray[np.int64] = torch.bincount((group * _BINS + bins).flatten(), minlength=groups * _BINS).numpy()
    return counts.reshape(groups, _BINS)


def logit_magnitudes(
    histogram: LogitHistogram,
    *,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
    figure: style.FigureBase | None = None,
) -> style.Figure:
    """For each class, the logit where it is the label and where it is not, the margin over the best other, and means.

    A constant added to all logits of a voxel changes the logits but not the margins or the softmax. With more than 20
    classes, the 20 most frequent are shown.

    Args:
        histogram: The histograms to plot.
        class_names: One for each class.
        title: Title of the figure.
        figure: A figure or subfigure to draw on; a new one by default.

    Examples:
        >>> from segcal.synthetic import demo_scenes
        >>> case = demo_scenes()[0][0]
        >>> figure = logit_magnitudes(LogitHistogram(6).update(case.logits, case.labels))
    """
    count = histogram.own.sum(1)
    names = style.names_of(class_names, len(count))
    shown = np.sort(np.argsort(-count, kind="stable")[: style.MOST_CLASSES])
    canvas = style.canvas(figure, 8.6, 1.6 + 0.32 * len(shown))
    left, middle, right = canvas.subplots(1, 3, sharey=True, width_ratios=(1, 1, 0.95))
    _draw_ridges(left, histogram.other[shown], style.FAINT)
    _draw_ridges(left, histogram.own[shown], style.PLAIN)
    _draw_ridges(middle, histogram.margin[shown], style.PLAIN, below_zero=style.WRONG)
    _fit(left, histogram.own[shown], histogram.other[shown])
    _fit(middle, histogram.margin[shown])
    left.set(yticks=range(len(shown)), yticklabels=[names[k] for k in shown], ylim=(len(shown) - 0.4, -0.6))
    style.tidy(left, title="logit of the class")
    style.tidy(middle, title="its margin over the best other")
    _draw_matrix(right, histogram.mean_magnitude[np.ix_(shown, shown)], [names[k] for k in shown])
    style.tidy(right, title="mean |logit| by label (rows)")
    for ax in (left, middle, right):
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0)
    shades = {"at voxels of the class": style.PLAIN, "at other voxels": style.FAINT, "predicted wrong": style.WRONG}
    style.key(canvas, {name: (colour, 0.75) for name, colour in shades.items()}, loc="outside lower left")
    if not count.any():
        style.message(left, "no valid voxels")
    part_of = f"the {len(shown)} most frequent of {len(count)} classes"
    return style.titled(canvas, title, part_of if len(shown) < len(count) else None)


def _draw_ridges(ax: style.Axes, counts: NDArray[np.int64], colour: str, *, below_zero: str | None = None) -> None:
    """One row per class, with each distribution scaled to the height of the row."""
    for row, count in enumerate(counts):
        base = row + 0.4
        ax.axhline(base, color=style.FAINT, linewidth=0.6, zorder=1)
        if not count.any():
            continue
        height = base - 0.85 * count / count.max()
        parts = [(slice(None), colour)]
        if below_zero is not None:
            parts = [(slice(0, _BINS // 2), below_zero), (slice(_BINS // 2, None), colour)]
        for bins, shade in parts:
            x = np.append(_EDGES[:-1][bins], _EDGES[1:][bins][-1])
            ax.stairs(height[bins], x, baseline=base, fill=True, color=shade, alpha=0.75, linewidth=0, zorder=2)


def _fit(ax: style.Axes, *groups: NDArray[np.int64]) -> None:
    """Limit the x axis to the central 99.8% of every distribution."""
    low, high = [], []
    for counts in (row for group in groups for row in group if row.any()):
        cumulative = np.cumsum(counts) / counts.sum()
        low.append(_EDGES[np.searchsorted(cumulative, 0.001)])
        high.append(_EDGES[np.searchsorted(cumulative, 0.999) + 1])
    if low:
        ax.set_xlim(min(low) - 0.5, max(high) + 0.5)


def _draw_matrix(ax: style.Axes, means: NDArray[np.float64], names: Sequence[str]) -> None:
    """Mean magnitudes as shades, with numbers if they fit and a colour scale otherwise."""
    finite = means[np.isfinite(means)]
    top = float(finite.max()) if finite.size else 1.0
    shades = np.ma.masked_invalid(means)
    image = ax.imshow(shades, cmap="Purples", vmin=0, vmax=1.3 * top, aspect="auto")
    ax.set_xticks(range(len(names)), names, rotation=90)
    if len(names) > 12:
        style.scale(ax, image)
        return
    for (row, column), value in np.ndenumerate(means):
        text = "" if np.isnan(value) else f"{value:.1f}"
        colour = "white" if value > 0.8 * top else style.INK
        ax.text(column, row, text, ha="center", va="center", fontsize=style.SMALL - 1, color=colour)
