"""Much to do: ten thousand cases, a case far larger than the memory it may take, and the same work over and over.

    many   ``segcal evaluate`` on very many small cases: memory and open files must not grow with their number
    large  ``segcal evaluate`` on one case of many gigabytes, in an address space that is much smaller than it. The file
           is sparse, so it takes no disk; every byte of it is read all the same.
    loop   ``segcal.evaluate`` on the same cases for some minutes: neither memory nor open files may grow

Lines of progress come once a minute; a command that takes longer must have printed some.

    python benchmarks/load.py [--cases 10000] [--gigabytes 20] [--space 8] [--minutes 2] [--only many,large,loop]
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

GB = 2**30


def write_many(root: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(0, 2, (3, 24, 32)).astype(np.float32), rng.integers(0, 3, (24, 32)).astype(np.uint8)
    for folder in ("logits", "labels"):
        (root / folder).mkdir(parents=True)
    for k in range(count):
        np.save(root / "logits" / f"case{k:05d}.npy", np.roll(logits, k, axis=1))
        np.save(root / "labels" / f"case{k:05d}.npy", np.roll(labels, k + k % 3, axis=0))


def write_large(root: Path, gigabytes: float) -> tuple[int, ...]:
    """One sparse case: all logits 0 but for the first rows."""
    depth = int(gigabytes * GB / (4 * 4 * 512 * 512))
    for folder, shape, dtype in (("logits", (4, depth, 512, 512), np.float32), ("labels", (depth, 512, 512), np.uint8)):
        (root / folder).mkdir(parents=True)
        array = np.lib.format.open_memmap(root / folder / "case.npy", "w+", dtype, shape)
        array[..., :2, :, :] = 1 if folder == "labels" else np.arange(4).reshape(4, 1, 1, 1)
    return 4, depth, 512, 512


class Watch(threading.Thread):
    """The most memory and open files of a process while it runs."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.files, self.memory, self.space = process, 0, 0, 0

    def run(self) -> None:
        """Look five times a second until it ends."""
        while True:
            try:
                self.files = max(self.files, len(os.listdir(f"/proc/{self.process}/fd")))  # noqa: PTH208
                status = Path(f"/proc/{self.process}/status").read_text().splitlines()
            except OSError:
                return
            found = {line.split(":")[0]: line.split()[1] for line in status if line.startswith("Vm")}
            if not found:
                return
            self.memory, self.space = int(found["VmHWM"]) * 1024, int(found["VmPeak"]) * 1024
            time.sleep(0.2)


def evaluate(root: Path, space: float | None = None) -> str:
    """The command on a dataset, with at most this many gigabytes of address space; returns a row."""

    def limit() -> None:
        if space is not None:
            resource.setrlimit(resource.RLIMIT_AS, (int(space * GB),) * 2)

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "segcal", "evaluate", str(root), "--metrics", "nll,ece", "--regions", "everything"]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limit, env=environment
    )
    watch = Watch(process.pid)
    watch.start()
    out, err = process.communicate()
    minutes = (time.perf_counter() - started) / 60
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        sys.exit(f"ended with {process.returncode}\n{out}\n{err}")
    lines = sum("evaluating" in line for line in err.splitlines())
    if lines < int(minutes) - 1:
        sys.exit(f"{lines} lines of progress in {minutes:.1f} minutes")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"{seconds:>9.1f}{watch.memory / GB:>9.2f}{watch.space / GB:>10.2f}{watch.files:>7}{lines:>10}"


def loop(minutes: float, root: Path) -> str:
    """Memory and open files of this process, after a few evaluations and at the end."""
    import segcal

    write_many(root, 60)

    def state() -> tuple[int, int]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    started, count, first = time.process_time(), 0, (0, 0)
    while time.process_time() - started < 60 * minutes or count < 20:
        segcal.evaluate(segcal.open_cases(root), metrics=("nll", "ece", "dsc"))
        count += 1
        if count == 10:
            first = state()
    last = state()
    if last[1] > first[1] or last[0] > first[0] + 20 * 2**20:
        sys.exit(f"grew from {first} to {last} (bytes, files) in {count} evaluations")
    (start, files), (end, left) = first, last
    return f"{count:,} evaluations: {start / 1e6:.1f} MB and {files} open files, then {end / 1e6:.1f} MB and {left}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--space", type=float, default=8.0, help="address space of the large case, in gigabytes")
    parser.add_argument("--minutes", type=float, default=2.0, help="CPU minutes of the loop")
    parser.add_argument("--only", default="many,large,loop")
    asked = parser.parse_args()
    print(f"{'what':<34}{'CPU s':>9}{'GB':>9}{'space GB':>10}{'files':>7}{'progress':>10}")
    for name in asked.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "ds"
            if name == "many":
                for count in (max(1, asked.cases // 10), asked.cases):
                    write_many(root.with_name(f"{count}"), count)
                    print(f"{f'{count:,} small cases':<34}{evaluate(root.with_name(f'{count}'))}", flush=True)
            elif name == "large":
                shape = write_large(root, asked.gigabytes)
                what = f"{asked.gigabytes:g} GB, {'x'.join(map(str, shape))}"
                print(f"{what:<34}{evaluate(root, asked.space)}", flush=True)
            else:
                print(f"loop, {asked.minutes:g} CPU minutes: {loop(asked.minutes, root)}", flush=True)


if __name__ == "__main__":
    main()
