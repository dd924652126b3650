import math

import numpy as np
import pytest
import torch
from tests.metrics.test_calibration import example, naive
from tests.reference import metrics as reference

from segcal.errors import InputError
from segcal.metrics import SecondPass, ace_adaptive, tace
from segcal.statistics import VoxelStatistics

METHODS = {"ace-adaptive": (ace_adaptive, None), "tace": (tace, 1e-3)}


@pytest.mark.parametrize(("metric", "threshold"), METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("bins", [1, 7, 15])
def test_one_pass_is_within_its_bound_and_two_passes_are_exact(metric, threshold, scale, bins):
    logits, labels = example(voxels=500, scale=scale)
    expected = reference.ace_adaptive(*naive(logits, labels), bins, threshold)
    stats = VoxelStatistics(4).update(logits, labels)
    once = metric(stats, num_bins=bins)
    assert abs(once - expected) <= once.bound + 1e-12
    exact = SecondPass(stats, num_bins=bins, threshold=threshold or 0.0)
    for part in (slice(0, 100), slice(100, 500)):
        exact.update(logits[part], labels[part])
    twice = metric(stats, num_bins=bins, exact=exact)
    assert twice == pytest.approx(expected, abs=1e-6)
    assert twice.bound <= once.bound


def test_the_bound_is_small_for_many_voxels():
    logits, labels = example(voxels=100_000)
    stats = VoxelStatistics(4).update(logits, labels)
    once, twice = ace_adaptive(stats), ace_adaptive(stats, exact=SecondPass(stats).update(logits, labels))
    assert once == pytest.approx(twice, abs=1e-3)
    assert once.bound < 0.1
    assert twice.bound < 1e-3


def test_second_passes_merge():
    logits, labels = example()
    stats = VoxelStatistics(4).update(logits, labels)
    whole = SecondPass(stats).update(logits, labels)
    merged = (
        SecondPass(stats).update(logits[:150], labels[:150]).merge(SecondPass(stats).update(logits[150:], labels[150:]))
    )
    assert np.array_equal(whole.sums[0], merged.sums[0])
    assert ace_adaptive(stats, exact=merged) == pytest.approx(ace_adaptive(stats, exact=whole), rel=1e-12)
    with pytest.raises(InputError, match="split different bins"):
        whole.merge(SecondPass(stats, num_bins=4))
    with pytest.raises(InputError, match="second pass was made for"):
        ace_adaptive(stats, num_bins=4, exact=whole)


def test_ties_are_shared_whatever_their_order():
    """All voxels alike: every bin has the mean frequency, in any order of the labels."""
    labels = torch.arange(100) // 50
    for order in (labels, labels.flip(0)):
        stats = VoxelStatistics(2).update(torch.zeros(100, 2), order)
        assert ace_adaptive(stats) == pytest.approx(0, abs=1e-12)


def test_equal_width_tace_equals_the_released_code():
    logits, labels = example(scale=6.0)
    stats = VoxelStatistics(4).update(logits, labels)
    expected = reference.tace_width(*naive(logits, labels), 15, 1e-3)
    assert tace(stats, binning="width") == pytest.approx(expected, rel=1e-9)


def test_classes_below_the_threshold_are_left_out():
    logits = torch.tensor([[0.0, 0.0, -20.0]]).repeat(10, 1)
    stats = VoxelStatistics(3).update(logits, torch.zeros(10, dtype=torch.int64))
    assert tace(stats).count == tace(stats, binning="width").count == 2
    assert ace_adaptive(stats).count == 3


def test_thresholds_must_be_known():
    stats = VoxelStatistics(4, threshold=0.01).update(*example())
    assert tace(stats) == tace(stats, threshold=0.01)
    with pytest.raises(InputError, match=r"collect with threshold=0.003"):
        tace(stats, threshold=0.003)
    with pytest.raises(InputError, match="binning is 'size'; expected one of mass, width"):
        tace(stats, binning="size")
    with pytest.raises(InputError, match="threshold is 2"):
        VoxelStatistics(4, threshold=2)


def test_nothing_to_bin():
    stats = VoxelStatistics(4)
    exact = SecondPass(stats).update(torch.zeros(3, 4), torch.full((3,), 255))
    assert math.isnan(ace_adaptive(stats, exact=exact))
