"""The parts of ``selective`` and ``ets``: thresholds, losses and weights, against plain searches."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from calibrators.local_cases import Tensors, case_set
from segcal.calibrators import SelectiveScaling, selective
from segcal.calibrators.ensemble_temperature import _least_squares, _log_parts
from segcal.calibrators.selective import _folded, _network, _selection_loss, paper_temperature
from segcal.fitting.data import FitData
from segcal.fitting.measured import mean_loss
from segcal.fitting.sampling import VoxelSample

CLASSES, CPU = 3, torch.device("cpu")


def sample(count=400, seed=0):
    """Half of the strata stand for three voxels each; the others for one."""
    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, CLASSES, generator=random)
    labels = torch.where(torch.rand(count, generator=random) < 0.7, logits.argmax(1), logits.argmin(1))
    strata = np.arange(count) % 2
    return VoxelSample(
        logits, labels, strata, np.arange(count, dtype=np.uint64), np.array([3 * count // 2, count // 2])
    )


def suspicious(rule, seed=0):
    """A selector with random weights."""
    calibrator = SelectiveScaling(rule=rule)
    calibrator.num_classes = CLASSES
    calibrator.allocate(CLASSES)
    random = torch.Generator().manual_seed(seed)
    for weight, bias in calibrator._layers():
        weight.copy_(torch.randn(weight.shape, generator=random))
        bias.copy_(torch.randn(bias.shape, generator=random))
    return calibrator


@pytest.mark.parametrize("unit", [1.0, 1e-3])
def test_the_paper_takes_the_selector_as_it_is_and_its_recall_sets_the_temperature(unit):
    voxels, calibrator = sample(), suspicious("paper")
    for own in calibrator._layers()[-1]:
        own.mul_(unit)  # the suspicion is small, but above 0 all the same
    found = calibrator.suspicion(voxels.logits.log_softmax(1)) > 0
    calibrator._choose(voxels, CPU)
    weights = torch.from_numpy(voxels.weights)
    recall = float(weights[voxels.wrong & found].sum() / weights[voxels.wrong].sum())
    assert calibrator.detection.recall == pytest.approx(recall)
    assert float(calibrator.beta) == pytest.approx(1 / paper_temperature(recall))
    assert torch.equal(calibrator.suspicion(voxels.logits.log_softmax(1)) > 0, found)


@pytest.mark.parametrize("seed", [0, 5, 6])
def test_no_other_threshold_and_temperature_have_a_lower_nll(seed):
    voxels, calibrator = sample(seed=seed), suspicious("nll", seed)
    suspicion = calibrator.suspicion(voxels.logits.log_softmax(1)).double()
    weights = voxels.weights / voxels.weights.sum()

    def nll(suspected, beta):
        z = torch.where(suspected[:, None], beta * voxels.logits.double(), voxels.logits.double())
        return float(weights @ torch.nn.functional.cross_entropy(z, voxels.labels, reduction="none").numpy())

    calibrator._choose(voxels, CPU)
    chosen = nll(calibrator.suspicion(voxels.logits.log_softmax(1)) > 0, float(calibrator.beta))
    for share in np.linspace(0.05, 0.95, 10):
        suspected = suspicion > suspicion.quantile(share)
        assert chosen <= min(nll(suspected, beta) for beta in np.geomspace(1e-3, 1, 25)) + 2e-3
    assert chosen < nll(suspicion > math.inf, 1.0)


def test_training_is_steady_and_the_selector_is_stored(monkeypatch):
    monkeypatch.setattr(selective, "_EPOCHS", 16)
    parts = []
    for seed in (0, 1):
        voxels = sample(800, seed)
        wrong = voxels.logits[:, 1] > 2  # what the selector has to learn
        labels = torch.where(wrong, voxels.logits.argmin(1), voxels.logits.argmax(1))
        parts.append(dataclasses.replace(voxels, labels=labels))
    calibrator = SelectiveScaling()
    calibrator.allocate(CLASSES)
    training = calibrator._train(*parts, CPU, seed=0)
    losses = [epoch.validation for epoch in training.history]
    assert max(losses) < 1.1 * losses[0]
    assert training.objective == min(losses) < 0.9 * losses[0]
    suspicion, wrong = calibrator.suspicion(parts[1].logits.log_softmax(1)), parts[1].wrong
    assert float((suspicion[wrong][:, None] > suspicion[~wrong]).double().mean()) > 0.75  # pairs in the right order


def test_wrong_and_right_voxels_weigh_the_same_in_the_loss():
    voxels, network = sample(60), _network(CLASSES).eval().requires_grad_(False)
    loss = _selection_loss(network, voxels, CPU)
    with torch.no_grad():
        log_p = network(voxels.logits.log_softmax(1)).log_softmax(1)
    parts = []
    for wrong in (0, 1):
        own = voxels.wrong == bool(wrong)
        weights = torch.from_numpy(voxels.weights)[own]
        parts.append(float(-(log_p[own, wrong].double() @ weights) / weights.sum()))
    assert float(loss(slice(None))) == pytest.approx(sum(parts) / 2, rel=1e-5)
    index = torch.tensor([3, 8])
    assert float(loss(index)) == pytest.approx(float(torch.stack([loss(index[:1]), loss(index[1:])]).mean()), rel=1e-5)


def test_a_selector_starts_from_the_log_probabilities():
    first, *_ = _network(CLASSES)
    assert torch.equal(first.weight, torch.eye(CLASSES))
    assert not first.bias.any()
    widths = [layer.weight.shape for layer in _network(CLASSES) if isinstance(layer, torch.nn.Linear)]
    assert widths == [(3, 3), (6, 3), (3, 6), (2, 3)]


@pytest.mark.parametrize("seed", range(4))
def test_weights_of_least_squares_are_those_of_a_search_on_the_simplex(seed):
    voxels, beta = sample(seed=seed), torch.tensor(0.4 + 0.3 * seed, dtype=torch.float64)
    logits, weights = voxels.logits.double(), voxels.weights / voxels.weights.sum()
    parts = torch.stack(_log_parts(logits, beta), 1).exp().numpy()
    one_hot = np.eye(CLASSES)[voxels.labels]

    def error(w):
        return float(weights @ ((np.einsum("i,nic->nc", w, parts) - one_hot) ** 2).sum(1))

    found = _least_squares(logits, voxels.labels, weights, beta)
    simplex = {"type": "eq", "fun": lambda w: w.sum() - 1}
    best = minimize(error, np.full(3, 1 / 3), bounds=[(0, 1)] * 3, constraints=simplex, options={"ftol": 1e-14})
    assert found.sum() == pytest.approx(1)
    assert (found >= 0).all()
    assert error(found) <= best.fun + 1e-9


def test_of_three_distributions_one_alone_may_be_the_best():
    voxels = sample()
    logits, weights = voxels.logits.double(), voxels.weights / voxels.weights.sum()
    best, worst = logits.argmax(1), logits.argmin(1)
    for labels, beta, expected in ((best, 2.0, 0), (best, 0.5, 1), (worst, 0.5, 2), (worst, 2.0, 2)):
        found = _least_squares(logits, labels, weights, torch.tensor(beta, dtype=torch.float64))
        np.testing.assert_allclose(found, np.eye(3)[expected], atol=1e-9)


def test_a_temperature_that_hurts_the_fit_data_is_replaced():
    calibrator = suspicious("paper")
    calibrator._layers()[-1][1][1] += 1e6  # everything is suspected
    z = 3 * torch.randn(1, CLASSES, 6, 5, generator=torch.Generator().manual_seed(0))
    cases, notes = case_set(Tensors("0", z, z.argmax(1), None)), []  # and everything is right
    before = mean_loss(cases).nll
    calibrator.beta.fill_(1e-10)
    assert calibrator._measure(FitData(cases, None, "auto", 0), before, 0.5, notes) == before
    assert float(calibrator.beta) == 1
    assert [note.split(": ")[1] for note in notes] == ["T1 = 2", "T1 = 1"]


def test_a_batch_is_its_images_each_alone():
    calibrator = suspicious("nll")
    calibrator.beta.fill_(0.2)
    z = 3 * torch.randn(2, CLASSES, 6, 5, generator=torch.Generator().manual_seed(0))
    calibrator._layers()[-1][1][0] += calibrator.suspicion(z.log_softmax(1)).median()  # half of them are suspected
    changed = (calibrator(z) - z.log_softmax(1)).abs().amax(1) > 1e-3
    assert changed.any()
    assert not changed.all()
    torch.testing.assert_close(calibrator(z), torch.cat([calibrator(image) for image in z.split(1)]))


def test_batch_norm_is_part_of_the_linear_maps():
    network = _network(CLASSES).requires_grad_(False)
    random = torch.Generator().manual_seed(0)
    for layer in network:
        if isinstance(layer, torch.nn.BatchNorm1d):
            for own in (layer.weight, layer.bias, layer.running_mean):
                own.copy_(torch.randn(own.shape, generator=random))
            layer.running_var.copy_(2e-5 * torch.rand(layer.running_var.shape, generator=random) + 2e-5)
    x = torch.randn(50, CLASSES, generator=random)
    *first, last = _folded(network)
    hidden = x
    for weight, bias in first:
        hidden = torch.nn.functional.linear(hidden, weight, bias).relu()
    found = torch.nn.functional.linear(hidden, *last)
    torch.testing.assert_close(found, network.eval()(x), rtol=1e-4, atol=1e-4 * float(found.abs().max()))
