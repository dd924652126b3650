"""Commands shared by the ranks of a torchrun job: ``python benchmarks/ranks.py``.

Every command runs with 1, 2 and 4 ranks of one thread each on this machine. Seconds are those of the command itself,
without the start of Python: by the clock, and of the processor for the rank that has most to do, which other programs
on the same cores change little. Then one of two ranks is killed (``kill -9``) in the middle of ``evaluate`` and of
``compare``, and the same command goes on with ``--resume``.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORLDS = (1, 2, 4)
CASES, SIZE = 96, (384, 512)
# What differs from run to run by nature.
TIMES = ("timings", "seconds", "command")
COMMANDS = {
    "evaluate": ["evaluate", "DATA", "-o", "OUT.json"],
    "fit ts": ["fit", "DATA", "--method", "ts", "-o", "OUT.safetensors"],
    "fit cms-op, all voxels": ["fit", "DATA", "--method", "cms-op", "--voxels", "all", "-o", "OUT.safetensors"],
    "fit trust": ["fit", "DATA", "--method", "trust", "-o", "OUT.safetensors"],
    "compare": ["compare", "DATA", "--methods", "ts,dc,cms-op", "--repeats", "2", "-o", "OUT"],
}


def child() -> None:
    """One rank: run the command, tell its time, and die after some cases if that is asked."""
    from segcal.cli import main
    from segcal.evaluation import evaluate, unfinished

    left, measure = int(os.environ.get("CASES_TO_LIVE", "-1")), evaluate.measure_case
    unfinished.EVERY = 1.0

    def mortal(*arguments: Any) -> Any:
        nonlocal left
        if left == 0 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return measure(*arguments)

    evaluate.measure_case = mortal
    started, worked = time.perf_counter(), time.process_time()
    try:
        main()
    except SystemExit as stop:
        if stop.code:
            raise
    print(f"\nseconds {time.perf_counter() - started:.2f} {time.process_time() - worked:.2f}", flush=True)


def run(
    world: int, name: str, data: Path, out: Path, *more: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    words = [word.replace("DATA", str(data)).replace("OUT", str(out)) for word in COMMANDS[name]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([*torchrun, __file__, *words, *more], env=environment, capture_output=True, text=True)


def seconds(done: subprocess.CompletedProcess[str]) -> tuple[float, float]:
    """The most that any rank took, by the clock and of the processor."""
    if done.returncode:
        sys.exit(done.stderr)
    found = re.findall(r"^seconds (\S+) (\S+)$", done.stdout, re.MULTILINE)
    return max(float(wall) for wall, _ in found), max(float(own) for _, own in found)


def result(name: str, out: Path) -> Path:
    """The file that a command wrote."""
    return out / "results.json" if name == "compare" else Path(COMMANDS[name][-1].replace("OUT", str(out)))


def content(path: Path) -> Any:
    """The numbers of a result: a JSON document, or the tensors of a calibrator."""
    if path.suffix == ".json":
        return json.loads(path.read_text())
    import segcal

    return {name: tensor.double().flatten().tolist() for name, tensor in segcal.load(path).tensors().items()}


def gap(mine: Any, other: Any) -> float:
    """The largest difference of two numbers, relative if they are above 1; infinite if anything else differs."""
    if isinstance(mine, dict):
        if mine.keys() != other.keys():
            return math.inf
        return max((gap(mine[name], other[name]) for name in mine if name not in TIMES), default=0.0)
    if isinstance(mine, list):
        return max(map(gap, mine, other), default=0.0) if len(mine) == len(other) else math.inf
    if isinstance(mine, float) and isinstance(other, float):
        return abs(mine - other) / max(1.0, abs(mine))
    return 0.0 if mine == other else math.inf  # also counts, which are whole numbers


def speed(data: Path, folder: Path) -> None:
    heads = "".join(f"{f'ranks: {world}':>16}" for world in WORLDS)
    print(f"\nseconds (of the busiest rank's processor)\n{'':24}{heads}   speed-up   largest difference", flush=True)
    for name in COMMANDS:
        outs = [folder / f"{name}-{world}" for world in WORLDS]
        taken = [seconds(run(world, name, data, out)) for world, out in zip(WORLDS, outs, strict=True)]
        found = [content(result(name, out)) for out in outs]
        times = "".join(f"{f'{wall:.1f} ({busiest:.1f})':>16}" for wall, busiest in taken)
        gains = " ".join(f"{taken[0][1] / busiest:.1f}" for _, busiest in taken[1:])
        largest = max(gap(found[0], other) for other in found[1:])
        print(f"{name:24}{times}{gains:>11}{largest:>21.1e}", flush=True)


def killed(data: Path, folder: Path) -> None:
    for name, survived in (("evaluate", 30), ("compare", 10)):
        out = folder / f"killed-{name}"
        done = run(2, name, data, out, CASES_TO_LIVE=str(survived))
        said = [line for line in done.stderr.splitlines() if "nother rank" in line or "to fix" in line]
        print(f"\n{name}: rank 1 of 2 is killed after {survived} cases; exit code {done.returncode}; rank 0 says")
        print("\n".join(f"  {line.replace(str(folder), '.').strip()}" for line in said))
        kept = [path for path in folder.glob(f"killed-{name}*/**/*") if path.is_file()]
        print(f"  results: {'written' if result(name, out).exists() else 'none'}; files kept: {len(kept)}")
        wall, _ = seconds(run(2, name, data, out, "--resume"))
        largest = gap(content(result(name, folder / f"{name}-2")), content(result(name, out)))
        print(f"  --resume: {wall:.1f} s; largest difference from two ranks that lived: {largest:.1e}", flush=True)


def main() -> None:
    import torch

    import segcal
    from segcal.cases import write_dataset

    with tempfile.TemporaryDirectory() as temporary:
        folder, plant = Path(temporary), [segcal.synthetic.SpatialTemperature()]
        data, warm = folder / "data", folder / "warm"
        write_dataset(segcal.synthetic.scenes(CASES, size=SIZE, plant=plant), data, dtype="float32")
        write_dataset(segcal.synthetic.scenes(8, size=(128, 160), plant=plant), warm, dtype="float32")
        for name in COMMANDS:  # so that no command waits for loops to be compiled
            seconds(run(1, name, warm, folder / f"warm-{name}"))
        print(f"{CASES} scenes of {SIZE[0]} x {SIZE[1]}, 6 classes, float32; gloo, one thread for each rank")
        print(f"{os.cpu_count()} cores, shared with other work; torch {torch.__version__}, {platform.machine()}")
        speed(data, folder)
        killed(data, folder)


if __name__ == "__main__":
    if "RANK" in os.environ:
        child()
    else:
        main()
