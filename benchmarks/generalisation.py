"""Held-out calibration of tuned maps on real logits: ``python benchmarks/generalisation.py DATA [--splits 3]``.

DATA is any segcal dataset. Of its images 50 calibrate, 30 choose the strength, and the rest test, in several random
splits. Every map is tuned twice, by NLL and by ECE; fiducio's defaults are fitted to as many voxels. Values are means
over test images, then over splits; intervals are percentile bootstraps over the images of all splits.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

import segcal
from segcal.cases import CaseSet
from segcal.inference import bootstrap_interval
from segcal.study.tuning import Select, tune

METRICS = ("nll", "ece", "ace", "ba-ece", "brier", "flip")
TUNED = ("cms-ap", "cms-op")
CALIBRATE, VALIDATE = 50, 30
PEER_VOXELS = 400_000  # as many as segcal fits to


def fiducio_default(name: str, cases: CaseSet) -> Callable[[Tensor], Tensor]:
    """A map of fiducio, fitted with its defaults to a uniform sample of voxels."""
    import fiducio

    random = torch.Generator().manual_seed(0)
    drawn = []
    for case in cases:
        z, y = case.logits.movedim(1, -1)[case.valid], case.labels[case.valid]
        chosen = torch.randint(len(y), (PEER_VOXELS // len(cases),), generator=random)
        drawn.append((z[chosen], y[chosen]))
    logits, labels = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    device = "cuda" if torch.cuda.is_available() else "cpu"  # where there is one: a hundred seconds become a few
    calibrator = getattr(fiducio, name)(device=device).fit(logits.T[None].to(device), labels[None].to(device))
    return lambda z: calibrator.transform(z.to(device)).cpu().clamp(min=1e-38).log()


def methods(calibration: CaseSet, validation: CaseSet, peers: Sequence[str]) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {
        "uncalibrated": lambda: None,
        "ts": lambda: segcal.CALIBRATORS["ts"]().fit(calibration),
    }
    for method in TUNED:
        found[f"{method}, not tuned"] = lambda method=method: segcal.CALIBRATORS[method]().fit(calibration)
        selections: tuple[Select, ...] = ("nll", "ece")
        for select in selections:
            found[f"{method}, by {select}"] = lambda method=method, select=select: tune(
                method, calibration, validation, select=select
            )
    for name in peers:
        found[f"fiducio {name}"] = lambda name=name: fiducio_default(name, calibration)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--peers", nargs="*", default=["CMSAP", "CMSOP"], help="maps of fiducio")
    arguments = parser.parse_args()
    cases = segcal.open_cases(arguments.data)
    print(f"segcal {segcal.__version__}, torch {torch.__version__}, {len(cases)} images, {cases.num_classes} classes")
    if arguments.peers:
        print(f"fiducio {importlib.metadata.version('fiducio')}")
    values: dict[str, dict[str, list[float]]] = {}
    for seed in range(arguments.splits):
        parts = cases.split(CALIBRATE, VALIDATE, len(cases) - CALIBRATE - VALIDATE, seed=seed)
        for name, fit in methods(parts.calibration, parts.validation, arguments.peers).items():
            started = time.perf_counter()
            calibrator = fit()
            seconds = time.perf_counter() - started
            metrics = METRICS if calibrator is not None else METRICS[:-1]
            results = segcal.evaluate(parts.test, calibrator, metrics=metrics)
            print(f"split {seed}: {name} in {seconds:.1f} s", flush=True)
            for metric in metrics:
                own = [row.value for row in results.rows if row.metric == metric and row.case in parts.test.ids]
                values.setdefault(name, {}).setdefault(metric, []).extend(own)
    print(f"\n{'':22}" + "".join(f"{metric:>26}" for metric in METRICS))
    for name, measured in values.items():
        cells = []
        for metric in METRICS:
            if metric not in measured:
                cells.append(f"{'':>26}")
                continue
            low, high = bootstrap_interval(np.array(measured[metric]))
            cells.append(f"{np.nanmean(measured[metric]):8.4f} [{low:.4f}, {high:.4f}]".rjust(26))
        print(f"{name:22}" + "".join(cells))


if __name__ == "__main__":
    main()
