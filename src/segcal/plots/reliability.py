"""Reliability diagrams: accuracy against confidence, for everything at once and class by class.

A bar spans the gap between the mean confidence and the accuracy of a bin: vermillion if the network is overconfident,
blue if it is underconfident. The diagonal is perfect calibration. Bins with fewer than 100 voxels are pale, with open
marks and no line: even for independent voxels, their accuracy would be uncertain by about 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from segcal.errors import InputError, check_name
from segcal.metrics.reliability import Reliability
from segcal.plots import style

Band = tuple[NDArray[np.float64], NDArray[np.float64]]
Of = Literal["predicted", "probability"]

# Bins with fewer voxels are drawn pale.
_ENOUGH_VOXELS = 100

# Bootstrap replicates computed at once, which bounds the memory by this many numbers per case.
_REPLICATES_AT_ONCE = 64


def reliability_diagram(
    parts: Reliability | Sequence[Reliability],
    *,
    before: Reliability | Sequence[Reliability] | None = None,
    title: str | None = None,
    replicates: int = 2000,
    seed: int = 0,
    figure: style.FigureBase | None = None,
) -> style.Figure:
    """Accuracy against confidence with the gap of every bin, and below it how many voxels each bin holds.

    Args:
        parts: Reliability of the whole set, or one per case. With two cases or more, a band shows the 95% bootstrap
            interval over cases (``bootstrap_band``).
        before: The same before calibration, drawn as a dashed line.
        title: Title of the figure.
        replicates: Bootstrap replicates.
        seed: Seed of the bootstrap.
        figure: A figure or subfigure to draw on; a new one by default.

    Examples:
        >>> from segcal.metrics.reliability import reliability
        >>> from segcal.statistics import VoxelStatistics
        >>> from segcal.synthetic import demo_scenes
        >>> cases = demo_scenes()[0][:3]
        >>> stats = [VoxelStatistics(6).update(case.logits, case.labels) for case in cases]
        >>> figure = reliability_diagram([reliability(part) for part in stats], title="demo")
    """
    cases = _cases(parts, "parts")
    pooled = pool(cases)
    earlier = None if before is None else pool(_cases(before, "before"))
    canvas = style.canvas(figure, 4.2, 5.2)
    top, bottom = canvas.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    draw_diagram(top, pooled)
    if len(cases) > 1 and pooled.count.any():
        low, high = (_broken(edge, pooled) for edge in bootstrap_band(cases, replicates=replicates, seed=seed))
        look: dict[str, Any] = {"color": style.INK, "alpha": 0.18, "linewidth": 0, "zorder": 3}
        top.fill_between(pooled.mean_confidence, low, high, label=f"95% interval over {len(cases)} cases", **look)
    if earlier is not None:
        look = {"color": style.MUTED, "linewidth": 1.2, "zorder": 3.5}
        label = f"before: ECE {style.number(ece(earlier), '.4f')}"
        top.plot(earlier.mean_confidence, _broken(earlier.accuracy, earlier), "--", label=label, **look)
    top.text(0.03, 0.97, "underconfident", color=style.UNDER, fontsize=style.SMALL, ha="left", va="top")
    top.text(0.97, 0.03, "overconfident", color=style.OVER, fontsize=style.SMALL, ha="right", va="bottom")
    if pooled.count.sum():
        top.legend(loc="upper left", bbox_to_anchor=(0.0, 0.94), **style.LEGEND)
    style.tidy(top, title=_summary(pooled), ylabel="accuracy")
    _draw_counts(bottom, pooled)
    style.tidy(bottom, xlabel="confidence", ylabel="share of voxels")
    return style.titled(canvas, title)


def classwise_diagram(
    classes: Sequence[Reliability],
    *,
    of: Of = "predicted",
    class_names: Sequence[str] | None = None,
    title: str | None = None,
    figure: style.FigureBase | None = None,
) -> style.Figure:
    """One small reliability diagram per class, with the share of voxels and the calibration error of each.

    With more than 20 classes, the 20 that contribute most to ``sce`` (``of="predicted"``) or ``cece`` are shown, worst
    first. Grey steps along the bottom are the shares of voxels, on a logarithmic scale over four decades.

    Args:
        classes: One per class, all made with ``predicted=k`` or all with ``probability_of=k``.
        of: Which of the two: ``predicted`` or ``probability``.
        class_names: One for each class.
        title: Title of the figure.
        figure: A figure or subfigure to draw on; a new one by default.

    Examples:
        >>> from segcal.metrics.reliability import reliability
        >>> from segcal.statistics import VoxelStatistics
        >>> from segcal.synthetic import demo_scenes
        >>> case = demo_scenes()[0][0]
        >>> stats = VoxelStatistics(6).update(case.logits, case.labels)
        >>> figure = classwise_diagram([reliability(stats, predicted=k) for k in range(6)])
        >>> len(figure.axes)
        6
    """
    check_name("of", of, get_args(Of))
    cases = _cases(classes, "classes")
    names = style.names_of(class_names, len(cases))
    shown = _worst(cases)
    columns = min((min(width, len(shown)) for width in (5, 4, 3)), key=lambda width: -len(shown) % width)
    rows = math.ceil(len(shown) / columns)
    canvas = style.canvas(figure, max(4.0, 1.75 * columns), 2.05 * rows + 0.5)
    grid = canvas.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    key = {"overconfident": (style.OVER, 0.45), "underconfident": (style.UNDER, 0.45)}
    style.key(canvas, {**key, "voxels (log scale)": (style.FAINT, 0.7)}, loc="outside lower right")
    predicted = of == "predicted"
    x, y = ("confidence", "accuracy") if predicted else ("probability", "share with label")
    total = sum(int(part.count.sum()) for part in cases)
    for place, (ax, index) in enumerate(zip(grid.flat, shown, strict=False)):
        part = cases[index]
        draw_diagram(ax, part, small=True)
        _draw_silhouette(ax, part)
        count = int(part.count.sum())
        share = style.share(count, total) if predicted else style.share(int(part.correct.sum()), count)
        lowest, first = place >= len(shown) - columns, place % columns == 0
        heading = f"{names[index]}\n{share}, ECE {style.number(ece(part))}"
        style.tidy(ax, title=heading, xlabel=x * lowest, ylabel=y * first, label_size=style.SMALL)
        if lowest:  # There may be no axes below to carry the labels.
            ax.tick_params(labelbottom=True)
    for ax in grid.flat[len(shown) :]:
        ax.remove()
    part_of = f"{len(shown)} of {len(cases)} classes, most miscalibrated first"
    return style.titled(canvas, title, part_of if len(shown) < len(cases) else None)


def bootstrap_band(parts: Sequence[Reliability], *, replicates: int = 2000, seed: int = 0) -> Band:
    """The 95% percentile bootstrap interval of every bin's accuracy over cases: ``low, high (bins,)``.

    Cases, not voxels, are resampled, because the voxels of a case are not independent. A bin that is empty in all cases
    is NaN; replicates in which a bin is empty are left out for that bin. Memory is O(cases x bins + replicates x bins).

    Examples:
        >>> case = Reliability(np.array([0, 4]), np.array([0.0, 3.0]), np.array([0, 2]))
        >>> bootstrap_band([case, case])
        (array([nan, 0.5]), array([nan, 0.5]))
    """
    if replicates < 1:
        raise InputError(f"replicates is {replicates}", expected="at least 1")
    cases = _cases(parts, "parts")
    # Counts stay below 2^53, so float64 products are exact and run in BLAS.
    count = np.stack([case.count for case in cases]).astype(np.float64)
    correct = np.stack([case.correct for case in cases]).astype(np.float64)
    random = np.random.default_rng(seed)
    even = np.full(len(cases), 1 / len(cases))
    accuracy = np.full((replicates, count.shape[1]), np.nan)
    for start in range(0, replicates, _REPLICATES_AT_ONCE):
        rows = accuracy[start : start + _REPLICATES_AT_ONCE]
        weights = random.multinomial(len(cases), even, size=len(rows)).astype(np.float64)
        drawn = weights @ count
        np.divide(weights @ correct, drawn, out=rows, where=drawn > 0)
    low, high = np.full((2, count.shape[1]), np.nan)
    known = ~np.isnan(accuracy).all(0)
    if known.any():
        low[known], high[known] = np.nanquantile(accuracy[:, known], (0.025, 0.975), axis=0)
    return low, high


def from_bins(bins: Mapping[str, Sequence[float]]) -> Reliability:
    """The bins of a diagram, from the lists that results hold."""
    count, correct = (np.array(bins[name], np.int64) for name in ("count", "correct"))
    return Reliability(count, np.array(bins["confidence"], np.float64), correct)


def pool(parts: Sequence[Reliability]) -> Reliability:
    """The reliability of all parts together.

    Examples:
        >>> part = Reliability(np.array([2]), np.array([1.5]), np.array([1]))
        >>> pool([part, part]).count
        array([4])
    """
    fields = ("count", "confidence", "correct")
    return Reliability(*(np.sum([getattr(part, name) for part in parts], axis=0) for name in fields))


def ece(part: Reliability) -> float:
    """``sum_b |correct_b - confidence_b| / n``, NaN without voxels.

    Examples:
        >>> ece(Reliability(np.array([4, 4]), np.array([1.0, 3.0]), np.array([2, 3])))
        0.125
    """
    count = int(part.count.sum())
    return float(np.abs(part.correct - part.confidence).sum()) / count if count else math.nan


def draw_diagram(ax: style.Axes, part: Reliability, *, small: bool = False) -> None:
    """Draw diagonal, gap bars and accuracy line, or a message if there are no voxels."""
    ax.plot((0, 1), (0, 1), color=style.FAINT, linewidth=1, zorder=1)
    ticks = (0, 0.5, 1) if small else np.linspace(0, 1, 6)
    ax.set(xlim=(0, 1), ylim=(0, 1), xticks=ticks, yticks=ticks)
    filled, enough = part.count > 0, part.count >= _ENOUGH_VOXELS
    if not filled.any():
        style.message(ax, "no valid voxels")
        return
    confidence, accuracy = part.mean_confidence, part.accuracy
    width = 1 / len(part.count)
    for which, alpha, face in ((enough, 0.45, style.INK), (filled & ~enough, 0.15, "white")):
        if not which.any():  # An empty, unclipped line would break the layout.
            continue
        gap = (confidence - accuracy)[which]
        ax.bar(
            part.edges[:-1][which] + width / 2, gap, bottom=accuracy[which], width=0.92 * width, linewidth=0, zorder=2,
            color=[style.OVER if value > 0 else style.UNDER for value in gap], alpha=alpha, label="_gap",
        )  # fmt: skip
        ax.plot(
            confidence[which], accuracy[which], "o", color=style.INK, markerfacecolor=face, zorder=5, clip_on=False,
            markersize=2.5 if small else 4, markeredgewidth=0.8, label="_accuracy",
        )  # fmt: skip
    width = 1.0 if small else 1.4
    ax.plot(confidence, _broken(accuracy, part), color=style.INK, linewidth=width, zorder=4, label="accuracy")


def _broken(values: NDArray[np.float64], part: Reliability) -> NDArray[np.float64]:
    """The values of bins with enough voxels, NaN elsewhere, which leaves gaps in lines."""
    return np.where(part.count >= _ENOUGH_VOXELS, values, np.nan)


def _draw_counts(ax: style.Axes, part: Reliability) -> None:
    """The share of voxels in each bin, on a logarithmic scale because most are in the last bin."""
    total = part.count.sum()
    ax.set(xlim=(0, 1))
    if not total:
        ax.set(yticks=())
        return
    filled = part.count > 0
    shares = part.count[filled] / total
    width = 1 / len(part.count)
    ax.set_yscale("log")
    ax.bar(
        part.edges[:-1][filled] + width / 2, shares, width=0.92 * width, color=style.MUTED, linewidth=0, label="_share"
    )
    low = 10.0 ** math.floor(math.log10(shares.min()) - 0.3)
    ticks = [10.0**k for k in range(0, round(math.log10(low)) - 1, -2)]
    ax.set(ylim=(low, 1.5), yticks=ticks, yticklabels=[f"{100 * tick:g}%" for tick in ticks])
    ax.minorticks_off()


def _draw_silhouette(ax: style.Axes, part: Reliability) -> None:
    """The share of voxels in each bin along the bottom fifth of small axes, from 1/10000 to 1 on a log scale."""
    total = part.count.sum()
    if not total:
        return
    height = np.zeros(len(part.count))
    filled = part.count > 0
    height[filled] = np.clip(1 + np.log10(part.count[filled] / total) / 4, 0.05, 1)
    ax.stairs(0.2 * height, part.edges, fill=True, color=style.FAINT, alpha=0.7, linewidth=0, zorder=0)


def _summary(part: Reliability) -> str:
    count = int(part.count.sum())
    if not count:
        return "ECE undefined"
    accuracy, confidence = part.correct.sum() / count, part.confidence.sum() / count
    return (
        f"ECE {ece(part):.4f}\naccuracy {accuracy:.3f}, confidence {confidence:.3f}, {style.short_count(count)} voxels"
    )


def _worst(classes: Sequence[Reliability]) -> list[int]:
    """The classes to show: all in order, or the most miscalibrated ones."""
    if len(classes) <= style.MOST_CLASSES:
        return list(range(len(classes)))
    errors = [np.abs(part.correct - part.confidence).sum() for part in classes]
    return [int(index) for index in np.argsort(errors, kind="stable")[::-1][: style.MOST_CLASSES]]


def _cases(parts: Reliability | Sequence[Reliability], argument: str) -> Sequence[Reliability]:
    cases = [parts] if isinstance(parts, Reliability) else list(parts)
    bins = {len(case.count) for case in cases}
    if len(bins) != 1:
        raise InputError(
            f"{argument} has {len(cases)} reliabilities with {sorted(bins) or 'no'} bins",
            expected="at least one, all with the same number of bins",
        )
    return cases
