"""Calibration metrics against naive loops, and the theorems that hold for them."""

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference import metrics as reference

from segcal import metrics
from segcal.errors import InputError
from segcal.kernels import AffineMap
from segcal.metrics import METRICS, Measure
from segcal.statistics import VoxelStatistics

BINS = (10, 15, 7)
BANDS = ("band-0-3", "band-3-7", "band-7-15", "band-15-inf")


def example(classes=4, voxels=400, seed=0, scale=2.0):
    """Logits ``(n, C)`` in float64 and labels that are right about as often as the logits say."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(voxels, classes, generator=random, dtype=torch.float64) * scale
    noise = -torch.log(-torch.log(torch.rand(logits.shape, generator=random)))
    return logits, (logits / 1.5 + noise).argmax(1)


def naive(logits, labels):
    return [reference.softmax(z) for z in logits.tolist()], labels.tolist()


@pytest.mark.parametrize("classes", [2, 4, 9])
@pytest.mark.parametrize("bins", BINS)
def test_binned_errors_equal_the_loops(classes, bins):
    logits, labels = example(classes)
    p, y = naive(logits, labels)
    stats = VoxelStatistics(classes, BINS).update(logits, labels)
    for name in ("ece", "mce", "ace", "sce", "cece"):
        expected = getattr(reference, name)(p, y, bins)
        assert METRICS[name].function(stats, num_bins=bins) == pytest.approx(expected, rel=1e-9), name
    assert metrics.ece_wrong(stats) == pytest.approx(reference.ece_wrong(p, y, bins), rel=1e-9)
    assert metrics.ece_right(stats) == pytest.approx(reference.ece_right(p, y, bins), rel=1e-9)
    assert metrics.sce(stats, num_bins=bins, divide=True) == pytest.approx(
        reference.sce(p, y, bins) / classes, rel=1e-9
    )
    assert metrics.cece(stats, num_bins=bins, reduction="sum") == pytest.approx(
        reference.cece(p, y, bins) * classes, rel=1e-9
    )


@pytest.mark.parametrize("name", ["nll", "brier", "entropy", "confidence-balance"])
def test_proper_scores_equal_the_loops(name):
    logits, labels = example()
    stats = VoxelStatistics(4).update(logits, labels)
    expected = getattr(reference, name.replace("-", "_"))(*naive(logits, labels))
    assert METRICS[name].function(stats) == pytest.approx(expected, rel=1e-12)
    assert METRICS[name].function(stats).count == 400


def test_confidence_balance_of_one_predicted_class():
    logits, labels = example()
    stats = VoxelStatistics(4).update(logits, labels)
    chosen = logits.argmax(1) == 2
    expected = reference.confidence_balance(*naive(logits[chosen], labels[chosen]))
    assert metrics.confidence_balance(stats, predicted=2) == pytest.approx(expected, rel=1e-9)
    assert metrics.confidence_balance(stats, predicted=2).count == int(chosen.sum())


def test_boundary_aware_ece_equals_the_loops():
    logits, labels = example()
    distance = torch.rand(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 12
    edges = (0, 3, 7, 15, math.inf)
    regions = {
        name: (low <= distance) & (distance < high) for name, low, high in zip(BANDS, edges, edges[1:], strict=False)
    }
    stats = VoxelStatistics(4, regions=BANDS).update(logits, labels, regions=regions, distance=distance)
    assert metrics.ba_ece(stats) == pytest.approx(reference.ba_ece(*naive(logits, labels), distance.tolist()), rel=1e-9)
    assert metrics.ba_ece(stats).count == 3  # nothing is further than 15


def test_boundary_aware_ece_without_boundary_or_distance():
    logits, labels = example()
    far = {name: torch.full_like(labels, name == BANDS[-1], dtype=torch.bool) for name in BANDS}
    stats = VoxelStatistics(4, regions=BANDS).update(
        logits, labels, regions=far, distance=torch.full((400,), torch.inf)
    )
    assert math.isnan(metrics.ba_ece(stats))
    assert metrics.ba_ece(stats).count == 0
    with pytest.raises(InputError, match="pass distance= to VoxelStatistics.update"):
        metrics.ba_ece(VoxelStatistics(4, regions=BANDS).update(logits, labels, regions=far))


def test_smooth_ece_equals_the_integral():
    logits, labels = example(3, 40)
    stats = VoxelStatistics(3).update(logits, labels)
    assert metrics.smece(stats) == pytest.approx(reference.smece(*naive(logits, labels)), rel=2e-3)


def test_smooth_ece_of_a_point_mass():
    """One confidence p and accuracy a: the smoothed error is |p - a| for every bandwidth."""
    stats = VoxelStatistics(2).update(torch.tensor([[math.log(3.0), 0.0]]).repeat(100, 1), torch.arange(100) % 2)
    assert metrics.smece(stats) == pytest.approx(0.25, abs=1e-6)


def test_free_energy_std():
    logits, labels = example()
    expected = float(torch.logsumexp(logits, 1).std(correction=0))
    assert metrics.free_energy_std(VoxelStatistics(4).update(logits, labels)) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), bins=st.integers(1, 40))
def test_what_must_hold_between_calibration_errors(seed, bins):
    logits, labels = example(seed=seed)
    stats = VoxelStatistics(4, (bins, 2 * bins)).update(logits, labels)
    coarse, fine = (metrics.ece(stats, num_bins=n) for n in (bins, 2 * bins))
    assert coarse <= fine + 1e-12  # splitting a bin cannot lower the sum of absolute gaps
    assert coarse <= metrics.mce(stats, num_bins=bins) + 1e-12
    assert metrics.ace(stats, num_bins=bins) <= metrics.mce(stats, num_bins=bins) + 1e-12
    assert coarse <= metrics.sce(stats, num_bins=bins) + 1e-12
    assert metrics.ece(stats, num_bins=1) == pytest.approx(
        abs(float(torch.softmax(logits, 1).amax(1).mean()) - metrics.accuracy(stats)), rel=1e-9
    )
    right, wrong = metrics.ece_right(stats), metrics.ece_wrong(stats)
    assert right.count + wrong.count == 400


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_a_monotone_map_keeps_the_labels_and_labels_keep_dice(temperature):
    logits, labels = example()
    before = VoxelStatistics(4).update(logits, labels)
    after = VoxelStatistics(4).update(logits, labels, score_map=AffineMap.temperature(temperature))
    assert np.array_equal(before.total().confusion, after.total().confusion)
    assert metrics.flip(after) == 0
    assert metrics.flip(after).count == 400
    assert math.isnan(metrics.flip(before))


def test_a_gauge_changes_nothing_but_the_free_energy():
    logits, labels = example()
    gauge = torch.randn(400, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 20
    a, b = VoxelStatistics(4).update(logits, labels), VoxelStatistics(4).update(logits + gauge, labels)
    for name, spec in METRICS.items():
        if not spec.needs or spec.needs == ("classwise",):
            same = spec.function(b) == pytest.approx(spec.function(a), rel=1e-9, abs=1e-12)
            assert same == (name != "free-energy-std"), name


def test_a_calibrated_model_has_no_error_and_balanced_confidence():
    """Labels drawn from the probabilities: all errors vanish as 1 / sqrt(n)."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 3, 500_000, generator=random) * 2
    labels = (logits - torch.log(-torch.log(torch.rand(logits.shape, generator=random)))).argmax(1)
    stats = VoxelStatistics(3).update(logits, labels)
    for name in ("ece", "sce", "cece", "smece", "ace-adaptive", "tace"):
        assert METRICS[name].function(stats) < 0.005, name
    assert abs(metrics.confidence_balance(stats)) < 0.005


def test_classwise_metrics_need_classwise_statistics():
    logits, labels = example()
    stats = VoxelStatistics(4, classwise=False).update(logits, labels)
    full = VoxelStatistics(4).update(logits, labels)
    for name, spec in METRICS.items():
        if spec.needs == ("classwise",):
            with pytest.raises(InputError, match="classwise=True"):
                spec.function(stats)
        elif not spec.needs:
            assert spec.function(stats) == pytest.approx(spec.function(full), rel=1e-12), name


def test_bin_counts_nobody_asked_for_are_refused():
    stats = VoxelStatistics(4, (15,)).update(*example())
    with pytest.raises(InputError, match=r"bins=\(..., 20\)"):
        metrics.ece(stats, num_bins=20)
    assert metrics.ece(stats, num_bins=16) >= 0


def test_options_are_checked():
    stats = VoxelStatistics(4).update(*example())
    with pytest.raises(InputError, match="reduction is 'max'; expected one of mean, sum"):
        metrics.cece(stats, reduction="max")


def test_measures_are_floats_that_survive_pickling():
    value = Measure(0.5, 3, 0.01)
    back = pickle.loads(pickle.dumps(value))
    assert (back, back.count, back.bound) == (0.5, 3, 0.01)
    assert value + 1 == 1.5


def test_means_leave_undefined_cases_out_and_count_the_others():
    logits, labels = example()
    cases = [VoxelStatistics(4).update(logits[i::3], labels[i::3]) for i in range(3)]
    cases.append(VoxelStatistics(4).update(logits, torch.full_like(labels, 255)))
    per_image = Measure.mean(metrics.ece(case, num_bins=15) for case in cases)
    assert per_image == pytest.approx(np.mean([metrics.ece(case) for case in cases[:3]]))
    assert per_image.count == 3
    pooled = metrics.ece(sum(cases[1:], cases[0]))
    assert pooled == pytest.approx(metrics.ece(VoxelStatistics(4).update(logits, labels)), rel=1e-12)
    assert math.isnan(metrics.ece(VoxelStatistics(4)))
    assert cases[0].count() == 134  # pooling changes no case
