"""Pooled values come from sums over cases: the value of the sum is the metric of the merged voxels."""

import math

import numpy as np
import pytest
import torch

from segcal.metrics import METRICS
from segcal.metrics.additive import ADDITIVE
from segcal.regions import BANDS
from segcal.statistics import VoxelStatistics

OPTIONS = [
    *((id, {}) for id in ADDITIVE),
    ("ece", {"num_bins": 50}),
    ("sce", {"divide": True, "num_bins": 50}),
    ("cece", {"reduction": "sum"}),
    ("dsc", {"absent": "one"}),
    ("dsc", {"background": False}),
    ("miou", {"absent": "one", "background": False}),
    ("volume-dice", {"absent": "one"}),
    ("flip", {"kind": "harmful"}),
    ("nll-calibration", {"num_bins": 50}),
    ("brier-calibration", {"num_bins": 50}),
]


def case(seed, voxels, classes=5):
    """Statistics of a case with an offset of its own; the last class occurs in no label and in no prediction."""
    random = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(voxels, classes, generator=random, dtype=torch.float64) + 30 * seed
    z[:, -1] -= 99
    y = torch.randint(0, classes - 1, (voxels,), generator=random)
    distance = 20 * torch.rand(voxels, generator=random)
    low, high = torch.tensor([0.0, 3, 7, 15]), torch.tensor([3.0, 7, 15, math.inf])
    bands = {name: (low[k] <= distance) & (distance < high[k]) for k, name in enumerate(BANDS)}
    stats = VoxelStatistics(classes, regions=("some", *BANDS))
    return stats.update(
        z, y, regions={"some": torch.rand(voxels, generator=random) < 0.3, **bands}, distance=distance,
        uncalibrated=torch.randint(0, classes, (voxels,), generator=random),
    )  # fmt: skip


CASES = [case(seed, voxels) for seed, voxels in enumerate((300, 40, 1, 700))]


@pytest.mark.parametrize("region", ["everything", "some"])
@pytest.mark.parametrize(("id", "options"), OPTIONS)
def test_the_value_of_the_added_sums_is_the_metric_of_the_merged_cases(id, options, region):
    sums = np.stack([ADDITIVE[id].sums(one, region=region, **options) for one in CASES])
    for weights in ((1, 1, 1, 1), (0, 3, 0, 1), (2, 0, 2, 0)):
        merged = CASES[0].empty_like()
        for weight, one in zip(weights, CASES, strict=True):
            for _ in range(weight):
                merged.merge(one)
        expected = METRICS[id].function(merged, region=region, **options)
        total = np.tensordot(np.array(weights, dtype=float), sums, 1)
        assert ADDITIVE[id].value(total, **options) == pytest.approx(float(expected), rel=1e-9)
        stacked = np.stack([total, sums[0]])
        assert ADDITIVE[id].value(stacked, **options)[0] == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("id", ADDITIVE)
def test_nothing_adds_nothing_and_has_no_value(id):
    empty = CASES[0].empty_like()
    sums = ADDITIVE[id].sums(empty, region="everything")
    assert not sums.any()
    assert sums.shape == ADDITIVE[id].sums(CASES[0], region="everything").shape
    assert np.isnan(ADDITIVE[id].value(sums))


def test_an_impossible_label_gives_an_infinite_sum():
    stats = VoxelStatistics(2).update(torch.tensor([[0.0, -math.inf], [1.0, 0.0]]), torch.tensor([1, 0]))
    assert ADDITIVE["nll"].sums(stats, region="everything").tolist() == [math.inf, 2]
