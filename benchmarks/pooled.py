"""Whether the 95% intervals of pooled values hold the truth as often as they say: ``python benchmarks/pooled.py``.

A population of scenes is evaluated once, before and after temperature scaling; its pooled values are the truth. Then
400 studies draw 10, 20, 40 or 80 of its cases, and the share of intervals that hold the truth is counted, as
``segcal.evaluate`` makes them and, in brackets, as plain percentiles of the bootstrap. After temperature scaling the
ECE is small against its noise, which is the hard case. ``mce`` and ``ace``, which get no interval, are there to show
why. Takes one or two minutes on one core.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from segcal.calibrators import TemperatureScaling
from segcal.evaluation.evaluate import evaluate_many
from segcal.evaluation.plan import Plan
from segcal.evaluation.pooled import pooled_of
from segcal.inference import Pooled, pooled_intervals
from segcal.metrics.measure import divided
from segcal.synthetic import demo_plant, scenes

STUDIES, SIZES = 400, (10, 20, 40, 80)
METRICS = (
    "nll", "brier", "accuracy", "dsc", "confidence-balance", "ece", "cece", "ba-ece", "nll-calibration",
    "brier-calibration",
)  # fmt: skip


def of_gaps(total: NDArray[np.float64], largest: bool) -> NDArray[np.float64]:
    """``mce`` or ``ace`` of the sums ``(..., bins, 3)`` of voxels, confidence and correctness."""
    gaps = divided(np.abs(total[..., 1] - total[..., 2]), total[..., 0])
    return np.nanmax(gaps, -1) if largest else np.nanmean(gaps, -1)


def share_held(columns: Sequence[Pooled], cases: int) -> NDArray[np.float64]:
    """Share of studies of so many cases whose intervals hold the value of the population, ``(columns,)``."""
    truth = [column.value(column.sums.sum(0, keepdims=True))[0] for column in columns]
    random, held = np.random.default_rng(cases), np.zeros(len(columns))
    for study in range(STUDIES):
        drawn = random.choice(len(columns[0].sums), cases, replace=False)
        low, high = pooled_intervals([column._replace(sums=column.sums[drawn]) for column in columns], seed=study).T
        held += (low <= truth) & (truth <= high)
    return held / STUDIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--population", type=int, default=1500, help="number of scenes")
    given = parser.parse_args()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("segcal", "torch", "numpy"))
    print(f"{versions}, python {platform.python_version()}, {os.cpu_count()} cores")
    size, plant = (32, 40), demo_plant(6)
    ts = TemperatureScaling().fit(scenes(10, size=size, plant=plant, seed=12))
    population = scenes(given.population, size=size, plant=plant, seed=11)
    found = evaluate_many(Plan.make(METRICS), population, {"before": None, "after": ts})
    columns: dict[str, Pooled] = {}
    for when, results in found.items():
        own = {metric: pooled_of(metric, sums) for (_, _, metric), sums in results.sums.items()}
        bins = own["nll-calibration"].sums
        own |= {
            name: Pooled(bins, lambda sums, n=name: of_gaps(sums, n == "mce"), error=True) for name in ("mce", "ace")
        }
        columns |= {f"{metric}, {when}": column for metric, column in own.items()}
    print(f"{STUDIES} studies: share of 95% intervals of pooled values that hold that of {given.population} scenes;")
    print(f"in brackets, plain percentiles\n{'':<27}{'truth':>7}" + "".join(f"{n:>8} cases" for n in SIZES))
    corrected = [share_held(list(columns.values()), cases) for cases in SIZES]
    plain = [share_held([own._replace(error=False) for own in columns.values()], cases) for cases in SIZES]
    for place, (name, column) in enumerate(columns.items()):
        value = float(column.value(column.sums.sum(0, keepdims=True))[0])
        cells = "".join(f"{a[place]:>7.1%} ({b[place]:>4.0%})" for a, b in zip(corrected, plain, strict=True))
        print(f"{name:<27}{value:>7.4f}{cells}")


if __name__ == "__main__":
    main()
