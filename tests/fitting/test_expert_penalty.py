"""The ODIR penalty, against the equivalent matrix scaling that is found by asking the map itself."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from segcal.calibrators import CALIBRATORS
from segcal.fitting.expert_form import ExpertForm, Quadratic
from segcal.fitting.expert_sums import expert_map

IDS = ("ms", "dc", "cdc", "cms-ap", "cms-op")


def random_theta(calibrator, classes, seed=0):
    theta = calibrator.form(classes).identity
    theta = theta + np.random.default_rng(seed).random(theta.shape)
    return np.clip(theta, *calibrator.form(classes).bounds)


def probe(calibrator, theta, classes, winner):
    """W and b of the map ``scores = W z + b`` of the voxels that ``winner`` wins, in rank order for gaps.

    Found from a point far inside the region of one order, and from steps along each logit that leave the order as it
    is. Log-probabilities cannot be moved one by one; there W and b are the map's own.
    """
    if calibrator.features in ("logits", "log-probs"):  # their scores are only known up to a constant per voxel
        own = theta[winner if len(theta) > 1 else 0]
        return own[:, :-1], own[:, -1]
    mapping = expert_map(theta, calibrator.features)
    order = [winner, *(k for k in range(classes) if k != winner)]
    base = torch.zeros(1, classes, dtype=torch.float64)
    base[0, order] = -10.0 * torch.arange(classes, dtype=torch.float64)
    scores, moved = mapping(base)[0], mapping(base + torch.eye(classes, dtype=torch.float64))
    weight = (moved - scores).T
    bias = scores - weight @ base[0]
    if calibrator.features == "gaps":
        weight, bias = weight[order][:, order], bias[order]
    return weight.numpy(), bias.numpy()


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("name", IDS)
def test_the_penalty_is_that_of_the_equivalent_matrix_scaling(name, classes):
    calibrator = CALIBRATORS[name]()
    lam, mu = 0.7, 1.3
    identity = calibrator.form(classes).identity
    for seed in range(3):
        theta = random_theta(calibrator, classes, seed)
        for expert in range(len(theta)):
            root = calibrator.form(classes).odir(expert, lam, mu)
            penalty = Quadratic(theta[expert].size)
            penalty.add(root, identity[expert].ravel())
            weight, bias = probe(calibrator, theta, classes, expert)
            plain, none = probe(calibrator, identity, classes, expert)
            assert np.allclose(none, 0)
            # In the gauge in which the identity is I, W is I plus what differs from the identity.
            weight = weight - plain + np.eye(classes)
            off = ~np.eye(classes, dtype=bool)
            expected = lam * np.mean(weight[off] ** 2) + mu * np.mean(bias**2)
            assert penalty.value(theta[expert].ravel()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", IDS)
def test_the_identity_and_temperatures_of_affine_maps_cost_nothing(name):
    calibrator = CALIBRATORS[name]()
    identity = calibrator.form(4).identity
    for expert in range(len(identity)):
        root = calibrator.form(4).odir(expert, 1.0, 1.0)
        penalty = Quadratic(identity[expert].size)
        penalty.add(root, identity[expert].ravel())
        assert penalty.value(identity[expert].ravel()) == pytest.approx(0, abs=1e-14)
        assert np.abs(penalty.gradient(identity[expert].ravel())).max() < 1e-14
        if calibrator.features in ("logits", "log-probs"):
            assert penalty.value(0.3 * identity[expert].ravel()) == pytest.approx(0, abs=1e-14)


def test_strengths_are_apart_and_linear():
    for features in ("logits", "margins", "gaps"):
        form = ExpertForm(features, 3, routed=False)

        def odir(off_diagonal, bias, form=form):
            root = form.odir(1, off_diagonal, bias).toarray()
            return root.T @ root

        assert np.allclose(odir(2.0, 5.0), 2 * odir(1.0, 0.0) + 5 * odir(0.0, 1.0))
        assert not odir(0.0, 0.0).any()


def test_quadratics_add_up():
    random = np.random.default_rng(0)
    penalty, expected = Quadratic(5), []
    theta = random.normal(size=5)
    for _ in range(3):
        root, centre = random.normal(size=(2, 5)), random.normal(size=5)
        penalty.add(csr_array(root), centre)
        expected.append(0.5 * np.sum((root @ (theta - centre)) ** 2))
    diagonal, centre = random.random(5), random.normal(size=5)
    penalty.add(diagonal, centre)
    expected.append(0.5 * np.sum(diagonal * (theta - centre) ** 2))
    assert penalty.value(theta) == pytest.approx(sum(expected))
    assert np.allclose(penalty.matrix @ theta, penalty.times(theta))
    assert np.allclose(penalty.matrix.diagonal(), penalty.diagonal())
    for i, unit in enumerate(np.eye(5)):
        slope = (penalty.value(theta + 1e-5 * unit) - penalty.value(theta - 1e-5 * unit)) / 2e-5
        assert penalty.gradient(theta)[i] == pytest.approx(slope, rel=1e-6)
