"""The linear map of each predicted class: the convex optimum, out of fold, and what it is for."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from segcal.calibrators import TemperatureScaling
from segcal.calibrators.trust.fit import FOLDS, fold_of, survey
from segcal.calibrators.trust.network import Sample, TrustNetwork, held_out_loss
from segcal.calibrators.trust.rising import apply_rising
from segcal.calibrators.trust.slopes import _RIDGE, COLUMNS, _loss, fit_slopes, linear_correction
from segcal.synthetic import ClassConditional, scenes


@pytest.fixture(scope="module")
def sample():
    cases = scenes(8, size=(48, 64), num_classes=4, plant=[ClassConditional([3.0, 1.0, 2.0, 1.2])], coherence=0)
    seen = survey(cases, TemperatureScaling().fit(cases).beta, fold_of(cases, 0), 0)
    return seen.sample._replace(offset=apply_rising(seen.odds.rising(), seen.sample.offset))


def test_it_is_the_optimum(sample):
    found = fit_slopes(sample, 4, FOLDS)
    assert found.converged
    assert found.certificate < 1e-7
    x = torch.cat((sample.offset[:, None], sample.features[:, : COLUMNS - 2]), 1).double().numpy()
    weights = sample.weights.double().numpy() / float(sample.weights.double().sum())
    mean = np.average(x, 0, weights)
    scale = np.sqrt(np.average((x - mean) ** 2, 0, weights))
    own = (sample.winner.numpy() == 1) & (sample.folds.numpy() != 2)
    inputs = np.column_stack((np.ones(own.sum()), ((x - mean) / scale)[own]))
    sign = np.where(sample.right.numpy()[own] > 0, -1.0, 1.0)

    def loss(b):
        odds = sign * (x[own, 0] + inputs @ b)
        q = 1 / (1 + np.exp(-odds))
        value = weights[own] @ np.logaddexp(0, odds) + _RIDGE * (b @ b) / 2
        return value, inputs.T @ (weights[own] * sign * q) + _RIDGE * b

    expected = minimize(loss, np.zeros(COLUMNS), jac=True, method="BFGS", options={"gtol": 1e-10})
    values = found.values[2, 1].numpy()
    np.testing.assert_allclose(values[1:] * scale, expected.x[1:], atol=1e-4)
    assert values[0] + values[1:] @ mean == pytest.approx(expected.x[0], abs=1e-4)


def test_the_cases_of_a_fold_do_not_matter_to_it(sample):
    before = fit_slopes(sample, 4, FOLDS).values
    right = torch.where(sample.folds == 1, 1 - sample.right, sample.right)
    after = fit_slopes(sample._replace(right=right), 4, FOLDS).values
    assert torch.equal(before[1], after[1])
    assert all(not torch.equal(before[f], after[f]) for f in (0, 2, 3))


def test_it_finds_that_classes_differ(sample):
    found = fit_slopes(sample, 6, FOLDS).values
    assert not found[:, 4:].any(), "classes that are never predicted"
    plain = sample.offset.expand(FOLDS, -1)
    lines = [linear_correction(own, sample.features, sample.winner, sample.offset) for own in found]
    network = TrustNetwork(sample.features.shape[1], 6, FOLDS)  # says nothing
    before, after = (held_out_loss(network, sample, offsets) for offsets in (plain, plain + torch.stack(lines)))
    assert after < 0.97 * before


def test_a_class_that_is_always_right_stays_finite():
    generator = torch.Generator().manual_seed(0)
    n = 4000
    features, offset = torch.randn(n, 18, generator=generator), torch.randn(n, generator=generator)
    one = torch.ones(n)
    sample = Sample(features, torch.zeros(n).long(), offset, one, one, torch.arange(n) % FOLDS)
    found = fit_slopes(sample, 3, FOLDS)
    assert found.converged
    assert 0 < found.values[:, 0, 0].min() < found.values[:, 0].abs().max() < 20


def test_the_penalty_is_half_of_a_hundred_thousandth_of_the_squares():
    x, b = np.ones((1, COLUMNS)), np.arange(1.0, 1 + COLUMNS)
    value, slope, curvature = _loss(x, np.zeros(1), np.ones(1), np.zeros(1), b)
    assert value == pytest.approx(0.5e-5 * (b**2).sum())
    np.testing.assert_allclose(slope, 1e-5 * b)
    np.testing.assert_allclose(curvature, 1e-5 * np.eye(COLUMNS))
