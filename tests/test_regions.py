from __future__ import annotations

import math
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.ndimage import distance_transform_edt
from tests.reference import regions as reference

from segcal.errors import InputError
from segcal.regions import BAND_EDGES, BANDS, REGIONS, CaseRegions, boundary_distance, local_patches
from segcal.regions.boundary import label_boundary

ONE_MASK = [name for name in REGIONS if name != "local"]

spacings = st.sampled_from([0.3, 0.5, 1.0, 2.5])
shapes = st.one_of(
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=7),
    hnp.array_shapes(min_dims=3, max_dims=3, min_side=1, max_side=4),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, tuple[float, ...]]:
    """Labels (N, *spatial) with ignored voxels, a mask, and a spacing."""
    shape = (draw(st.integers(1, 2)), *draw(shapes))
    labels = draw(hnp.arrays(np.int64, shape, elements=st.sampled_from([0, 0, 1, 1, 2, 255])))
    mask = draw(hnp.arrays(np.bool_, shape, elements=st.sampled_from([True, True, True, False])))
    spacing = tuple(draw(st.tuples(*[spacings] * (len(shape) - 1))))
    return torch.from_numpy(labels), torch.from_numpy(mask), spacing


def blobs(*shape: int, seed: int = 0) -> torch.Tensor:
    """Three smooth-edged classes, large enough for every band: nested boxes around a seeded corner."""
    corner = np.random.default_rng(seed).integers(0, 4, len(shape))
    grid = np.max(np.abs(np.indices(shape) - corner.reshape(-1, *[1] * len(shape))), axis=0)
    return torch.from_numpy(np.digitize(grid, [10, 14])).unsqueeze(0)


@settings(deadline=None, max_examples=60)
@given(cases())
def test_distance_is_the_brute_force_distance(case: tuple[torch.Tensor, torch.Tensor, tuple[float, ...]]) -> None:
    labels, mask, spacing = case
    valid = (labels != 255) & mask
    distance = boundary_distance(labels, spacing=spacing, mask=mask)
    assert distance.dtype == torch.float32
    for image, kept, found in zip(labels.numpy(), valid.numpy(), distance.numpy(), strict=True):
        np.testing.assert_allclose(found, reference.boundary_distance(image, kept, spacing), rtol=2e-7)
        boundary = label_boundary(torch.from_numpy(image)[None], torch.from_numpy(kept)[None])[0]
        assert sorted(map(tuple, boundary.nonzero().tolist())) == reference.boundary_voxels(image, kept)


@settings(deadline=None, max_examples=60)
@given(cases())
def test_boundary_region_is_within_two_steps_of_another_label(
    case: tuple[torch.Tensor, torch.Tensor, tuple[float, ...]],
) -> None:
    labels = case[0]  # 255 is one more class here.
    found = CaseRegions(labels, ignore_index=-1).mask("boundary")
    for image, region in zip(labels.numpy(), found.tolist(), strict=True):
        assert region == reference.boundary_region(image).tolist()


@settings(deadline=None, max_examples=60)
@given(cases())
def test_regions_and_bands_partition_the_valid_voxels(
    case: tuple[torch.Tensor, torch.Tensor, tuple[float, ...]],
) -> None:
    labels, mask, spacing = case
    regions = CaseRegions(labels, spacing=spacing, mask=mask)
    masks = {name: regions.mask(name) for name in ONE_MASK}
    everything = masks["everything"]
    assert torch.equal(everything, (labels != 255) & mask)
    assert torch.equal(masks["boundary"] ^ masks["interior"], everything)
    assert torch.equal(masks["all"], masks["foreground"] | masks["boundary"])
    assert torch.equal(sum(masks[name].int() for name in BANDS), everything.int())
    assert not any(bool((found & ~everything).any()) for found in masks.values())
    assert torch.equal(regions.bands >= 0, everything)
    for index, name in enumerate(BANDS):
        assert torch.equal(regions.bands == index, masks[name])


@settings(deadline=None, max_examples=30)
@given(cases(), st.integers(0, 2))
def test_ignored_voxels_never_matter(
    case: tuple[torch.Tensor, torch.Tensor, tuple[float, ...]], replacement: int
) -> None:
    labels, mask, spacing = case
    before = CaseRegions(labels, spacing=spacing, mask=mask)
    hidden = torch.where(mask, labels, replacement)  # Any label may stand under the mask.
    ignored = torch.where(mask, labels, 255)  # Masking out and ignoring are the same thing.
    for after in (CaseRegions(hidden, spacing=spacing, mask=mask), CaseRegions(ignored, spacing=spacing)):
        assert torch.equal(before.distance, after.distance)
        assert all(torch.equal(before.mask(name), after.mask(name)) for name in ONE_MASK)


def test_a_change_across_ignored_voxels_is_no_boundary() -> None:
    labels = torch.zeros(1, 9, 9, dtype=torch.int64)
    labels[:, 4:] = 1
    labels[:, 3:5] = 255
    regions = CaseRegions(labels)
    assert bool(regions.distance.isposinf().all())
    assert not bool(regions.mask("boundary").any())


@pytest.mark.parametrize("shape", [(40, 50), (20, 24, 22)])
def test_scaling_the_spacing_scales_the_distance(shape: tuple[int, ...]) -> None:
    labels = blobs(*shape)
    spacing = (0.5, 2.0, 1.25)[: len(shape)]
    once = boundary_distance(labels, spacing=spacing)
    thrice = boundary_distance(labels, spacing=[3 * length for length in spacing])
    torch.testing.assert_close(thrice, 3 * once)
    assert torch.equal(boundary_distance(labels), boundary_distance(labels, spacing=[1] * len(shape)))


def test_distances_across_a_straight_edge() -> None:
    labels = torch.zeros(1, 5, 40, dtype=torch.int64)
    labels[..., 20:] = 1
    regions = CaseRegions(labels)
    assert regions.distance[0, 2].tolist() == [*range(19, -1, -1), *range(20)]
    assert regions.mask("boundary")[0, 2].nonzero().flatten().tolist() == list(range(18, 22))
    assert regions.mask("all")[0, 2].nonzero().flatten().tolist() == list(range(18, 40))
    assert regions.bands[0, 2, 20:].tolist() == [0] * 3 + [1] * 4 + [2] * 8 + [3] * 5
    millimetres = CaseRegions(labels, spacing=(1.0, 3 / 7))  # 7 voxels are 3 mm, rounding or not.
    assert millimetres.bands[0, 2, 20:].tolist() == [0] * 7 + [1] * 10 + [2] * 3
    assert torch.equal(millimetres.mask("boundary"), regions.mask("boundary"))


@pytest.mark.parametrize("shape", [(1, 30), (1, 30, 30), (30, 1, 30)])
def test_single_slices_equal_the_image_without_the_axis(shape: tuple[int, ...]) -> None:
    thin = blobs(*shape)
    flat = thin.reshape(1, *[length for length in shape if length > 1])
    assert torch.equal(boundary_distance(thin).flatten(), boundary_distance(flat).flatten())


@pytest.mark.parametrize("labels", [torch.ones(2, 8, 9, dtype=torch.int64), torch.tensor([0, 1, 1])])
def test_without_boundary_all_voxels_are_in_the_last_band(labels: torch.Tensor) -> None:
    regions = CaseRegions(labels)
    assert bool(regions.distance.isposinf().all())
    assert not bool(regions.mask("boundary").any())
    assert bool(regions.mask("interior").all())
    assert bool((regions.bands == len(BAND_EDGES) - 2).all())
    assert torch.equal(regions.mask("all"), regions.mask("foreground"))


def test_all_ignored_image_has_empty_regions() -> None:
    regions = CaseRegions(torch.full((1, 6, 6), 255))
    assert not any(bool(regions.mask(name).any()) for name in ONE_MASK)
    assert [int(part.mask.sum()) for part in regions.parts("local")] == [0] * 10


def test_one_image_with_boundary_does_not_reach_the_other() -> None:
    labels = torch.cat([blobs(12, 12), torch.zeros(1, 12, 12, dtype=torch.int64)])
    distance = boundary_distance(labels)
    assert torch.equal(distance[:1], boundary_distance(labels[:1]))
    assert bool(distance[1].isposinf().all())


def test_every_band_holds_the_distances_it_is_named_after() -> None:
    labels = torch.cat([blobs(70, 40, seed=seed) for seed in range(3)])
    labels[:, 5:9, 5:9] = 255
    whole = CaseRegions(labels)
    for index, name in enumerate(BANDS):
        chosen = whole.distance[whole.mask(name)].tolist()
        assert chosen
        assert all(reference.band(distance) == index for distance in chosen)


@pytest.mark.parametrize("spatial", [(200, 100), (72, 73), (80, 90, 100), (5, 300), (3, 4, 5)])
def test_patches_are_inside_and_as_large_as_the_image_allows(spatial: tuple[int, ...]) -> None:
    patches = local_patches(spatial, seed=3)
    assert len(patches) == 10
    for patch in patches:
        for window, length in zip(patch, spatial, strict=True):
            assert 0 <= window.start < window.stop <= length
            assert window.stop - window.start == min(72, length)


def test_patches_follow_the_seed_and_reach_both_ends() -> None:
    assert local_patches((200, 300), seed=1) == local_patches((200, 300), seed=1)
    assert local_patches((200, 300), seed=1) != local_patches((200, 300), seed=2)
    starts = {patch[0].start for patch in local_patches((75,), count=200)}
    assert starts == {0, 1, 2, 3}


def test_local_parts_are_the_valid_voxels_of_their_windows() -> None:
    labels = blobs(100, 90)
    labels[:, 50:60] = 255
    regions = CaseRegions(labels, seed=7)
    parts = list(regions.parts("local"))
    assert [part.window for part in parts] == local_patches((100, 90), seed=7)
    for (rows, columns), mask in parts:
        assert mask.shape == (1, 72, 72)
        assert torch.equal(mask, labels[:, rows, columns] != 255)
    with pytest.raises(InputError, match="local"):
        regions.mask("local")


def test_a_user_mask_is_a_region() -> None:
    labels = torch.tensor([[[0, 1, 255], [1, 2, 0]]])
    chosen = torch.tensor([[[True, False, True], [True, True, False]]])
    regions = CaseRegions(labels)
    expected = chosen & (labels != 255)
    assert torch.equal(regions.mask(chosen), expected)
    (part,) = regions.parts(chosen)
    assert torch.equal(part.mask, expected)
    assert part.window == (slice(0, 2), slice(0, 3))


def test_the_distance_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import segcal.regions.boundary as module

    calls: list[int] = []
    original = module.distance_transform_edt
    monkeypatch.setattr(module, "distance_transform_edt", lambda *a, **k: calls.append(1) or original(*a, **k))
    regions = CaseRegions(blobs(20, 20))
    for name in ONE_MASK:
        regions.mask(name)
    assert bool((regions.bands >= 0).all())
    assert len(calls) == 1
    CaseRegions(blobs(20, 20)).mask("boundary")
    assert len(calls) == 1  # The boundary region needs no distances.


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_integer_labels_and_any_memory_order(dtype: torch.dtype) -> None:
    labels = blobs(24, 30)
    strided = labels.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(boundary_distance(strided), boundary_distance(labels))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_results_are_on_the_labels_device() -> None:
    labels = blobs(24, 30)
    here, there = CaseRegions(labels), CaseRegions(labels.cuda())
    for name in ONE_MASK:
        assert there.mask(name).is_cuda
        assert torch.equal(there.mask(name).cpu(), here.mask(name))
    assert there.distance.is_cuda


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mask": torch.ones(1, 4, 5, dtype=torch.bool)}, ["mask", "(1, 4, 5)", "(1, 4, 4)"]),
        ({"mask": torch.ones(1, 4, 4)}, ["mask", "torch.float32", "shape (1, 4, 4), bool"]),
        ({"spacing": (1.0,)}, ["spacing", "(1.0,)", "2 positive lengths"]),
        ({"spacing": (1.0, 0.0)}, ["spacing", "(1.0, 0.0)"]),
        ({"spacing": (1.0, math.nan)}, ["spacing", "nan"]),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        CaseRegions(torch.zeros(1, 4, 4, dtype=torch.int64), **arguments)  # type: ignore[arg-type]
    assert all(word in str(error.value) for word in words)


def test_bad_labels_and_regions_are_named() -> None:
    with pytest.raises(InputError, match=r"dtype torch\.float32"):
        CaseRegions(torch.zeros(1, 4, 4))
    with pytest.raises(InputError, match=r"\(1, 0, 4\)"):
        CaseRegions(torch.zeros(1, 0, 4, dtype=torch.int64))
    regions = CaseRegions(torch.zeros(1, 4, 4, dtype=torch.int64))
    with pytest.raises(InputError, match=r"'edge'.*boundary"):
        regions.mask("edge")
    with pytest.raises(InputError, match=r"region has shape \(4, 4\)"):
        regions.mask(torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(InputError, match="size is 0"):
        local_patches((4, 4), size=0)


def test_registry_ids_are_those_of_the_methods_page() -> None:
    assert all(name == region.id for name, region in REGIONS.items())
    assert {"everything", "foreground", "all", "boundary", "interior", "local"} < set(REGIONS)
    assert BANDS == ("band-0-3", "band-3-7", "band-7-15", "band-15-inf")
    assert [name for name in REGIONS if name.startswith("band-")] == list(BANDS)


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (0.7, 0.1, 3.3)])
def test_distances_and_bands_in_parts_are_those_of_the_whole(
    spacing: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = blobs(19, 14, 21)
    boundary = label_boundary(labels, torch.ones_like(labels, dtype=torch.bool))[0].numpy()
    expected = distance_transform_edt(~boundary, sampling=spacing).astype(np.float32)
    for module in ("segcal.regions", "segcal.regions.boundary"):
        monkeypatch.setattr(sys.modules[module], "CHUNK", 2 * 14 * 21)
    parts = CaseRegions(labels, spacing=spacing)
    assert np.array_equal(parts.distance[0].numpy(), expected)
    assert np.array_equal(parts.bands[0].numpy(), np.digitize(expected, [3, 7, 15]))


def test_distances_take_no_more_than_thirty_bytes_a_voxel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scipy's own take more than twice that, which for a large scan is gigabytes."""
    labels = blobs(48, 64, 64)
    monkeypatch.setattr(sys.modules["segcal.regions.boundary"], "CHUNK", 64 * 64)
    regions = CaseRegions(labels)
    assert bool(regions.boundary.any())
    tracemalloc.start()
    assert bool(regions.distance.isfinite().all())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30 * labels.numel()
