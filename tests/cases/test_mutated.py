"""A sample of ``benchmarks/fuzz.py``: damaged input of every kind is refused clearly, or read right."""

import warnings

import pytest

from fuzzers import benchmark

TARGETS = (
    "npy", "npz", "nii", "nii.gz", "png", "tif", "zarr", "zarr+crc32c", "h5", "h5+fletcher32", "segcal.toml",
    "run.toml",
)  # fmt: skip


@pytest.mark.filterwarnings("default")  # Libraries warn of what they find odd before they refuse it.
@pytest.mark.parametrize("name", TARGETS)
def test_damaged_input_is_refused_or_read_right(tmp_path, name):
    fuzz = benchmark("fuzz")
    target = fuzz.targets()[name]
    target.write(tmp_path / "valid")
    assert target.judge(tmp_path / "valid", "[]") == "accepted"
    outcomes = set()
    for number in range(12):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind = fuzz.damage(target, tmp_path / "valid", tmp_path / f"{number}", seed=7, number=number)
        outcomes.add(found := target.judge(tmp_path / f"{number}", kind))
        assert not found.startswith("FAIL"), f"{name} {number} {kind}: {found}"
    assert "refused" in outcomes
