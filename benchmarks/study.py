"""A whole study: how long it takes and how often it reads the scores, and whether its intervals hold what they promise.

``python benchmarks/study.py time`` compares 20 methods on 100 cases of 19 x 256 x 512 float16 logits on disk, with two
processes, and counts how often the logits of a case are read in each stage. Goal: testing reads every test case once
for all methods together. One repeat, as another would only take as long again (``--repeats``). Fits are printed as they
end. ``--cases``, ``--methods`` and ``--size`` make it smaller.

``python benchmarks/study.py coverage`` makes 200 studies of known truth and counts how often the 95% interval of the
per-image mean holds it. Goal: 93 to 97%. Beside it, the interval that takes the cases of different repeats for
different ones. Values are drawn from skewed distributions (case, repeat and noise), and from a large population of
scenes that were evaluated once. Without a word, both run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from segcal.calibrators import (
    CALIBRATORS,
    ClassConditionalDirichlet,
    CMSArgmaxPreserving,
    CMSOrderPreserving,
    DirichletCalibration,
    TemperatureScaling,
)
from segcal.cases import open_cases, write_dataset
from segcal.cases.disk import DiskCase
from segcal.evaluation.evaluate import evaluate_many
from segcal.evaluation.plan import Plan
from segcal.inference import hierarchical_bootstrap, mean_over_repeats
from segcal.study import Step, compare
from segcal.synthetic import demo_plant, scenes

STUDIES, REPEATS, TESTED = 200, 3, 0.3


# Four more methods make twenty. They are registered when this file is imported, which processes do, too.
class _MoreDirichlet(DirichletCalibration):
    id = "dc-2"


class _MoreConditionalDirichlet(ClassConditionalDirichlet):
    id = "cdc-2"


class _MoreArgmaxPreserving(CMSArgmaxPreserving):
    id = "cms-ap-2"


class _MoreOrderPreserving(CMSOrderPreserving):
    id = "cms-op-2"


for _cls in (_MoreDirichlet, _MoreConditionalDirichlet, _MoreArgmaxPreserving, _MoreOrderPreserving):
    CALIBRATORS[_cls.id] = _cls

_read = DiskCase.logits


def _counted(self: DiskCase, rows: slice) -> torch.Tensor:
    """Note the share of the case that is read, in the stage that the process was started in or is in."""
    if log := os.environ.get("SEGCAL_READS"):
        with Path(log).open("a") as file:
            file.write(f"{os.environ['SEGCAL_STAGE']}\t{(rows.stop - rows.start) / self.spatial[0]}\n")
    return _read(self, rows)


DiskCase.logits = _counted  # type: ignore[method-assign]


def run_study(count: int, methods: int, size: tuple[int, int], classes: int, repeats: int, workers: int) -> None:
    ids = [id for id in CALIBRATORS if id != "ensemble"][:methods]
    with tempfile.TemporaryDirectory() as folder:
        print(f"writing {count} scenes of {classes} x {size[0]} x {size[1]} ...", flush=True)
        data = scenes(count, size=size, num_classes=classes, plant=demo_plant(classes))
        write_dataset(data, Path(folder) / "data", dtype="float16")
        os.environ["SEGCAL_READS"] = str(Path(folder) / "reads")

        os.environ["SEGCAL_STAGE"] = "before"
        started = time.perf_counter()

        def stage(step: Step) -> None:
            name = step.name.split(":")[0].split(",")[0]
            if name.split(" ")[0] != os.environ["SEGCAL_STAGE"] or name.startswith("fitted"):
                print(f"{time.perf_counter() - started:7.0f} s  {name}", flush=True)
            os.environ["SEGCAL_STAGE"] = name.split(" ")[0]

        study = compare(
            open_cases(Path(folder) / "data"),
            ids,
            repeats,
            output=Path(folder) / "out",
            workers=workers,
            progress=stage,
        )
        seconds = time.perf_counter() - started
        del os.environ["SEGCAL_READS"]
        reads: Counter[str] = Counter()
        for line in (Path(folder) / "reads").read_text().splitlines():
            name, share = line.split("\t")
            reads[name] += float(share)
    document = study.document
    failed = [row["key"] for row in document["methods"] if row["status"] == "failed"]
    print(f"{len(ids)} methods, {repeats} repeats, {workers} processes: {seconds:.0f} s in all")
    print(f"failed: {', '.join(failed) or 'none'}")
    print(f"{'method':<14}{'fit s':>8}{'evaluate s':>12}{'peak MB':>9}")
    for key, own in document["timings"]["per_method"].items():
        print(f"{key:<14}{own['fit_seconds']:>8.1f}{own['evaluate_seconds']:>12.1f}{own['peak_memory_mb']:>9.0f}")
    test = sum(len(split["test"]) for split in document["splits"])
    chosen = sum(len(split["validation"]) for split in document["splits"])
    for name, value in reads.items():
        print(f"reads of whole cases, {name}: {value:.1f}")
    print(f"testing: {reads['testing'] / test:.2f} reads per test case and repeat (goal: 1.00)")
    print(f"validating: {reads['validating'] / chosen:.2f} reads per validation case and repeat")


def coverage(values: NDArray[np.float64], truth: NDArray[np.float64]) -> tuple[float, float]:
    """Shares of studies ``(studies, repeats, cases, columns)`` whose interval holds the truth ``(columns,)``."""
    held = {"used": [], "naive": []}  # type: dict[str, list[Any]]
    for number, study in enumerate(values):
        for name, own in (("used", mean_over_repeats(study)[None]), ("naive", study)):
            found = hierarchical_bootstrap(own, seed=number)
            held[name].append((found.low <= truth) & (truth <= found.high))
    return float(np.mean(held["used"])), float(np.mean(held["naive"]))


def tested(random: np.random.Generator, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """NaN for the cases that a repeat does not test, ``(repeats, cases, columns)``."""
    for repeat in values:
        out = random.permutation(values.shape[1])[round(TESTED * values.shape[1]) :]
        repeat[out] = np.nan
    return values


def simulated(cases: int, noise: float) -> tuple[float, float]:
    random = np.random.default_rng(cases)
    shape = (STUDIES, REPEATS, cases, 2)
    values = random.gamma(4.0, 0.25, (STUDIES, 1, cases, 2)) * np.exp(noise * random.standard_normal(shape))
    truth = np.full(2, np.exp(noise**2 / 2))
    return coverage(np.stack([tested(random, study) for study in values]), truth)


def of_scenes(population: int, cases: int) -> tuple[float, float]:
    data = scenes(population, size=(32, 40), plant=demo_plant(6), seed=11)
    ts = TemperatureScaling().fit(scenes(10, size=(32, 40), plant=demo_plant(6), seed=12))
    found = evaluate_many(Plan.make(("nll", "ece", "dsc")), data, {"before": None, "after": ts})
    table = np.array(
        [list(own.values(metric).values()) for own in found.values() for metric in ("nll", "ece", "dsc")]
    ).T
    random = np.random.default_rng(0)
    studies = []
    for _ in range(STUDIES):
        drawn = table[random.choice(population, cases, replace=False)]
        studies.append(tested(random, np.repeat(drawn[None], REPEATS, 0)))
    return coverage(np.stack(studies), table.mean(0))


def run_coverage(population: int) -> None:
    print(
        f"{STUDIES} studies of {REPEATS} repeats that test {TESTED:.0%} of the cases; share of 95% intervals that hold"
    )
    print("the true mean: as segcal.compare makes them (goal: 93 to 97%), and with repeats taken as independent")
    for cases in (40, 100, 300):
        for noise in (0.0, 0.3):
            used, naive = simulated(cases, noise)
            print(f"values, {cases:>3} cases, noise of repeats {noise:.1f}: {used:.1%} ({naive:.1%})", flush=True)
    for cases in (60, 150):
        used, naive = of_scenes(population, cases)
        print(f"scenes, {cases:>3} cases of {population}: {used:.1%} ({naive:.1%})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("time", "coverage"))
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--methods", type=int, default=20)
    parser.add_argument("--size", type=int, nargs=2, default=(256, 512))
    parser.add_argument("--classes", type=int, default=19)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--population", type=int, default=3000, help="scenes of the coverage study")
    given = parser.parse_args()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("segcal", "torch", "numpy"))
    print(f"{versions}, python {platform.python_version()}, {os.cpu_count()} cores")
    if given.part != "coverage":
        run_study(given.cases, given.methods, tuple(given.size), given.classes, given.repeats, given.workers)
    if given.part != "time":
        run_coverage(given.population)


if __name__ == "__main__":
    main()
