import math

import numpy as np
import pytest
import torch
from tests.reference import metrics as reference

from segcal import metrics
from segcal.errors import InputError
from segcal.statistics import VoxelStatistics


def predicting(prediction, labels, classes=5):
    return VoxelStatistics(classes).update(torch.eye(classes)[prediction], labels)


@pytest.fixture
def labelled():
    random = torch.Generator().manual_seed(0)
    prediction, labels = (torch.randint(0, 4, (300,), generator=random) for _ in range(2))
    return prediction, labels  # class 4 occurs in neither


def test_overlaps_equal_the_loops(labelled):
    prediction, labels = labelled
    stats = predicting(prediction, labels)
    dice = reference.dice(prediction.tolist(), labels.tolist(), 5)
    iou = reference.iou(prediction.tolist(), labels.tolist(), 5)
    np.testing.assert_allclose(metrics.dice_per_class(stats), dice, rtol=1e-12)
    assert metrics.dsc(stats) == pytest.approx(np.mean(dice[:4]))
    assert metrics.dsc(stats).count == 4
    assert metrics.dsc(stats, absent="one") == pytest.approx(np.mean([*dice[:4], 1]))
    assert metrics.dsc(stats, background=False) == metrics.volume_dice(stats) == pytest.approx(np.mean(dice[1:4]))
    assert metrics.miou(stats) == pytest.approx(np.mean(iou[:4]))
    assert metrics.miou(stats, background=False).count == 3
    assert metrics.accuracy(stats) == pytest.approx(float((prediction == labels).double().mean()))


def test_one_minus_one_plus_dice_is_half_of_iou(labelled):
    stats = predicting(*labelled)
    dice = metrics.dice_per_class(stats)[:4]
    assert metrics.miou(stats) == pytest.approx(np.mean(dice / (2 - dice)))


def test_perfect_and_hopeless_predictions(labelled):
    _, labels = labelled
    assert metrics.dsc(predicting(labels, labels)) == 1
    assert metrics.dsc(predicting((labels + 1) % 4, labels)) == 0


def test_flips_are_split_in_three():
    labels = torch.tensor([0, 0, 0, 0, 255])
    after, before = torch.tensor([1, 0, 1, 0, 1]), torch.tensor([0, 1, 2, 0, 0])
    stats = VoxelStatistics(3).update(torch.eye(3)[after], labels, uncalibrated=before)
    for kind in ("harmful", "beneficial", "neutral"):
        assert metrics.flip(stats, kind=kind) == 0.25
    assert metrics.flip(stats) == 0.75
    assert metrics.flip(stats).count == 4


def test_flips_of_voxels_without_comparison_do_not_count():
    stats = VoxelStatistics(3).update(torch.eye(3), torch.arange(3), uncalibrated=torch.zeros(3, dtype=torch.int64))
    stats.update(torch.eye(3), torch.arange(3))
    assert metrics.flip(stats) == pytest.approx(2 / 3)
    assert math.isnan(metrics.flip(VoxelStatistics(3).update(torch.eye(3), torch.arange(3))))


def test_options_are_checked(labelled):
    stats = predicting(*labelled)
    with pytest.raises(InputError, match="absent is 'zero'; expected one of nan, one"):
        metrics.dsc(stats, absent="zero")
    with pytest.raises(InputError, match="one of all, harmful"):
        metrics.flip(stats, kind="bad")
