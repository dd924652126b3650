"""Every calibrator and all metrics with many classes: ``python benchmarks/classes.py [--methods ids]``.

Prints, as they come, seconds, processor seconds, peak memory and the NLL before and after, or why a fit is refused; and
the NLL of one more image before and after. Each row is a process of its own, which reads its data from files. Images
are smooth fields of an embedding of the classes. Labels are drawn from the softmax of its scores, and the network's
logits are these times a factor for each predicted class, plus noise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from scipy.ndimage import gaussian_filter

# Images, their height and width, for each number of classes: a million voxels, and a hundred thousand of the last.
SIZES = {19: (8, 362), 150: (8, 362), 1000: (8, 112)}
# With a thousand classes these calibrators are run.
REQUIRED = ("ts", "ets", "vs", "isotonic", "trust")
# Dimensions of the embedding.
_DIMENSIONS = 12
# Times of the statistics are the least of so many.
_REPEATS = 10

_FIT = """
import json, resource, sys, time
import segcal
cases = segcal.open_cases(sys.argv[1])
started, before = time.perf_counter(), time.process_time()
calibrator = segcal.CALIBRATORS[sys.argv[3]]()
try:
    report = calibrator.fit(cases).fit_report
    found = {"before": report.nll_before, "after": report.nll_after, "converged": report.converged,
             "certificate": report.certificate, "used": report.voxels_used, "notes": report.notes}
except segcal.errors.InputError as error:
    found = {"refused": str(error)}
found["seconds"], found["processor"] = time.perf_counter() - started, time.process_time() - before
found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
if "refused" not in found:
    held_out, options = segcal.open_cases(sys.argv[2]), {"metrics": ("nll",), "regions": ("everything",)}
    results = [segcal.evaluate(held_out, calibrator=own, **options) for own in (None, calibrator)]
    found["held out"] = [float(own.value("nll")) for own in results]
print(json.dumps(found))
"""
_EVALUATE = """
import json, resource, sys, time
import segcal
cases = segcal.open_cases(sys.argv[1])
started, before = time.perf_counter(), time.process_time()
segcal.evaluate(cases, metrics=tuple(segcal.METRICS), regions=("everything", "boundary"))
seconds, processor = time.perf_counter() - started, time.process_time() - before
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({"seconds": seconds, "processor": processor, "memory": memory}))
"""
_STATISTICS = """
import json, sys, time
import segcal, torch
case = segcal.open_cases(sys.argv[1])[0]
logits, labels = case.logits, case.labels
torch.set_num_threads(1)
passes = {
    "everything": lambda: segcal.VoxelStatistics(logits.shape[1]).update(logits, labels),
    "top label": lambda: segcal.VoxelStatistics(logits.shape[1], (), classwise=False).update(logits, labels),
    "exp": lambda: torch.exp(logits, out=out),
}
out, best = torch.empty_like(logits), dict.fromkeys(passes, float("inf"))
for _ in range(int(sys.argv[2])):
    for name, one in passes.items():
        started = time.process_time()
        one()
        best[name] = min(best[name], time.process_time() - started)
print(json.dumps({name: 1e9 * seconds / logits.numel() for name, seconds in best.items()}))
"""


def make(folder: Path, classes: int, numbers: range, size: int) -> None:
    """Write the images with these numbers, of one number of classes."""
    shared = np.random.default_rng(0)
    embedding = shared.normal(size=(classes, _DIMENSIONS)).astype(np.float32)
    frequency = -np.log(1 + shared.permutation(classes)).astype(np.float32)
    factor = shared.uniform(0.8, 2.5, classes).astype(np.float32)
    for name in ("logits", "labels"):
        (folder / name).mkdir(parents=True)
    (folder / "segcal.toml").write_text("ignore_index = -1\n")
    for case in numbers:
        random = np.random.default_rng(1 + case)
        field = np.stack([gaussian_filter(random.normal(size=(size, size)), 6) for _ in range(_DIMENSIONS)], -1)
        field = (1.8 * field / field.std() + 0.3 * random.normal(size=field.shape)).astype(np.float32)
        scores = field.reshape(-1, _DIMENSIONS) @ embedding.T + frequency
        labels = (scores + random.gumbel(size=scores.shape)).argmax(1)
        logits = scores * factor[scores.argmax(1)][:, None] + 0.5 * random.normal(size=scores.shape).astype(np.float32)
        np.save(folder / "logits" / f"{case}.npy", np.ascontiguousarray(logits.T.reshape(classes, size, size)))
        np.save(folder / "labels" / f"{case}.npy", labels.reshape(size, size).astype(np.int16))


def run(limit: float, program: str, *arguments: object) -> dict[str, object]:
    """What a program prints within ``limit`` seconds; an error's last line where it fails."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"stopped after {limit:g} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def row(name: str, found: dict[str, object]) -> str:
    """One line of the table."""
    if "failed" in found:
        return f"  {name:12}failed: {found['failed']}"
    line = f"  {name:12}{found['seconds']:8.1f} s{found['processor']:8.1f} s{found['memory']:7.2f} GB"
    if "refused" in found:
        return f"{line}  refused: {found['refused']}"
    if "before" in found:
        line += f"  NLL {found['before']:.4f} -> {found['after']:.4f}  {found['used']:>9,} voxels"
        line += "  held out {:.4f} -> {:.4f}".format(*found["held out"])
        line += f"  certificate {found['certificate']:.0e}{'' if found['converged'] else ' NOT CONVERGED'}"
    return line


def main() -> None:
    """Make the data, run everything, print a line each."""
    import segcal

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=[], help="ids of calibrators; without metrics and statistics")
    parser.add_argument("--classes", nargs="*", type=int, default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which a row is stopped")
    options = parser.parse_args()
    limit = options.seconds
    for classes in options.classes:
        cases, size = SIZES[classes]
        print(f"{classes} classes, {cases} images of {size} x {size}: {cases * size * size:,} voxels", flush=True)
        with tempfile.TemporaryDirectory() as root:
            folder, other = Path(root) / "data", Path(root) / "held-out"
            make(folder, classes, range(cases), size)
            make(other, classes, range(cases, cases + 1), size)
            for name in options.methods or segcal.CALIBRATORS:
                if classes < 1000 or name in REQUIRED:
                    print(row(name, run(limit, _FIT, folder, other, name)), flush=True)
            if not options.methods:
                print(row("all metrics", run(limit, _EVALUATE, folder)), flush=True)
                times = run(limit, _STATISTICS, folder, _REPEATS)
                listed = ", ".join(f"{what} {nanoseconds:.2f}" for what, nanoseconds in times.items())
                print(f"  statistics, processor ns per logit on one thread: {listed}", flush=True)


if __name__ == "__main__":
    main()
