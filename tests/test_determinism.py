"""The same seed gives the same bytes; other numbers of threads or workers move sums by rounding, and nothing else."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import deterministic
import segcal
from seeds import in_torture_only

THREADS = (1, 2)


@pytest.fixture(scope="module")
def cases():
    return deterministic.made()


@pytest.fixture
def threads():
    """Sets the number of threads; puts it back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def assert_near(one, other, rel):
    """Two documents with the same words and counts, and numbers that agree."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_near(one[key], other[key], rel)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_near(*pair, rel)
    elif isinstance(one, float):
        assert math.isclose(one, other, rel_tol=rel, abs_tol=rel)
    else:
        assert one == other


def test_another_process_writes_the_same_bytes(threads):
    """Statistics, results.json, fits and calibrated files."""
    child = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "deterministic.py")],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert not child.returncode, child.stderr
    threads(1)
    assert deterministic.digests() == json.loads(child.stdout)


def test_statistics_differ_by_rounding_between_numbers_of_threads(cases):
    alone = deterministic.statistics(cases).tensors()
    for count in (2, 3):
        first, second = (deterministic.statistics(cases, count) for _ in range(2))
        assert first.to_dict() == second.to_dict()
        for name, own in first.tensors().items():
            if own.dtype == torch.int64:
                assert torch.equal(own, alone[name]), name
            else:
                np.testing.assert_allclose(own, alone[name], rtol=1e-12, atol=1e-12, err_msg=name)


@in_torture_only
def test_results_differ_by_rounding_between_numbers_of_workers(cases):
    alone = segcal.evaluate(cases)
    assert alone.to_json() == segcal.evaluate(cases).to_json()
    assert_near(alone.to_dict(), segcal.evaluate(cases, workers=2).to_dict(), 1e-12)


@in_torture_only
@pytest.mark.parametrize("method", deterministic.METHODS)
def test_fits_and_maps_with_other_numbers_of_threads(method, cases, threads):
    """A map of voxels is the same to the bit; the fit that it comes from is as good to 1e-9."""
    found, written = [], set()
    for count in THREADS:
        threads(count)
        found.append(deterministic.fitted(cases, method))
        written.add(deterministic.applied(cases, found[0]))
    assert len(written) == 1
    losses = [own.fit_report.nll_after for own in found]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-9)
