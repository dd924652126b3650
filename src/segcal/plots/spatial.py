"""Maps of one case: where the network is uncertain, wrong, over- and underconfident."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from segcal.evaluation.maps import score_maps
from segcal.plots import style
from segcal.plots.boundary import BAND_NAMES
from segcal.plots.colours import class_colours
from segcal.plots.view import Plane, View
from segcal.regions import CaseRegions
from segcal.types import Case

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

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
    figure: FigureBase | None = None,
) -> Figure:
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
    _draw_confidence(canvas, axes["confidence"], view, planes["confidence"])
    _draw_balance(canvas, axes["balance"], view, planes["confidence-balance"])
    _draw_bands(canvas, axes["band"], view, view.plane(regions.bands))
    shown = np.bincount(np.append(labels[valid], planes["prediction"].ravel()), minlength=len(names))
    rows = int(inches / 2 / _ENTRY_HEIGHT)
    _draw_legend(axes["legend"], shown.tolist(), names, colours, rows, ignored=not valid.all())
    return style.titled(canvas, view.name if title is None else title)


def _draw_steps(ax: Axes, view: View, plane: Plane, title: str, colours: Sequence[str]) -> Any:
    """A map of whole numbers, with one colour for each."""
    from matplotlib.colors import ListedColormap

    limits = {"vmin": -0.5, "vmax": len(colours) - 0.5, "interpolation": "nearest"}
    return view.show(ax, plane, title, cmap=ListedColormap(list(colours)), **limits)


def _draw_confidence(figure: FigureBase, ax: Axes, view: View, confidence: Plane) -> None:
    least = 1 / view.case.shape[1]
    middle = (1 + least) / 2
    labels = {least: f"1/C = {least:.2g}", middle: f"{middle:.2g}", 1.0: "1"}
    _draw_scaled(figure, ax, view, confidence, "confidence", "viridis", labels)


def _draw_balance(figure: FigureBase, ax: Axes, view: View, balance: Plane) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    finite = np.abs(balance[np.isfinite(balance)])
    limit = max(float(np.percentile(finite, 98)) if finite.size else 1.0, 1e-3)
    labels = {-limit: f"−{limit:.2g} under", 0.0: "0", limit: f"{limit:.2g} over"}
    signed = LinearSegmentedColormap.from_list("segcal-signed", [style.UNDER, "#FFFFFF", style.OVER])
    _draw_scaled(figure, ax, view, balance, "confidence balance (NLL − entropy)", signed, labels)


def _draw_scaled(
    figure: FigureBase, ax: Axes, view: View, plane: Plane, title: str, colours: Any, labels: Mapping[float, str]
) -> None:
    """A map with a colour scale, labelled at both ends and in the middle."""
    shown = view.show(ax, np.ma.masked_invalid(plane), title, cmap=colours, vmin=min(labels), vmax=max(labels))
    bar = style.scale(figure, ax, shown, below=view.shape[1] / view.shape[0])
    bar.set_ticks(list(labels), labels=list(labels.values()))
    # The outer labels stay within the scale, so that all panels are aligned.
    first, _, last = bar.ax.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")


def _draw_bands(figure: FigureBase, ax: Axes, view: View, bands: Plane) -> None:
    title = "distance band (voxels)" if view.case.spacing is None else "distance band"
    shown = _draw_steps(ax, view, np.ma.masked_less(bands, 0), title, _BAND_COLOURS)
    bar = style.scale(figure, ax, shown, below=view.shape[1] / view.shape[0])
    bar.set_ticks(range(len(BAND_NAMES)), labels=BAND_NAMES)


def _draw_legend(
    ax: Axes, counts: Sequence[int], names: Sequence[str], colours: Sequence[str], rows: int, *, ignored: bool
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
    ax.legend(
        handles=handles,
        loc="upper left",
        borderaxespad=0,
        ncols=1 if len(handles) <= min(12, rows) else 2,
        **style.LEGEND,
    )
