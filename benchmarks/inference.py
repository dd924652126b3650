"""Statistics of a whole study beside plain loops in one run: ``python benchmarks/inference.py``.

20 methods x 400 cases x 6 metrics x 3 repeats, 2000 replicates, everything once. The loop draws indices and averages
with numpy, once per replicate for all methods and metrics (``loop``) or for every column anew (``loop, each column``,
timed on few columns and scaled up). Peak memory is what the arrays of one more call take. The first test of pairs also
imports scipy.stats.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.inference import (
    compare_pairs,
    friedman,
    hierarchical_bootstrap,
    mean_case_rank,
    mean_over_repeats,
    paired_difference,
)

REPEATS, CASES, METHODS, METRICS, REPLICATES = 3, 400, 20, 6, 2000
TIMED_COLUMNS = 4


def study(missing: float) -> NDArray[np.float64]:
    random = np.random.default_rng(0)
    values = random.gamma(2.0, 0.05, (REPEATS, CASES, 1, METRICS)) * random.gamma(
        50.0, 0.02, (REPEATS, CASES, METHODS, METRICS)
    )
    values[random.random(values.shape) < missing] = np.nan
    return values


def loop(values: NDArray[np.float64], seed: int = 0) -> NDArray[np.float64]:
    """Percentiles of nested resampling of indices, ``(2, ...)``."""
    random = np.random.default_rng(seed)
    means = []
    for _ in range(REPLICATES):
        drawn = [
            values[repeat][random.integers(CASES, size=CASES)] for repeat in random.integers(REPEATS, size=REPEATS)
        ]
        means.append(np.nanmean(np.concatenate(drawn), axis=0))
    return np.quantile(means, (0.025, 0.975), axis=0)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def report(name: str, seconds: float, reference: float | None = None) -> None:
    print(f"  {name:<32}{seconds:>9.3f} s" + (f"  {seconds / reference:>8.1f}x" if reference else ""))


def main() -> None:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("segcal", "numpy", "scipy")]
    print(f"python {platform.python_version()}, {', '.join(versions)}")
    for missing in (0.0, 0.05):
        values = study(missing)
        print(f"\n{METHODS} methods x {CASES} cases x {METRICS} metrics x {REPEATS} repeats, {missing:.0%} missing")
        ours, result = timed(lambda values=values: hierarchical_bootstrap(values))
        report("hierarchical_bootstrap", ours, ours)
        report("paired_difference", timed(lambda values=values: paired_difference(values, baseline=0))[0], ours)
        looped, bounds = timed(lambda values=values: loop(values))
        report("loop", looped, ours)
        columns = values.reshape(REPEATS, CASES, -1)[:, :, :TIMED_COLUMNS]
        each, _ = timed(lambda columns=columns: [loop(columns[:, :, i], i) for i in range(TIMED_COLUMNS)])
        report("loop, each column", each * METHODS * METRICS / TIMED_COLUMNS, ours)
        width = result.high - result.low
        off = np.abs(np.stack([result.low, result.high]) - bounds) / width
        print(
            f"  ends of the intervals, loop against segcal: {off.mean():.3f} of a width apart, at most {off.max():.3f}"
        )
        tracemalloc.start()
        hierarchical_bootstrap(values)
        print(f"  peak memory {tracemalloc.get_traced_memory()[1] / 1e6:.0f} MB")
        tracemalloc.stop()

    cases = mean_over_repeats(study(0.0))
    print(f"\n{METHODS} methods x {CASES} cases x {METRICS} metrics, all {METHODS * (METHODS - 1) // 2} pairs")
    for test in ("wilcoxon", "mann-whitney"):
        seconds, _ = timed(lambda test=test: [compare_pairs(cases[:, :, m], test=test) for m in range(METRICS)])
        report(f"compare_pairs, {test}", seconds)
    report("friedman", timed(lambda: [friedman(cases[:, :, m]) for m in range(METRICS)])[0])
    report("mean_case_rank", timed(lambda: mean_case_rank(cases))[0])


if __name__ == "__main__":
    main()
