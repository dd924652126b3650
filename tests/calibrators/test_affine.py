"""Vector, matrix and Dirichlet scaling: what they recover, and what they promise."""

import numpy as np
import pytest
import torch

from reference.calibrators import best_nll, drawn, nll
from segcal.calibrators import CALIBRATORS
from segcal.synthetic import ClassAffine, GaugeOffsets, Temperature, scenes, true_calibration_error

IDS = ("vs", "ms", "ms-c", "dc")


def planted(plant, count=4, seed=0):
    return scenes(count, size=(96, 128), num_classes=3, plant=plant, coherence=0, seed=seed)


def fall(calibrator, plant):
    """How many times smaller the true calibration error of other scenes is than before."""
    before = after = 0.0
    for case in planted(plant, 2, seed=9):
        before += true_calibration_error(case.logits.log_softmax(1), case.posterior).kl_sum
        after += true_calibration_error(calibrator(case.logits), case.posterior).kl_sum
    return before / after


def centred(values, dim=0):
    """Without what the softmax does not see."""
    return values - values.mean(dim, keepdim=True)


def test_vector_scaling_recovers_scales_and_biases():
    plant = [ClassAffine([1.0, 1.5, 0.7], [0.0, 0.5, -0.5])]
    calibrator = CALIBRATORS["vs"]().fit(planted(plant))
    scales = torch.tensor([1.0, 1.5, 0.7]).double()
    assert torch.allclose(calibrator.weight[0, :, 0], scales, atol=0.1)
    biases = torch.tensor([0.0, 0.5, -0.5]).double()
    assert torch.allclose(centred(calibrator.bias[0]), centred(biases), atol=0.1)
    assert fall(calibrator, plant) > 50


def test_vector_scaling_of_a_hundred_classes_is_at_scipys_optimum():
    random = np.random.default_rng(0)
    z = torch.from_numpy(2 * random.normal(size=(6000, 100))).float()
    scale, bias = random.uniform(0.7, 1.1, 100), 0.3 * random.normal(size=100)
    y = torch.from_numpy((z.double().numpy() * scale + bias + random.gumbel(size=z.shape)).argmax(1))
    calibrator = CALIBRATORS["vs"]().fit(z, y, voxels="all")
    assert calibrator.weight.shape == (1, 100, 1)
    assert calibrator.fit_report.converged
    assert not calibrator.fit_report.notes
    assert calibrator.fit_report.nll_after == pytest.approx(best_nll("vs", z, y), abs=1e-7)
    assert float(nll(calibrator(z.double()), y)) == pytest.approx(calibrator.fit_report.nll_after, abs=1e-9)


@pytest.mark.parametrize("name", ["ms", "ms-c", "dc"])
def test_matrices_recover_a_temperature_with_biases(name):
    plant = [ClassAffine([0.5, 0.5, 0.5], [0.0, 0.8, -0.8])]
    calibrator = CALIBRATORS[name]().fit(planted(plant))
    assert torch.allclose(centred(calibrator.weight[0]), centred(0.5 * torch.eye(3).double()), atol=0.03)
    assert torch.allclose(centred(calibrator.bias[0]), torch.tensor([0.0, 0.8, -0.8]).double(), atol=0.15)
    assert fall(calibrator, plant) > 50


def test_a_gauge_harms_only_what_sees_it():
    clean, spoilt = [Temperature(2.0)], [Temperature(2.0), GaugeOffsets(5.0)]
    for name in IDS:
        plain, gauged = (CALIBRATORS[name]().fit(planted(plant, 1)).fit_report for plant in (clean, spoilt))
        same = abs(plain.nll_after - gauged.nll_after) < 1e-5
        assert same == CALIBRATORS[name].translation_invariant


def test_richer_maps_fit_better():
    z, y = drawn(3000, 4)
    z -= z.logsumexp(1, keepdim=True)  # then ms sees what dc sees
    after = {name: CALIBRATORS[name]().fit(z, y).fit_report.nll_after for name in ("ts", *IDS, "cdc")}
    assert after["ms"] == pytest.approx(after["dc"], abs=1e-7)
    assert after["ts"] > after["vs"] > after["ms"]
    assert after["ts"] > after["ms-c"] > after["ms"] > after["cdc"]


@pytest.mark.parametrize("name", ["ts", *IDS])
def test_the_map_of_the_passes_is_the_map(name):
    z, y = drawn(500, 4)
    calibrator = CALIBRATORS[name]().fit(z, y)
    if calibrator.score_map is None:
        assert name in ("ms-c", "dc")
    else:
        scores = calibrator.score_map(z.double())
        assert torch.allclose(scores.log_softmax(1), calibrator(z.double()), atol=1e-12)


def test_adam_keeps_the_row_sums_of_ms_c_equal():
    z, y = drawn(1000, 4)
    sums = CALIBRATORS["ms-c"](solver="adam", patience=2).fit(z, y).weight[0].sum(1)
    assert (sums - sums.mean()).abs().max() < 1e-5
    assert abs(float(sums[0]) - 1) > 1e-3


def test_rows_of_ms_c_share_one_sum():
    z, y = drawn(2000, 4)
    calibrator = CALIBRATORS["ms-c"]().fit(z, y)
    sums = calibrator.weight[0].sum(1)
    assert (sums - sums[0]).abs().max() < 1e-12
    basis = calibrator.form(4).basis.toarray()
    assert basis.shape == (20, CALIBRATORS["ms-c"].parameter_count(4).optimised)
    assert torch.linalg.matrix_rank(torch.from_numpy(basis)) == basis.shape[1]
