"""Whether the 95% intervals of pooled values hold the truth as often as they say: ``python benchmarks/pooled.py``.

A population of scenes is evaluated once, before and after temperature scaling; its pooled values are the truth. Then
400 studies draw 10, 20, 40 or 80 of its cases, and the share of intervals that hold the truth is counted, as
``segcal.evaluate`` makes them and, in brackets, as plain percentiles of the bootstrap. After temperature scaling the
ECE is small against its noise, which is the hard case. ``mce`` and ``ace``, which get no interval, are there to show
why. Below, the same for studies of three repeats that test 30% of the cases each, as ``segcal.compare`` averages them,
and for groups of four similar cases, in brackets with their groups left out. Takes three minutes on one core.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from segcal.calibrators import TemperatureScaling
from segcal.evaluation.evaluate import evaluate_many
from segcal.evaluation.plan import Plan
from segcal.evaluation.pooled import pooled_of
from segcal.inference import Pooled, pooled_intervals
from segcal.metrics.measure import divided
from segcal.synthetic import demo_plant, scenes

STUDIES, SIZES, REPEATS, TESTED = 400, (10, 20, 40, 80), 3, 0.3
FEW = ("nll, before", "ece, before", "nll, after", "ece, after")
METRICS = (
    "nll", "brier", "accuracy", "dsc", "confidence-balance", "ece", "cece", "ba-ece", "nll-calibration",
    "brier-calibration",
)  # fmt: skip


def of_gaps(total: NDArray[np.float64], largest: bool) -> NDArray[np.float64]:
    """``mce`` or ``ace`` of the sums ``(..., bins, 3)`` of voxels, confidence and correctness."""
    gaps = divided(np.abs(total[..., 1] - total[..., 2]), total[..., 0])
    return np.nanmax(gaps, -1) if largest else np.nanmean(gaps, -1)


def share_held(
    columns: Sequence[Pooled], units: int, *, repeats: int = 0, size: int = 1, grouped: bool = True
) -> NDArray[np.float64]:
    """Share of studies whose intervals hold the value of the population, ``(columns,)``.

    A study draws so many units: cases, or groups of ``size`` cases that follow each other in the population.
    """
    truth = [column.value(column.sums.sum(0, keepdims=True))[0] for column in columns]
    random, held = np.random.default_rng(units), np.zeros(len(columns))
    for study in range(STUDIES):
        first = random.choice(len(columns[0].sums) // size, units, replace=False)
        drawn = (size * first[:, None] + np.arange(size)).reshape(-1)
        groups = drawn // size if size > 1 and grouped else None
        sums = [column.sums[drawn] for column in columns]
        if repeats:
            places = np.argsort(random.random((repeats, units)), axis=1).T
            tested = places < round(TESTED * units)
            sums = [own[:, None] * tested.reshape(*tested.shape, *[1] * (own.ndim - 1)) for own in sums]
            sums = [own[tested.any(1)] for own in sums]
        both = [column._replace(sums=own) for column, own in zip(columns, sums, strict=True)]
        low, high = pooled_intervals(both, groups=groups, seed=study).T
        held += (low <= truth) & (truth <= high)
    return held / STUDIES


def show(columns: Mapping[str, Pooled], shares: Sequence[Sequence[NDArray[np.float64]]]) -> None:
    """A line for each column: the truth, and the shares of every size, the second of each in brackets."""
    for place, (name, column) in enumerate(columns.items()):
        value = float(column.value(column.sums.sum(0, keepdims=True))[0])
        cells = "".join(f"{own[0][place]:>7.1%} ({own[1][place]:>4.0%})" for own in shares)
        print(f"{name:<27}{value:>7.4f}{cells}", flush=True)


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
    plain = {name: column._replace(error=False) for name, column in columns.items()}
    show(columns, [[share_held(list(own.values()), n) for own in (columns, plain)] for n in SIZES])
    few = {name: columns[name] for name in FEW}
    print(f"{REPEATS} repeats that test {TESTED:.0%} of so many cases each; in brackets, plain percentiles")
    pairs = (few, {name: plain[name] for name in FEW})
    show(few, [[share_held(list(own.values()), n, repeats=REPEATS) for own in pairs] for n in SIZES])
    print("so many groups of 4 cases with similar NLL; in brackets, as if these cases were independent")
    order = np.argsort(list(found["before"].values("nll").values()))
    alike = [column._replace(sums=column.sums[order]) for column in few.values()]
    show(few, [[share_held(alike, n, size=4, grouped=grouped) for grouped in (True, False)] for n in SIZES])


if __name__ == "__main__":
    main()
