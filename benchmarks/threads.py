"""Times with 1, 2, 4, 8, 16 threads: ``python benchmarks/threads.py [--images 30] [--threads 1 2 4 8 16]``.

Logits of 19 x 256 x 512 in float32 lie in memory. Every number of threads has a process of its own, which is given the
number as users give it, by ``torch.set_num_threads``, and is bound to as many cores of its own. Processes that fit
beside each other on the machine run at the same time, the largest first, and share its memory. Times are the least of
several calls after one that compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import segcal
from segcal.synthetic import SpatialTemperature, scenes

CLASSES, IMAGE = 19, (256, 512)
# Fits, which take seconds, are timed this often, all else this often.
FITS, CALLS = 1, 7
# Images that trust is fitted and applied to.
TRUST = 4


def least(function: Callable[[], object], calls: int) -> float:
    function()
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def measure(images: int) -> dict[str, float]:
    """Seconds of every operation with the threads of this process."""
    some = scenes(min(images, 10), size=IMAGE, num_classes=CLASSES, plant=[SpatialTemperature()])
    times = -(-images // len(some))
    logits = torch.cat([case.logits for case in some]).repeat(times, 1, 1, 1)[:images]
    labels = torch.cat([case.labels for case in some]).repeat(times, 1, 1)[:images]
    found = {"copy": least(lambda: logits.clone(), CALLS)}
    found["statistics"] = least(lambda: segcal.VoxelStatistics(CLASSES).update(logits, labels), CALLS)
    for method in ("ts", "dc", "cms-op", "isotonic"):
        calibrator = segcal.CALIBRATORS[method]()
        found[f"{method} fit"] = least(lambda own=calibrator: own.fit(logits, labels), FITS)
        found[f"{method} apply"] = least(lambda own=calibrator: own(logits), CALLS)
    trust = segcal.CALIBRATORS["trust"]()
    found["trust fit"] = least(lambda: trust.fit(logits[:TRUST], labels[:TRUST]), FITS)
    found["trust apply"] = least(lambda: trust(logits[:TRUST]), CALLS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=30)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--one", type=int, nargs=2, metavar=("THREADS", "CORE"), help="measure in this process")
    arguments = parser.parse_args()
    if arguments.one is not None:
        threads, core = arguments.one
        os.sched_setaffinity(0, range(core, core + threads))
        torch.set_num_threads(threads)
        print(json.dumps(measure(arguments.images)))
        return
    command = [sys.executable, __file__, "--images", str(arguments.images), "--one"]
    found: dict[int, dict[str, float]] = {}
    waiting = sorted(arguments.threads, reverse=True)
    while waiting:
        core, together = 0, {}
        for count in [*waiting]:
            if not together or core + count <= (os.cpu_count() or 1):
                process = subprocess.Popen([*command, str(count), str(core)], stdout=subprocess.PIPE, text=True)
                together[count], core = process, core + count
                waiting.remove(count)
        for count, process in together.items():
            found[count] = json.loads(process.communicate()[0])
            print(f"{count} threads: measured", file=sys.stderr, flush=True)
    print(f"segcal {segcal.__version__}, torch {torch.__version__}, {os.cpu_count()} cores")
    print(f"{arguments.images} x {CLASSES} x {IMAGE[0]} x {IMAGE[1]} float32, seconds")
    print(f"{'threads':14}" + "".join(f"{count:>9}" for count in arguments.threads) + "   speed-up")
    for name in found[arguments.threads[0]]:
        times = [found[count][name] for count in arguments.threads]
        print(f"{name:14}" + "".join(f"{own:9.3f}" for own in times) + f"{times[0] / min(times):9.1f}x")


if __name__ == "__main__":
    main()
