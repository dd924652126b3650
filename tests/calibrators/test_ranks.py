"""Fits do not depend on how many processes share the cases."""

import pytest

from pretended_ranks import pretended_ranks
from segcal.calibrators import CALIBRATORS, ensemble_temperature, selective
from segcal.fitting import expert_exact
from segcal.study.tuning import tune
from segcal.synthetic import SpatialTemperature, scenes

FAST = {"lts-ti": {"epochs": 1}}
CASES = scenes(9, size=(24, 32), plant=[SpatialTemperature()])


def assert_same(mine, own):
    tensors = own.tensors()
    for name, tensor in mine.tensors().items():
        gap = (tensor - tensors[name]).abs().max() / tensors[name].abs().max().clamp(min=1)
        assert float(gap) < 1e-8, name
    for value in ("nll_before", "nll_after"):
        assert getattr(mine.fit_report, value) == pytest.approx(getattr(own.fit_report, value), rel=1e-10)
    assert mine.fit_report.voxels_used == own.fit_report.voxels_used


@pytest.mark.parametrize(
    "method", ["ts", "ets", "ms", "cms-op", "cdc", "histogram", "meta-cal", "lts-ti", "selective", "trust"]
)
def test_fits_are_those_of_one_process(method, monkeypatch):
    # Fewer than the cases have: exact fits read all cases in every pass.
    monkeypatch.setattr(expert_exact, "SAMPLE_VOXELS", 2000)
    monkeypatch.setattr(ensemble_temperature, "MIXTURE_VOXELS", 2000)
    monkeypatch.setattr(selective, "_EPOCHS", 3)
    if method == "cdc":
        monkeypatch.setattr(expert_exact, "_DAMPED_PASSES", 3)  # of about ninety
    own = CALIBRATORS[method](**FAST.get(method, {})).fit(CASES, voxels="all")
    with pretended_ranks(monkeypatch, 3):
        assert_same(CALIBRATORS[method](**FAST.get(method, {})).fit(CASES, voxels="all"), own)


def test_samples_and_crops_are_those_of_one_process(monkeypatch):
    monkeypatch.setattr(expert_exact, "SAMPLE_VOXELS", 2000)
    for method in ("vs", "lts-ti"):
        own = CALIBRATORS[method](**FAST.get(method, {})).fit(CASES)
        with pretended_ranks(monkeypatch, 2):
            assert_same(CALIBRATORS[method](**FAST.get(method, {})).fit(CASES), own)


def test_strengths_are_those_of_one_process(monkeypatch):
    own = tune("vs", CASES, strengths=(1.0, 0.01))
    with pretended_ranks(monkeypatch, 12):  # more than there are cases
        mine = tune("vs", CASES, strengths=(1.0, 0.01))
    assert mine.tuning == own.tuning
    assert_same(mine, own)
