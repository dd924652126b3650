"""Commands from files beside the reading alone: ``python benchmarks/gpu_files.py [--images 60] [--device cuda]``.

Cases of 19 x 512 x 1024 in float16 npy, 20 MB each, which the machine's memory holds: the disk is as fast as it can be.
Seconds of a second run, when all is compiled; milliseconds a case; and how many GB of scores go through in a second.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import segcal
from segcal.cases import CaseSet
from segcal.synthetic import SpatialTemperature, scenes

CLASSES, SIZE = 19, (512, 1024)
# Scenes that are made; the others are these with other noise.
MADE = 4
FITS = ("ts", "cms-op", "isotonic")
REGIONS = ("everything", "boundary")


def write(folder: Path, images: int) -> None:
    some = scenes(MADE, size=SIZE, num_classes=CLASSES, plant=[SpatialTemperature()])
    random = np.random.default_rng(0)
    for name in ("logits", "labels"):
        (folder / name).mkdir()
    for n in range(images):
        case = some[n % MADE]
        noise = 0.2 * random.standard_normal(case.logits.shape[1:], np.float32)
        np.save(folder / f"logits/{n:04}.npy", (case.logits[0].numpy() + noise).astype(np.float16))
        np.save(folder / f"labels/{n:04}.npy", case.labels[0].numpy().astype(np.uint8))


def read(cases: CaseSet) -> float:
    """Every case once, as commands read them."""
    return sum(float(case.logits.flatten()[0]) + int(case.labels.flatten()[0]) for case in cases)


def work(folder: Path, device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    cases = segcal.open_cases(folder)
    yield "reading", lambda: read(cases)
    yield f"reading, to {device}", lambda: read(cases.on(torch.device(device)))
    yield "evaluate nll, ece", lambda: segcal.evaluate(cases, metrics=("nll", "ece"), device=device)
    yield "evaluate", lambda: segcal.evaluate(cases, regions=REGIONS, device=device)
    fitted = {}
    for method in FITS:
        calibrator = fitted[method] = segcal.CALIBRATORS[method]()
        yield f"fit {method}", lambda c=calibrator: c.fit(cases, device=device)
        yield f"evaluate {method}", lambda c=calibrator: segcal.evaluate(cases, c, regions=REGIONS, device=device)
    turns = iter(range(2))
    yield f"apply {FITS[1]}", lambda: segcal.apply(fitted[FITS[1]], cases, folder / f"out{next(turns)}", device=device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    where = torch.cuda.get_device_name() if given.device.startswith("cuda") else f"{torch.get_num_threads()} threads"
    print(f"segcal {segcal.__version__}, torch {torch.__version__}, {where}")
    size = given.images * CLASSES * SIZE[0] * SIZE[1] * 2 / 1e9
    print(f"{given.images} cases of {CLASSES} x {SIZE[0]} x {SIZE[1]}, {size:.2f} GB of scores")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), given.images)
        for name, run in work(Path(folder), given.device):
            run()
            started = time.perf_counter()
            run()
            took = time.perf_counter() - started
            print(f"  {name:24} {took:8.2f} s {1e3 * took / given.images:9.1f} ms {size / took:8.2f} GB/s", flush=True)


if __name__ == "__main__":
    main()
