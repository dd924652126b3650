"""From one voxel to 10^10, by merging; and images of which there is next to nothing."""

import math

import numpy as np
import pytest
import torch

from reference import metrics as naive
from seeds import ROUNDS, SEED
from segcal.metrics import METRICS
from segcal.statistics import VoxelStatistics
from torture import inputs

FROM_STATISTICS = [name for name, spec in METRICS.items() if not set(spec.needs) & {"distance", "surfaces"}]


def collected(z, y, **options):
    return VoxelStatistics(z.shape[1], **options).update(z, y, uncalibrated=z.roll(1, 1).argmax(1))


def times(stats, count):
    """The statistics of ``count`` copies, by doubling."""
    total, power = stats.empty_like(), stats
    while count:
        if count % 2:
            total.merge(power)
        power, count = power + power, count // 2
    return total


@pytest.mark.parametrize("family", ["ordinary", "±3e38", "one ulp", "-inf"])
@pytest.mark.parametrize("copies", [1, 2**24 + 1, 10**10 // 40])
def test_no_metric_sees_how_often_the_same_voxels_come(family, copies):
    z = inputs.logits(family, 40, 4, torch.float32, SEED)
    once = collected(z, inputs.labels(z, SEED))
    often = times(once, copies)
    assert often.count() == 40 * copies
    for name in FROM_STATISTICS:
        one, many = METRICS[name].function(once), METRICS[name].function(often)
        assert many == pytest.approx(one, rel=1e-13, abs=1e-13, nan_ok=True), name


@pytest.mark.parametrize("seed", range(SEED * ROUNDS, (SEED + 1) * ROUNDS))
def test_ten_thousand_million_voxels_of_different_kinds(seed):
    random = np.random.default_rng(seed)
    total, parts, voxels = VoxelStatistics(3), [], 0
    while voxels < 10**10:
        z = inputs.logits("ordinary", 30, 3, torch.float64, seed, voxels)
        y = inputs.labels(z, seed, voxels)
        copies = int(10 ** random.uniform(0, 8))
        total.merge(times(collected(z, y), copies))
        parts.append((copies, [naive.softmax(row) for row in z.tolist()], y.tolist()))
        voxels += 30 * copies
    assert total.count() == voxels
    assert METRICS["nll"].function(total) == pytest.approx(
        math.fsum(copies * 30 * naive.nll(p, y) for copies, p, y in parts) / voxels, rel=1e-13
    )
    gaps = np.zeros(15)
    for copies, p, y in parts:
        for confidence, hit in zip(*naive.top(p, y)[:2], strict=True):
            gaps[naive.bin_of(confidence, 15)] += copies * (confidence - hit)
    assert METRICS["ece"].function(total) == pytest.approx(np.abs(gaps).sum() / voxels, rel=1e-11)


@pytest.mark.parametrize("shape", [(1, 4), (1, 4, 1), (1, 4, 1, 1), (1, 4, 1, 1, 1)], ids=str)
def test_an_image_of_one_voxel(shape):
    z = inputs.logits("ordinary", 1, 4, torch.float32, SEED).view(shape)
    y = torch.full((1, *shape[2:]), 2)
    stats = collected(z, y)
    p = naive.softmax(z.double().flatten().tolist())
    assert stats.count() == 1
    assert METRICS["nll"].function(stats) == pytest.approx(-math.log(p[2]), rel=1e-12)
    assert METRICS["ece"].function(stats) == pytest.approx(abs(max(p) - (max(p) == p[2])), rel=1e-12)
    for name in FROM_STATISTICS:
        assert METRICS[name].function(stats).count >= 0, name


def test_a_volume_of_background():
    z = inputs.logits("sure", 60, 3, torch.float32, SEED).T.reshape(1, 3, 3, 4, 5).contiguous()
    z[:, 0] = 90.0
    stats = collected(z, torch.zeros(1, 3, 4, 5, dtype=torch.int64))
    for name in ("nll", "brier", "entropy", "ece", "mce", "ace", "sce", "cece", "smece"):
        assert 0 <= METRICS[name].function(stats) < 1e-9, name
    assert math.isnan(METRICS["ece-wrong"].function(stats))
    assert METRICS["dsc"].function(stats) == METRICS["accuracy"].function(stats) == 1
    assert math.isnan(METRICS["volume-dice"].function(stats))


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_no_hard_input_makes_a_metric_undefined(backend):
    for family in inputs.FAMILIES:
        for dtype in inputs.TYPES[1:]:
            z = inputs.logits(family, 50, 5, dtype, SEED)
            stats = collected(z, inputs.labels(z, SEED, right=0.5), backend=backend)
            for name in FROM_STATISTICS:
                assert math.isfinite(METRICS[name].function(stats)), (name, family, dtype)
