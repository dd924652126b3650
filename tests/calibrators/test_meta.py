import math

import pytest
import torch

import segcal
from segcal.calibrators import TemperatureScaling, meta
from segcal.calibrators.meta import MetaCal, entropy
from segcal.errors import InputError
from segcal.fitting.first_pass import SampleNLL
from segcal.fitting.measured import Detection, detection_counts
from segcal.fitting.sampling import VoxelSampler
from segcal.kernels import Voxels
from segcal.synthetic import Temperature, scenes

CASES = scenes(3, size=(32, 40), plant=[Temperature(4.0)], ignored=0.05)


def valid_voxels(cases=CASES):
    z = torch.cat([case.logits.movedim(1, -1)[case.valid] for case in cases])
    return z, torch.cat([case.labels[case.valid] for case in cases])


@pytest.mark.parametrize("miscoverage", [0.0, 0.01, 0.05])
def test_no_more_correct_predictions_are_rejected_than_allowed(miscoverage):
    calibrator = MetaCal(miscoverage).fit(CASES)
    z, y = valid_voxels()
    right = z.argmax(1) == y
    uncertain = entropy(z.double())
    rejected = uncertain > float(calibrator.gamma)
    assert rejected[right].double().mean() <= miscoverage
    nearest = uncertain[right & ~rejected].max()
    assert (uncertain[right] >= nearest).double().mean() > miscoverage  # one step less would be too many
    confidence = calibrator.predict_proba(z).amax(1)
    assert torch.allclose(confidence[rejected], torch.tensor(1 / 6), atol=1e-5)
    assert calibrator.detection.recall == pytest.approx(float(rejected[~right].double().mean()))
    assert calibrator.detection.precision == pytest.approx(float((~right)[rejected].double().mean()))
    assert calibrator.detection.accuracy == pytest.approx(float((rejected != right).double().mean()))


def test_rounding_does_not_decide_who_is_rejected():
    z, y = valid_voxels()
    calibrator = MetaCal(0.02).fit(z, y)
    for dtype in (torch.float32, torch.float64):
        near = (entropy(z.to(dtype)) - float(calibrator.gamma)).abs().min()
        assert near > 1e-5  # rounding moves entropies by up to 1e-6


def test_the_rest_is_at_its_best_temperature():
    calibrator = MetaCal(0.02).fit(CASES)
    z, y = valid_voxels()
    kept = entropy(z.double()) <= float(calibrator.gamma)
    alone = TemperatureScaling().fit(z[kept], y[kept])
    assert calibrator.temperature == pytest.approx(alone.temperature, rel=1e-4)


def test_rejecting_gives_way_where_it_hurts():
    cases = scenes(3, size=(32, 40))
    calibrator = MetaCal(0.9).fit(cases)
    assert any("nothing is rejected" in note for note in calibrator.fit_report.notes)
    alone = TemperatureScaling().fit(cases)
    assert calibrator.temperature == pytest.approx(alone.temperature, rel=1e-4)
    assert torch.allclose(calibrator(cases[0].logits), alone(cases[0].logits), atol=1e-4)
    assert calibrator.fit_report.nll_after <= calibrator.fit_report.nll_before


@pytest.mark.parametrize("right", [True, False])
def test_nothing_to_rank_is_said(right):
    z = torch.randn((200, 4), generator=torch.Generator().manual_seed(0))
    calibrator = MetaCal().fit(z, z.argmax(1) if right else z.argmin(1))
    assert f"no {'misprediction' if right else 'correct prediction'}" in calibrator.fit_report.notes[0]
    assert not (entropy(z) > float(calibrator.gamma)).any()


def test_labels_stay_and_validation_sets_the_threshold():
    validation = scenes(3, size=(32, 40), plant=[Temperature(4.0)], seed=5)
    calibrator = MetaCal().fit(CASES, validation=validation)
    z, y = valid_voxels(validation)
    right = z.argmax(1) == y
    assert (entropy(z.double()) > float(calibrator.gamma))[right].double().mean() <= 0.05
    assert segcal.evaluate(validation, calibrator, metrics=("flip",)).value("flip") == 0


def test_the_entropy_of_a_softmax():
    z = torch.tensor([[0.0, 0.0], [0.0, -torch.inf], [0.0, -40.0]], dtype=torch.float64)
    assert entropy(z).tolist() == pytest.approx([math.log(2), 0.0, 41 * math.exp(-40)], rel=1e-9)


def test_detection_of_nothing_is_undefined():
    counts = detection_counts(torch.tensor([False]), torch.tensor([False]), torch.ones(1).double().numpy())
    found = Detection.of(counts)
    assert math.isnan(found.recall)
    assert math.isnan(found.precision)
    assert found.accuracy == 1


def test_the_derivatives_of_the_nll():
    z = torch.randn((1, 3, 40), generator=torch.Generator().manual_seed(0))
    sampler = VoxelSampler(3, 100)
    sampler.add(Voxels(z, torch.randint(0, 3, (1, 40), generator=torch.Generator().manual_seed(1))))
    function = SampleNLL.of(sampler.sample())
    step = 1e-5
    lower, (_, slope, curvature), upper = (function(0.7 + shift) for shift in (-step, 0.0, step))
    assert slope == pytest.approx((upper[0] - lower[0]) / (2 * step), rel=1e-6)
    assert curvature == pytest.approx((upper[1] - lower[1]) / (2 * step), rel=1e-6)


def test_a_share_is_a_share():
    with pytest.raises(InputError, match="miscoverage is 1"):
        MetaCal(1)


def test_two_numbers_need_a_sample_only_and_the_report_says_so(monkeypatch):
    whole = MetaCal(0.01).fit(CASES)
    monkeypatch.setattr(meta, "_VOXELS", 2000)
    calibrator = MetaCal(0.01).fit(CASES, voxels="all")
    assert "gamma and T are fitted to 2,000 voxels: voxels = 'all' does not change that" in calibrator.fit_report.notes
    assert calibrator.temperature == pytest.approx(whole.temperature, rel=0.1)
    assert not any("voxels = " in note for note in MetaCal(0.01).fit(CASES).fit_report.notes)


def test_a_temperature_of_few_voxels_that_is_worse_for_all_is_not_kept(monkeypatch):
    monkeypatch.setattr(meta, "_VOXELS", 20)
    random = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(5000, 3, generator=random)
    labels = torch.multinomial(z.softmax(1), 1, generator=random)[:, 0]  # calibrated as they are
    calibrator = MetaCal(0.0).fit(z, labels)
    report = calibrator.fit_report
    assert report.nll_after <= report.nll_before
    assert calibrator.temperature == 1
