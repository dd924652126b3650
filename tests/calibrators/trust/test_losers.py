"""How the losers share what the winner leaves: the convex optimum, and simpler maps for many classes."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar

from segcal.calibrators.trust import losers
from segcal.calibrators.trust.losers import WrongVoxels, fit_losers, fit_temperature, loser_scores
from segcal.fitting.expert_device import DeviceRows


def wrong_voxels(classes=4, count=400, seed=0):
    """Wrong voxels whose labels follow the losers' logits through another temperature and offsets."""
    random = np.random.default_rng(seed)
    z = random.normal(size=(count, classes)) * 2
    scores = 0.6 * z + np.linspace(0, 1, classes)
    scores[np.arange(count), z.argmax(1)] = -np.inf
    p = np.exp(scores - scores.max(1, keepdims=True))
    labels = np.array([random.choice(classes, p=own / own.sum()) for own in p])
    return WrongVoxels(torch.tensor(z).float(), torch.tensor(labels), np.arange(count) % 4, np.ones(count))


def reference(voxels, b, change):
    """NLL by the formula, in float64."""
    z = voxels.logits.double().numpy()
    winner = z.argmax(1)
    margins = z.max(1, keepdims=True) - z
    classes = z.shape[1]
    total = 0.0
    for m, k, y in zip(margins, winner, voxels.labels.numpy(), strict=True):
        u = b * m + change[k, :, -1]
        if change.shape[2] > 1:
            u = u + change[k, :, :classes] @ m
        u[k] = np.inf
        total += u[y] + np.log(np.exp(-u).sum())
    return total / len(z)


def test_the_temperature_is_the_minimum():
    voxels = wrong_voxels()
    none = np.zeros((4, 4, 1))
    best = minimize_scalar(lambda b: reference(voxels, b, none), bounds=(0.01, 5), method="bounded")
    assert fit_temperature(voxels) == pytest.approx(best.x, abs=1e-4)


@pytest.mark.parametrize("unit", [0.2, 100.0])
def test_logits_in_another_unit_have_the_temperature_in_it(unit):
    voxels = wrong_voxels()
    other = dataclasses.replace(voxels, logits=unit * voxels.logits)
    assert fit_temperature(other) == pytest.approx(fit_temperature(voxels) / unit, rel=1e-5)


def test_weaker_penalties_are_not_tried_once_the_loss_rises(monkeypatch):
    losses, tried = {np.inf: 3.0, 1.0: 2.0, 0.1: 2.5, 0.01: 1.0}, []
    monkeypatch.setattr(
        losers._Trial, "held_out_loss", lambda self, strength: tried.append(strength) or losses[strength]
    )
    assert losers._best(wrong_voxels(), 4, 1.0, tuple(losses)) == 1
    assert tried == [strength for strength in (np.inf, 1.0, 0.1) for _ in range(4)]


@pytest.mark.parametrize("most", [32, 2], ids=["matrices", "biases"])
def test_the_fit_is_the_penalised_optimum(most, monkeypatch):
    monkeypatch.setattr(losers, "_MATRICES", most)
    voxels = wrong_voxels(classes=3, count=120)
    found = fit_losers(voxels, 4, strengths=(np.inf, 0.1))
    assert found.strength == 0.1
    assert found.converged
    assert found.certificate < 1e-6
    size = found.change[0].size

    def objective(x):
        change = x.reshape(found.change.shape)
        return reference(voxels, found.temperature, change) + 0.5 * 0.1 / size * (x**2).sum()

    best = minimize(objective, np.zeros(found.change.size), method="BFGS", options={"gtol": 1e-8})
    assert objective(found.change.ravel()) <= best.fun + 1e-7
    np.testing.assert_allclose(found.change.ravel(), best.x, atol=2e-3)
    assert found.nll_after == pytest.approx(reference(voxels, found.temperature, found.change), abs=1e-9)
    assert found.nll_after < found.nll_before


def test_without_structure_one_temperature_is_kept():
    random = np.random.default_rng(0)
    z = random.normal(size=(300, 4))
    labels = (z.argmax(1) + random.integers(1, 4, 300)) % 4  # any loser
    voxels = WrongVoxels(torch.tensor(z).float(), torch.tensor(labels), np.arange(300) % 4, np.ones(300))
    found = fit_losers(voxels, 4)
    assert found.strength >= 0.1
    assert found.temperature < 0.2


@pytest.mark.parametrize(("classes", "columns", "said"), [
    (2, 0, "two classes"), (3, 4, ""), (32, 33, ""), (33, 1, "biases and no matrices"), (300, 0, "one temperature"),
])  # fmt: skip
def test_many_classes_have_simpler_maps_and_say_so(classes, columns, said):
    assert losers.columns(classes) == columns
    assert said in losers.explain(classes)
    assert bool(losers.explain(classes)) == bool(said)


@pytest.mark.parametrize("size", [(6, 7), (256, 300)], ids=["torch", "compiled"])
def test_scores_are_those_of_the_formula(size):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(1, 4, *size, generator=generator)
    for columns in (5, 1, 0):
        change = 0.3 * torch.randn(4, 4, columns, generator=generator).double()
        found = loser_scores(z, z.argmax(1), torch.tensor(0.7).double(), change).double()
        margins = (z.amax(1, keepdim=True) - z).double()
        own = change[z.argmax(1)[0]]  # (H, W, 4, columns)
        expected = 0.7 * margins
        if columns:
            expected = expected + own[..., -1].movedim(-1, 0)
        if columns > 1:
            expected = expected + torch.einsum("hwji,nihw->njhw", own[..., :-1], margins)
        losing = torch.ones_like(z, dtype=torch.bool).scatter(1, z.argmax(1, keepdim=True), False)
        shift = found + expected  # scores are minus u, up to a constant per voxel
        shift = shift - shift.masked_fill(~losing, 0).sum(1, keepdim=True) / losing.sum(1, keepdim=True)
        assert shift[losing].abs().max() < 1e-4


@pytest.mark.parametrize("strength", [0.1, 1e-3])
def test_the_solver_of_devices_finds_the_same_optimum(strength, monkeypatch):
    voxels = wrong_voxels(classes=5, count=900)
    voxels.logits[:40, 2] = -torch.inf  # an impossible class
    voxels = voxels.where(((voxels.labels != 2) & (voxels.labels != voxels.logits.argmax(1))).numpy())
    here = fit_losers(voxels, 4, strengths=(np.inf, strength))

    def there(_, own):
        return DeviceRows.of(own.logits, own.labels, torch.from_numpy(own.weights), "margins", 5)

    monkeypatch.setattr(losers._Matrices, "_rows", there)
    monkeypatch.setattr(losers, "minimise", None)  # the other solver is not needed
    found = fit_losers(voxels, 4, strengths=(np.inf, strength))
    assert found.strength == here.strength == strength
    assert found.certificate <= 1e-8
    np.testing.assert_allclose(found.change, here.change, atol=1e-5)
    assert found.nll_after == pytest.approx(here.nll_after, abs=1e-9)


def test_the_objective_of_devices_is_the_same():
    voxels, random = wrong_voxels(classes=3, count=50), np.random.default_rng(0)
    here, there = (losers._problem(voxels, 0.8) for _ in range(2))
    rows = DeviceRows.of(voxels.logits, voxels.labels, torch.from_numpy(voxels.weights), "margins", 3)
    there.rows = rows._replace(impossible=rows.winner[:, None] == torch.arange(3))
    x = 0.1 * random.normal(size=3 * 3 * 4)
    values, gradient, hessians = here.objective(x, 0.3)
    found = there._there(torch.from_numpy(x).view(3, -1), 0.3)
    for mine, theirs in zip(found, (values, gradient.reshape(3, -1), np.stack(hessians)), strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, atol=1e-9)


def test_a_problem_says_how_it_is_summed():
    with pytest.raises(TypeError, match="abstract method"):
        losers._Problem(wrong_voxels(), 1.0)
