from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.reference import surfaces as reference

from segcal.errors import InputError
from segcal.metrics.surfaces import asd, hd95, surface_dice, surface_distances

shapes = st.one_of(
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6),
    hnp.array_shapes(min_dims=3, max_dims=3, min_side=1, max_side=4),
)
spacings = st.sampled_from([0.3, 1.0, 2.5])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[float, ...]]:
    """Prediction, labels with ignored voxels, mask and spacing."""
    shape = (draw(st.integers(1, 2)), *draw(shapes))
    labels = draw(hnp.arrays(np.int64, shape, elements=st.sampled_from([0, 0, 1, 1, 2, 255])))
    prediction = draw(hnp.arrays(np.int64, shape, elements=st.integers(0, 2)))
    mask = draw(hnp.arrays(np.bool_, shape, elements=st.sampled_from([True, True, True, False])))
    spacing = tuple(draw(st.tuples(*[spacings] * (len(shape) - 1))))
    return torch.from_numpy(prediction), torch.from_numpy(labels), torch.from_numpy(mask), spacing


def box(spatial: tuple[int, ...], start: tuple[int, ...], side: int) -> torch.Tensor:
    labels = torch.zeros(1, *spatial, dtype=torch.int64)
    labels[(0, *[slice(a, a + side) for a in start])] = 1
    return labels


def wavy(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Three classes with curved, partly shared surfaces."""
    random = np.random.default_rng(seed)
    grid = np.indices(shape) / 4
    field = sum(np.sin(axis * random.uniform(0.5, 1.5) + random.uniform(0, 6)) for axis in grid)
    return torch.from_numpy(np.digitize(field, np.quantile(field, [0.35, 0.75]))).unsqueeze(0)


@settings(deadline=None, max_examples=80)
@given(pairs(), st.sampled_from([0.0, 0.3, 1.0, 2.5]))
def test_metrics_are_those_of_the_brute_force(
    pair: tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[float, ...]], tolerance: float
) -> None:
    prediction, labels, mask, spacing = pair
    valid = (labels != 255) & mask
    distances = surface_distances(prediction, labels, 4, spacing=spacing, mask=mask)
    found = torch.stack([hd95(distances), asd(distances), surface_dice(distances, tolerance=tolerance)], -1)
    assert found.dtype == torch.float64
    for n, label in np.ndindex(len(labels), 4):
        image = (prediction[n].numpy(), labels[n].numpy(), valid[n].numpy())
        expected = reference.surface_metrics(*image, label, spacing, tolerance)
        np.testing.assert_allclose(found[n, label], expected, rtol=1e-12)


@settings(deadline=None, max_examples=30)
@given(pairs())
def test_missing_a_class_is_worse_than_any_error(
    pair: tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[float, ...]],
) -> None:
    """Take a class out of the prediction: no distance gets better, and the miss is marked."""
    prediction, labels, mask, spacing = pair
    without = torch.where(prediction == 1, 0, prediction)
    before, after = (surface_distances(p, labels, 3, spacing=spacing, mask=mask) for p in (prediction, without))
    labelled = ((labels == 1) & mask).flatten(1).any(1)
    assert torch.equal(after.missed[:, 1], labelled)
    for metric in (hd95, asd):
        defined = labelled & ~metric(before)[:, 1].isnan()
        assert bool((metric(after)[defined, 1] >= metric(before)[defined, 1]).all())
        both = defined & ~before.missed[:, 1]
        assert bool((metric(after)[both, 1] > metric(before)[both, 1]).all())
    assert bool((surface_dice(after)[labelled, 1] == 0).all())


@settings(deadline=None, max_examples=30)
@given(pairs(), st.integers(0, 2))
def test_what_is_predicted_at_ignored_voxels_never_matters(
    pair: tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[float, ...]], replacement: int
) -> None:
    prediction, labels, mask, spacing = pair
    other = torch.where((labels != 255) & mask, prediction, replacement)
    ignored = torch.where(mask, labels, 255)
    one = surface_distances(prediction, labels, 3, spacing=spacing, mask=mask)
    two = surface_distances(other, ignored, 3, spacing=spacing)
    for metric in (hd95, asd, surface_dice):
        torch.testing.assert_close(metric(one), metric(two), rtol=0, atol=0, equal_nan=True)


@settings(deadline=None, max_examples=30)
@given(pairs())
def test_exchanging_prediction_and_labels_changes_nothing(
    pair: tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[float, ...]],
) -> None:
    prediction, labels, mask, spacing = pair
    keep = mask & (labels != 255)
    labels = torch.where(keep, labels, 0)
    one = surface_distances(prediction, labels, 3, spacing=spacing, mask=keep)
    two = surface_distances(labels, prediction, 3, spacing=spacing, mask=keep)
    for metric in (hd95, asd, surface_dice):
        torch.testing.assert_close(metric(one), metric(two), rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(20, 30), (12, 14, 10), (1, 20, 30)])
def test_identical_segmentations_are_perfect(shape: tuple[int, ...]) -> None:
    labels = wavy(shape, 0)
    distances = surface_distances(labels, labels, 3)
    assert hd95(distances).tolist() == asd(distances).tolist() == [[0, 0, 0]]
    assert surface_dice(distances, tolerance=0).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("spatial", [(40, 60), (20, 22, 30)])
@pytest.mark.parametrize("shift", [1, 3, 7])
def test_a_shifted_box_is_as_far_away_as_it_was_shifted(spatial: tuple[int, ...], shift: int) -> None:
    start = (5,) * len(spatial)
    labels = box(spatial, start, 8)
    prediction = box(spatial, (*start[:-1], start[-1] + shift), 8)
    spacing = (1.0,) * (len(spatial) - 1) + (0.5,)
    in_voxels, in_mm = (surface_distances(prediction, labels, 2, spacing=s) for s in (None, spacing))
    assert hd95(in_voxels)[0, 1] == shift
    assert hd95(in_mm)[0, 1] == shift / 2
    assert 0 < asd(in_voxels)[0, 1] < shift
    assert surface_dice(in_voxels, tolerance=shift)[0, 1] == 1
    assert surface_dice(in_voxels, tolerance=shift - 1)[0, 1] < 1


def test_scaling_the_spacing_scales_distances() -> None:
    prediction, labels = wavy((16, 18, 20), 1), wavy((16, 18, 20), 2)
    once = surface_distances(prediction, labels, 3, spacing=(0.5, 2.0, 1.25))
    thrice = surface_distances(prediction, labels, 3, spacing=(1.5, 6.0, 3.75))
    for metric in (hd95, asd):
        torch.testing.assert_close(metric(thrice), 3 * metric(once))
    torch.testing.assert_close(surface_dice(thrice, tolerance=3), surface_dice(once, tolerance=1))


def test_a_tolerance_of_whole_voxels_is_met_in_any_unit() -> None:
    labels, prediction = box((9, 9), (1, 1), 4), box((9, 9), (1, 4), 4)
    assert 3 * 0.1 > 0.3
    distances = surface_distances(prediction, labels, 2, spacing=(0.1, 0.1))
    assert surface_dice(distances, tolerance=0.3)[0, 1] == 1


@pytest.mark.parametrize("shape", [(1, 20, 30), (20, 1, 30)])
def test_a_single_slice_is_its_image(shape: tuple[int, ...]) -> None:
    prediction, labels = wavy(shape, 1), wavy(shape, 2)
    thin = surface_distances(prediction, labels, 3)
    flat = surface_distances(prediction.reshape(1, 20, 30), labels.reshape(1, 20, 30), 3)
    assert torch.equal(thin.counts, flat.counts)
    assert torch.equal(asd(thin), asd(flat))


def test_absent_classes() -> None:
    labels, prediction = box((9, 9), (2, 2), 3), torch.zeros(1, 9, 9, dtype=torch.int64)
    distances = surface_distances(prediction, labels, 3, spacing=(1.0, 2.0))
    assert distances.missed.tolist() == [[False, True, False]]
    assert distances.absent.tolist() == [[False, False, True]]
    chosen = {"diagonal": math.hypot(9, 18), "infinite": math.inf, "skip": math.nan, 7: 7.0, 2.5: 2.5}
    for metric in (hd95, asd):
        for absent, expected in chosen.items():
            values = metric(distances, absent=absent)[0]
            assert float(values[1]) == pytest.approx(expected, rel=1e-12, nan_ok=True)
            assert bool(values[2].isnan())
            assert values[0] == metric(distances)[0, 0] < chosen["diagonal"]
    assert surface_dice(distances)[0, 1] == 0
    assert bool(surface_dice(distances)[0, 2].isnan())
    assert surface_dice(distances, absent="one")[0].tolist() == [surface_dice(distances)[0, 0], 0, 1]
    assert distances.counts[0].tolist() == [32 + 12 + 32, 8, 0]


def test_a_class_without_surface_is_still_missed() -> None:
    """Valid voxels that do not reach the border: a class that fills them has no surface, but it is there."""
    mask = torch.zeros(1, 7, 7, dtype=torch.bool)
    mask[0, 2:5, 2:5] = True
    ones = torch.ones(1, 7, 7, dtype=torch.int64)
    dotted = ones.clone()
    dotted[0, 3, 3] = 0
    missed = surface_distances(ones * 2, ones, 3, mask=mask)
    assert missed.missed.tolist() == [[False, True, True]]
    assert hd95(missed)[0, 1:].tolist() == [math.hypot(7, 7)] * 2
    assert surface_dice(missed)[0, 1:].tolist() == [0, 0]
    nearly = surface_distances(dotted, ones, 2, mask=mask)  # Both have class 1, but only one has a surface of it.
    assert nearly.missed.tolist() == [[True, False]]
    assert all(bool(metric(nearly)[0, 1].isnan()) for metric in (hd95, asd, surface_dice))


def test_no_valid_voxel_gives_nan_with_count_zero() -> None:
    distances = surface_distances(torch.zeros(1, 4, 4, dtype=torch.int64), torch.full((1, 4, 4), 255), 2)
    assert distances.counts.tolist() == [[0, 0]]
    assert bool(hd95(distances).isnan().all())


def monai_values(
    prediction: torch.Tensor, labels: torch.Tensor, spacing: tuple[float, ...], tolerance: float
) -> list[torch.Tensor]:
    monai = pytest.importorskip("monai.metrics")
    one_hot = [torch.nn.functional.one_hot(x, 4).movedim(-1, 1) for x in (prediction, labels)]
    options = {"include_background": True, "spacing": spacing}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns of absent classes.
        return [
            monai.compute_hausdorff_distance(*one_hot, percentile=95, **options),
            monai.compute_average_surface_distance(*one_hot, symmetric=True, **options),
            monai.compute_surface_dice(*one_hot, [tolerance] * 4, **options),
        ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(40, 50), (18, 20, 16)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_equal_to_monai(shape: tuple[int, ...], seed: int) -> None:
    prediction, labels = wavy(shape, seed), wavy(shape, seed + 10)
    prediction[labels == 2] = 1  # Class 2 in one of the two only, class 3 in neither.
    prediction[prediction == 2] = 0
    spacing = (1.0, 0.7, 2.5)[: len(shape)]
    distances = surface_distances(prediction, labels, 4, spacing=spacing)
    infinite = [metric(distances, absent="infinite") for metric in (hd95, asd)]
    found = [*infinite, surface_dice(distances, tolerance=1.5)]
    expected = monai_values(prediction, labels, spacing, 1.5)
    assert bool(expected[0][0, 2].isnan())  # Its quantile of infinities; the class is absent in the prediction.
    expected[0][0, 2] = torch.inf
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_results_are_on_the_labels_device() -> None:
    prediction, labels = wavy((20, 20), 1), wavy((20, 20), 2)
    there = surface_distances(prediction.cuda(), labels.cuda(), 3)
    assert asd(there).is_cuda
    assert torch.equal(asd(there).cpu(), asd(surface_distances(prediction, labels, 3)))


def test_bad_arguments_are_named() -> None:
    labels = torch.zeros(1, 4, 4, dtype=torch.int64)
    with pytest.raises(InputError, match=r"prediction has shape \(1, 2, 4, 4\).*\(1, 4, 4\)"):
        surface_distances(torch.zeros(1, 2, 4, 4, dtype=torch.int64), labels, 2)
    with pytest.raises(InputError, match=r"prediction contains 2; expected 0\.\.1"):
        surface_distances(labels + 2, labels, 2)
    with pytest.raises(InputError, match=r"labels contains 9.*ignore_index"):
        surface_distances(labels, labels + 9, 2)
    with pytest.raises(InputError, match=r"prediction has dtype torch\.float32"):
        surface_distances(labels.float(), labels, 2)
    with pytest.raises(InputError, match=r"mask has shape \(4, 4\)"):
        surface_distances(labels, labels, 2, mask=torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(InputError, match="spacing"):
        surface_distances(labels, labels, 2, spacing=(1.0, -1.0))
    distances = surface_distances(labels, labels, 2)
    with pytest.raises(InputError, match="tolerance"):
        surface_dice(distances, tolerance=-1)
    for absent in ("zero", "one", -1, math.nan, True):
        with pytest.raises(InputError, match=f"absent is {absent!r}.*'diagonal', 'infinite', 'skip'"):
            hd95(distances, absent=absent)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="absent is 'skip'; expected one of nan, one"):
        surface_dice(distances, absent="skip")  # type: ignore[arg-type]
