"""``trust`` on scenes: ``python benchmarks/trust_scenes.py [--images 50]``.

The true KL divergence, from the known posterior to what a calibrator says, where the fault is spatial and where it is
class-conditional: 24 scenes to fit to, 24 others to measure on, three pairs of seeds; means over all test scenes, with
95% bootstrap intervals of the difference from ``trust``, paired by scene. Then what a fit from files takes, and what
applying takes, for images of 19 x 256 x 512.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import segcal
from segcal.cases import CaseSet
from segcal.cases.calibrated import case_scores
from segcal.inference import bootstrap_interval
from segcal.synthetic import ClassConditional, SpatialTemperature, scenes, true_calibration_error

FAULTS = {
    "spatial": [SpatialTemperature()],
    "class-conditional": [ClassConditional([3.0, 1.0, 2.0, 1.2, 2.5, 1.6])],
}
METHODS = ("trust", "ts", "isotonic", "lts-ti", "cms-ap", "cms-op")
SEEDS, SCENES, SIZE = (61, 62, 63), 24, (128, 160)
CLASSES, IMAGE = 19, (256, 512)


def true_kl(cases: CaseSet, calibrator: object) -> list[float]:
    """Of every scene."""
    found = []
    for case in cases:
        posterior = case.posterior
        assert posterior is not None
        found.append(float(true_calibration_error(case_scores(case, calibrator), posterior).kl))  # type: ignore[arg-type]
    return found


def known_truth() -> None:
    for fault, plant in FAULTS.items():
        kl: dict[str, list[float]] = {method: [] for method in METHODS}
        for seed in SEEDS:
            fit, test = (scenes(SCENES, size=SIZE, plant=plant, coherence=0, seed=s) for s in (seed, seed + 1000))
            for method in METHODS:
                kl[method] += true_kl(test, segcal.CALIBRATORS[method]().fit(fit, seed=seed))
        print(f"\n{fault} fault: true KL in nats, {len(kl['trust'])} scenes")
        for method, values in kl.items():
            low, high = bootstrap_interval(np.array(values) - np.array(kl["trust"]))
            beside = "" if method == "trust" else f"   minus trust [{low:+.5f}, {high:+.5f}]"
            print(f"  {method:10} {np.mean(values):.5f}{beside}")


def resident(name: str) -> float:
    """VmRSS or VmHWM of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def cost(images: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("logits", "labels"):
            (Path(folder) / kind).mkdir()
        for case in scenes(images, size=IMAGE, num_classes=CLASSES, plant=[SpatialTemperature()]):
            np.save(Path(folder) / f"logits/{case.id}.npy", case.logits[0].numpy())
            np.save(Path(folder) / f"labels/{case.id}.npy", case.labels[0].numpy().astype(np.uint8))
        print(f"\n{torch.get_num_threads()} threads, images of {CLASSES} x {IMAGE[0]} x {IMAGE[1]} from files")
        cases = segcal.open_cases(folder)
        segcal.CALIBRATORS["trust"]().fit(cases.select(cases.ids[:8]))  # compiles
        for count in (images // 4, images):
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
            before, started = resident("VmRSS"), time.perf_counter()
            calibrator = segcal.CALIBRATORS["trust"]().fit(cases.select(cases.ids[:count]))
            seconds, memory = time.perf_counter() - started, resident("VmHWM") - before
            print(f"  fit to {count} images: {seconds:.0f} s, {memory:.0f} MB more than before")
        print("  " + "\n  ".join(calibrator.fit_report.notes if calibrator.fit_report else ()))
        z = cases[0].logits
        for threads in (1, torch.get_num_threads()):
            torch.set_num_threads(threads)
            times = []
            for _ in range(7):
                started = time.perf_counter()
                calibrator(z)
                times.append(time.perf_counter() - started)
            print(f"  apply, {threads} threads: {z[0, 0].numel() / np.median(times) / 1e6:.2f} megapixels per second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50)
    arguments = parser.parse_args()
    print(f"segcal {segcal.__version__}, torch {torch.__version__}")
    known_truth()
    cost(arguments.images)


if __name__ == "__main__":
    main()
