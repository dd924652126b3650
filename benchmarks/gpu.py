"""segcal and its peers on a CUDA device: ``python benchmarks/gpu.py [--images 50] [--methods ts] [--without-triton]``.

Logits of 19 x 256 x 512 in float32 lie on the device. Times are medians of several calls after one that compiles, with
the device waited for, and in brackets how long the device worked in one call: the rest is Python. ``copies`` is how
many copies of the logits would take as long, and the bandwidth counts the bytes that an operation must read and write.
Without triton, statistics and the fit of one temperature are measured as they are where triton is not installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import segcal
from segcal.synthetic import scenes

CLASSES, IMAGE = 19, (256, 512)
METHODS = ("ts", "ets", "dc", "cms-op", "cms-ap", "isotonic")


def begin(about: str, made: int = 10) -> tuple[Tensor, Tensor, list[str]]:
    """Read the arguments, say what is measured on what, and return the data and the methods."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--without-triton", action="store_true")
    arguments = parser.parse_args()
    images = arguments.images
    if arguments.without_triton:
        sys.modules["triton"] = None  # type: ignore[assignment]
        print("without triton")
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    print(f"segcal {segcal.__version__}, {versions}, {torch.cuda.get_device_name()}")
    logits, labels = data(images, made)
    size = f"{images} x {CLASSES} x {IMAGE[0]} x {IMAGE[1]} float32, {logits.numel() * 4 / 1e9:.2f} GB"
    print(f"{size}, {labels.numel() / 1e6:.2f} megapixels on the device")
    return logits, labels, arguments.methods


def data(images: int, made: int) -> tuple[Tensor, Tensor]:
    """Scenes repeated with noise: their maps are coherent and their confidences are those of a network."""
    some = scenes(min(images, made), size=IMAGE, num_classes=CLASSES, plant=[segcal.synthetic.SpatialTemperature()])
    logits = torch.cat([case.logits for case in some]).cuda()
    labels = torch.cat([case.labels for case in some]).cuda()
    times = -(-images // len(logits))
    logits, labels = logits.repeat(times, 1, 1, 1)[:images], labels.repeat(times, 1, 1)[:images]
    random = torch.Generator("cuda").manual_seed(0)
    return logits + 0.2 * torch.randn(logits.shape, device="cuda", generator=random), labels


def seconds(function: Callable[..., object], calls: int, *arguments: object) -> float:
    function(*arguments)
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        started = time.perf_counter()
        function(*arguments)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def on_device(function: Callable[..., object]) -> float:
    """Seconds that the device works in one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return (
        sum(event.device_time for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)
        / 1e6
    )


def plain_torch(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """NLL and ECE with 15 bins, as one would write them."""
    log_p = logits.log_softmax(1)
    nll = -log_p.gather(1, labels[:, None]).mean()
    confidence, winner = log_p.max(1)
    confidence, right = confidence.exp().flatten(), (winner == labels).flatten().float()
    bins = (confidence * 15).ceil().long().clamp(1, 15) - 1
    gap = torch.zeros(15, device=logits.device).index_add_(0, bins, confidence - right)
    return float(nll), float(gap.abs().sum() / len(right))


def peers(logits: Tensor, labels: Tensor) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {"plain torch: NLL and ECE": lambda: plain_torch(logits, labels)}
    try:
        from torchmetrics.functional.classification import multiclass_calibration_error as ece

        found["torchmetrics: ECE"] = lambda: ece(logits, labels, CLASSES, n_bins=15)
    except ImportError:
        print("torchmetrics is not installed")
    try:
        import fiducio

        found["fiducio: temperature fit"] = lambda: fiducio.TemperatureScaling(device="cuda").fit(logits, labels)
    except ImportError:
        print("fiducio is not installed")
    return found


def main() -> None:
    assert __doc__ is not None
    logits, labels, methods = begin(__doc__)
    size = logits.numel() * 4
    copy = seconds(lambda there: there.copy_(logits), 20, torch.empty_like(logits))

    def show(name: str, function: Callable[..., object], calls: int, moved: float = 1.0) -> None:
        took, device = seconds(function, calls), on_device(function)
        bandwidth = f"{moved * size / device / 1e9:8.0f} GB/s" if took < 0.1 else ""
        times = f"{took * 1e3:10.3f} ms ({device * 1e3:8.3f} ms)"
        print(f"  {name:34} {times} {took / copy:8.1f} copies ({device / copy:6.1f}) {bandwidth}", flush=True)

    there = torch.empty_like(logits)
    show("copy", lambda: there.copy_(logits), 20, 2.0)
    show("statistics, everything", lambda: segcal.VoxelStatistics(CLASSES).update(logits, labels), 20)
    show("statistics, top label", lambda: segcal.VoxelStatistics(CLASSES, classwise=False).update(logits, labels), 20)
    for name, function in peers(logits, labels).items():
        show(name, function, 1 if "fit" in name else 5)
    fitted = {}
    for method in methods if sys.modules["triton"] else ("ts",):
        calibrator = segcal.CALIBRATORS[method]()
        show(f"{method} fit, all voxels", lambda c=calibrator: c.fit(logits, labels, voxels="all"), 3)
        report = calibrator.fit_report
        assert report is not None
        nll = f"NLL {report.nll_before:.6f} to {report.nll_after:.6f}"
        print(f"    {nll}, gradient {report.certificate:.1e}, {report.voxels_used:,} voxels")
        fitted[method] = calibrator
    for method, calibrator in fitted.items():
        show(f"{method} apply", lambda c=calibrator: c(logits), 20, 2.0)
        kept = bool((calibrator(logits).argmax(1) == logits.argmax(1)).all())
        print(f"    labels {'kept' if kept else 'moved'}")
    if not sys.modules["triton"]:
        return
    times = -(-(2 * 10**8) // labels.numel())
    many, their = logits.repeat(times, 1, 1, 1), labels.repeat(times, 1, 1)
    took = seconds(lambda: segcal.CALIBRATORS["ts"]().fit(many, their, voxels="all"), 3)
    print(f"  ts fit, {their.numel():,} voxels: {took * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
