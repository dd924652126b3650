"""Pictures of some cases, slice by slice: image, label, prediction, confidence, temperature, error, flips."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from segcal.calibrators import Calibrator
from segcal.cases import CaseSet
from segcal.cases.calibrated import AnyCalibrator, of_channel, score_pieces
from segcal.files.atomic import atomic_path
from segcal.types import Case

CASES, SLICES, PIXELS = 12, 8, 256
Pixels = NDArray[np.uint8]

# Okabe and Ito's colours, which colour-blind readers can distinguish. More classes take hues a golden angle apart.
_CLASSES = np.array(
    [(40, 40, 46), (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0)], np.uint8
)
_IGNORED = np.array((128, 128, 128), np.uint8)
# Dark blue over teal to pale yellow: brighter means more confident, in print too.
_CONFIDENCE = np.array([(13, 8, 60), (46, 66, 138), (32, 131, 141), (94, 201, 120), (253, 240, 150)], float)
# Blue below 1, white at 1, red above.
_TEMPERATURE = np.array([(33, 82, 163), (146, 181, 222), (247, 247, 247), (231, 148, 122), (160, 22, 38)], float)
# Right or kept; wrong or flipped for the worse; flipped for the better; flipped from wrong to wrong.
_GREY, _RED, _GREEN, _ORANGE = np.array([(226, 232, 236), (200, 50, 40), (0, 140, 100), (230, 159, 0)], np.uint8)


class Place(NamedTuple):
    """What is drawn: a case or, for multi-label data, a channel of one."""

    case: str
    channel: int = 0


def write_browser(
    cases: CaseSet,
    calibrator: Callable[[str], Calibrator] | None,
    method: str,
    *,
    before: Mapping[str, Mapping[Place, float]],
    after: Mapping[str, Mapping[Place, float]],
    folder: Path,
) -> list[dict[str, Any]]:
    """Draw some cases, those with the worst ECE before calibration first. The names of the PNG files are numbers.

    For multi-label data, channels of cases are chosen and drawn.

    Args:
        cases: Cases to choose from.
        calibrator: The calibrator of a case, for the panels "after"; None leaves these out.
        method: Its name in the study.
        before: Metric to the values of every place, uncalibrated.
        after: The same, calibrated.
        folder: Pictures go to ``browser/`` in it.
    """
    entries = []
    change = {place: after["nll"][place] - value for place, value in before["nll"].items()} if calibrator else {}
    for number, (where, title) in enumerate(chosen_cases(before["ece"], change)):
        case = cases.select([where.case])[0]
        own: AnyCalibrator = calibrator and calibrator(where.case)
        if cases.channel_names is not None:
            case, own = case.channel(where.channel), of_channel(own, where.channel)
        slices = []
        for place, (index, pictures) in enumerate(_panels(case, own)):
            files = {name: f"browser/{number}-{place}-{panel}.png" for panel, name in enumerate(pictures)}
            for name, file in files.items():
                with atomic_path(folder / file) as temporary:
                    Image.fromarray(pictures[name]).save(temporary, "PNG", optimize=True)
            slices.append({"index": index, "panels": [{"name": name, "file": file} for name, file in files.items()]})
        numbers = {f"{metric} before": values[where] for metric, values in before.items()}
        if calibrator is not None:
            numbers |= {f"{metric} after": values[where] for metric, values in after.items()}
        channel = cases.channel_names[where.channel] if cases.channel_names else ""
        about = {"case": where.case, "channel": channel, "title": title, "method": method}
        entries.append({**about, "shape": list(case.shape[2:]), "slices": slices, "numbers": numbers})
    return entries


def chosen_cases(
    ece: Mapping[Place, float], change: Mapping[Place, float] | None = None, count: int = CASES
) -> list[tuple[Place, str]]:
    """Up to ``count`` cases with their titles: a third with the worst ECE, a third helped least, others from the middle
    and the best.

    Args:
        ece: The ECE of every case.
        change: The change of NLL by calibration of every case; without it, no case is chosen by it.
        count: The number of cases, at least 4.

    Examples:
        >>> a, b, c, d, e, f = (Place(name) for name in "abcdef")
        >>> found = chosen_cases({a: 0.3, b: 0.1, c: 0.2, d: 0.15, e: 0.12, f: 0.11}, {b: 0.2}, count=4)
        >>> [(place.case, title) for place, title in found]
        [('a', 'worst ECE'), ('b', 'helped least'), ('d', 'middle ECE'), ('f', 'best ECE')]
    """
    worst_first = _falling(ece)
    if (total := len(worst_first)) <= count:
        return [(name, f"ECE rank {rank} of {total}, worst first") for rank, name in enumerate(worst_first, 1)]
    third = max(1, count // 3)
    found = dict.fromkeys(worst_first[:third], "worst ECE")
    found |= dict.fromkeys([name for name in _falling(change or {}) if name not in found][:third], "helped least")
    left = [name for name in worst_first if name not in found]
    best = (count - len(found)) // 2
    middle = count - len(found) - best
    start = (len(left) - best - middle) // 2
    found |= dict.fromkeys(left[start : start + middle], "middle ECE")
    found |= dict.fromkeys(left[len(left) - best :], "best ECE")
    return list(found.items())


def _falling(values: Mapping[Place, float]) -> list[Place]:
    """Names from the largest value to the smallest; undefined ones come last."""
    return sorted(values, key=lambda name: (math.isnan(values[name]), -values[name], name))


def _panels(case: Case, calibrator: AnyCalibrator) -> Iterator[tuple[int | None, dict[str, Pixels]]]:
    """For every slice shown: its index (None in 2D) and its pictures by name."""
    axes, depth = len(case.shape) - 2, case.shape[2]
    every = -(-max(case.shape[2:][-2:]) // PIXELS)
    places = sorted({int(place) for place in np.linspace(0, depth - 1, min(SLICES, depth)).round()})
    rows, columns = (places, 2) if axes == 3 else (range(0, depth, every), axes - 1)
    seen = _rows_seen(case, calibrator, torch.tensor(rows), (..., *[slice(None, None, every)] * columns))
    for number, place in enumerate(places if axes == 3 else [None]):
        planes = (one if axes == 2 else one[:, number] if axes == 3 else one[:, None] for one in seen)
        logits, labels, valid, *more = planes
        image = more.pop() if case.source.image(slice(0, 1)) is not None else None
        yield place, _pictures(logits, labels[0], valid[0], image, more[0] if more else None)


def _rows_seen(case: Case, calibrator: AnyCalibrator, rows: Tensor, columns: Any) -> list[Tensor]:
    """Some rows and columns ``(channels, rows, ...)`` of logits, labels and valid voxels, and of calibrated scores and
    the image if there are any. The case is read piece by piece; labels cannot be averaged, so others are left out."""
    if not case.source.sliceable:
        case.load()
    parts = []
    for piece, scores in score_pieces(case, calibrator):
        chunk, image = case.chunk(piece), case.source.image(piece)
        found = [chunk.logits[0], chunk.labels[:1], chunk.valid[:1]]
        found += ([] if calibrator is None else [scores[0]]) + ([] if image is None else [image[0]])
        own = rows[(rows >= piece.start) & (rows < piece.stop)] - piece.start
        parts.append([one.cpu().index_select(1, own)[columns] for one in found])
    return [torch.cat(own, 1) for own in zip(*parts, strict=True)]


def _pictures(
    logits: Tensor, labels: Tensor, valid: Tensor, image: Tensor | None, log_probs: Tensor | None
) -> dict[str, Pixels]:
    right = logits.argmax(0) == labels
    pictures = {} if image is None else {"image": _grey_or_colour(image)}
    pictures["label"] = _where(valid, _classes(labels.clamp(max=len(logits) - 1)), _IGNORED)
    pictures["prediction"] = _classes(logits.argmax(0))
    pictures["confidence before"] = _mapped(logits.softmax(0).amax(0), _CONFIDENCE)
    if log_probs is not None:
        pictures["confidence after"] = _mapped(log_probs.exp().amax(0), _CONFIDENCE)
        pictures["temperature"] = _mapped(_effective_temperature(logits, log_probs).log2() / 4 + 0.5, _TEMPERATURE)
    pictures["error"] = _where(valid, _where(right, _GREY, _RED), _IGNORED)
    if log_probs is not None:
        now = log_probs.argmax(0)
        flips = _where(right, _RED, _where(now == labels, _GREEN, _ORANGE))
        pictures["flips"] = _where(valid, _where(now == logits.argmax(0), _GREY, flips), _IGNORED)
    return pictures


def _effective_temperature(logits: Tensor, log_probs: Tensor) -> Tensor:
    """The factor by which the margin between the two best classes shrank; for ``S(z / T)``, the temperature itself."""
    best = logits.topk(2, 0)
    margin = best.values[0] - best.values[1]
    after = log_probs.gather(0, best.indices)
    ratio = margin / (after[0] - after[1])
    # If classes tie or swap places, there is no such temperature.
    return torch.where((ratio > 0) & ratio.isfinite(), ratio, torch.ones_like(ratio)).clamp(0.25, 4.0)


def _grey_or_colour(image: Tensor) -> Pixels:
    channels = image[:3] if len(image) == 3 else image[:1].expand(3, -1, -1)
    low, high = channels.min(), channels.max()
    scaled = (channels - low) / (high - low if bool(high > low) else 1.0)
    return (scaled * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()


def _classes(labels: Tensor) -> Pixels:
    count = int(labels.max()) + 1
    palette = _CLASSES
    if count > len(palette):
        turns = (0.382 * np.arange(count - len(palette))) % 1
        waves = 0.5 + 0.5 * np.cos(2 * np.pi * (turns[:, None] + np.array([0, 1 / 3, 2 / 3])))
        palette = np.concatenate([palette, (60 + 180 * waves).astype(np.uint8)])
    pixels: Pixels = palette[labels.clamp(min=0).numpy()]
    return pixels


def _mapped(values: Tensor, colours: NDArray[np.float64]) -> Pixels:
    position = np.clip(values.double().nan_to_num(0.5).numpy(), 0, 1) * (len(colours) - 1)
    steps = np.arange(len(colours))
    mixed = np.stack([np.interp(position, steps, colours[:, k]) for k in range(3)], -1)
    pixels: Pixels = mixed.round().astype(np.uint8)
    return pixels


def _where(mask: Tensor, yes: Pixels, no: Pixels) -> Pixels:
    return np.where(mask.numpy()[..., None], yes, no)
