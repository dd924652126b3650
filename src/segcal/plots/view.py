"""The plane of a case that is drawn: an image, or one slice of a volume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from segcal.errors import InputError
from segcal.plots import style
from segcal.types import Case

Plane = NDArray[Any]


@dataclass(frozen=True)
class View:
    """One plane of a case.

    Attributes:
        case: An image or a volume.
        channel: Which channel of a multi-label case.
        slice_index: Slice along the first axis of a volume, None for an image.
        log_probs: Scores to show instead of the case's logits, or None.
    """

    case: Case
    channel: int
    slice_index: int | None
    log_probs: Tensor | None

    @classmethod
    def of(cls, case: Case, *, slice_index: int | None, channel: int, log_probs: Tensor | None) -> View:
        """A checked view. By default, a volume shows the slice with most foreground, or the middle one without any."""
        batch, _, *spatial = case.shape
        if len(spatial) not in (2, 3):
            raise InputError(f"{len(spatial)} spatial axes", case=case.id, expected="an image or a volume")
        if not 0 <= channel < batch:
            raise InputError(f"channel is {channel}", case=case.id, expected=f"0..{batch - 1}")
        if log_probs is not None and tuple(log_probs.shape) != case.shape:
            raise InputError(
                f"log_probs have shape {tuple(log_probs.shape)}", case=case.id, expected=f"{case.shape} as the logits"
            )
        if slice_index is not None and (len(spatial) == 2 or not 0 <= slice_index < spatial[0]):
            expected = "none for an image" if len(spatial) == 2 else f"0..{spatial[0] - 1}"
            raise InputError(f"slice_index is {slice_index}", case=case.id, expected=expected)
        if slice_index is None and len(spatial) == 3:
            foreground = (case.valid[channel] & (case.labels[channel] != 0)).sum((1, 2))
            slice_index = int(foreground.argmax()) if bool(foreground.any()) else spatial[0] // 2
        return cls(case, channel, slice_index, log_probs)

    @property
    def rows(self) -> slice:
        """The rows of the case that are shown."""
        if self.slice_index is None:
            return slice(0, self.case.shape[2])
        return slice(self.slice_index, self.slice_index + 1)

    @property
    def aspect(self) -> float:
        """The height of a voxel divided by its width."""
        spacing = self.case.spacing
        return 1.0 if spacing is None else spacing[-2] / spacing[-1]

    @property
    def shape(self) -> tuple[float, float]:
        """Height and width as drawn, in units of a voxel's width."""
        return self.aspect * self.case.shape[-2], float(self.case.shape[-1])

    @property
    def name(self) -> str:
        """The name of the case and, for a volume, the slice."""
        where = "" if self.slice_index is None else f", slice {self.slice_index} of {self.case.shape[2]}"
        return self.case.id + where

    def scores(self, rows: slice) -> Tensor:
        """Scores ``(N, C, rows, ...)`` of some rows, without reading the others if the format allows it."""
        if self.log_probs is not None:
            return self.log_probs[:, :, rows]
        return self.case.chunk(rows).logits if self.case.source.sliceable else self.case.logits[:, :, rows]

    def plane(self, values: Tensor) -> Plane:
        """The shown plane of ``(N, *spatial)`` values, or of ``(N, rows, ...)`` values of its rows only."""
        chosen = values[self.channel].detach().cpu()
        if self.slice_index is not None:
            chosen = chosen[self.slice_index if len(chosen) > 1 else 0]
        return chosen.numpy()

    def image(self) -> Plane | None:
        """``(height, width, 3)``, or the first channel if there are not three; the central 98% stretched to [0, 1]."""
        image = self.case.image
        if image is None:
            return None
        shown = image[0] if self.slice_index is None else image[0, :, self.slice_index]
        shown = shown.movedim(0, -1) if len(shown) == 3 else shown[0]
        values: Plane = shown.float().cpu().numpy()
        low, high = np.percentile(values, (1, 99))
        stretched: Plane = np.clip((values - low) / max(high - low, 1e-12), 0, 1)
        return stretched

    def show(self, ax: style.Axes, values: Plane, title: str, **options: Any) -> Any:
        """Draw a plane with a title and a thin frame; masked voxels are hatched."""
        ax.patch.set(facecolor=style.IGNORED, hatch="//////", edgecolor=style.FAINT, linewidth=0)
        shown = ax.imshow(values, aspect=self.aspect, **options)
        ax.set(xticks=(), yticks=())
        for spine in ax.spines.values():
            spine.set(visible=True, color=style.FAINT, linewidth=0.8)
        ax.set_title(style.plain(title), loc="left", fontsize=style.NORMAL, color=style.INK)
        return shown
