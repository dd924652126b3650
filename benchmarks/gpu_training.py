"""Calibrators that train networks, on a CUDA device: ``python benchmarks/gpu_training.py [--images 50]``.

Logits of 19 x 256 x 512 in float32 lie on the device: a few scenes with a planted field of temperatures, repeated with
noise. Every method is fitted twice, as the first fit compiles kernels and chooses convolutions; ``lts``, ``lts-ti`` and
``ibts`` train for at most 40 epochs. Times of maps are medians of several calls, with the device waited for.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import segcal
from segcal.synthetic import SpatialTemperature, scenes

CLASSES, IMAGE = 19, (256, 512)
# Scenes that are made; the others are these with other noise.
SCENES = 5
CALLS = 5


def data(images: int) -> tuple[Tensor, Tensor]:
    some = scenes(min(images, SCENES), size=IMAGE, num_classes=CLASSES, plant=[SpatialTemperature()])
    chosen = torch.arange(images) % len(some)
    logits, labels = (torch.cat(own)[chosen].cuda() for own in zip(*((c.logits, c.labels) for c in some), strict=True))
    random = torch.Generator("cuda").manual_seed(0)
    return logits + 0.2 * torch.randn(logits.shape, device="cuda", generator=random), labels


def seconds(function: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50)
    arguments = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    print(f"segcal {segcal.__version__}, {versions}, {torch.cuda.get_device_name()}")
    logits, labels = data(arguments.images)
    size = f"{arguments.images} x {CLASSES} x {IMAGE[0]} x {IMAGE[1]} float32"
    print(f"{size}, {labels.numel() / 1e6:.2f} megapixels on the device")
    for method in ("lts-ti", "lts", "ibts", "selective", "trust"):
        torch.cuda.reset_peak_memory_stats()
        calibrator = segcal.CALIBRATORS[method]()
        first, again = (seconds(lambda c=calibrator: c.fit(logits, labels)) for _ in range(2))
        report = calibrator.fit_report
        assert report is not None
        print(f"{method}: fit {first:.2f} s, again {again:.2f} s, {report.iterations:,} steps of training or solver")
        print(f"  NLL {report.nll_before:.6f} to {report.nll_after:.6f}; {'; '.join(report.notes)}")
        calibrator(logits)
        took = statistics.median(seconds(lambda c=calibrator: c(logits)) for _ in range(CALLS))
        millions = labels.numel() / 1e6
        kept = "kept" if bool((calibrator(logits).argmax(1) == logits.argmax(1)).all()) else "MOVED"
        memory = torch.cuda.max_memory_allocated() / 1e9
        print(
            f"  apply {took * 1e3:.2f} ms, {took * 1e3 / millions:.2f} ms a megapixel, {millions / took:,.0f} "
            f"megapixels/s; labels {kept}; at most {memory:.1f} GB on the device",
            flush=True,
        )


if __name__ == "__main__":
    main()
