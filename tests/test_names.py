"""A misspelt name is answered with the one that was meant, wherever names are checked."""

import pytest
import torch

import segcal
from datasets import plain
from segcal.calibrators import SelectiveScaling
from segcal.errors import SegcalError, did_you_mean
from segcal.evaluation.evaluate import evaluate
from segcal.metrics import preset
from segcal.metrics.modules import Calibration
from segcal.regions import CaseRegions
from segcal.study import compare
from segcal.study.tuning import tune
from segcal.synthetic import scenes
from segcal.training.config import parse_config

CASES = scenes(6, size=(16, 20))


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: compare(CASES, ("ts", "cmsop")), "cms-op"),
        (lambda: compare(CASES, "decision_preserving"), "decision-preserving"),
        (lambda: compare(CASES, regions=("boundry",)), "boundary"),
        (lambda: compare(CASES, tune="pathe"), "path"),
        (lambda: tune("Isotonic", CASES), "isotonic"),
        (lambda: SelectiveScaling(base="dirichlet-ts"), None),
        (lambda: SelectiveScaling(base="cms_ap"), "cms-ap"),
        (lambda: evaluate(CASES, metrics=("eec",)), "ece"),
        (lambda: evaluate(CASES, metrics=("ece[numbins=5]",)), "num_bins"),
        (lambda: evaluate(CASES, regions=("bondary",)), "boundary"),
        (lambda: CaseRegions(torch.zeros(1, 8, 8, dtype=torch.int64)).parts("foregound"), "foreground"),
        (lambda: preset("nacls"), "nacl"),
        (lambda: parse_config({"data": "a", "output": "b", "loss": "diec"}), "dice"),
        (lambda: parse_config({"data": "a", "output": "b", "epoch": 3}), "epochs"),
        (lambda: Calibration(3, metrics=("nlll",)), "nll"),
    ],
)
def test_the_name_that_was_meant_is_in_the_error(call, meant):
    with pytest.raises(SegcalError) as raised:
        call()
    if meant is None:
        assert "did you mean" not in str(raised.value)
    else:
        assert f"did you mean '{meant}'?" in str(raised.value)


def test_nothing_is_guessed_where_nothing_is_near():
    assert did_you_mean("zzzzzz", segcal.CALIBRATORS) is None
    assert did_you_mean(3.5, segcal.CALIBRATORS) is None
    assert did_you_mean("TS", segcal.CALIBRATORS) == "did you mean 'ts'?"


def test_the_command_line_says_so_too(run, tmp_path):
    data = plain(tmp_path / "data", count=4)
    for arguments, meant in (
        (("fit", data, "-o", tmp_path / "cal", "--method", "cmsop"), "cms-op"),
        (("compare", data, "-o", tmp_path / "r", "--methods", "ts,vss"), "vs"),
        (("evaluate", data, "--metrics", "nll,brierr"), "brier"),
        (("evaluate", data, "--regions", "boundery"), "boundary"),
        (("evaluate", data, "--preset", "crak"), "crac"),
    ):
        code, text, error = run(*arguments)
        assert (code, text) == (1, "")
        assert f"did you mean '{meant}'?" in error
