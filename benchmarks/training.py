"""Steps of ``segcal train``, and what they wait for: ``python benchmarks/training.py [--networks acdc --modes plain]``.

The networks of ``reproduce/``, on random images of the sizes there. Milliseconds a step of an epoch after one that
warms up; on a CUDA device in brackets how long the device worked, the number of kernels, and those that took the
longest. The rest is Python, which runs side by side hide from each other. ``graphs`` is torch's "reduce-overhead".
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import segcal
from reproduce.acdc import config as acdc
from reproduce.camvid import config as camvid
from segcal.training import Trainer, parse_config

# Of each network: its keys, and the channels, classes and size of its images.
NETWORKS: dict[str, tuple[dict[str, Any], tuple[int, int, tuple[int, int]]]] = {
    "acdc": ({**acdc.TRAINING, "loss": "ce-dice"}, (1, 4, (224, 224))),
    "camvid": ({**camvid.TRAINING, **camvid.UNET}, (3, 11, (360, 480))),
    "tiramisu": ({**camvid.TRAINING, **camvid.TIRAMISU}, (3, 11, (360, 480))),
}
MODES: dict[str, dict[str, Any] | None] = {"plain": None, "compiled": {}, "graphs": {"mode": "reduce-overhead"}}
# Kernels that are listed.
_LISTED = 6


def write(folder: Path, channels: int, classes: int, size: tuple[int, int], images: int) -> None:
    """A dataset of noise."""
    random = np.random.default_rng(0)
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True)
    for n in range(images):
        np.save(folder / f"images/{n}.npy", random.integers(0, 256, (channels, *size)).astype(np.float32))
        np.save(folder / f"labels/{n}.npy", random.integers(0, classes, size).astype(np.uint8))
    (folder / "segcal.toml").write_text(f"classes = {classes}\n")


def epochs(trainer: Trainer, mode: str) -> Iterator[None]:
    """One epoch after the other."""
    options = MODES[mode]
    model: Any = trainer.network if options is None else torch.compile(trainer.network, dynamic=False, **options)
    for epoch in range(1, 100):
        trainer._train_epoch(model, epoch, lambda step: None)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        yield


def measure(name: str, mode: str, trainer: Trainer) -> None:
    steps, run = trainer.schedule.steps, epochs(trainer, mode)
    started = time.perf_counter()
    next(run)
    first = time.perf_counter() - started
    started = time.perf_counter()
    next(run)
    took = (time.perf_counter() - started) / steps
    print(f"{name}, {mode}: {took * 1e3:.2f} ms a step", end="")
    kernels = []
    if torch.cuda.is_available():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            next(run)
        kernels = sorted(profile.key_averages(), key=lambda own: -own.self_device_time_total)
        device = sum(own.self_device_time_total for own in kernels) / 1e3 / steps
        print(f" ({device:.2f} ms, {sum(own.count for own in kernels) // steps} kernels)", end="")
    print(f", the first epoch {first:.1f} s", flush=True)
    for own in kernels[:_LISTED]:
        took = own.self_device_time_total / 1e3 / steps
        print(f"  {took:7.3f} ms {own.count // steps:5}  {own.key[:90]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--crop", type=int, help="smaller samples, for a CPU")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"segcal {segcal.__version__}, torch {torch.__version__}, {where}")
    for name in given.networks:
        keys, image = NETWORKS[name]
        smaller = {"crop": [given.crop] * 2} if given.crop else {}
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "data"
            write(data, *image, images=given.steps * keys["batch"] + 2)
            more = {"split": {"train": 1.0}, "data": str(data), **smaller}
            for mode in given.modes:
                output = str(Path(folder) / mode)
                measure(name, mode, Trainer(parse_config({**keys, **more, "output": output})))
                torch.compiler.reset()


if __name__ == "__main__":
    main()
