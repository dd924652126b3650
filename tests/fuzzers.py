"""The targets of ``benchmarks/fuzz.py``, for tests that run a share of them."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def benchmark(name):
    """A module of the benchmarks, which are not part of the package."""
    if not BENCHMARKS.is_dir():
        pytest.skip("the benchmarks are not part of the package")
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return __import__(name)
