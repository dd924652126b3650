"""A map for each predicted class: what they recover, what they keep, and experts with few voxels."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from reference.calibrators import best_nll, drawn, least, nll
from segcal.calibrators import CALIBRATORS
from segcal.fitting.expert_form import FLOOR
from segcal.fitting.expert_sums import expert_map
from segcal.kernels.experts import ExpertMap
from segcal.synthetic import ClassConditional, GaugeOffsets, scenes, true_calibration_error

IDS = ("cdc", "cms-ap", "cms-op")
TEMPERATURES = (1.0, 2.0, 3.0)


def planted(offsets=None, count=6, seed=0):
    plant = [ClassConditional(TEMPERATURES, offsets), GaugeOffsets(5.0)]
    return scenes(count, size=(96, 128), num_classes=3, plant=plant, coherence=0, seed=seed)


def fall(calibrator, offsets=None):
    """How many times smaller the true calibration error of other scenes is than before."""
    before = after = 0.0
    for case in planted(offsets, 2, seed=9):
        before += true_calibration_error(case.logits.log_softmax(1), case.posterior).kl_sum
        after += true_calibration_error(calibrator(case.logits), case.posterior).kl_sum
    return before / after


@pytest.mark.parametrize("name", IDS)
def test_planted_temperatures_of_winners_are_recovered(name):
    calibrator = CALIBRATORS[name]().fit(planted())
    assert fall(calibrator) > 20
    for winner, temperature in enumerate(TEMPERATURES):
        first, second = (k for k in range(3) if k != winner)
        own = calibrator.weight[winner]
        if name == "cms-ap":
            slopes = own[first, first], own[second, second]
        elif name == "cms-op":
            slopes = (own[0, 0],)  # of the largest gap; the data say little about the others
        else:  # of the scores of the other two, by their log-probabilities
            slopes = own[first, first] - own[second, first], own[second, second] - own[first, second]
        for slope in slopes:
            assert float(slope) == pytest.approx(1 / temperature, abs=0.15)


def test_cdc_recovers_offsets_as_well_and_cms_cannot():
    offsets = (0.5, 0.2, 0.8)
    free, kept = (CALIBRATORS[name]().fit(planted(offsets)) for name in ("cdc", "cms-op"))
    assert fall(free, offsets) > 20
    assert kept.fit_report.nll_after > free.fit_report.nll_after


def near_ties(size, dtype, classes=5):
    """Logits with exact ties and gaps of one ulp at every place of the order."""
    random = torch.Generator().manual_seed(0)
    z = (3 * torch.randn(1, classes, *size, generator=random)).to(dtype)
    source = z[:, torch.randperm(classes, generator=random)]
    near = torch.nextafter(source, torch.full_like(source, -torch.inf))
    choice = torch.rand(z.shape, generator=random)
    return torch.where(choice < 0.2, source, torch.where(choice < 0.5, near, z))


@pytest.fixture(scope="module", params=("cms-ap", "cms-op", "ts", "ets"))
def keeping(request):
    return CALIBRATORS[request.param]().fit(*drawn(3000, 5))


@pytest.mark.parametrize("size", [(40, 30), (240, 230)], ids=["torch", "numba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_decisions_are_kept_bit_for_bit(keeping, dtype, size):
    z = near_ties(size, dtype)
    log_probs = keeping(z)
    assert torch.equal(log_probs.argmax(1), z.argmax(1))
    if keeping.preserves == "order":
        order = z.sort(dim=1, descending=True, stable=True).indices
        assert (log_probs.gather(1, order).diff(dim=1) <= 0).all()


@pytest.mark.parametrize("name", IDS)
def test_torch_and_numba_agree(name):
    calibrator = CALIBRATORS[name]().fit(*drawn(3000, 5))
    z = near_ties((240, 230), torch.float32)
    rows = torch.cat([calibrator(z[:, :, row : row + 20]) for row in range(0, 240, 20)], 2)
    assert torch.allclose(calibrator(z), rows, rtol=1e-5, atol=1e-5)


def test_one_expert_sees_only_its_winner():
    z, y = drawn(4000, 3)
    for name in IDS:
        whole = CALIBRATORS[name]().fit(z, y)
        mine = z.argmax(1) == 1
        alone = CALIBRATORS[name]().fit(z[mine], y[mine])
        assert torch.allclose(whole(z[mine]), alone(z[mine]), atol=1e-3)


# -- experts with few voxels -------------------------------------------------------------------------------------------


def starved(name, few, n=4000):
    """Data in which class 2 wins only ``few`` voxels, and a calibrator fitted to them."""
    z, y = drawn(4 * n, 3)
    winner = z.argmax(1)
    chosen = torch.cat(((winner != 2).nonzero()[:n, 0], (winner == 2).nonzero()[:few, 0]))
    z, y = z[chosen], y[chosen]
    return z, y, CALIBRATORS[name]().fit(z, y)


def pooled_map(calibrator, z, y):
    """One map for all winners: the parents of the experts, as a map of its own."""
    features = calibrator.features
    size = 3 - (features == "gaps")
    x = np.c_[np.eye(size), np.full(size, FLOOR if calibrator.preserves else 0.0)].ravel()
    lower, upper = replace(calibrator.form(3), routed=False).bounds

    def objective(at):
        own = at.view(1, size, size + 1)
        return nll(ExpertMap(features, own[:, :, :-1], own[:, :, -1])(z.double()), y)

    _, found = least(objective, x, list(zip(lower.ravel(), upper.ravel(), strict=True)))
    return expert_map(found.reshape(1, size, size + 1), features)


@pytest.mark.parametrize("name", IDS)
def test_an_expert_without_voxels_is_the_pooled_map(name):
    z, y, calibrator = starved(name, 0)
    unseen = drawn(2000, 3, seed=7)[0]
    unseen = unseen[unseen.argmax(1) == 2].double()
    expected = pooled_map(calibrator, z, y)(unseen).log_softmax(1)
    assert torch.allclose(calibrator(unseen), expected, atol=5e-3)


@pytest.mark.parametrize("name", IDS)
def test_a_starved_expert_is_between_the_pooled_map_and_its_own_optimum(name):
    # Of the very voxels that it has: worse than the best for them alone, better than what is best for all.
    distances = []
    for few in (5, 20, 50):
        z, y, calibrator = starved(name, few)
        assert any(f"2 ({few})" in note for note in calibrator.fit_report.notes)
        own = z.argmax(1) == 2
        parent = float(nll(pooled_map(calibrator, z, y)(z[own].double()), y[own]))
        alone = best_nll(name, z[own], y[own])
        found = float(nll(calibrator(z[own].double()), y[own]))
        assert alone - 1e-6 <= found <= parent + 1e-3
        distances.append((parent - found) / (parent - alone))
    assert distances[0] < distances[-1]  # the more voxels, the more its own


@pytest.mark.parametrize("name", IDS)
def test_the_other_experts_do_not_suffer(name):
    z, y, calibrator = starved(name, 5)
    others = z.argmax(1) != 2
    assert float(nll(calibrator(z[others].double()), y[others])) == pytest.approx(
        best_nll(name, z[others], y[others]), abs=1e-6
    )


def test_cdc_reaches_the_optimum_where_many_parameters_are_at_their_bounds():
    plant = [ClassConditional(list(np.random.default_rng(0).uniform(1.2, 3, 8)))]
    cases = scenes(4, size=(64, 96), num_classes=8, plant=plant)
    report = CALIBRATORS["cdc"]().fit(cases).fit_report
    assert any("at their bound of 100" in note for note in report.notes)
    assert report.converged
    assert report.certificate < 1e-9
