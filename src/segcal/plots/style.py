"""The style of all plots: colours, font sizes, axes; and saving figures.

pyplot and rcParams are not used: figures are plain objects, and everything is set on them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from segcal.errors import InputError, import_extra
from segcal.files.atomic import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure as Figure
    from matplotlib.figure import FigureBase as FigureBase

# Vermillion and blue of Okabe and Ito, which every kind of colour vision distinguishes.
OVER, UNDER = "#D55E00", "#0072B2"
PLAIN, WRONG = "#5E4FA2", "#AA3377"
INK, MUTED, FAINT, IGNORED = "#262626", "#6B6B6B", "#C9C9C9", "#E9E9E9"
LARGE, NORMAL, SMALL = 10.0, 8.5, 7.0
#: The look of every legend.
LEGEND: dict[str, Any] = {"fontsize": SMALL, "frameon": False, "labelcolor": INK}

#: Most classes in one figure. With more, plots show the most important ones and say so.
MOST_CLASSES = 20

FORMATS = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


_Array = NDArray[np.float64]

# Slate for class 0, which usually is the background, then the palette of Okabe and Ito. More are found by distance.
_FIRST = ("#30363D", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")

# Linear sRGB as seen with normal, red-blind and green-blind vision (Machado et al. 2009).
_VISIONS = np.array(
    [
        np.eye(3),
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    ]
)
# Normal vision distinguishes many more colours, so its distances count half.
_WEIGHTS = np.array([0.5, 1.0, 1.0])

# OKLab (Ottosson 2020): linear sRGB to cone responses to lightness and two opponent axes.
_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_OPPONENTS = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def canvas(figure: FigureBase | None, width: float, height: float) -> FigureBase:
    """The given figure, or a new one of this size in inches, which needs matplotlib."""
    if figure is not None:
        return figure
    import_extra("matplotlib", "plots", "drawing plots")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def root(figure: FigureBase) -> Figure:
    """The whole figure that a figure or subfigure belongs to."""
    whole = figure.figure
    assert whole is not None
    return whole  # type: ignore[return-value]  # matplotlib types it as a figure or subfigure; it is the root


def save(figure: FigureBase, path: str | Path, *, dpi: float = 150) -> Path:
    """Write a figure as PNG, SVG or PDF, by the extension, atomically.

    Examples:
        >>> import tempfile
        >>> from matplotlib.figure import Figure
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(Figure(), f"{folder}/plots/empty.svg").name
        'empty.svg'
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise InputError(f"path is {str(path)!r}", expected=f"a name that ends in {', '.join(FORMATS)}")
    matplotlib = import_extra("matplotlib", "plots", "drawing plots")
    # Without dates, versions and random names of elements, so that equal plots are equal files.
    with atomic_path(path) as temporary, matplotlib.rc_context({"svg.hashsalt": "segcal"}):
        root(figure).savefig(temporary, format=suffix[1:], dpi=dpi, metadata=FORMATS[suffix])
    return path


def tidy(ax: Axes, *, title: str = "", xlabel: str = "", ylabel: str = "", label_size: float = NORMAL) -> None:
    """Keep only thin left and bottom axes, with small fonts and the title on the left."""
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set(color=MUTED, linewidth=0.8)
    ax.set_facecolor("white")
    ax.tick_params(which="both", labelsize=SMALL, labelcolor=INK, color=MUTED, width=0.8, length=3)
    ax.set_title(plain(title), loc="left", fontsize=NORMAL, color=INK)
    ax.set_xlabel(xlabel, fontsize=label_size, color=INK)
    ax.set_ylabel(ylabel, fontsize=label_size, color=INK)


def titled(figure: FigureBase, title: str | None, note: str | None = None) -> Figure:
    """Give a figure or subfigure a title and a note, if there are any; returns the whole figure."""
    if text := ": ".join(filter(None, (title, note))):
        figure.suptitle(plain(text), fontsize=LARGE, color=INK, x=0.005, ha="left")
    return root(figure)


def message(ax: Axes, text: str) -> None:
    """Write a message in the middle of empty axes."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", fontsize=NORMAL, color=MUTED)


def scale(ax: Axes, shown: ScalarMappable, *, below: float | None = None) -> Colorbar:
    """A slim colour scale to the right of axes or, if ``below`` is their width over their height, below them."""
    place = ax.inset_axes((1.03, 0, 0.04, 1) if below is None else (0, -0.075 * below, 1, 0.035 * below))
    bar = ax.figure.colorbar(shown, cax=place, orientation="vertical" if below is None else "horizontal")
    bar.outline.set_visible(False)
    place.tick_params(which="both", labelsize=SMALL, labelcolor=INK, color=MUTED, width=0.8, length=2)
    return bar


def key(figure: FigureBase, colours: Mapping[str, tuple[str, float]], **place: Any) -> None:
    """A legend below the axes, from the name of each colour to the colour and its opacity."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, alpha=alpha, label=name) for name, (colour, alpha) in colours.items()]
    figure.legend(handles=handles, ncols=len(handles), **place, **LEGEND)


def names_of(class_names: Sequence[str] | None, num_classes: int) -> list[str]:
    """The given names, checked and shortened, or ``class 0``, ``class 1``, ..."""
    if class_names is None:
        return [f"class {k}" for k in range(num_classes)]
    if len(class_names) != num_classes:
        raise InputError(f"class_names has {len(class_names)} names", expected=f"{num_classes}, one for each class")
    return [plain(shortened(name)) for name in class_names]


def plain(text: str) -> str:
    """A text that matplotlib draws as it is: between two dollars it would look for a formula."""
    return text.replace("$", r"\$")


def shortened(name: str, length: int = 20) -> str:
    """A name, cut to fit a small panel."""
    return name if len(name) <= length else name[: length - 1] + "…"


def share(part: float, whole: float) -> str:
    """A percentage as text, which is 0% or 100% only if that is exact.

    Examples:
        >>> share(1, 8), share(1, 10**6), share(999_999, 10**6), share(0, 0)
        ('12.5%', '<0.1%', '>99.9%', 'none')
    """
    if not whole:
        return "none"
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return "<0.1%"
    return ">99.9%" if 99.9 < percent < 100 else f"{percent:.1f}%".replace(".0%", "%")


def short_count(count: int) -> str:
    """A count in a few characters.

    Examples:
        >>> [short_count(n) for n in (812, 45_600, 10_368_000)]
        ['812', '45.6k', '10.4M']
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def ratio(sums: NDArray[Any], count: NDArray[np.int64]) -> NDArray[np.float64]:
    """Means from sums and counts, NaN where a count is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        means: NDArray[np.float64] = np.where(count > 0, sums / count, np.nan)
    return means


def number(value: float, form: str = ".3f") -> str:
    """A value, or "undefined" for NaN."""
    return "undefined" if math.isnan(value) else f"{value:{form}}"


@functools.lru_cache
def class_colours(num_classes: int) -> tuple[str, ...]:
    """One colour per class, as hex. The colour of a class does not depend on the number of classes.

    After eight fixed colours, each is the candidate with the largest distance in OKLab to its nearest predecessor, as
    seen with whichever of normal, red-blind and green-blind vision separates the two least. Beyond about 20 classes no
    palette works for everyone.

    Examples:
        >>> class_colours(3), class_colours(30)[:3] == class_colours(3)
        (('#30363D', '#E69F00', '#56B4E9'), True)
    """
    levels = np.linspace(0.05, 0.95, 10)
    candidates = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(-1, 3)
    lightness, *opponents = _views(candidates)[0].T
    # Not as light as the page or ignored voxels, not as dark as the slate, and not grey.
    candidates = candidates[(lightness > 0.35) & (lightness < 0.9) & (np.hypot(*opponents) > 0.05)]
    views = _views(candidates)
    colours = list(_FIRST)
    nearest = np.min([_separation(views, colour) for colour in colours], axis=0)
    while len(colours) < num_classes:
        colours.append(_hex(candidates[nearest.argmax()]))
        nearest = np.minimum(nearest, _separation(views, colours[-1]))
    return tuple(colours[:num_classes])


def _views(rgb: _Array) -> _Array:
    """``(n, 3)`` sRGB in [0, 1] to OKLab for each kind of vision, ``(3, n, 3)``."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ _VISIONS.transpose(0, 2, 1), 0, 1)
    views: _Array = np.cbrt(seen @ _CONES.T) @ _OPPONENTS.T
    return views


def _separation(views: _Array, colour: str) -> _Array:
    """``(n,)`` weighted distance from one colour, for the vision that separates them least."""
    own = _views(np.array([_rgb(colour)]))
    separation: _Array = (_WEIGHTS[:, None] * np.linalg.norm(views - own, axis=-1)).min(0)
    return separation


def _rgb(colour: str) -> list[float]:
    return [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]


def _hex(rgb: Iterable[float]) -> str:
    return "#" + "".join(f"{round(255 * value):02X}" for value in rgb)
