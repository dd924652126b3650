"""Ensemble temperature scaling: the best mixture, of everything, and never worse than the temperature alone."""

import itertools

import numpy as np
import pytest
import torch

from reference.calibrators import drawn, ets, least, nll
from segcal.calibrators import EnsembleTemperatureScaling, TemperatureScaling, ensemble_temperature
from segcal.errors import InputError
from segcal.scores import keep_order
from segcal.synthetic import ConfidentlyWrong, Temperature, scenes, true_calibration_error


def noisy(n=4000, classes=4, share=0.1, seed=0):
    """Overconfident, and a share of the labels is pure noise, so that all three parts are needed."""
    random = np.random.default_rng(seed)
    z = 4 * random.normal(size=(n, classes))
    y = (z / 2 + random.gumbel(size=z.shape)).argmax(1)
    noise = random.random(n) < share
    y[noise] = random.integers(0, classes, int(noise.sum()))
    return torch.from_numpy(z).float(), torch.from_numpy(y)


def best_weights(z, y, beta):
    """By scipy, in weights that are normalised."""
    tiny = [(1e-12, 1.0)] * 3
    return min(
        (least(lambda w: nll(ets(w, z.double(), beta), y), np.array(w), tiny) for w in ((0.9, 0.05, 0.05), (1, 1, 1))),
        key=lambda found: found[0],
    )


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_the_weights_are_the_best_ones(share):
    z, y = noisy(share=share)
    calibrator = EnsembleTemperatureScaling().fit(z, y)
    beta = float(TemperatureScaling().fit(z, y).beta)
    assert float(calibrator.beta) == pytest.approx(beta, rel=1e-6)
    best, _ = best_weights(z, y, beta)
    report = calibrator.fit_report
    assert report.converged
    assert report.certificate < 1e-7
    assert report.nll_after == pytest.approx(best, abs=1e-6)
    assert float(nll(calibrator(z.double()), y)) == pytest.approx(report.nll_after, abs=1e-6)
    assert calibrator.weights.sum() == pytest.approx(1)
    assert (calibrator.weights >= 0).all()


def test_the_map_is_that_of_the_formula():
    z, _ = noisy(500)
    calibrator = EnsembleTemperatureScaling()
    calibrator.num_classes = 4
    for weights in ((0.5, 0.3, 0.2), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.0, 1.0, 0.0)):
        calibrator.weights.copy_(torch.tensor(weights))
        calibrator.beta.fill_(0.4)
        expected = ets(torch.tensor(weights).double(), z.double(), 0.4)
        assert torch.allclose(calibrator(z.double()).exp(), expected.exp(), atol=1e-12)


def test_it_starts_as_the_identity():
    calibrator = EnsembleTemperatureScaling()
    calibrator.num_classes = 3
    z = 3 * torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(calibrator(z), z.log_softmax(1), atol=1e-6)


@pytest.mark.parametrize("weights", [(0.6, 0.3, 0.1), (0.01, 0.0, 0.99), (0.5, 0.5, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(30, 20), (300, 200)], ids=["torch", "numba"])
@pytest.mark.parametrize("beta", [0.3, 0.9, 3.0])
def test_any_mixture_keeps_argmax_and_order_bit_for_bit(weights, dtype, size, beta):
    calibrator = EnsembleTemperatureScaling()
    calibrator.num_classes = 5
    calibrator.weights.copy_(torch.tensor(weights))
    calibrator.beta.fill_(beta)
    random = torch.Generator().manual_seed(0)
    z = (4 * torch.randn(1, 5, *size, generator=random)).to(dtype)
    near = torch.nextafter(z, torch.full_like(z, -torch.inf)).roll(1, 1)  # one ulp below the class before
    z = torch.where(torch.rand(z.shape, generator=random) < 0.4, near, z)
    log_probs = calibrator(z)
    assert torch.equal(log_probs.argmax(1), z.argmax(1))
    order = z.sort(dim=1, descending=True, stable=True).indices
    assert (log_probs.gather(1, order).diff(dim=1) <= 0).all()


def test_an_order_broken_by_rounding_is_restored():
    kernel = pytest.importorskip("segcal.kernels.apply_cpu").keep_order
    random = torch.Generator().manual_seed(0)
    for shape in ((3, 5, 40, 30), (7, 19), (1, 6, 11)):
        z = torch.randn(shape, generator=random).round(decimals=1)
        scores = z + 0.3 * torch.randn(shape, generator=random)
        order = z.sort(dim=1, descending=True, stable=True).indices
        expected = torch.zeros_like(z).scatter(1, order, scores.gather(1, order).cummin(1).values)
        assert torch.equal(keep_order(scores, z), expected)
        found, winner = kernel(scores, z)
        assert torch.equal(found, expected)
        assert torch.equal(winner, z.argmax(1))


# A share of the voxels is wrong and sure of it: the uniform part has work to do.
PLANT = [Temperature(0.5), ConfidentlyWrong(0.05, depth=5.0)]


@pytest.mark.parametrize("objective", ["nll", "mse"])
def test_passes_over_everything_find_what_the_whole_does(objective, monkeypatch):
    cases = scenes(5, size=(32, 40), plant=PLANT, ignored=0.1)
    exact = EnsembleTemperatureScaling(objective).fit(cases)
    monkeypatch.setattr(ensemble_temperature, "MIXTURE_VOXELS", 1500)
    streamed, sampled = (EnsembleTemperatureScaling(objective).fit(cases, voxels=voxels) for voxels in ("all", "auto"))
    assert exact.fit_report.voxels_used == streamed.fit_report.voxels_used == exact_voxels(cases)
    assert streamed.fit_report.nll_after == pytest.approx(exact.fit_report.nll_after, abs=1e-8)
    assert torch.allclose(streamed.weights, exact.weights, atol=1e-3)
    assert exact.weights.max() < 0.999 or objective == "mse"
    assert streamed.fit_report.converged
    assert streamed.fit_report.certificate < 1e-7
    assert sampled.fit_report.voxels_used == 1500
    assert "stratified sample of 1,500" in sampled.fit_report.notes[-1]
    assert float(sampled.beta) == pytest.approx(float(exact.beta), rel=1e-5)  # the temperature is of everything
    assert measured(sampled, cases) == pytest.approx(exact.fit_report.nll_after, abs=5e-3)
    assert sampled.fit_report.nll_after == pytest.approx(measured(sampled, cases), abs=0.02)


def test_a_label_without_any_probability_is_met_by_the_uniform_part(monkeypatch):
    monkeypatch.setattr(ensemble_temperature, "MIXTURE_VOXELS", 500)
    z, y = noisy(20_000, share=0.0)
    z = z / 2
    z[-1], y[-1] = torch.tensor([990.0, 0.0, 0.0, 0.0]), 1
    calibrator = EnsembleTemperatureScaling().fit(z, y, voxels="all")
    assert float((calibrator.beta * z[-1].double()).softmax(0)[1]) == 0
    assert calibrator.fit_report.converged
    best, _ = best_weights(z, y, float(calibrator.beta))
    assert calibrator.fit_report.nll_after == pytest.approx(best, abs=1e-6)


def exact_voxels(cases):
    return sum(int(case.valid.sum()) for case in cases)


def measured(calibrator, cases):
    log_probs = torch.cat([calibrator(case.logits.double()).movedim(1, -1)[case.valid] for case in cases])
    return float(nll(log_probs, torch.cat([case.labels[case.valid] for case in cases])))


def test_the_squared_error_is_the_least_on_the_simplex():
    z, y = noisy(share=0.3)
    calibrator = EnsembleTemperatureScaling("mse").fit(z, y)
    one_hot = torch.nn.functional.one_hot(y, 4)

    def error(weights):
        probs = ets(torch.tensor(weights, dtype=torch.float64), z.double(), float(calibrator.beta)).exp()
        return float((probs - one_hot).square().sum(1).mean())

    found = error(calibrator.weights.tolist())
    assert found < error((1.0, 0.0, 0.0)) - 1e-4
    grid = [(i / 40, j / 40, (40 - i - j) / 40) for i, j in itertools.product(range(41), repeat=2) if i + j <= 40]
    assert found <= min(error(weights) for weights in grid) + 1e-12
    assert float((calibrator(z.double()).exp() - one_hot).square().sum(1).mean()) == pytest.approx(found, abs=1e-9)


def test_never_worse_than_the_temperature_alone():
    for data in (noisy(), drawn(2000, 3), noisy(12), noisy(2, 2)):
        alone, mixed = (cls().fit(*data).fit_report for cls in (TemperatureScaling, EnsembleTemperatureScaling))
        assert mixed.nll_after <= alone.nll_after
        assert mixed.nll_before == pytest.approx(alone.nll_before, rel=1e-9)


def test_a_planted_temperature_is_recovered():
    cases = scenes(4, size=(96, 128), plant=[Temperature(2.5)], coherence=0)
    calibrator = EnsembleTemperatureScaling().fit(cases)
    before = after = 0.0
    for case in cases:
        before += true_calibration_error(case.logits.log_softmax(1), case.posterior).kl_sum
        after += true_calibration_error(calibrator(case.logits), case.posterior).kl_sum
    assert after < before / 20


def test_degenerate_data():
    z, y = noisy(300)
    for scores, labels in ((torch.zeros_like(z), y), (z, torch.ones_like(y)), (z, z.argmax(1)), (z, z.argmin(1))):
        calibrator = EnsembleTemperatureScaling().fit(scores, labels)
        report = calibrator.fit_report
        assert report.nll_after <= report.nll_before
        assert torch.isfinite(calibrator.weights).all()
        assert float(nll(calibrator(scores.double()), labels)) == pytest.approx(report.nll_after, abs=1e-6)


def test_impossible_classes_are_fitted_as_they_are_applied():
    z, y = noisy()
    z[y != 3, 3] = -torch.inf
    calibrator = EnsembleTemperatureScaling().fit(z, y)
    assert float(nll(calibrator(z.double()), y)) == pytest.approx(calibrator.fit_report.nll_after, abs=1e-8)
    with pytest.raises(InputError, match="logit is -inf"):
        EnsembleTemperatureScaling().fit(z, torch.full_like(y, 3))


def test_unknown_objectives_are_refused():
    with pytest.raises(InputError, match="objective is 'ece'"):
        EnsembleTemperatureScaling("ece")


def test_weights_of_least_squares_that_are_worse_than_the_identity_are_not_kept(monkeypatch):
    z, y = noisy(500)
    monkeypatch.setattr(ensemble_temperature, "_least_squares", lambda *_: np.array([0.0, 0.0, 1.0]))
    calibrator = EnsembleTemperatureScaling("mse").fit(z, y)
    assert calibrator.weights.tolist() == [1, 0, 0]
    assert "no mixture is better than the temperature alone, which is kept" in calibrator.fit_report.notes
    alone = TemperatureScaling().fit(z, y)
    torch.testing.assert_close(calibrator(z), alone(z), atol=1e-5, rtol=0)
    assert calibrator.fit_report.nll_after == pytest.approx(alone.fit_report.nll_after, rel=1e-6)
    assert calibrator.fit_report.iterations == alone.fit_report.iterations  # those of the temperature are all
