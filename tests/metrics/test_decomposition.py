"""The calibration parts of NLL and Brier score: what a frequency in place of the confidence of every bin saves."""

import math

import numpy as np
import pytest
import torch

from segcal.metrics import brier, brier_calibration, nll, nll_calibration
from segcal.statistics import VoxelStatistics

BINS = (1, 5, 15, 50)


def example(seed=0, voxels=4000, classes=4, scale=2.0):
    random = np.random.default_rng(seed)
    z = scale * random.normal(size=(voxels, classes))
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    softer = np.exp(z / 2) / np.exp(z / 2).sum(1, keepdims=True)
    y = (softer.cumsum(1) < random.random((voxels, 1))).sum(1).clip(max=classes - 1)
    return z, p, y


def binned_means(values, confidence, bins):
    """Every voxel's mean of the values in its bin ``(lo, hi]`` of the confidence."""
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    means = np.bincount(place, values, bins) / np.maximum(np.bincount(place, minlength=bins), 1)
    return means[place]


def logarithmic(q, r, right):
    """NLL of confidence q, with the loss r of the label among the other classes in wrong voxels."""
    # A bin with no right (wrong) voxel has none to lose -log 0 on.
    with np.errstate(divide="ignore"):
        return float(np.mean(np.where(right, -np.log(q), -np.log1p(-q) + r)))


@pytest.mark.parametrize("bins", BINS)
def test_calibration_and_refinement_are_the_whole_nll_up_to_the_spread_within_bins(bins):
    z, p, y = example()
    stats = VoxelStatistics(4, BINS).update(torch.from_numpy(z), torch.from_numpy(y))
    q, right = p.max(1), p.argmax(1) == y
    r = np.where(right, 0.0, -np.log(p[np.arange(len(y)), y]) + np.log1p(-q))
    assert logarithmic(q, r, right) == pytest.approx(nll(stats), rel=1e-9)
    conf, acc = binned_means(q, q, bins), binned_means(right.astype(float), q, bins)
    recalibrated = logarithmic(acc, r, right)  # refinement: every bin has its accuracy, losers keep their shares
    assert nll_calibration(stats, num_bins=bins) == pytest.approx(
        logarithmic(conf, r, right) - recalibrated, rel=1e-9, abs=1e-12
    )
    remainder = logarithmic(q, r, right) - logarithmic(conf, r, right)
    assert nll_calibration(stats, num_bins=bins) + recalibrated + remainder == pytest.approx(nll(stats), rel=1e-9)


@pytest.mark.parametrize("bins", BINS)
def test_calibration_and_refinement_are_the_whole_brier_score_up_to_the_spread_within_bins(bins):
    z, p, y = example(1)
    stats = VoxelStatistics(4, BINS).update(torch.from_numpy(z), torch.from_numpy(y))
    truth = np.eye(4)[y]
    conf = np.column_stack([binned_means(p[:, k], p[:, k], bins) for k in range(4)])
    freq = np.column_stack([binned_means(truth[:, k], p[:, k], bins) for k in range(4)])
    score = lambda q: float(np.mean(((q - truth) ** 2).sum(1)))  # noqa: E731
    refinement = score(freq)
    assert brier_calibration(stats, num_bins=bins) == pytest.approx(score(conf) - refinement, rel=1e-9)
    remainder = score(p) - score(conf)
    # Within a bin of width w, p moves by at most w, and |p - y| + |mean - y| is at most 2 in each class.
    assert abs(remainder) <= 4 * 2 / bins
    assert brier_calibration(stats, num_bins=bins) + refinement + remainder == pytest.approx(brier(stats), rel=1e-9)


def test_more_bins_find_no_less_and_a_true_network_has_next_to_nothing():
    z, _, y = example(2, voxels=60_000)
    stats = VoxelStatistics(4, (15, 45)).update(torch.from_numpy(z), torch.from_numpy(y))
    true = VoxelStatistics(4, (15, 45)).update(torch.from_numpy(z / 2), torch.from_numpy(y))
    for part in (nll_calibration, brier_calibration):
        assert 0 < part(stats, num_bins=15) <= part(stats, num_bins=45)  # 45 bins are those 15, cut in three
        assert 0 <= part(true) < 0.02 * part(stats)


def test_a_confidence_of_one_that_is_wrong_costs_much_but_not_infinity():
    z, y = torch.tensor([[200.0, 0.0]] * 3), torch.tensor([0, 0, 1])
    stats = VoxelStatistics(2).update(z, y)
    assert math.isfinite(nll_calibration(stats))
    assert 4 < nll_calibration(stats) < nll(stats)
    assert math.isnan(nll_calibration(VoxelStatistics(2)))
    assert math.isnan(brier_calibration(VoxelStatistics(2)))
