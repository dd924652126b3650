"""Peak memory of every command on one large volume, and on one twice as large: ``python benchmarks/outofcore.py``.

A command that holds something of every voxel needs more for the larger one. Each is a process of its own; memory is
what it allocates (RssAnon, looked at every 20 ms), without the pages of mapped files, which the system can take back.
``compare`` gets four cases that are links to the volume.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from scipy.ndimage import zoom

import segcal

# Slices of the volume and of the larger one, and what they have in common.
DEPTHS, PLANE, CLASSES = (80, 160), (448, 512), 4
COPIES = 4
FITS, USED = ("ts", "lts-ti", "trust", "isotonic", "cms-ap"), ("ts", "trust")
_EVERY = 0.02


def volume(folder: Path, depth: int) -> None:
    """One case of smooth fields; labels are the noisy argmax. Written slice by slice."""
    random = np.random.default_rng(0)
    coarse = random.normal(size=(CLASSES, depth // 16, *(size // 32 for size in PLANE)))
    for part in ("logits", "labels"):
        (folder / part).mkdir(parents=True)
    logits = open_memmap(folder / "logits" / "case0.npy", "w+", np.float32, (CLASSES, depth, *PLANE))
    labels = open_memmap(folder / "labels" / "case0.npy", "w+", np.uint8, (depth, *PLANE))
    slabs = zoom(coarse, (1, 16, 1, 1), order=1)
    for z in range(depth):
        field = 3 * zoom(slabs[:, z], (1, 32, 32), order=1)
        noise = zoom(random.normal(size=(CLASSES, PLANE[0] // 8, PLANE[1] // 8)), (1, 8, 8), order=1)
        logits[:, z], labels[z] = 2 * field, (field + 0.7 * noise).argmax(0)


def commands(data: Path, copies: Path, out: Path) -> dict[str, list[str]]:
    """All commands, by name."""
    found = {"evaluate": ["evaluate", data]}
    for id in FITS:
        found[f"fit {id}"] = ["fit", data, "--method", id, "--test", "0", "-o", out / f"{id}.safetensors"]
        if id in USED:
            found[f"apply {id}"] = ["apply", out / f"{id}.safetensors", data, "-o", out / f"applied-{id}"]
            found[f"evaluate {id}"] = ["evaluate", data, "--calibrator", out / f"{id}.safetensors"]
    found["pack"] = ["pack", data, out / "packed"]
    found["check"] = ["check", data]
    found["evaluate, bands and patches"] = ["evaluate", data, "--regions", _REGIONS]
    found["evaluate --maps"] = ["evaluate", data, "--metrics", "nll", "--maps", out / "maps"]
    found["compare ts,isotonic"] = [
        "compare",
        copies,
        "--methods",
        "ts,isotonic",
        "--repeats",
        "1",
        "-o",
        out / "report",
    ]
    found["evaluate hd95"] = ["evaluate", data, "--metrics", "nll,hd95", "--regions", "everything"]
    return {name: list(map(str, command)) for name, command in found.items()}


_REGIONS = ",".join(("everything", *segcal.regions.BANDS, "local"))


def peak(command: list[str]) -> tuple[float, float]:
    """The most memory that a command allocates, in MB, and its seconds."""
    started, most = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, "-m", "segcal", *command], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        own = [int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")]
        most = max(most, *own, 0)
        time.sleep(_EVERY)
    if process.wait():
        raise SystemExit(f"failed: {' '.join(command)}")
    return most / 1024, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of commands")
    only = parser.parse_args().only
    sizes = [CLASSES * depth * PLANE[0] * PLANE[1] * 4 / 2**20 for depth in DEPTHS]
    voxels = (DEPTHS[1] - DEPTHS[0]) * PLANE[0] * PLANE[1]
    print(f"segcal {segcal.__version__}: {CLASSES} classes, {PLANE[0]} x {PLANE[1]} x {DEPTHS[0]} and {DEPTHS[1]}")
    print(f"{'scores':28}{sizes[0]:8.0f} MB{sizes[1]:8.0f} MB   bytes for each further voxel", flush=True)
    with tempfile.TemporaryDirectory() as root:
        works = [commands(*made(Path(root), depth)) for depth in DEPTHS]
        for name in works[0]:
            if not only or name in only:
                (first, took), (second, longer) = (peak(own[name]) for own in works)
                more = (second - first) * 2**20 / voxels
                row = f"{name:28}{first:8.0f} MB{second:8.0f} MB{more:8.1f}   {took:.0f} and {longer:.0f} s"
                print(row, flush=True)


def made(root: Path, depth: int) -> tuple[Path, Path, Path]:
    """Folders with the volume, with links to it, and for what is written."""
    data, copies, out = (root / f"{name}-{depth}" for name in ("data", "copies", "out"))
    volume(data, depth)
    out.mkdir()
    for part in ("logits", "labels"):
        (copies / part).mkdir(parents=True)
        for number in range(COPIES):
            (copies / part / f"case{number}.npy").symlink_to(data / part / "case0.npy")
    return data, copies, out


if __name__ == "__main__":
    main()
