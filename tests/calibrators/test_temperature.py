import math

import pytest
import torch
from scipy.optimize import minimize_scalar

from segcal.calibrators import TemperatureScaling, temperature
from segcal.synthetic import GaugeOffsets, Temperature, scenes, true_calibration_error


def nll(z, y, beta):
    return float(torch.nn.functional.cross_entropy(beta * z.double(), y, ignore_index=255))


@pytest.mark.parametrize("planted", [0.4, 1.0, 2.5])
def test_planted_temperature_is_recovered(planted):
    cases = scenes(6, size=(64, 80), plant=[Temperature(planted), GaugeOffsets(5.0)], coherence=0)
    calibrator = TemperatureScaling().fit(cases)
    assert calibrator.temperature == pytest.approx(planted, rel=0.03)
    before = after = 0.0
    for case in cases:
        before += true_calibration_error(case.logits.log_softmax(1), case.posterior).kl
        after += true_calibration_error(calibrator(case.logits), case.posterior).kl
    assert after < 0.05 * before or planted == 1.0


def test_optimum_equals_scipys():
    cases = scenes(3, size=(48, 64), plant=[Temperature(2.0)])
    calibrator = TemperatureScaling().fit(cases)
    z = torch.cat([case.logits for case in cases])
    y = torch.cat([case.labels for case in cases])
    best = minimize_scalar(lambda log_beta: nll(z, y, math.exp(log_beta)), bounds=(-3, 3), options={"xatol": 1e-10})
    assert nll(z, y, float(calibrator.beta)) == pytest.approx(best.fun, abs=1e-10)
    assert calibrator.fit_report.nll_after == pytest.approx(best.fun, abs=1e-7)
    assert calibrator.fit_report.certificate < 1e-4


def test_at_the_optimum_nll_equals_entropy():
    """Ding et al. 2021, Theorem 4."""
    cases = scenes(3, size=(48, 64), plant=[Temperature(2.0)])
    calibrator = TemperatureScaling().fit(cases)
    log_p = torch.cat([calibrator(case.logits.double()).movedim(1, -1)[case.valid] for case in cases])
    y = torch.cat([case.labels[case.valid] for case in cases])
    likelihood = float(-log_p.gather(1, y[:, None]).mean())
    entropy = float(-(log_p.exp() * log_p).sum(1).mean())
    assert likelihood == pytest.approx(entropy, abs=1e-6)


def test_separable_data_stop_at_the_bound_and_say_so():
    y = torch.randint(0, 3, (200,), generator=torch.Generator().manual_seed(0))
    sure = TemperatureScaling().fit(2.0 * torch.nn.functional.one_hot(y, 3), y)
    assert sure.fit_report.converged
    assert "bound" in sure.fit_report.notes[0]
    assert math.isfinite(sure.temperature)
    wrong = TemperatureScaling().fit(2.0 * torch.nn.functional.one_hot((y + 1) % 3, 3), y)
    assert "bound" in wrong.fit_report.notes[0]
    assert wrong.temperature > 100


def test_equal_logits_and_one_label_do_not_break():
    flat = TemperatureScaling().fit(torch.zeros(50, 3), torch.zeros(50, dtype=torch.int64))
    assert flat.fit_report.nll_after == pytest.approx(math.log(3))
    z = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    assert math.isfinite(TemperatureScaling().fit(z, torch.zeros(50, dtype=torch.int64)).temperature)


def test_the_seed_of_the_sample_does_not_matter_to_the_result():
    cases = scenes(3, size=(48, 64), plant=[Temperature(2.0)])
    first, second = (TemperatureScaling().fit(cases, seed=seed).temperature for seed in (0, 1))
    assert first == pytest.approx(second, rel=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scale", [1e-5, 1e-3])
def test_logits_too_small_to_have_a_slope_are_scaled_all_the_same(scale, sign):
    """The NLL hardly depends on beta near 1, where a slope of zero is no sign of the optimum."""
    z = scale * torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    y = torch.multinomial((sign * 0.1 * z / scale).softmax(1), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    calibrator = TemperatureScaling().fit(z, y)
    best = minimize_scalar(lambda beta: nll(z, y, beta), bounds=(1e-3, 1e3), method="bounded")
    assert nll(z, y, float(calibrator.beta)) <= best.fun + 1e-8
    assert calibrator.temperature > 0


def test_the_sample_to_start_from_has_as_many_voxels_of_each_case(monkeypatch):
    cases = scenes(2, size=(32, 40))
    total, sample = temperature._first_pass(cases, 0)
    assert total.count == len(sample.labels) == 2 * 32 * 40  # few enough to be taken whole
    monkeypatch.setattr(temperature, "SAMPLE_VOXELS", 1000)
    total, sample = temperature._first_pass(cases, 0)
    assert total.count == 2 * 32 * 40
    assert len(sample.labels) == 1000
    own = {tuple(z) for z in cases[1].logits.flatten(2)[0].T.tolist()}
    assert [tuple(z) in own for z in sample.logits.tolist()] == [False] * 500 + [True] * 500


def test_two_passes_are_enough(monkeypatch):
    passes = []
    sums = temperature._sums_at
    monkeypatch.setattr(temperature, "_sums_at", lambda cases, beta: passes.append(beta) or sums(cases, beta))
    TemperatureScaling().fit(scenes(3, size=(32, 40), plant=[Temperature(2.0)]))
    assert 1 <= len(passes) <= 2


@pytest.mark.parametrize("unit", [1.0, 1e-2, 3e-3])
def test_the_unit_of_the_logits_is_that_of_the_temperature(unit):
    z = torch.cat([case.logits for case in scenes(2, size=(32, 40), plant=[Temperature(2.0)])])
    y = torch.cat([case.labels for case in scenes(2, size=(32, 40), plant=[Temperature(2.0)])])
    expected = minimize_scalar(lambda beta: nll(z, y, beta), bounds=(0.1, 2.0), options={"xatol": 1e-9}).x
    assert unit / TemperatureScaling().fit(unit * z, y).temperature == pytest.approx(expected, rel=3e-4)
