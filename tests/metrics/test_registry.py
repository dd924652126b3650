"""What the rest of the library is told about metrics, and metrics where bins, bands and classes end."""

import math

import numpy as np
import pytest
import torch
from tests.metrics.test_calibration import naive
from tests.reference import metrics as reference

from segcal.errors import InputError
from segcal.metrics import METRICS, Reliability, ace_adaptive, ba_ece, confidence_balance, diagnosis
from segcal.metrics.additive import ADDITIVE
from segcal.metrics.calibration import class_balances
from segcal.metrics.equal_mass import tace_second_pass
from segcal.metrics.reliability import predicted_reliability, reliability
from segcal.statistics import VoxelStatistics


def example(voxels=300, classes=3, seed=0):
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(voxels, classes, generator=random)
    return logits, torch.randint(0, classes, (voxels,), generator=random)


def test_quality_is_of_masks_and_surfaces_are_of_the_foreground():
    surfaces = {"hd95", "asd", "surface-dice"}
    assert {id for id, spec in METRICS.items() if spec.quality} == {"dsc", "miou", "accuracy", "volume-dice", *surfaces}
    assert {id for id, spec in METRICS.items() if spec.foreground} == {"volume-dice", *surfaces}


def test_errors_are_the_metrics_in_which_opposite_gaps_cancel():
    """Twice the same scores, right more often than said and then less often: an error of both is below their mean."""
    cancelling = set()
    for id, additive in ADDITIVE.items():
        if METRICS[id].needs in ((), ("classwise",)):
            logits = torch.tensor([[1.0, 0.0]]).expand(1000, 2)
            parts = [torch.arange(1000) >= right for right in (950, 450)]
            stats = [VoxelStatistics(2).update(logits, labels.long()) for labels in parts]
            sums = [additive.sums(one, region="everything") for one in stats]
            one, other, both = (float(additive.value(total)) for total in (*sums, sums[0] + sums[1]))
            if min(one, other) > 0 and both < 0.5 * min(one, other):
                cancelling.add(id)
    assert cancelling == {id for id, additive in ADDITIVE.items() if additive.error} - {"ba-ece"}
    assert ADDITIVE["ba-ece"].error


def test_the_bound_holds_for_the_worst_order_within_a_group():
    """All probabilities are in one bin of the histogram, and the labels are sorted by them."""
    p = torch.linspace(0.50001, 0.50009, 400, dtype=torch.float64)
    logits = torch.stack((torch.log(1 - p), torch.log(p)), 1)
    labels = (torch.arange(400) >= 200).long()
    stats = VoxelStatistics(2).update(logits, labels)
    once = ace_adaptive(stats, num_bins=2)
    error = abs(once - reference.ace_adaptive(*naive(logits, labels), 2, None))
    assert error == pytest.approx(0.5, abs=1e-3)
    assert error <= once.bound + 1e-9 <= 0.51


def test_groups_that_no_edge_cuts_have_no_bound():
    logits = torch.tensor([[0.0, 1.0], [0.0, 3.0]]).repeat_interleave(50, 0)
    stats = VoxelStatistics(2).update(logits, torch.arange(100) % 2)
    assert ace_adaptive(stats, num_bins=2).bound == 0
    assert ace_adaptive(stats, num_bins=3).bound > 0


def test_the_second_pass_of_tace_has_its_threshold():
    stats = VoxelStatistics(3, threshold=0.01, thresholds=(0.1,)).update(*example())
    assert tace_second_pass(stats).threshold == 0.01
    assert tace_second_pass(stats, threshold=0.1).threshold == 0.1
    assert tace_second_pass(stats, binning="width") is None


def test_reliability_is_of_a_prediction_or_of_a_probability():
    stats = VoxelStatistics(3).update(*example())
    for k, expected in enumerate(predicted_reliability(stats)):
        for mine, theirs in zip(vars(reliability(stats, predicted=k)).values(), vars(expected).values(), strict=True):
            assert np.array_equal(mine, theirs)
        assert reliability(stats, probability_of=k).count.sum() == 300
    with pytest.raises(InputError, match="at most one"):
        reliability(stats, predicted=0, probability_of=0)
    bins = Reliability(np.array([2, 0, 1]), np.array([1.0, 0.0, 0.5]), np.array([1, 0, 1]))
    assert bins.edges.tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert np.array_equal(bins.accuracy, [0.5, np.nan, 1], equal_nan=True)


def test_balances_of_predicted_classes_add_up_to_that_of_all():
    stats = VoxelStatistics(3).update(*example())
    balances = class_balances(stats)
    assert sum(one * one.count for one in balances) / 300 == pytest.approx(confidence_balance(stats))
    assert sum(one.count for one in balances) == 300
    for k, expected in enumerate(balances):
        assert confidence_balance(stats, predicted=k) == expected
    for k in (-1, 3):
        with pytest.raises(InputError, match=f"predicted is {k}"):
            confidence_balance(stats, predicted=k)


def test_a_band_at_distance_zero_counts_and_an_empty_band_does_not():
    stats = VoxelStatistics(2, regions=("near", "far", "none"))
    near, none = torch.tensor([True, True, False]), torch.zeros(3, dtype=torch.bool)
    logits, labels = torch.tensor([[2.0, 0.0]] * 3), torch.tensor([0, 1, 0])
    regions = {"near": near, "far": ~near, "none": none}
    stats.update(logits, labels, regions=regions, distance=torch.tensor([0.0, 0.0, 9.0]))
    assert ba_ece(stats, bands=("near", "far", "none")).count == 2
    p = 1 / (1 + math.exp(-2))
    expected = (abs(0.5 - p) + 0.1 * (1 - p)) / 1.1
    assert ba_ece(stats, bands=("near", "far", "none")) == pytest.approx(expected, rel=1e-6)


def test_verdicts_of_the_undefined_and_at_their_limits():
    assert diagnosis.verdict(math.nan) == diagnosis.offset_risk(math.nan) == "undefined"
    assert diagnosis.verdict(diagnosis.BALANCED) == "overconfident"
    assert diagnosis.verdict(-diagnosis.BALANCED) == "underconfident"
    assert diagnosis.verdict(0.99 * diagnosis.BALANCED) == "balanced"
    assert diagnosis.offset_risk(diagnosis.SOME_SPREAD) == "some"
    assert diagnosis.offset_risk(diagnosis.MUCH_SPREAD) == "high"
