"""Fitting and applying calibrators beside their peers in one run: ``python benchmarks/calibrators.py [--images 8]``.

Every contender runs in a process of its own, on the same scenes of 19 classes of 256 x 512, held in memory; segcal also
from files. Times are of one fit (below a second the best of five), peers with their defaults unless the name says more.
NLLs are evaluated by one float64 function. Absent peers are left out: ``pip install fiducio probmetrics``.
``--many`` is for ``ts``, for applying and for memory, which do not take peers' hundreds of steps: the other maps of
fiducio are fitted by two steps there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import segcal
from segcal.synthetic import ClassAffine, ClassConditional, scenes

CLASSES, HEIGHT, WIDTH = 19, 256, 512
FIDUCIO = {"ts": "TS", "ms": "MS", "dc": "DC", "cms-ap": "CMSAP", "cms-op": "CMSOP"}
# Goals: how many times faster than the best peer that reaches the optimum (ts), or than fiducio's defaults.
FIT_GOALS = {"ts": 40, "ms": 20, "dc": 20, "cms-ap": 20, "cms-op": 20}
APPLY_GOALS = {"ts": 5, "cms-ap": 15, "cms-op": 10}
MEMORY_GOAL = 10
OPTIMAL = 1e-6

Predict = Callable[[Tensor], Tensor]


def write_scene(folder: str, index: int) -> None:
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    plant = [
        ClassConditional(list(random.uniform(1.2, 3, CLASSES))),
        ClassAffine(list(random.uniform(0.8, 1.25, CLASSES)), list(random.normal(0, 0.5, CLASSES))),
    ]
    case = scenes(index + 1, size=(HEIGHT, WIDTH), num_classes=CLASSES, plant=plant)[index]
    for kind, values in (("logits", case.logits[0].numpy()), ("labels", case.labels[0].numpy().astype(np.uint8))):
        np.save(Path(folder) / kind / f"case{index:03d}.npy", values)


def read(folder: str, images: int) -> tuple[Tensor, Tensor]:
    logits = torch.empty(images, CLASSES, HEIGHT, WIDTH)
    labels = torch.empty(images, HEIGHT, WIDTH, dtype=torch.int64)
    for index in range(images):
        logits[index] = torch.from_numpy(np.load(Path(folder) / "logits" / f"case{index:03d}.npy"))
        labels[index] = torch.from_numpy(np.load(Path(folder) / "labels" / f"case{index:03d}.npy"))
    return logits, labels


def nll_of(predict: Predict, logits: Tensor, labels: Tensor) -> float:
    """Mean NLL of log-probabilities, image by image, summed in float64."""
    total = 0.0
    for z, y in zip(logits, labels, strict=True):
        total += float(torch.nn.functional.nll_loss(predict(z[None]).double(), y[None], reduction="sum"))
    return total / labels.numel()


def fit_segcal(method: str, logits: Tensor, labels: Tensor, **options: Any) -> Predict:
    return segcal.CALIBRATORS[method]().fit(logits, labels, voxels="all")


def fit_segcal_sample(method: str, logits: Tensor, labels: Tensor, **options: Any) -> Predict:
    return segcal.CALIBRATORS[method]().fit(logits, labels)


def fit_segcal_files(method: str, logits: Tensor, labels: Tensor, folder: str, images: int) -> Predict:
    return segcal.CALIBRATORS[method]().fit(segcal.open_cases(folder)[:images], voxels="all")


def fit_fiducio(method: str, logits: Tensor, labels: Tensor, **options: Any) -> Predict:
    import fiducio

    calibrator = getattr(fiducio, FIDUCIO[method])().fit(logits, labels)
    return calibrator.transform


def fit_fiducio_lbfgs(method: str, logits: Tensor, labels: Tensor, **options: Any) -> Predict:
    import fiducio

    calibrator = getattr(fiducio, FIDUCIO[method])(optimizer="lbfgs").fit(logits, labels)
    return calibrator.transform


def fit_fiducio_briefly(method: str, logits: Tensor, labels: Tensor, **options: Any) -> Predict:
    import fiducio

    calibrator = getattr(fiducio, FIDUCIO[method])(max_iter=2).fit(logits, labels)
    return calibrator.transform


def fit_probmetrics(method: str, logits: Tensor, labels: Tensor, **options: Any) -> Predict:
    from probmetrics.calibrators.temperature_scaling import TemperatureScalingCalibrator
    from probmetrics.distributions import CategoricalLogits

    flat = logits.flatten(2).transpose(1, 2).reshape(-1, CLASSES)
    calibrator = TemperatureScalingCalibrator(opt="bisection")
    calibrator.fit_torch(CategoricalLogits(flat), labels.flatten())

    def predict(z: Tensor) -> Tensor:
        rows = z.flatten(2).transpose(1, 2).reshape(-1, CLASSES)
        found = calibrator.predict_proba_torch(CategoricalLogits(rows)).get_logits().log_softmax(1)
        return found.view(len(z), -1, CLASSES).transpose(1, 2).reshape(z.shape)

    return predict


FITS: dict[str, tuple[str, Callable[..., Predict]]] = {
    "segcal": ("segcal", fit_segcal),
    "segcal, a sample": ("segcal", fit_segcal_sample),
    "segcal, from files": ("segcal", fit_segcal_files),
    "fiducio": ("fiducio", fit_fiducio),
    "fiducio, LBFGS": ("fiducio", fit_fiducio_lbfgs),
    "fiducio, two steps": ("fiducio", fit_fiducio_briefly),
    "probmetrics, bisection": ("probmetrics", fit_probmetrics),
}


def resident(field: str) -> float:
    """VmRSS or VmHWM of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


class Found(NamedTuple):
    """What a contender did."""

    seconds: float
    extra: float  # MB at the peak of the first fit
    nll: float
    apply: float  # seconds for all images at once, the best of five
    by_image: float  # seconds for one image after the other
    flips: int


def contend(name: str, method: str, images: int, folder: str) -> None:
    """Run one contender and print what it did as JSON."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    _, fit = FITS[name]
    logits, labels = read(folder, images)
    options = {"folder": folder, "images": images}
    if name.startswith("segcal"):  # import, warm up, compile: so many voxels that they are read from a stream
        segcal.CALIBRATORS[method]().fit(logits[:4], labels[:4], voxels="all")(logits[:1])
    if "files" in name:
        del logits
        logits = torch.empty(0)
    rounds, best, extra = 0, float("inf"), 0.0
    while rounds < 1 or (best < 1 and rounds < 5):
        rounds += 1
        Path("/proc/self/clear_refs").write_text("5")  # start a new peak
        before, start = resident("VmRSS"), time.perf_counter()
        predict = fit(method, logits, labels, **options)
        best = min(best, time.perf_counter() - start)
        if rounds == 1:  # as of those that take long enough for one round
            extra = resident("VmHWM") - before
    if not len(logits):
        logits, labels = read(folder, images)
    predict(logits[:1])
    applied = by_image = float("inf")
    with torch.no_grad():
        for _ in range(5):
            start = time.perf_counter()
            predict(logits)
            middle = time.perf_counter()
            for image in logits:
                predict(image[None])
            applied, by_image = min(applied, middle - start), min(by_image, time.perf_counter() - middle)
        flips = sum(int((predict(z[None]).argmax(1) != z[None].argmax(1)).sum()) for z in logits)
        nll = nll_of(predict if "fiducio" not in name else lambda z: predict(z).clamp(min=1e-38).log(), logits, labels)
    print(json.dumps(Found(best, extra, nll, applied, by_image, flips)._asdict()), flush=True)


def run(name: str, method: str, images: int, folder: str) -> Found | None:
    try:
        importlib.metadata.version(FITS[name][0]) if FITS[name][0] != "segcal" else None
    except importlib.metadata.PackageNotFoundError:
        return None
    command = [sys.executable, __file__, "--contend", name, method, str(images), folder]
    output = subprocess.run(command, capture_output=True, text=True, check=False)
    if output.returncode:
        print(f"{name} {method} failed: {output.stderr.strip().splitlines()[-1:]}")
        return None
    return Found(**json.loads(output.stdout.strip().splitlines()[-1]))


def show(method: str, images: int, names: list[str], folder: str) -> dict[str, Found]:
    """Run the contenders of one method one after the other, and print them as a table."""
    print(f"\n{method}, {images} images, {images * HEIGHT * WIDTH:,} voxels", flush=True)
    print(f"{'':24}{'fit':>9}{'extra memory':>15}{'NLL':>13}{'apply':>10}{'by image':>10}{'labels changed':>16}")
    found = {}
    for name in names:
        result = run(name, method, images, folder)
        if result is not None:
            found[name] = result
            seconds = f"{result.seconds:8.2f}s{result.extra:12.0f} MB"
            print(
                f"{name:24}{seconds}{result.nll:13.8f}{result.apply:9.3f}s{result.by_image:9.3f}s{result.flips:16,}",
                flush=True,
            )
    return found


def verdict(what: str, ratio: float, goal: float) -> bool:
    print(f"  {what}: {ratio:.1f}x (goal {goal:g}x){'' if ratio >= goal else '  MISSED'}", flush=True)
    return ratio >= goal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--many", type=int, default=8, help="images for ts, applying and memory")
    parser.add_argument("--methods", default=",".join(FIDUCIO))
    parser.add_argument("--data", help="folder for the scenes, kept for the next run")
    parser.add_argument("--contend", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contend:
        name, method, images, folder = arguments.contend
        contend(name, method, int(images), folder)
        return
    packages = {package: importlib.metadata.version(package) for package in ("torch", "numba", "numpy", "scipy")}
    for package in ("fiducio", "probmetrics"):
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            packages[package] = "absent"
    print(f"segcal {segcal.__version__}, " + ", ".join(f"{name} {version}" for name, version in packages.items()))
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.data or temporary
        for kind in ("logits", "labels"):
            (Path(folder) / kind).mkdir(parents=True, exist_ok=True)
        count = max(arguments.images, arguments.many)
        missing = [n for n in range(count) if not (Path(folder) / "labels" / f"case{n:03d}.npy").exists()]
        with ProcessPoolExecutor() as pool:
            list(pool.map(write_scene, [folder] * len(missing), missing))
        fine = [compare(method, arguments, folder) for method in arguments.methods.split(",")]
    raise SystemExit(0 if all(fine) else "a goal is missed")


def compare(method: str, arguments: argparse.Namespace, folder: str) -> bool:
    if method == "ts":
        names = ["segcal", "segcal, from files", "fiducio, LBFGS", "probmetrics, bisection"]
        fitted = many = show(method, arguments.many, names, folder)
        best = fitted["segcal"].nll + OPTIMAL
        peers = [own for name, own in fitted.items() if "segcal" not in name and own.nll <= best]
    else:
        fitted = show(method, arguments.images, ["segcal", "segcal, a sample", "segcal, from files", "fiducio"], folder)
        many = show(method, arguments.many, ["segcal, from files", "fiducio, two steps"], folder)
        peers = [own for name, own in fitted.items() if name == "fiducio"]
    applied = [own for name, own in many.items() if "segcal" not in name]
    if not peers or not applied:
        return True
    ours, streamed = fitted["segcal"], many["segcal, from files"]
    fine = verdict("fit", min(peer.seconds for peer in peers) / ours.seconds, FIT_GOALS[method])
    fine &= method == "ts" or ours.nll < peers[0].nll
    if method in APPLY_GOALS:
        own_time = min(own.apply for name, own in many.items() if "segcal" in name)
        fine &= verdict("apply", min(peer.apply for peer in applied) / own_time, APPLY_GOALS[method])
        fine &= ours.flips == streamed.flips == 0
    fine &= verdict("memory, from files", min(own.extra for own in applied) / max(streamed.extra, 1), MEMORY_GOAL)
    return fine


if __name__ == "__main__":
    main()
