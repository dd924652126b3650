"""Peak memory of streaming through an ensemble, and of walking through one huge case; speed of the storage formats.

    python benchmarks/pooling.py

Each figure comes from a process of its own. Files are made in a temporary folder and removed.
"""

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import segcal

WALK = """
import json, re, sys, time
from pathlib import Path
import segcal
def peak():  # VmHWM starts anew with the process, unlike ru_maxrss, which remembers the parent's
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
base, start, voxels = peak(), time.perf_counter(), 0
for case in segcal.open_cases(sys.argv[1], pooling=sys.argv[2]):
    if sys.argv[3] == "whole":
        voxels += case.logits[:, 0].numel()
    else:
        for chunk in case.chunks():
            voxels += chunk.labels.numel()
print(json.dumps({"voxels": voxels, "base": base, "peak": peak(), "seconds": time.perf_counter() - start}))
"""


def walk(folder, pooling, how):
    done = subprocess.run(
        [sys.executable, "-c", WALK, folder, pooling, how], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def report(name, result):
    print(
        f"{name:58s} peak {result['peak']:6.0f} MB (imports alone {result['base']:4.0f} MB), "
        f"{result['seconds']:6.1f} s, {result['voxels'] / result['seconds'] / 1e6:5.1f} Mvoxel/s"
    )


def ensemble(folder, members=5, cases=20, shape=(19, 512, 1024), format="npy"):
    """Random members; the same scores for every case, because only their size matters here."""
    generator = np.random.default_rng(0)
    (folder / "labels").mkdir(parents=True)
    for member in range(members):
        scores = generator.normal(0, 3, shape).astype(np.float32)
        target = folder / "logits" / f"member{member}"
        target.mkdir(parents=True)
        for case in range(cases):
            path = target / f"case{case:02d}.{format}"
            np.save(path, scores) if format == "npy" else np.savez_compressed(path, logits=scores)
    for case in range(cases):
        np.save(folder / "labels" / f"case{case:02d}.npy", generator.integers(0, 19, shape[1:]).astype(np.uint8))


def huge(folder, shape=(20, 256, 1024, 1024)):
    """A case of 10.7 GB as float16, sparse on disk."""
    (folder / "labels").mkdir(parents=True)
    (folder / "logits").mkdir()
    np.lib.format.open_memmap(folder / "labels" / "a.npy", "w+", np.uint8, shape[1:])
    np.lib.format.open_memmap(folder / "logits" / "a.npy", "w+", np.float16, shape)


def formats(folder, shape=(19, 1800, 3600)):
    """Time to read one case of 6.5 million pixels and 19 classes in each format segcal writes, page cache warm."""
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (1, *shape)).astype(np.float32))

    class Source:
        id, batch, num_classes, spatial, spacing, ignore_index, sliceable = "a", 1, shape[0], shape[1:], None, 255, True
        logits = staticmethod(lambda rows: logits[:, :, rows])
        labels = staticmethod(lambda rows: logits[:, :, rows].argmax(1))
        mask = image = posterior = staticmethod(lambda rows: None)

    cases = segcal.CaseSet([segcal.cases.CaseRef("a", lambda: segcal.Case(Source()))], num_classes=shape[0])
    for format, dtype in (
        ("npy", "float16"),
        ("npy", "float32"),
        ("zarr", "float16"),
        ("h5", "float16"),
        ("npz", "float16"),
    ):
        written = segcal.write_dataset(cases, folder / f"{format}-{dtype}", format=format, dtype=dtype)
        result = walk(folder / f"{format}-{dtype}", "logits", "whole")
        report(f"read 19 x 1800 x 3600, {format} {dtype}, {written.bytes / 1e6:.0f} MB", result)


def main():
    print(f"segcal {segcal.__version__}, numpy {np.__version__}, torch {torch.__version__}, {platform.processor()}")
    print(f"{torch.get_num_threads()} threads\n")
    for format in ("npy", "npz"):
        cases = 20 if format == "npy" else 4  # Compressed files are slow to make, and more of them take no more memory.
        with tempfile.TemporaryDirectory() as folder:
            ensemble(Path(folder) / "e", cases=cases, format=format)
            for pooling in ("logits", "probs"):
                name = f"pool 5 members, {cases} cases, 19 x 512 x 1024, {format}, {pooling}"
                report(name, walk(Path(folder) / "e", pooling, "whole"))
    with tempfile.TemporaryDirectory() as folder:
        huge(Path(folder) / "h")
        report("walk through one 10.7 GB case, npy float16", walk(Path(folder) / "h", "logits", "chunks"))
    with tempfile.TemporaryDirectory() as folder:
        formats(Path(folder))


if __name__ == "__main__":
    main()
