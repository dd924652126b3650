"""The compiled path of ``ets`` for every set of weights, against its own definition."""

import pytest
import torch

from segcal.calibrators import EnsembleTemperatureScaling
from segcal.calibrators.ensemble_temperature import _label_log_parts, _log_parts
from segcal.kernels import dispatch, fast_maps

# Values of a whole that is worth a compiled loop.
MANY = 10**9
WEIGHTS = [(1.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.5, 0.0, 0.5), (0.4, 0.3, 0.3), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]


def example(weights):
    calibrator = EnsembleTemperatureScaling()
    calibrator.num_classes = 3
    calibrator.beta.fill_(0.4)
    calibrator.weights.copy_(torch.tensor(weights))
    return calibrator, 3 * torch.randn(2, 3, 40, 50, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_fast_and_plain_are_the_same(weights):
    calibrator, logits = example(weights)
    kernels = fast_maps(logits, MANY)
    assert kernels is not None
    found, plain = calibrator._fast(kernels, logits), calibrator._scores(logits.double()).log_softmax(1)
    assert found is not None
    torch.testing.assert_close(found.double(), plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_impossible_classes_leave_the_uniform_part_to_the_plain_path(weights):
    calibrator, logits = example(weights)
    logits[0, 1, 2, 3] = -torch.inf
    assert (calibrator._fast(fast_maps(logits, MANY), logits) is None) == (weights[2] > 0)
    p = calibrator(logits).exp()
    assert p[0, 1, 2, 3] == 0
    torch.testing.assert_close(p.sum(1), torch.ones(2, 40, 50))


def test_the_parts_of_the_label_are_the_same_by_both_paths(monkeypatch):
    _, logits = example(WEIGHTS[0])
    labels, beta = logits.argmin(1), torch.tensor(0.4, dtype=torch.float64)
    plain = torch.stack([part.gather(1, labels[:, None]).flatten() for part in _log_parts(logits.double(), beta)], 1)
    for large in (0, MANY):
        monkeypatch.setattr(dispatch, "_LARGE", large)
        found = torch.from_numpy(_label_log_parts(logits, labels, beta))
        torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-5)
