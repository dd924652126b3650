"""What commands cost, and whether ``segcal plan`` knows it: ``python benchmarks/cost.py [DATA]``.

Without DATA: processor seconds per 10^9 voxels of evaluating, of every fit and of every map, by one thread, on scenes
of 4 and 19 classes. The constants of ``segcal/study/costs.py`` are from this table. Fits also draw voxels: what they
do with them does not grow beyond a limit, so a fit to more voxels costs less for each.

With DATA: what ``segcal plan DATA`` says beside what the commands take, each as a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import segcal
from segcal.cases.calibrated import score_pieces
from segcal.synthetic import demo_plant, scenes

CASES, SIZE, CLASSES = 14, (256, 512), (4, 19)
REGIONS = ("everything", "boundary")  # as the command has them
# Cases that maps are timed on.
_MAPPED = 4
# What is run beside the forecast.
FITS, APPLIED, COMPARED = ("ts", "cms-ap", "lts-ti", "trust"), "ts", "ts,cms-ap"


def processor() -> str:
    """The name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())


def seconds(work: Callable[[], object]) -> float:
    """Processor seconds."""
    started = time.process_time()
    work()
    return time.process_time() - started


def constants() -> None:
    """Time everything on scenes, in files."""
    torch.set_num_threads(1)
    print(f"segcal {segcal.__version__}, torch {torch.__version__}, one thread of {processor()}")
    print(f"{CASES} images of {SIZE[0]} x {SIZE[1]}; processor seconds, and the same for 10^9 voxels")
    voxels = CASES * math.prod(SIZE) / 1e9
    for classes in CLASSES:
        with tempfile.TemporaryDirectory() as folder:
            made = scenes(CASES, size=SIZE, num_classes=classes, plant=demo_plant(classes))
            segcal.write_dataset(made, Path(folder) / "data", dtype="float32")
            cases = segcal.open_cases(Path(folder) / "data")
            segcal.evaluate(cases[:2], regions=REGIONS)  # loads the compiled loops
            print(f"\n{classes} classes{'':10}{'s':>8}{'s / 10^9':>10}", flush=True)
            line("read", seconds(lambda cases=cases: [case.load().id for case in cases]), voxels)
            line("evaluate", seconds(lambda cases=cases: segcal.evaluate(cases, regions=REGIONS)), voxels)
            for id, kind in segcal.CALIBRATORS.items():
                if id == "ensemble":
                    continue
                calibrator = kind()
                calibrator.fit(cases[:2])  # also what the first fit loads
                line(f"fit {id}", seconds(lambda own=calibrator, cases=cases: own.fit(cases)), voxels)
                for _ in range(2):  # the first one loads compiled loops
                    found = seconds(lambda own=calibrator, cases=cases: mapped(cases[:_MAPPED], own))
                line(f"map {id}", found, voxels * _MAPPED / CASES)
            for id in ("cms-ap", "cms-op", "dc"):
                line(f"tune {id}", seconds(lambda id=id, cases=cases: segcal.tune(id, cases[:10], cases[10:])), voxels)


def mapped(cases: segcal.CaseSet, calibrator: segcal.calibrators.Calibrator) -> None:
    """Calibrate cases and throw the result away."""
    for case in cases:
        for _ in score_pieces(case, calibrator):
            pass


def line(what: str, found: float, voxels: float) -> None:
    """Print a measurement."""
    print(f"  {what:18}{found:8.2f}{found / voxels:10.0f}", flush=True)


def beside(data: Path) -> None:
    """Forecasts and what happened."""
    program = [sys.executable, "-m", "segcal"]
    methods = ",".join(dict.fromkeys((*FITS, APPLIED, *COMPARED.split(","))))
    forecast = json.loads(output([*program, "plan", str(data), "--methods", methods, "--json"]))
    compared = json.loads(output([*program, "plan", str(data), "--methods", COMPARED, "--json"]))
    rows = {row["command"]: row for row in (*compared["rows"], *forecast["rows"])}
    size, machine = forecast["data"], forecast["machine"]
    print(f"segcal {segcal.__version__}, {processor()}, {machine['threads']} threads, load {os.getloadavg()[0]:.1f}")
    print(f"{data.name}: {size['cases']} cases, {size['voxels']:,} voxels, {size['classes']} classes, {size['format']}")
    print(f"passes {1 / machine['alone']:.2f} x reference on one thread, {1 / machine['together']:.2f} x on all\n")
    heads = f"{'s':>8}{'found':>8}{'ratio':>7}{'CPU s':>8}{'MB':>8}{'found':>8}{'ratio':>7}"
    print(f"{'':20}{heads}{'written':>15}{'found':>15}")
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        commands = {"evaluate": ["evaluate", str(data), "-o", str(where / "results.json")]}
        for id in FITS:
            commands[f"fit {id}"] = ["fit", str(data), "--method", id, "-o", str(where / f"{id}.safetensors")]
        fitted = str(where / f"{APPLIED}.safetensors")
        commands[f"apply {APPLIED}"] = ["apply", fitted, str(data), "-o", str(where / "applied")]
        commands[f"compare {COMPARED}"] = ["compare", str(data), "--methods", COMPARED, "-o", str(where / "report")]
        for name, command in commands.items():
            before, own = written(where), rows[name]
            started, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            peak = int(output([sys.executable, "-c", _PEAK, *command]).splitlines()[-1]) * 1024
            took, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
            print(
                f"{name:20}{own['seconds']:8.0f}{took:8.0f}{own['seconds'] / took:7.2f}{cpu:8.0f}"
                f"{own['memory'] / 1e6:8.0f}{peak / 1e6:8.0f}{own['memory'] / peak:7.2f}"
                f"{own['disk']:15,.0f}{written(where) - before:15,.0f}",
                flush=True,
            )


# A command, and then its peak memory.
_PEAK = """
import resource, subprocess, sys
subprocess.run([sys.executable, "-m", "segcal", *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def output(command: list[str]) -> str:
    """What a program prints."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def written(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path)
    given = parser.parse_args().data
    constants() if given is None else beside(given)
