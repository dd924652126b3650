"""Peak memory of ``segcal evaluate`` on one large volume and on many classes: ``python benchmarks/evaluate_memory.py``.

Each evaluation is a process of its own, which prints its peak resident memory and its processor time. The data are
smooth random fields in a temporary folder (1.2 GB).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from scipy.ndimage import zoom

VOLUME, CLASSES = (256, 512, 512), 4
IMAGE, MANY_CLASSES = (64, 64), 1000
RUNS = {
    "volume": ("nll,ece,dsc", None),
    "image": (None,),
}
_PROGRAM = """
import resource, sys, time
import segcal
started = time.process_time()
cases = segcal.open_cases(sys.argv[1])
options = {"metrics": sys.argv[2].split(",")} if sys.argv[2] else {}
regions = ("everything", "boundary")  # as the command has it
segcal.evaluate(cases, regions=regions, **options)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, time.process_time() - started)
"""


def volume(folder: Path) -> None:
    """One case of smooth fields; labels are the noisy argmax. Written slab by slab."""
    random = np.random.default_rng(0)
    coarse = random.normal(size=(CLASSES, *(size // 32 for size in VOLUME)))
    paths = [folder / part / "case.npy" for part in ("logits", "labels")]
    open_memmap(paths[0], "w+", np.float32, (CLASSES, *VOLUME))
    open_memmap(paths[1], "w+", np.uint8, VOLUME)
    slabs = zoom(coarse, (1, 32, 1, 1), order=1)
    for z in range(VOLUME[0]):
        field = 3 * zoom(slabs[:, z], (1, 32, 32), order=1)
        # Mapped anew for every slab: this process stays small, for its peak counts as its children's, too.
        open_memmap(paths[0], "r+")[:, z] = field
        open_memmap(paths[1], "r+")[z] = (
            field + 0.5 * zoom(random.normal(size=(CLASSES, 64, 64)), (1, 8, 8), order=1)
        ).argmax(0)


def image(folder: Path) -> None:
    """Two small images with a thousand classes."""
    (folder / "segcal.toml").write_text("ignore_index = -1\n")
    random = np.random.default_rng(0)
    for case in ("a", "b"):
        labels = random.integers(0, MANY_CLASSES, (8, 8)).repeat(8, 0).repeat(8, 1)
        scores = random.normal(size=(MANY_CLASSES, *IMAGE)).astype(np.float32)
        np.put_along_axis(scores, labels[None], 6, 0)
        np.save(folder / "logits" / f"{case}.npy", scores)
        np.save(folder / "labels" / f"{case}.npy", labels.astype(np.int16))


def main() -> None:
    """Make the data, run every evaluation, print a line each."""
    print(f"volume: {VOLUME}, {CLASSES} classes, float32; image: two of {IMAGE}, {MANY_CLASSES} classes")
    print(f"{'data':8}{'metrics':14}{'peak GB':>8}{'CPU s':>9}")
    with tempfile.TemporaryDirectory() as root:
        for name, requests in RUNS.items():
            folder = Path(root) / name
            for part in ("logits", "labels"):
                (folder / part).mkdir(parents=True)
            {"volume": volume, "image": image}[name](folder)
            for metrics in requests:
                command = [sys.executable, "-c", _PROGRAM, str(folder), metrics or ""]
                peak, seconds = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
                print(f"{name:8}{metrics or 'default':14}{float(peak):8.2f}{float(seconds):9.1f}", flush=True)


if __name__ == "__main__":
    main()
