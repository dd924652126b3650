"""Calibrators that train networks, on a CUDA device: ``python benchmarks/gpu_training.py [--images 50]``.

Logits of 19 x 256 x 512 in float32 lie on the device: a few scenes with a planted field of temperatures, repeated with
noise. Every method is fitted twice, as the first fit compiles kernels and chooses convolutions; ``lts``, ``lts-ti`` and
``ibts`` train for at most 40 epochs. Times of maps are medians of several calls, with the device waited for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import segcal
from gpu import begin

# Scenes that are made; the others are these with other noise.
SCENES = 5
CALLS = 5


def seconds(function: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    assert __doc__ is not None
    logits, labels, _ = begin(__doc__, SCENES)
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
