"""What the rest of the library is told about metrics, and metrics where bins, bands and classes end."""

import math

import numpy as np
import pytest
import torch
from tests.metrics.test_calibration import naive
from tests.reference import metrics as reference

from segcal.errors import InputError
from segcal.metrics import (
    METRICS,
    Reliability,
    SecondPass,
    ace_adaptive,
    ba_ece,
    check_options,
    confidence_balance,
    diagnosis,
    smece,
)
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


def test_the_bound_of_one_bin_is_half_its_width_and_a_second_pass_divides_it():
    """No voxel has the label of the second class, so only the confidences within a group are misplaced."""
    logits = torch.stack((torch.zeros(400), torch.linspace(1.0, 1.00001, 400)), 1).double()
    labels = torch.zeros(400, dtype=torch.long)
    stats = VoxelStatistics(2).update(logits, labels)
    grid = stats.class_grid
    width = {
        float(u - low)
        for u, low in zip(grid.upper, grid.lower, strict=True)
        for p in (0.268941, 0.731059)
        if low < p <= u
    }
    once = ace_adaptive(stats, num_bins=2)
    assert once.bound == pytest.approx(sum(width) / len(width) / 2, rel=1e-6)
    twice = ace_adaptive(stats, num_bins=2, exact=SecondPass(stats, num_bins=2).update(logits, labels))
    assert 0 <= twice.bound < 1e-3 * once.bound


def test_an_edge_at_zero_cuts_nothing():
    logits = torch.tensor([[0.0, 40.0], [0.0, 1.0]]).repeat_interleave(
        50, 0
    )  # the first probability is in the first bin
    stats = VoxelStatistics(2).update(logits, torch.zeros(100, dtype=torch.long))
    assert ace_adaptive(stats, num_bins=2).bound == 0


def test_smooth_ece_of_two_point_masses():
    """Overconfident at 0.9, underconfident at 0.6: the smoothed gaps overlap by as much as the bandwidth says."""
    z, right = torch.tensor([0.9, 0.6]).double().logit(), (60, 90)
    logits = torch.stack((z, torch.zeros(2)), 1).repeat_interleave(100, 0)
    labels = torch.cat([(torch.arange(100) >= count).long() for count in right])
    found = smece(VoxelStatistics(2).update(logits, labels))
    t = (np.arange(4000) + 0.5) / 4000

    def smoothed(width):
        total = 0.0
        for p, gap in ((0.9, 0.15), (0.6, -0.15)):
            images = [2 * k + side * p for k in range(-3, 4) for side in (1, -1)]
            kernel = sum(np.exp(-0.5 * ((t - place) / width) ** 2) for place in images)
            total = total + gap * kernel / (width * math.sqrt(2 * math.pi))
        return np.abs(total).mean()

    assert smoothed(float(found)) == pytest.approx(float(found), rel=2e-3)
    assert 0.05 < found < 0.29


@pytest.mark.parametrize("threshold", [0, 1, 1.5])
def test_thresholds_given_as_options_are_probabilities(threshold):
    assert check_options(METRICS["tace"], {"threshold": "0.5", "binning": "width"}) == {
        "threshold": 0.5,
        "binning": "width",
    }
    with pytest.raises(InputError, match="between 0 and 1"):
        check_options(METRICS["tace"], {"threshold": threshold})
