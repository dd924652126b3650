"""A sample of ``benchmarks/mutated_files.py``: no damaged file ends in a traceback or takes much memory."""

import importlib.util
import random
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import segcal

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "mutated_files.py"
# What a decoder of LZMA takes for its dictionary, however small the file.
LZMA_MEMORY = 10 * 2**20


@pytest.fixture(scope="module")
def mutated():
    if not SCRIPT.is_file():
        pytest.skip("the benchmarks are not part of the package")
    spec = importlib.util.spec_from_file_location("mutated_files", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SHAPE = (4, 64, 96)
    return module


def checked(root):
    """The report, and the most memory it took."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    report = segcal.check(root)
    return report, tracemalloc.get_traced_memory()[1] - before


@pytest.mark.filterwarnings("default")  # Libraries warn of what they find odd before they refuse it.
@pytest.mark.parametrize(
    "format", ["npy", "npz", "nii", "nii.gz", "png", "tif", "zarr", "zarr+crc32c", "h5", "h5+fletcher32"]
)
def test_damaged_files_are_refused_or_read(tmp_path, mutated, format):
    mutated.write_valid(tmp_path / "valid", format)
    segcal.check(tmp_path / "valid")  # Imports what it needs.
    tracemalloc.start()
    try:
        report, allowed = checked(tmp_path / "valid")
        assert not report.problems
        truth = segcal.open_cases(tmp_path / "valid")[0].load()
        refused = 0
        for number in range(10):
            shutil.copytree(tmp_path / "valid", tmp_path / "damaged")
            kind = mutated.damage(tmp_path / "damaged", format, random.Random(f"{format}/{number}"))
            report, memory = checked(tmp_path / "damaged")
            assert memory < 2 * allowed + (LZMA_MEMORY if kind == "repack" else 0), kind
            refused += bool(report.problems)
            if not report.problems and not report.notes and format in mutated.COVERED and kind != "repack":
                case = segcal.open_cases(tmp_path / "damaged")[0]
                np.testing.assert_array_equal(case.logits, truth.logits)
                np.testing.assert_array_equal(case.labels, truth.labels)
            shutil.rmtree(tmp_path / "damaged")
        assert refused
    finally:
        tracemalloc.stop()
