"""What is said of calibrators, and single functions of theirs where they begin and end."""

import numpy as np
import pytest
import torch

from segcal.calibrators import CALIBRATORS, DirichletCalibration, LocalTemperatureScaling, TemperatureScaling
from segcal.calibrators.base import Calibrator, registered
from segcal.calibrators.local_network import FLOOR, TemperatureTree, network_inputs
from segcal.calibrators.meta import _exceeded
from segcal.calibrators.trust import features, losers
from segcal.errors import InputError
from segcal.fitting.data import FitData


class Reversed(Calibrator):
    """The least likely class is made the most likely."""

    id = "reversed-for-tests"
    title = "Reversed"
    translation_invariant = True
    preserves = None

    def _scores(self, logits):
        return -logits

    def _fit(self, data: FitData):
        raise NotImplementedError


def as_if_fitted(calibrator, classes=3):
    calibrator.num_classes = classes
    calibrator.allocate(classes)
    return calibrator


def test_predictions_are_those_of_the_input_only_where_the_argmax_is_kept():
    logits = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(as_if_fitted(Reversed()).predict(logits), logits.argmin(1))
    assert torch.equal(as_if_fitted(TemperatureScaling()).predict(logits), logits.argmax(1))


@pytest.mark.parametrize("classes", [2, 4])
def test_other_numbers_of_classes_are_refused(classes):
    with pytest.raises(InputError, match=f"{classes}"):
        as_if_fitted(TemperatureScaling())(torch.zeros(2, classes, 3))


def test_registered_are_the_classes_with_an_id_of_their_own():
    found = registered()
    assert found["reversed-for-tests"] is Reversed
    assert {name: cls for name, cls in found.items() if name in CALIBRATORS} == CALIBRATORS
    assert all(cls.id == name and "id" in vars(cls) for name, cls in found.items())


@pytest.mark.parametrize("cls", CALIBRATORS.values(), ids=CALIBRATORS)
def test_maps_of_single_voxels_see_no_neighbours(cls):
    assert cls.spatial == cls.id.startswith(("lts", "ibts", "trust", "ensemble"))


def test_training_needs_a_rate_and_patience():
    for wrong in ({"patience": 0}, {"learning_rate": 0.0}):
        with pytest.raises(InputError):
            DirichletCalibration(**wrong)
    LocalTemperatureScaling(weight_decay=0.0)
    with pytest.raises(InputError):
        LocalTemperatureScaling(weight_decay=-1e-9)


def test_inputs_of_the_network_are_log_probabilities_with_a_floor():
    logits = torch.tensor([[3.0, 1.0, -2.0], [5.0, -torch.inf, 5.0]])
    found = network_inputs(logits, "log-probs")
    torch.testing.assert_close(found[0], logits[0].log_softmax(0))
    torch.testing.assert_close(found[1], torch.tensor([-np.log(2), -FLOOR, -np.log(2)]).float())


def test_inputs_are_divided_by_any_scale_that_is_not_zero():
    tree = TemperatureTree(3)
    tree.standardise_by(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 1e-3, 0.0]))
    assert tree.scale.tolist() == pytest.approx([0.5, 1e-3, 1.0])
    assert tree.mean.tolist() == [1, 2, 3]


def test_the_value_that_a_share_exceeds():
    values, weights = torch.tensor([4.0, 1.0, 3.0, 2.0]), np.array([1.0, 1.0, 2.0, 4.0])
    expected = {0.0: 4.0, 0.1: 4.0, 1 / 8: 3.0, 0.3: 3.0, 3 / 8: 2.0, 7 / 8: 1.0, 1.0: 1.0}
    assert {share: _exceeded(values, weights, share) for share in expected} == expected


def test_log_odds_of_the_winner_from_the_log_of_what_it_leaves():
    rest = torch.tensor([-1e-3, -0.5, -3.0, 0.0], dtype=torch.float64)
    found = features.log_odds(rest[:, None])
    torch.testing.assert_close(found[:3], ((1 - rest.exp()) / rest.exp()).log()[:3])
    assert -20 < found[3] < -10


def wrong_voxels(classes=3, count=60, seed=0):
    random = np.random.default_rng(seed)
    z = 2 * random.normal(size=(count, classes))
    labels = np.argsort(z, 1)[np.arange(count), random.integers(0, classes - 1, count)]
    weights = random.integers(1, 4, count).astype(float)
    return losers.WrongVoxels(torch.tensor(z).float(), torch.tensor(labels), np.arange(count) % 2, weights)


@pytest.mark.parametrize("kind", [losers._Matrices, losers._Biases])
def test_slopes_and_curvature_of_the_losers_are_derivatives(kind, monkeypatch):
    monkeypatch.setattr(losers, "_MATRICES", 32 if kind is losers._Matrices else 2)
    problem = kind(wrong_voxels(), 0.8)
    size = int(np.prod(problem.shape))
    x, step = 0.1 * np.random.default_rng(1).normal(size=size), 1e-5
    values, gradient, hessians = problem.objective(x, 0.3)
    assert problem.nll(x) + 0.5 * 0.3 / (size / 3) * (x**2).sum() == pytest.approx(values.sum())
    for place in range(size):
        moved = [problem.objective(x + side * step * np.eye(size)[place], 0.3) for side in (1, -1)]
        slope = (moved[0][0].sum() - moved[1][0].sum()) / (2 * step)
        assert gradient[place] == pytest.approx(slope, abs=1e-7)
        block, own = divmod(place, size // 3)
        curved = (moved[0][1] - moved[1][1])[block * (size // 3) : (block + 1) * (size // 3)] / (2 * step)
        np.testing.assert_allclose(hessians[block][own], curved, atol=1e-6)


def test_the_loss_of_a_trial_is_the_sum_over_the_voxels_held_out():
    train, held_out = (losers._problem(wrong_voxels(seed=seed), 0.8) for seed in (0, 1))
    trial = losers._Trial(train, held_out)
    plain = losers._log_r(wrong_voxels(seed=1), 0.8) @ wrong_voxels(seed=1).weights
    assert trial.held_out_loss(np.inf) == pytest.approx(-plain)
    fitted = trial.held_out_loss(0.5)
    x, _, _ = train.fit(0.5, np.zeros(trial.x.size), 1e-8)
    assert fitted == pytest.approx(held_out.nll(x) * held_out.total, rel=1e-4)


def test_two_folds_are_enough_to_choose_by():
    random = np.random.default_rng(0)
    z = torch.tensor(np.abs(random.normal(size=(400, 3))) + np.array([5.0, 0.0, 0.0])).float()
    labels = torch.full((400,), 2)  # always the last class, which no temperature says
    voxels = losers.WrongVoxels(z, labels, np.arange(400) % 2, np.ones(400))
    found = losers.fit_losers(voxels, 2)
    assert np.isfinite(found.strength)
    assert found.nll_after < 0.5 * found.nll_before
    assert np.isinf(losers.fit_losers(voxels, 1).strength)
