"""Distance maps and surface metrics beside their peers in one run: ``python benchmarks/surfaces.py``.

Peers that are not installed are left out: ``pip install edt monai surface-distance``. Every round runs all of a table's
rows in turn; times are the minimum over the rounds, and the ratio is a row's time over that of segcal's first row.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import time
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType

import numpy as np
import torch
from scipy.ndimage import distance_transform_edt, gaussian_filter
from torch import Tensor

from segcal.metrics.surfaces import asd, hd95, surface_dice, surface_distances
from segcal.regions import CaseRegions
from segcal.regions.boundary import label_boundary

SETTINGS = {"2D 512 x 1024, 19 classes": ((512, 1024), 19), "3D 128^3, 4 classes": ((128, 128, 128), 4)}
TOLERANCE = 2.0
ROUNDS = 7

Runs = dict[str, Callable[[], object]]


def scene(shape: tuple[int, ...], classes: int) -> tuple[Tensor, Tensor]:
    """Labels and a prediction that errs along the surfaces, ``(1, *spatial)``."""
    random = np.random.default_rng(0)
    smooth = [gaussian_filter(random.normal(size=shape), sigma) for sigma in (16, 4)]
    truth, error = (field / field.std() for field in smooth)
    edges = np.quantile(truth, np.linspace(0, 1, classes + 1)[1:-1])
    labels, prediction = np.digitize(truth, edges), np.digitize(truth + 0.1 * error, edges)
    return torch.from_numpy(prediction).unsqueeze(0), torch.from_numpy(labels).unsqueeze(0)


def peer(module: str, distribution: str) -> ModuleType | None:
    try:
        found = importlib.import_module(module)
    except ImportError:
        print(f"{distribution}: not installed")
        return None
    print(f"{distribution} {importlib.metadata.version(distribution)}")
    return found


def table(title: str, runs: Runs) -> None:
    times = {name: float("inf") for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name] = min(times[name], time.perf_counter() - start)
    print(f"\n{title}")
    for name, seconds in times.items():
        print(f"  {name:<44}{1000 * seconds:>9.1f} ms  {seconds / times['segcal']:>6.2f}x")


def segcal_regions(labels: Tensor) -> object:
    case = CaseRegions(labels)
    return case.mask("all"), case.mask("boundary"), case.mask("interior"), case.bands, case.distance


def segcal_metrics(prediction: Tensor, labels: Tensor, classes: int) -> list[Tensor]:
    distances = surface_distances(prediction, labels, classes)
    return [hd95(distances), asd(distances), surface_dice(distances, tolerance=TOLERANCE)]


def monai_metrics(monai: ModuleType, one_hot: list[Tensor]) -> list[Tensor]:
    return [
        monai.compute_hausdorff_distance(*one_hot, include_background=True, percentile=95),
        monai.compute_average_surface_distance(*one_hot, include_background=True, symmetric=True),
        monai.compute_surface_dice(*one_hot, [TOLERANCE] * one_hot[0].shape[1], include_background=True),
    ]


def deepmind_metrics(deepmind: ModuleType, one_hot: list[Tensor]) -> list[object]:
    results = []
    for guess, truth in zip(*(x[0].numpy() for x in one_hot), strict=True):
        distances = deepmind.compute_surface_distances(truth, guess, [1.0] * truth.ndim)
        results.append(deepmind.compute_robust_hausdorff(distances, 95))
        results.append(deepmind.compute_average_surface_distance(distances))
        results.append(deepmind.compute_surface_dice_at_tolerance(distances, TOLERANCE))
    return results


def main() -> None:
    warnings.simplefilter("ignore")
    np.Inf, np.NaN = np.inf, np.nan  # type: ignore[attr-defined]  # surface-distance 0.1 was written for numpy 1.
    for distribution in ("segcal", "numpy", "scipy", "torch"):
        print(f"{distribution} {importlib.metadata.version(distribution)}")
    edt, monai = peer("edt", "edt"), peer("monai.metrics", "monai")
    deepmind = peer("surface_distance", "surface-distance")
    torch.set_num_threads(1)  # As numpy, scipy and the peers have, so that a busy machine disturbs all alike.
    for title, (shape, classes) in SETTINGS.items():
        prediction, labels = scene(shape, classes)
        inside = ~label_boundary(labels, torch.ones_like(labels, dtype=torch.bool))[0].numpy()
        maps: Runs = {
            "segcal": lambda labels=labels: CaseRegions(labels).distance,
            "segcal, distance, masks, bands, totals": partial(segcal_regions, labels),
            "scipy, boundary given": partial(distance_transform_edt, inside),
        }
        if edt is not None:
            maps["edt, boundary given, 1 thread"] = partial(edt.edt, inside, parallel=1)
        table(f"Distance map, {title}", maps)

        one_hot = [
            torch.nn.functional.one_hot(x, classes).movedim(-1, 1).bool().contiguous() for x in (prediction, labels)
        ]
        metrics: Runs = {"segcal": partial(segcal_metrics, prediction, labels, classes)}
        if monai is not None:
            metrics["MONAI, one-hot given"] = partial(monai_metrics, monai, one_hot)
        if deepmind is not None:
            metrics["DeepMind surface-distance, one-hot given"] = partial(deepmind_metrics, deepmind, one_hot)
        table(f"HD95, ASD and surface Dice of all classes, {title}", metrics)
        if monai is not None:
            both = zip(segcal_metrics(prediction, labels, classes), monai_metrics(monai, one_hot), strict=True)
            print(f"  largest relative difference to MONAI: {max(float((a / b - 1).abs().max()) for a, b in both):.1e}")


if __name__ == "__main__":
    main()
