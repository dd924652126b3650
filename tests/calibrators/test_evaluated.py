"""Evaluating through a calibrator is evaluating what the calibrator writes: one meaning of every metric."""

import math

import numpy as np
import pytest

import segcal
from segcal.cases import write_dataset
from segcal.evaluation.apply import apply
from segcal.metrics import METRICS

# Without flips, which compare with the scores before calibration: files do not know these.
MEASURED = [id for id in METRICS if id != "flip"]
REGIONS = ("everything", "boundary")


@pytest.fixture(scope="session")
def folder(cases, tmp_path_factory):
    """The scenes on disk, and the same with a class that is impossible in some places."""
    root = tmp_path_factory.mktemp("evaluated")
    write_dataset(cases[:2], root / "finite")
    write_dataset(cases[:2], root / "impossible")
    for path in (root / "impossible" / "logits").iterdir():
        scores = np.load(path)
        labels = np.load(root / "impossible" / "labels" / path.name)
        scores[2, :16] = np.where(labels[:16] == 2, scores[2, :16], -np.inf)
        np.save(path, scores)
    return root


def assert_same(one, other, tolerance, *, steps=0.0):
    assert [row[:3] for row in one.rows] == [row[:3] for row in other.rows]
    for left, right in zip(one.rows, other.rows, strict=True):
        # A voxel that rounding moves over the edge of a bin with few others changes that bin's gap.
        near = 0.05 if left.metric in ("mce", "ace") else max(tolerance, steps)
        assert left.value == pytest.approx(right.value, rel=tolerance, abs=near, nan_ok=True), left
        assert math.isfinite(left.value) or left.value == right.value or left.count == 0


@pytest.mark.parametrize("kind", ["finite", "impossible"])
def test_evaluating_through_a_calibrator_is_evaluating_what_it_writes(fitted, folder, tmp_path, kind):
    cases = segcal.open_cases(folder / kind)
    apply(fitted, cases, tmp_path)
    written = segcal.open_cases(tmp_path, labels=str(folder / kind / "labels"))
    through = segcal.evaluate(cases, fitted, metrics=MEASURED, regions=REGIONS)
    applied = segcal.evaluate(written, metrics=MEASURED, regions=REGIONS)
    # The confidences of trust take few values, and one of them can be rounded over the edge of a bin.
    assert_same(through, applied, 1e-3, steps=0.01 if fitted.id == "trust" else 0.0)
    assert all(abs(row.value) < 1e-5 for row in through.rows if row.metric == "free-energy-std")


def test_impossible_classes_are_evaluated_as_forward_maps_them(fitted, folder):
    cases = segcal.open_cases(folder / "impossible")
    through = segcal.evaluate(cases, fitted, metrics=(*MEASURED, "flip"), exact=True)
    function = segcal.evaluate(cases, lambda z: fitted(z), metrics=(*MEASURED, "flip"), exact=True)
    if not fitted.spatial:
        assert_same(through, function, 1e-5)
