"""Local temperature scaling, in one run: ``python benchmarks/local.py [--threads 2] [--cases 50] [--recovery]``.

Trains ``lts`` on cases of 19 x 256 x 512 read from disk, applies it with one thread, and prints the time of the
convolution alone beside it. ``--recovery`` adds what is recovered of planted temperatures, on held-out scenes.
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
from scipy.stats import spearmanr

import segcal
from segcal.calibrators import Calibrator, TemperatureScaling
from segcal.calibrators.local import (
    ImageTemperatureScaling,
    LocalTemperatureScaling,
    TranslationInvariantLocalTemperature,
)
from segcal.cases import CaseRef, CaseSet
from segcal.synthetic import GaugeOffsets, ImageTemperature, SpatialTemperature, scene_of, scenes

CLASSES, HEIGHT, WIDTH = 19, 256, 512


def write_cases(folder: Path, count: int) -> None:
    """Smooth random logits that are too sure where their classes meet, and labels drawn from the truth."""
    for part in ("logits", "labels"):
        (folder / part).mkdir()
    random = torch.Generator().manual_seed(0)
    for index in range(count):
        coarse = 6 * torch.randn(1, CLASSES, HEIGHT // 16, WIDTH // 16, generator=random)
        z = F.interpolate(coarse, size=(HEIGHT, WIDTH), mode="bicubic", align_corners=False)
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


def speed(count: int, threads: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        write_cases(Path(name), count)
        cases = segcal.open_cases(name)
        print(f"{memory():.2f} GB at the peak before training")
        torch.set_num_threads(threads)
        calibrator = LocalTemperatureScaling(epochs=40).fit(cases)
        report = calibrator.fit_report
        assert report is not None
        print(
            f"training lts on {count} cases of {CLASSES} x {HEIGHT} x {WIDTH}, {threads} threads: "
            f"{report.seconds:.0f} s (goal 300), {report.iterations} steps, peak {memory():.2f} GB (goal 2); "
            f"NLL {report.nll_before:.4f} -> {report.nll_after:.4f}"
        )
        print("  " + "; ".join(report.notes))
        torch.set_num_threads(1)
        logits = cases[0].logits
    pixels = HEIGHT * WIDTH / 1e6
    network = calibrator.network
    padded = F.pad(logits, (4,) * 4, mode="reflect")
    last = padded.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        print("applying, one thread, megapixels per second (goal 1):")
        for label, work in (
            ("lts", lambda: calibrator(logits)),
            ("its temperatures", lambda: calibrator.temperature_map(logits)),
            ("convolution alone, channels first", lambda: F.conv2d(padded, network.weight, network.bias, dilation=2)),
            ("convolution alone, channels last", lambda: F.conv2d(last, network.weight, network.bias, dilation=2)),
            ("log_softmax alone", lambda: logits.log_softmax(1)),
        ):
            print(f"  {label:36s} {pixels / best(work):6.2f}")


def kept(cases: CaseSet) -> CaseSet:
    """The same scenes, each generated once."""
    opened = [cases[index] for index in range(len(cases))]
    return CaseSet([CaseRef(case.id, lambda case=case: case) for case in opened], num_classes=cases.num_classes)


def nll(calibrator: Calibrator, cases: CaseSet) -> float:
    return segcal.evaluate(cases, calibrator, metrics=("nll",)).value("nll")


def recovery() -> None:
    local = (LocalTemperatureScaling, TranslationInvariantLocalTemperature, ImageTemperatureScaling)
    field, gauge, image = [SpatialTemperature()], [SpatialTemperature(), GaugeOffsets(5.0)], [ImageTemperature()]
    for title, plant, size, count in (
        ("field of temperatures", field, (64, 80), 200),
        ("the same with gauge offsets", gauge, (64, 80), 200),
        ("temperature of each image", image, (64, 80), 100),
        ("field in volumes, kernel in the plane", field, (12, 64, 64), 40),
    ):
        options = {"size": size, "num_classes": 4, "plant": plant}
        cases, test = kept(scenes(count, **options)), kept(scenes(20, seed=9, **options))
        print(f"{title}, {count} scenes of {size}")
        single = TemperatureScaling().fit(cases)
        print(f"  {'ts':8s} NLL {nll(single, test):.5f}")
        for cls in local:
            calibrator = cls().fit(cases)
            found = torch.cat([calibrator.temperature_map(case.logits).flatten() for case in test]).numpy()
            true = torch.cat([scene_of(case).temperature.flatten() for case in test]).numpy()
            rank, r = spearmanr(found, true).statistic, np.corrcoef(found, true)[0, 1]
            assert calibrator.fit_report is not None
            print(
                f"  {cls.id:8s} NLL {nll(calibrator, test):.5f}, rank correlation {rank:.3f}, correlation {r:.3f}, "
                f"{calibrator.fit_report.seconds:.0f} s"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--recovery", action="store_true")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.machine()}, {platform.system()}")
    speed(options.cases, options.threads)
    if options.recovery:
        torch.set_num_threads(options.threads)
        recovery()


if __name__ == "__main__":
    main()
