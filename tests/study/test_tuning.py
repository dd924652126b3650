import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import segcal
from multilabel import stacked
from segcal.calibrators import CALIBRATORS, load
from segcal.errors import InputError
from segcal.evaluation.evaluate import evaluate
from segcal.metrics.measure import Measure
from segcal.study import tuning
from segcal.study.tuning import _choose, tune
from segcal.synthetic import ClassAffine, ClassConditional, Temperature, scenes

SIZE = (32, 40)
EXACT = ("vs", "ms", "ms-c", "dc", "cdc", "cms-ap", "cms-op")
PLAIN = scenes(14, size=SIZE, num_classes=4, plant=[Temperature(2.0)], seed=3)
CONDITIONAL = scenes(14, size=SIZE, num_classes=4, plant=[ClassConditional([1.0, 2.0, 3.0, 4.0])], seed=3)


def held_out_nll(calibrator, cases):
    return evaluate(cases, calibrator, metrics=("nll",)).summary()[0].mean


@pytest.mark.parametrize("method", EXACT)
def test_infinite_shrinkage_is_temperature_scaling(method, tmp_path):
    ts = CALIBRATORS["ts"]().fit(PLAIN[:3])
    tuned = tune(method, PLAIN[:3], PLAIN[3:5], strengths=(math.inf,))
    # The constrained maps keep every gap above 0.001, which adds up over the four classes.
    close = 4e-3 if tuned.preserves else 1e-5
    z = PLAIN[0].logits
    torch.testing.assert_close(tuned.predict_proba(z), ts.predict_proba(z), rtol=0, atol=close)
    tuned.save(tmp_path / "tuned.safetensors")
    loaded = load(tmp_path / "tuned.safetensors")
    assert torch.equal(loaded(z), tuned(z))
    assert loaded.arguments()["shrinkage"] == math.inf
    assert b"Infinity" not in (tmp_path / "tuned.safetensors").read_bytes()  # which is no JSON


@pytest.mark.parametrize("method", ["cms-ap", "cms-op"])
def test_a_plain_temperature_is_not_overfitted(method):
    """One image to fit a rich map to: tuned, it stays near temperature scaling; untuned, it does not."""
    fitted_to, chosen_on, rest = PLAIN[:1], PLAIN[1:6], PLAIN[6:]
    tuned = tune(method, fitted_to, chosen_on)
    untuned = held_out_nll(CALIBRATORS[method]().fit(fitted_to), rest)
    ts = held_out_nll(CALIBRATORS["ts"]().fit(fitted_to), rest)
    assert held_out_nll(tuned, rest) < untuned
    assert held_out_nll(tuned, rest) < ts + 0.1 * (untuned - ts)


@pytest.mark.parametrize("validated", [True, False])
def test_what_temperature_cannot_express_is_learnt(validated):
    """Winners that are overconfident to different degrees; the strength chosen on images or by folds."""
    fitted_to, chosen_on, rest = CONDITIONAL[:6], CONDITIONAL[6:9], CONDITIONAL[9:]
    tuned = tune("cms-op", fitted_to, chosen_on if validated else None, strengths=(math.inf, 10.0, 0.1, 0.0))
    assert tuned.shrinkage < 10
    assert held_out_nll(tuned, rest) < held_out_nll(CALIBRATORS["ts"]().fit(fitted_to), rest) - 0.01
    assert ("validation images" if validated else "5 folds") in tuned.fit_report.notes[0]


def test_trials_are_means_over_images_and_the_lowest_wins():
    tuned = tune("dc", CONDITIONAL[:3], CONDITIONAL[3:6], strengths=(10.0, 0.1))
    values = evaluate(CONDITIONAL[3:6], tuned, metrics=("nll", "ece", "brier"), regions=("everything",))
    won = next(trial for trial in tuned.tuning if trial.arguments["shrinkage"] == tuned.shrinkage)
    assert won.nll == min(trial.nll for trial in tuned.tuning)
    for row in values.summary():
        if row.metric in ("nll", "ece", "brier"):
            assert getattr(won, row.metric) == pytest.approx(row.mean, rel=1e-9)


def table(nll, ece):
    return [[{"nll": a, "ece": b} for a, b in zip(*images, strict=True)] for images in zip(nll, ece, strict=True)]


def test_among_equal_errors_the_lowest_nll_is_chosen():
    ece = [[0.10, 0.20, 0.30], [0.09, 0.21, 0.31], [0.20, 0.30, 0.40]]  # alike, alike, clearly worse
    nll = [[3.0, 3.0, 3.0], [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]]
    assert _choose(table(nll, ece), "ece") == 1
    assert _choose(table(nll, ece), "nll") == 2


def test_an_image_without_valid_voxels_does_not_count():
    nan = math.nan
    assert _choose(table([[1.0, nan], [2.0, nan]], [[0.3, nan], [0.1, nan]]), "ece") == 1
    assert _choose(table([[1.0, nan], [2.0, nan]], [[0.3, nan], [0.1, nan]]), "nll") == 0


def test_calibrators_without_hyperparameters_are_fitted():
    tuned = tune("ts", PLAIN[:2])
    assert tuned.tuning == ()
    z = PLAIN[0].logits
    assert torch.equal(tuned(z), CALIBRATORS["ts"]().fit(PLAIN[:2])(z))


@pytest.mark.parametrize("validated", [True, False])
def test_all_voxels_are_fitted_to_where_asked_for(monkeypatch, validated):
    for module in (segcal.study.tuning, segcal.fitting.expert_exact):
        monkeypatch.setattr(module, "SAMPLE_VOXELS", 500)
    parts = (CONDITIONAL[:4], CONDITIONAL[4:6] if validated else None)
    few, every = (tune("dc", *parts, strengths=(0.1,), voxels=voxels) for voxels in ("auto", "all"))
    assert few.fit_report.voxels_used < every.fit_report.voxels_used
    expected = CALIBRATORS["dc"](shrinkage=0.1).fit(parts[0], voxels="all")
    assert every.fit_report.voxels_used == expected.fit_report.voxels_used
    assert torch.equal(every.weight, expected.weight)


def test_folds_are_no_more_than_the_groups():
    two = replace(CONDITIONAL[:6], groups=lambda name: "ab"[int(name[-1]) % 2])
    assert "2 folds" in tune("vs", two, strengths=(1.0, 0.0)).fit_report.notes[0]
    with pytest.raises(InputError, match="6 cases of one group and no validation cases"):
        tune("vs", replace(two, groups=lambda name: "a"))


def test_optuna_searches_what_has_no_path():
    pytest.importorskip("optuna")
    calibrator = CALIBRATORS["vs"](solver="adam", patience=2)
    tuned = tune(calibrator, PLAIN[:2], PLAIN[2:4], trials=3, seed=1)
    assert len(tuned.tuning) == 3
    best = min(tuned.tuning, key=lambda trial: trial.nll)
    assert {name: tuned.arguments()[name] for name in best.arguments} == best.arguments
    again = tune(calibrator, PLAIN[:2], PLAIN[2:4], trials=3, seed=1)
    assert [trial.nll for trial in again.tuning] == [trial.nll for trial in tuned.tuning]


def test_each_channel_of_multi_label_data_has_its_own_strength():
    parts = {
        "plain": scenes(6, size=SIZE, num_classes=2, plant=[Temperature(2.0)], seed=3),
        "biased": scenes(6, size=SIZE, num_classes=2, plant=[ClassAffine([1.0, 1.0], [0.0, 2.0])], seed=4),
    }
    cases, strengths = stacked(**parts), (math.inf, 1.0, 0.0)
    steps = []
    tuned = tune("vs", cases[:4], cases[4:], strengths=strengths, progress=steps.append)
    alone = {name: tune("vs", own[:4], own[4:], strengths=strengths) for name, own in parts.items()}
    for channel, own in zip(tuned.channels, alone.values(), strict=True):
        assert channel.shrinkage == own.shrinkage
        assert torch.equal(channel.bias, own.bias)
    assert tuned.channels[1].shrinkage < math.inf
    assert [trial.channel for trial in tuned.tuning] == ["plain"] * 3 + ["biased"] * 3
    assert [trial.nll for trial in tuned.tuning] == [trial.nll for own in alone.values() for trial in own.tuning]
    assert any(step.startswith("biased: ") for step in steps)
    # Fitting again keeps what was chosen for each.
    again = copy.deepcopy(tuned).fit(cases)
    assert [channel.shrinkage for channel in again.channels] == [channel.shrinkage for channel in tuned.channels]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"select": "dice"}, "select is 'dice'"),
        ({"strengths": ()}, "strengths are"),
        ({"strengths": (1.0, -1.0)}, "strengths are"),
        ({"strengths": (math.nan,)}, "strengths are"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        tune("dc", PLAIN[:2], PLAIN[2:3], **arguments)


def test_bad_calibrators_and_cases():
    with pytest.raises(InputError, match="calibrator is 'tss'"):
        tune("tss", PLAIN[:2])
    with pytest.raises(InputError, match="one case and no validation cases"):
        tune("dc", PLAIN[:1])
    with pytest.raises(InputError, match="no valid voxel"):
        _choose(table([[math.nan]], [[math.nan]]), "ece")
    with pytest.raises(InputError, match="off_diagonal is inf"):
        CALIBRATORS["dc"](off_diagonal=np.inf)


def test_the_note_names_the_settings_of_the_calibrator_where_trials_are_alike(monkeypatch):
    pytest.importorskip("optuna")
    cases = scenes(4, size=(16, 20))
    alike = {name: Measure.ratio(0.5, 10) for name in tuning._METRICS}
    monkeypatch.setattr(tuning, "_measure", lambda candidates, validation: [[alike]])
    found = tune(CALIBRATORS["vs"](solver="adam"), cases[:3], cases[3:], trials=3)
    first = found.tuning[0].arguments
    assert {name: found.arguments()[name] for name in first} == first
