"""The speed of local temperature scaling: ``python benchmarks/local.py [--threads 2] [--cases 50]``.

Trains ``lts`` on cases of 19 x 256 x 512 read from disk (goal: 40 epochs of 50 cases in 300 s and 2 GB on 2 cores), and
applies it with one thread (goal: 1 megapixel per second), the time of the convolution alone printed beside it, which is
what nothing with this network can beat. ``benchmarks/spatial.py`` says what is recovered.
"""

from __future__ import annotations

import argparse
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import segcal
from segcal.calibrators import LocalTemperatureScaling, TranslationInvariantLocalTemperature

CLASSES = 19


def write_cases(folder: Path, count: int, height: int, width: int) -> None:
    """Smooth random logits that are too sure where their classes meet, and labels drawn from the truth."""
    for part in ("logits", "labels"):
        (folder / part).mkdir()
    random = torch.Generator().manual_seed(0)
    for index in range(count):
        coarse = 6 * torch.randn(1, CLASSES, height // 16, width // 16, generator=random)
        z = F.interpolate(coarse, size=(height, width), mode="bicubic", align_corners=False)
        first, second = z.topk(2, 1).values.unbind(1)
        temperature = 1 + 2 * torch.exp(-(first - second) / 2)[:, None]
        labels = (z - torch.empty_like(z).exponential_(generator=random).log()).argmax(1)
        np.save(folder / "logits" / f"{index:03d}.npy", (temperature * z)[0].numpy())
        np.save(folder / "labels" / f"{index:03d}.npy", labels[0].to(torch.uint8).numpy())


def best(work: Callable[[], object], rounds: int = 7) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def speed(options: argparse.Namespace) -> None:
    shape = f"{CLASSES} x {options.height} x {options.width}"
    with tempfile.TemporaryDirectory() as name:
        write_cases(Path(name), options.cases, options.height, options.width)
        cases = segcal.open_cases(name)
        before = memory()
        torch.set_num_threads(options.threads)
        calibrator = LocalTemperatureScaling(epochs=options.epochs).fit(cases)
        report = calibrator.fit_report
        assert report is not None
        print(f"training lts on {options.cases} cases of {shape}, {options.epochs} epochs, {options.threads} threads:")
        print(f"  {report.seconds:.0f} s (goal 300), {report.iterations} steps, {report.voxels_used:,} voxels in crops")
        print(f"  peak memory {memory():.2f} GB (goal 2), {before:.2f} GB before")
        print(f"  NLL {report.nll_before:.4f} -> {report.nll_after:.4f}; " + "; ".join(report.notes))
        torch.set_num_threads(1)
        logits = cases[0].logits
    invariant = TranslationInvariantLocalTemperature()
    invariant.num_classes, invariant.network = CLASSES, calibrator.network
    pixels = options.height * options.width / 1e6
    network = calibrator.network
    padded = F.pad(logits, (4,) * 4, mode="reflect")
    last = padded.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        print(f"applying to {shape}, one thread, megapixels per second (goal 1), and times the floor:")
        floor = best(lambda: F.conv2d(last, network.weight, network.bias, dilation=2))
        for label, work in (
            ("lts", lambda: calibrator(logits)),
            ("lts-ti", lambda: invariant(logits)),
            ("temperatures of lts", lambda: calibrator.temperature_map(logits)),
            ("convolution alone, channels first", lambda: F.conv2d(padded, network.weight, network.bias, dilation=2)),
            ("log_softmax alone", lambda: logits.log_softmax(1)),
        ):
            seconds = best(work)
            print(f"  {label:36s} {pixels / seconds:6.2f}  {seconds / floor:5.2f}")
        print(f"  {'convolution alone: the floor':36s} {pixels / floor:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="of the training (2)")
    parser.add_argument("--cases", type=int, default=50, help="to train on (50)")
    parser.add_argument("--epochs", type=int, default=40, help="of the training at most (40)")
    parser.add_argument("--height", type=int, default=256, help="of a case (256)")
    parser.add_argument("--width", type=int, default=512, help="of a case (512)")
    options = parser.parse_args()
    print(f"segcal {segcal.__version__}, torch {torch.__version__}, {platform.machine()}, {platform.system()}")
    speed(options)


if __name__ == "__main__":
    main()
