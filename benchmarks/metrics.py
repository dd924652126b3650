"""Metrics beside their peers in one run: ``python benchmarks/metrics.py [--images 50] [--rounds 10] [--exp]``.

Peers that are not installed are left out: ``pip install torchmetrics fiducio probmetrics torch-uncertainty``. Every
contender runs in a process of its own, where its peak memory is measured; rounds go over all contenders in turn, and a
time is the minimum over the rounds. Peers that want probabilities get them for free. ``--exp`` tries every float32.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import torch
from torch import Tensor

from segcal import metrics
from segcal.kernels.compiled import exp
from segcal.statistics import VoxelStatistics

CLASSES, HEIGHT, WIDTH, BINS = 19, 256, 512, 15
MEMORY_LIMIT = 64  # MB
FLOOR_LIMIT = 4
ALL = ("nll", "brier", "entropy", "ece", "mce", "ace", "cece", "sce", "ace-adaptive", "tace", "smece", "ece-wrong")
ALL += ("ece-right", "accuracy", "dsc", "miou", "confidence-balance", "free-energy-std")


def scores(images: int, kind: str = "smooth") -> tuple[Tensor, Tensor]:
    """Logits ``(N, C, H, W)`` with smooth regions and noise, as a trained network has, or of pure noise; and labels."""
    random = torch.Generator().manual_seed(0)
    logits = torch.empty(images, CLASSES, HEIGHT, WIDTH)
    labels = torch.empty(images, HEIGHT, WIDTH, dtype=torch.int64)
    for n in range(images):
        logits[n] = torch.randn(CLASSES, HEIGHT, WIDTH, generator=random).mul_(3 if kind == "noise" else 1)
        if kind == "smooth":
            coarse = torch.randn(1, CLASSES, HEIGHT // 16, WIDTH // 16, generator=random) * 10
            logits[n] += torch.nn.functional.interpolate(coarse, size=(HEIGHT, WIDTH), mode="bicubic")[0]
        confidence, winner = logits[n].softmax(0).max(0)
        right = torch.rand(HEIGHT, WIDTH, generator=random) < confidence - 0.05
        labels[n] = torch.where(right, winner, logits[n].scatter(0, winner[None], -torch.inf).argmax(0))
    return logits, labels


def run_segcal(logits: Tensor, labels: Tensor, classwise: bool = True) -> dict[str, float]:
    return all_metrics(VoxelStatistics(CLASSES, classwise=classwise).update(logits, labels))


def run_pass(logits: Tensor, labels: Tensor) -> dict[str, float]:
    VoxelStatistics(CLASSES).update(logits, labels)
    return {}


def run_segcal_by_image(logits: Tensor, labels: Tensor) -> dict[str, float]:
    total = VoxelStatistics(CLASSES)
    for image, label in zip(logits, labels, strict=True):
        total.update(image[None], label[None])
    return all_metrics(total)


def all_metrics(stats: VoxelStatistics) -> dict[str, float]:
    names = [name for name in ALL if stats.class_grid is not None or "classwise" not in metrics.METRICS[name].needs]
    values = {name: float(metrics.METRICS[name].function(stats)) for name in names}
    return values | {"ece-50": float(metrics.ece(stats, num_bins=50))}


def run_torchmetrics(logits: Tensor, labels: Tensor) -> dict[str, float]:
    from torchmetrics.classification import MulticlassCalibrationError

    metric = MulticlassCalibrationError(CLASSES, n_bins=BINS)
    metric.update(logits, labels)
    return {"ece": float(metric.compute())}


def run_torchmetrics_by_image(logits: Tensor, labels: Tensor) -> dict[str, float]:
    from torchmetrics.classification import MulticlassCalibrationError

    metric = MulticlassCalibrationError(CLASSES, n_bins=BINS)
    for image, label in zip(logits, labels, strict=True):
        metric.update(image[None], label[None])
    return {"ece": float(metric.compute())}


def run_fiducio(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    from fiducio import metrics as fiducio

    return {
        "ece": fiducio.expected_calibration_error(probabilities, labels, n_bins=BINS),
        "ace": fiducio.unweighted_calibration_error(probabilities, labels, n_bins=BINS),
        "nll": fiducio.negative_log_likelihood(probabilities, labels),
        "brier": fiducio.brier_score(probabilities, labels),
    }


def run_probmetrics(logits: Tensor, labels: Tensor) -> dict[str, float]:
    from probmetrics.metrics import Metrics

    flat = logits.movedim(1, -1).reshape(-1, CLASSES)
    chosen = Metrics.from_names(["logloss", "brier", "ece-15", "accuracy"])
    found = chosen.compute_all_from_labels_logits(labels.reshape(-1), flat)
    return {"nll": float(found["logloss"]), "brier": float(found["brier"]), "ece": float(found["ece-15"])}


def run_torch_uncertainty(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    from torch_uncertainty.metrics import BrierScore, CalibrationError, CategoricalNLL, ClasswiseCalibrationError

    found = {
        "ece": CalibrationError("multiclass", num_bins=BINS, num_classes=CLASSES),
        "cece": ClasswiseCalibrationError(CLASSES, num_bins=BINS),
        "nll": CategoricalNLL(),
        "brier": BrierScore(CLASSES),
    }
    for image, label in zip(probabilities, labels, strict=True):
        flat, y = image.movedim(0, -1).reshape(-1, CLASSES), label.reshape(-1)
        for metric in found.values():
            metric.update(flat, y)
    return {name: float(metric.compute()) for name, metric in found.items()}


def top_label_only(logits: Tensor, labels: Tensor) -> dict[str, float]:
    return run_segcal(logits, labels, classwise=False)


# name: (distribution, what it computes, run, wants probabilities, how much faster segcal's full pass should be)
CONTENDERS: dict[str, tuple[str, str, Callable[..., dict[str, float]], bool, float]] = {
    "segcal": ("segcal", "everything", run_segcal, False, 0),
    "segcal, pass alone": ("segcal", "statistics for everything", run_pass, False, 0),
    "segcal, images": ("segcal", "everything, image by image", run_segcal_by_image, False, 0),
    "segcal top-label": ("segcal", "top-label metrics", top_label_only, False, 0),
    "torchmetrics": ("torchmetrics", "ECE", run_torchmetrics, False, 4),
    "torchmetrics, images": ("torchmetrics", "ECE, image by image", run_torchmetrics_by_image, False, 0),
    "fiducio": ("fiducio", "ECE, ACE, NLL, Brier", run_fiducio, True, 10),
    "probmetrics": ("probmetrics", "log-loss, Brier, ECE, accuracy", run_probmetrics, False, 18),
    "torch-uncertainty": ("torch-uncertainty", "ECE, classwise ECE, NLL, Brier", run_torch_uncertainty, True, 60),
}


def resident(field: str) -> float:
    """VmRSS or VmHWM of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def serve(name: str, images: int, kind: str) -> None:
    """Run one contender once for every line on stdin; report seconds, extra MB at the peak, and values as JSON."""
    warnings.simplefilter("ignore")
    _, _, run, wants_probabilities, _ = CONTENDERS[name]
    logits, labels = scores(images, kind)
    data = logits.softmax(1) if wants_probabilities else logits
    del logits
    run(data[:2], labels[:2])  # compile, import, warm up
    for _ in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")  # start a new peak
        before, start = resident("VmRSS"), time.perf_counter()
        values = run(data, labels)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "extra": resident("VmHWM") - before, "values": values}), flush=True)


class Contender:
    """A process that runs one contender on request and remembers its best time and worst memory."""

    def __init__(self, name: str, images: int, kind: str) -> None:
        command = [sys.executable, __file__, "--serve", name, "--images", str(images), "--kind", kind]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds, self.extra, self.values = math.inf, 0.0, dict[str, float]()

    def go(self) -> None:
        """Run once."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        line = ""
        while not line.startswith("{"):
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit(f"{self.process.args} ended")
        found = json.loads(line)
        self.seconds, self.extra = min(self.seconds, found["seconds"]), max(self.extra, found["extra"])
        self.values = found["values"]

    def end(self) -> None:
        """Let the process go."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(names: list[str], images: int, rounds: int, kind: str) -> dict[str, Contender]:
    contenders = {}
    for name in names:
        contenders[name] = Contender(name, images, kind)
        contenders[name].go()  # one after the other: making the data takes a while
    for _ in range(rounds):
        for contender in contenders.values():
            if contender.seconds < 8:  # slow ones are measured once
                contender.go()
    for contender in contenders.values():
        contender.end()
    return contenders


@numba.njit(nogil=True, fastmath=True)
def _read(x):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for i in range(x.size):
        total += x[i]
    return total


@numba.njit(nogil=True, fastmath={"contract"})
def _many_exps(x, y, repeats):  # type: ignore[no-untyped-def]
    for _ in range(repeats):
        for i in range(x.size):
            y[i] = exp(x[i])


def rate(work: Callable[[int], object], amount: float, rounds: int = 100) -> float:
    """Amount per second with one call of ``work`` on each of two threads."""
    threads = torch.get_num_threads()
    work(0)
    best = math.inf
    for _ in range(rounds):
        running = [threading.Thread(target=work, args=(turn,)) for turn in range(threads)]
        start = time.perf_counter()
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        best = min(best, time.perf_counter() - start)
    return amount * threads / best


def floor(images: int) -> float:
    """Seconds to read the logits once and to take one exp of each, at the rates this machine is measured to have.

    The exp is numpy's, the fastest of the libraries' (in cache, all threads); segcal's own, which keeps float32
    precision without handling overflow, is faster still and printed beside it.
    """
    memory = [np.ones(2**26, np.float32) for _ in range(torch.get_num_threads())]
    read = rate(lambda turn: _read(memory[turn]), memory[0].nbytes)
    block = [(-np.linspace(0, 20, 2**15, dtype=np.float32), np.empty(2**15, np.float32)) for _ in memory]
    library = rate(lambda turn: [np.exp(*block[turn]) for _ in range(1000)], 1000 * 2**15)
    own = rate(lambda turn: _many_exps(*block[turn], 1000), 1000 * 2**15)
    logits = images * CLASSES * HEIGHT * WIDTH
    seconds = logits * 4 / read + logits / library
    rates = f"read {read / 1e9:.1f} GB/s, exp {library / 1e9:.2f} G/s (segcal's own {own / 1e9:.2f})"
    print(f"floor: {rates} -> {seconds:.4f} s")
    return seconds


def many_voxels(count: int = 40_000_000, chunk: int = 4_000_000) -> None:
    """ECE of 40 million voxels whose truth is known, beside torchmetrics where it is installed."""
    stats, gaps = VoxelStatistics(2, (BINS,)), np.zeros(BINS)
    try:
        from torchmetrics.classification import MulticlassCalibrationError

        peer = MulticlassCalibrationError(2, n_bins=BINS, validate_args=False)
    except ImportError:
        peer = None
    for seed in range(count // chunk):
        random = torch.Generator().manual_seed(seed)
        logits = torch.randn(1, 2, chunk, generator=random) * 2
        confidence, winner = torch.softmax(logits[0].double(), 0).max(0)
        right = torch.rand(chunk, generator=random, dtype=torch.float64) < confidence - 0.05
        labels = torch.where(right, winner, 1 - winner)[None]
        stats.update(logits, labels)
        if peer is not None:
            peer.update(logits.softmax(1), labels)
        bins = (confidence * BINS).ceil().long() - 1
        gaps += torch.bincount(bins, weights=confidence - right.double(), minlength=BINS).numpy()
    truth, value = np.abs(gaps).sum() / count, metrics.ece(stats)
    print(f"\nECE of {count:,} voxels: truth {truth:.12f}, segcal {value:.12f} (off by {abs(truth - value):.1e})")
    if peer is not None:
        theirs = float(peer.compute())
        print(f"  torchmetrics {theirs:.12f} (off by {abs(truth - theirs):.1e})")


@numba.njit(nogil=True, fastmath={"contract"})
def _worst_exp(first, last):  # type: ignore[no-untyped-def]
    worst, bias = 0.0, 0.0
    for bits in range(first, last):
        x = np.uint32(bits).view(np.float32)
        truth = math.exp(np.float64(x))
        error = (np.float64(exp(x)) - truth) / truth
        worst, bias = max(worst, abs(error)), bias + error
    return worst, bias / (last - first)


def every_exp() -> None:
    first, last = (int(np.float32(x).view(np.uint32)) for x in (-0.0, -87.0))
    worst, bias = _worst_exp(first, last + 1)
    print(f"\nexp of all {last - first + 1:,} float32 in [-87, 0]: relative error at most {worst:.2e}, mean {bias:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--exp", action="store_true")
    parser.add_argument("--kind", choices=("smooth", "noise"), default="smooth")
    parser.add_argument("--serve")
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.images, options.kind)

    print(f"{platform.machine()}, {torch.get_num_threads()} threads, Python {platform.python_version()}")
    present = []
    for name, (distribution, *_) in CONTENDERS.items():
        try:
            print(f"{name}: {importlib.metadata.version(distribution)}")
            present.append(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: not installed")
    print(f"torch {torch.__version__}, numpy {np.__version__}, numba {numba.__version__}")
    print(f"\n{options.images} x {CLASSES} x {HEIGHT} x {WIDTH} float32, {options.kind}")
    lowest = floor(options.images)
    best = measure(present, options.images, options.rounds, options.kind)

    ours, top = best["segcal"], best["segcal top-label"]
    print(f"{'':22}{'seconds':>9}{'x segcal':>10}{'x top':>8}{'goal':>6}{'extra MB':>10}  what")
    for name, one in best.items():
        _, what, _, _, goal = CONTENDERS[name]
        ratios = f"{one.seconds / ours.seconds:10.1f}{one.seconds / top.seconds:8.1f}"
        print(f"{name:22}{one.seconds:9.3f}{ratios}{f'{goal:g}x' if goal else '':>6}{one.extra:10.0f}  {what}")
    print("goal for the top-label pass: 8x torchmetrics")
    alone = best["segcal, pass alone"]
    print(f"pass / floor = {alone.seconds / lowest:.1f} (goal {FLOOR_LIMIT}), top-label {top.seconds / lowest:.1f}")
    fewer = max(1, options.images // 5)
    few = measure(["segcal"], fewer, 1, options.kind)["segcal"]
    memory = f"{few.extra:.0f} MB for {fewer} images, {ours.extra:.0f} MB for {options.images}"
    print(f"extra memory: {memory} (goal {MEMORY_LIMIT})")
    print("values: " + ", ".join(f"{k} {v:.6f}" for k, v in ours.values.items()))
    for name, one in best.items():
        if not name.startswith("segcal"):
            found = ", ".join(f"{k} {v:.6f} ({v - ours.values[k]:+.1e})" for k, v in one.values.items())
            print(f"  {name}: {found}")
    many_voxels()
    if options.exp:
        every_exp()
    return None


if __name__ == "__main__":
    main()
