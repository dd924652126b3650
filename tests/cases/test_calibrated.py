"""Whoever shows what a calibrator makes of a case shows the same."""

import inspect

import numpy as np
import pytest
import torch
from typing_extensions import get_protocol_members

import segcal
from segcal.calibrators import CALIBRATORS
from segcal.cases.calibrated import CaseCalibrator, PerChannel, as_calibrator, case_scores, score_pieces
from segcal.cli.demo import _true_error
from segcal.errors import InputError, SegcalError
from segcal.evaluation.apply import apply, write_maps
from segcal.fitting.measured import mean_loss
from segcal.study.results import browser
from segcal.study.tuning import _measure, tune
from segcal.synthetic import Temperature, scenes, true_calibration_error

# Members that disagree, pooled as logits: pooling them as probabilities is another map altogether.
CASES = scenes(2, size=(24, 28), members=3, member_noise=3.0, plant=[Temperature(2.0)], ignored=0.05)
IMAGES = CASES[0].image.shape[1]
CALIBRATORS_TRIED = {
    **{id: {} for id in CALIBRATORS},
    "ensemble": {"space": "probs"},
    "ensemble of logits": {"space": "logits"},
    "ensemble, then ts": {"space": "probs", "base": "ts"},
    "lts with images": {"image_channels": IMAGES, "epochs": 1},
    "selective after ensemble": {"base": "ensemble"},
}


@pytest.fixture(scope="module", params=CALIBRATORS_TRIED)
def fitted(request):
    name = request.param
    arguments = {"epochs": 1} if name in ("lts", "lts-ti", "ibts") else CALIBRATORS_TRIED[name]
    return CALIBRATORS[name.replace(",", "").split()[0]](**arguments).fit(CASES)


def pieces(calibrator, case):
    """What the calibrator itself says of a case."""
    with torch.no_grad():
        return torch.cat([log_probs for _, log_probs in calibrator.pieces(case)], 2)


def nll(log_probs, case):
    return float(-log_probs.double().movedim(1, -1)[case.valid].gather(1, case.labels[case.valid][:, None]).mean())


def test_what_evaluation_sees_is_declared(fitted):
    assert isinstance(fitted, CaseCalibrator)
    assert as_calibrator(fitted) is fitted
    # From Python 3.12 on, isinstance does not look where a module keeps its buffers and parts.
    for name in get_protocol_members(CaseCalibrator) | get_protocol_members(PerChannel):
        inspect.getattr_static(fitted, name)


def test_maps_show_the_pieces(fitted, tmp_path):
    write_maps(CASES, tmp_path, calibrator=fitted)
    for case in CASES:
        expected = pieces(fitted, case).double().exp().amax(1)[0]
        found = np.load(tmp_path / "confidence" / f"{case.id}.npy")
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)


def test_trials_and_evaluation_measure_the_pieces(fitted):
    expected = [nll(pieces(fitted, case), case) for case in CASES]
    trials = [float(values["nll"]) for values in _measure([fitted], CASES)[0]]
    evaluated = segcal.evaluate(CASES, fitted, metrics=("nll",)).values("nll")
    assert trials == pytest.approx(expected, rel=1e-5)
    assert list(evaluated.values()) == pytest.approx(expected, rel=1e-5)
    voxels = [int(case.valid.sum()) for case in CASES]
    assert mean_loss(CASES, fitted).nll == pytest.approx(np.average(expected, weights=voxels), rel=1e-5)


def test_pictures_show_the_pieces(fitted, monkeypatch):
    drawn = []
    pictures = browser._pictures
    monkeypatch.setattr(browser, "_pictures", lambda *parts: drawn.append(parts[-1]) or pictures(*parts))
    list(browser._panels(CASES[0], fitted))
    assert torch.equal(drawn[0], pieces(fitted, CASES[0])[0])


def test_the_true_error_is_that_of_the_pieces(fitted):
    case = CASES[0]
    expected = true_calibration_error(pieces(fitted, case), case.posterior)
    assert _true_error(CASES[:1], fitted).kl == pytest.approx(expected.kl, rel=1e-5)


def test_pooling_in_another_space_is_seen():
    """The maps of an ensemble were those of the pooled logits, whatever the space."""
    case, ensemble = CASES[0], CALIBRATORS["ensemble"](space="probs").fit(CASES)
    confidence = case_scores(case, ensemble).exp().amax(1)
    mean = torch.stack([case.member_logits(m).softmax(1) for m in range(3)]).mean(0)
    torch.testing.assert_close(confidence, mean.amax(1))
    assert (confidence - case.logits.softmax(1).amax(1)).abs().max() > 0.1


USES = {
    "evaluate": lambda cases, calibrator, folder: segcal.evaluate(cases, calibrator),
    "apply": lambda cases, calibrator, folder: apply(calibrator, cases, folder),
    "maps": lambda cases, calibrator, folder: write_maps(cases, folder, calibrator=calibrator),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_calibrators_of_other_classes_are_refused(use, tmp_path):
    named = {"num_classes": 3, "size": (16, 20)}
    fitted_to = scenes(2, class_names="abc", **named)
    calibrator = CALIBRATORS["ts"]().fit(fitted_to)
    with pytest.raises(InputError, match="the cases have 4 classes; expected 3, as the calibrator has"):
        use(scenes(1, num_classes=4, size=(16, 20)), calibrator, tmp_path)
    with pytest.raises(InputError, match="the cases have the classes b, a, c; expected a, b, c"):
        use(scenes(1, class_names="bac", **named), calibrator, tmp_path)
    with pytest.raises(SegcalError, match="has not been fitted"):
        use(fitted_to, CALIBRATORS["ts"](), tmp_path)
    assert list(tmp_path.iterdir()) == []
    use(scenes(1, **named), calibrator, tmp_path)  # names that are not known are not compared


@pytest.mark.parametrize("fit", [lambda *parts: CALIBRATORS["ts"]().fit(parts[0], validation=parts[1]),
                                 lambda *parts: tune("dc", *parts)])  # fmt: skip
def test_validation_cases_of_other_classes_are_refused(fit):
    cases, other = (scenes(2, class_names=names, num_classes=3, size=(16, 20)) for names in ("abc", "bac"))
    with pytest.raises(InputError, match="validation has the classes b, a, c; expected a, b, c"):
        fit(cases, other)


def test_shifted_cases_of_other_classes_are_refused():
    cases, other = (scenes(6, class_names=names, num_classes=3, size=(16, 20)) for names in ("abc", "bac"))
    with pytest.raises(InputError, match="'night' has the classes b, a, c; expected a, b, c, as the dataset has"):
        segcal.compare(cases, ("ts",), 1, shifted={"night": other})


def test_functions_see_whole_cases_and_nothing_leaves_scores_as_they_are():
    case = CASES[0]
    parts = list(score_pieces(case, lambda logits: logits / 2))
    assert [rows for rows, _ in parts] == [slice(0, 24)]
    assert torch.equal(parts[0][1], case.logits / 2)
    assert torch.equal(case_scores(case, None), case.logits)
