"""Figures of one case: maps of where the network is uncertain, wrong, over- and underconfident, and local reliability.

Calibration over an image can hide miscalibration in its parts (Ding et al., Fig. 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from segcal.evaluation.maps import score_maps
from segcal.metrics.reliability import Reliability, reliability
from segcal.plots import style
from segcal.plots.boundary import BAND_NAMES
from segcal.plots.reliability import draw_diagram, ece
from segcal.plots.style import class_colours
from segcal.plots.view import Plane, View
from segcal.regions import PATCH_COUNT, PATCH_SIZE, CaseRegions, Window, local_patches
from segcal.statistics import VoxelStatistics
from segcal.types import Case

_WITH_IMAGE: list[Any] = [["image", "label", "prediction", "error"], ["confidence", "balance", "band", "legend"]]
_WITHOUT: list[Any] = [["label", "prediction", "error", "legend"], ["confidence", "balance", "band", "legend"]]
_BAND_COLOURS = ("#08306B", "#3F7FB8", "#9CC4E0", "#E3EEF8")
# Most classes in the legend, and the height of an entry in inches.
_MOST_NAMES, _ENTRY_HEIGHT = 24, 0.165


def spatial_maps(
    case: Case,
    *,
    log_probs: Tensor | None = None,
    class_names: Sequence[str] | None = None,
    slice_index: int | None = None,
    channel: int = 0,
    title: str | None = None,
    figure: style.FigureBase | None = None,
) -> style.Figure:
    """Image, label, prediction, confidence, error, confidence balance and distance band, side by side.

    For a volume, one slice along the first axis is shown, and only that slice of the scores is read; distances are
    three-dimensional. Ignored and masked voxels are hatched. The balance (NLL - entropy, > 0 overconfident) is clipped
    at the 98th percentile of its magnitude.

    Args:
        case: An image or a volume.
        log_probs: Calibrated log-probabilities ``(N, C, *spatial)`` to show instead of the case's logits.
        class_names: One for each class.
        slice_index: Slice of a volume; by default the one with most foreground (labels other than 0).
        channel: Which channel of a multi-label case.
        title: Title of the figure; by default the name of the case and the slice.
        figure: A figure or subfigure to draw on; a new one by default.

    Examples:
        >>> from segcal.synthetic import demo_scenes
        >>> images, volumes = demo_scenes()
        >>> figure = spatial_maps(volumes[0], class_names=volumes.class_names)
    """
    view = View.of(case, slice_index=slice_index, channel=channel, log_probs=log_probs)
    names = style.names_of(class_names, case.shape[1])
    regions = CaseRegions(case.labels, spacing=case.spacing, ignore_index=case.ignore_index, mask=case.mask)
    maps = score_maps(view.scores(view.rows), case.labels[:, view.rows], regions.valid[:, view.rows])
    planes = {name: view.plane(values) for name, values in maps.items()}
    labels, valid = view.plane(case.labels), view.plane(regions.valid)

    image = view.image()
    height, width = view.shape
    inches = 1.4 + 2 * 2.25 * min(2.0, max(0.15, height / width))
    canvas = style.canvas(figure, 10.0, inches)
    axes = canvas.subplot_mosaic(_WITHOUT if image is None else _WITH_IMAGE)
    if image is not None:
        view.show(axes["image"], image, "image", cmap="gray", vmin=0, vmax=1)
    colours = class_colours(case.shape[1])
    _draw_steps(axes["label"], view, np.ma.masked_array(labels, ~valid), "label", colours)
    _draw_steps(axes["prediction"], view, planes["prediction"], "prediction", colours)
    error = np.ma.masked_invalid(planes["error"])
    wrong = style.share(float(np.nansum(planes["error"])), error.count())
    _draw_steps(axes["error"], view, error, f"error ({wrong} wrong)", ("#FFFFFF", style.WRONG))
    _draw_confidence(axes["confidence"], view, planes["confidence"])
    _draw_balance(axes["balance"], view, planes["confidence-balance"])
    _draw_bands(axes["band"], view, view.plane(regions.bands))
    shown = np.bincount(np.append(labels[valid], planes["prediction"].ravel()), minlength=len(names))
    rows = int(inches / 2 / _ENTRY_HEIGHT)
    _draw_legend(axes["legend"], shown.tolist(), names, colours, rows, ignored=not valid.all())
    return style.titled(canvas, view.name if title is None else title)


def _draw_steps(ax: style.Axes, view: View, plane: Plane, title: str, colours: Sequence[str]) -> Any:
    """A map of whole numbers, with one colour for each."""
    from matplotlib.colors import ListedColormap

    limits = {"vmin": -0.5, "vmax": len(colours) - 0.5, "interpolation": "nearest"}
    return view.show(ax, plane, title, cmap=ListedColormap(list(colours)), **limits)


def _draw_confidence(ax: style.Axes, view: View, confidence: Plane) -> None:
    least = 1 / view.case.shape[1]
    middle = (1 + least) / 2
    labels = {least: f"1/C = {least:.2g}", middle: f"{middle:.2g}", 1.0: "1"}
    _draw_scaled(ax, view, confidence, "confidence", "viridis", labels)


def _draw_balance(ax: style.Axes, view: View, balance: Plane) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    finite = np.abs(balance[np.isfinite(balance)])
    limit = max(float(np.percentile(finite, 98)) if finite.size else 1.0, 1e-3)
    labels = {-limit: f"−{limit:.2g} under", 0.0: "0", limit: f"{limit:.2g} over"}
    signed = LinearSegmentedColormap.from_list("segcal-signed", [style.UNDER, "#FFFFFF", style.OVER])
    _draw_scaled(ax, view, balance, "confidence balance (NLL − entropy)", signed, labels)


def _draw_scaled(ax: style.Axes, view: View, plane: Plane, title: str, colours: Any, labels: dict[float, str]) -> None:
    """A map with a colour scale, labelled at both ends and in the middle."""
    shown = view.show(ax, np.ma.masked_invalid(plane), title, cmap=colours, vmin=min(labels), vmax=max(labels))
    bar = style.scale(ax, shown, below=view.shape[1] / view.shape[0])
    bar.set_ticks(list(labels), labels=list(labels.values()))
    # The outer labels stay within the scale, so that all panels are aligned.
    first, _, last = bar.ax.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")


def _draw_bands(ax: style.Axes, view: View, bands: Plane) -> None:
    title = "distance band (voxels)" if view.case.spacing is None else "distance band"
    shown = _draw_steps(ax, view, np.ma.masked_less(bands, 0), title, _BAND_COLOURS)
    bar = style.scale(ax, shown, below=view.shape[1] / view.shape[0])
    bar.set_ticks(range(len(BAND_NAMES)), labels=BAND_NAMES)


def _draw_legend(
    ax: style.Axes, counts: Sequence[int], names: Sequence[str], colours: Sequence[str], rows: int, *, ignored: bool
) -> None:
    """The classes that occur, in order; of more than fit into two columns of ``rows``, the most frequent."""
    from matplotlib.patches import Patch

    present = [k for k, count in enumerate(counts) if count]
    chosen = sorted(sorted(present, key=lambda k: -counts[k])[: min(_MOST_NAMES, 2 * rows - 2)])
    handles = [Patch(facecolor=colours[k], label=names[k]) for k in chosen]
    if len(chosen) < len(present):
        handles.append(Patch(facecolor="white", label=f"and {len(present) - len(chosen)} more"))
    if ignored:
        handles.append(
            Patch(facecolor=style.IGNORED, hatch="//////", edgecolor=style.FAINT, linewidth=0, label="ignored")
        )
    ax.axis("off")
    columns = 1 if len(handles) <= min(12, rows) else 2
    ax.legend(handles=handles, loc="upper left", borderaxespad=0, ncols=columns, **style.LEGEND)


def local_reliability(
    case: Case,
    *,
    log_probs: Tensor | None = None,
    count: int = PATCH_COUNT,
    size: int = PATCH_SIZE,
    seed: int = 0,
    num_bins: int = 10,
    slice_index: int | None = None,
    channel: int = 0,
    title: str | None = None,
    figure: style.FigureBase | None = None,
) -> style.Figure:
    """An image with random patches coloured by their ECE, and diagrams of the whole, the best and the worst patch.

    The bars, in the same colours, are the local ECEs in order; their mean and maximum are Local-Avg and Local-Max.
    Patches are those of ``segcal.regions.local_patches``. In a volume they are boxes, and those that cross the slice
    shown are outlined. By default that is the middle slice of the worst patch. Patches without valid voxels are left
    out.

    Args:
        case: An image or a volume.
        log_probs: Calibrated log-probabilities ``(N, C, *spatial)`` to show instead of the case's logits.
        count: Number of patches.
        size: Voxels along each side.
        seed: Seed of the patches.
        num_bins: Bins of the diagrams and of the ECE.
        slice_index: Slice of a volume.
        channel: Which channel of a multi-label case.
        title: Title of the figure; by default the name of the case.
        figure: A figure or subfigure to draw on; a new one by default.

    Examples:
        >>> from segcal.synthetic import demo_scenes
        >>> figure = local_reliability(demo_scenes()[0][0], size=40)
    """
    view = View.of(case, slice_index=slice_index, channel=channel, log_probs=log_probs)
    everything = tuple(slice(0, length) for length in case.shape[2:])
    total = _reliability(view, everything, num_bins)
    windows = local_patches(case.shape[2:], count=count, size=size, seed=seed)
    # An image no larger than a patch gives the same window several times.
    distinct = {tuple(part.start for part in window): window for window in windows}.values()
    patches = [Patch(window, _reliability(view, window, num_bins)) for window in distinct]
    patches = sorted((patch for patch in patches if patch.reliability.count.any()), key=lambda patch: patch.ece)
    if patches and slice_index is None and view.slice_index is not None:
        rows = patches[-1].window[0]
        view = replace(view, slice_index=(rows.start + rows.stop) // 2)

    height, width = view.shape
    canvas = style.canvas(figure, 9.2, 0.9 + 4.6 * min(1.1, max(0.75, height / width)))
    axes = canvas.subplot_mosaic([["image", "all", "spread"], ["image", "best", "worst"]], width_ratios=(2.2, 1, 1))
    _draw_image(axes["image"], view, patches)
    _draw_small(axes["all"], total, "everything")
    _draw_spread(axes["spread"], patches, ece(total))
    for name, index in (("best", 0), ("worst", -1)):
        if len(patches) > 1:
            _draw_small(axes[name], patches[index].reliability, f"{name} patch")
        else:
            axes[name].remove()
    return style.titled(canvas, view.name if title is None else title)


class Patch(NamedTuple):
    """A window of a case and its reliability."""

    window: Window
    reliability: Reliability

    @property
    def ece(self) -> float:
        """The local ECE."""
        return ece(self.reliability)


def _reliability(view: View, window: Window, num_bins: int) -> Reliability:
    """The reliability of the voxels in a window."""
    case, channel, everything = view.case, slice(view.channel, view.channel + 1), slice(None)
    voxels, columns = (channel, *window), (channel, everything, everything, *window[1:])
    statistics = VoxelStatistics(case.shape[1], bins=(num_bins,), classwise=False)
    scores, mask = view.scores(window[0])[columns], None if case.mask is None else case.mask[voxels]
    statistics.update(scores, case.labels[voxels], ignore_index=case.ignore_index, mask=mask)
    return reliability(statistics, num_bins)


def _draw_image(ax: style.Axes, view: View, patches: Sequence[Patch]) -> None:
    """The image in pale grey, so that the outlines stand out; without an image, the confidence."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    image = view.image()
    if image is None:
        image = view.plane(view.scores(view.rows).double().softmax(1).amax(1))
    grey = image if image.ndim == 2 else image @ np.array([0.299, 0.587, 0.114])
    place = view.slice_index
    rows = [patch.window[0] for patch in patches]
    on_show = [index for index, own in enumerate(rows) if place is None or own.start <= place < own.stop]
    count = f"{len(on_show)} of {len(patches)}" if len(on_show) < len(patches) else str(len(patches))
    title = f"{count} {'patch' if count == '1' else 'patches'}, coloured by local ECE"
    view.show(ax, grey, title, cmap="gray", vmin=-0.6, vmax=1)
    colours = _colours(patches)
    for index in on_show:
        down, across = patches[index].window[-2:]
        extreme = index in (0, len(patches) - 1)
        line = 2.6 if extreme else 1.6
        corner = (across.start - 0.5, down.start - 0.5)
        ax.add_patch(
            Rectangle(
                corner, across.stop - across.start, down.stop - down.start, fill=False, linewidth=line,
                edgecolor=colours[index], zorder=4 if extreme else 3, label="_patch",
                path_effects=[withStroke(linewidth=line + 1.4, foreground=style.INK)],
            )
        )  # fmt: skip
        if extreme and len(patches) > 1:
            # In opposite corners, so that the labels do not overlap if the patches do.
            best = index == 0
            ax.annotate(
                "best" if best else "worst", corner if best else (across.stop - 0.5, down.stop - 0.5),
                xytext=(4, -4) if best else (-4, 4), textcoords="offset points", ha="left" if best else "right",
                va="top" if best else "bottom", fontsize=style.SMALL, color="white", zorder=5,
                bbox={"facecolor": style.INK, "linewidth": 0, "pad": 1.5},
            )  # fmt: skip


def _draw_small(ax: style.Axes, part: Reliability, name: str) -> None:
    draw_diagram(ax, part, small=True)
    title = f"{name}\nECE {style.number(ece(part))}"
    style.tidy(ax, title=title, xlabel="confidence", ylabel="accuracy", label_size=style.SMALL)
    ax.set_box_aspect(1)


def _draw_spread(ax: style.Axes, patches: Sequence[Patch], total: float) -> None:
    """The local ECEs in order, with their mean and the ECE of the whole case."""
    ax.set_box_aspect(1)
    if len(patches) < 2:
        style.message(ax, "one patch covers\nthe whole case" if patches else "no valid voxels")
        style.tidy(ax, title="local ECE\n")
        ax.set(xticks=(), yticks=())
        return
    values = np.array([patch.ece for patch in patches])
    ax.bar(range(len(values)), values, color=_colours(patches), edgecolor=style.INK, linewidth=0.6, label="_local")
    ax.axhline(total, color=style.INK, linewidth=1, linestyle="--")
    title = f"local ECE\nmean {values.mean():.3f}, max {values.max():.3f}"
    style.tidy(ax, title=title, xlabel="patches (dashed: everything)", ylabel="ECE", label_size=style.SMALL)
    ax.set(xticks=(), ylim=(0, 1.15 * max(values.max(), total, 1e-6)))


def _colours(patches: Sequence[Patch]) -> list[tuple[float, float, float, float]]:
    """One colour per patch, darker for a larger ECE. The patches are sorted, so the last one has the largest."""
    from matplotlib import colormaps

    values = np.array([patch.ece for patch in patches])
    return [tuple(shade) for shade in colormaps["YlOrRd"](values / values.max(initial=1e-6))]
