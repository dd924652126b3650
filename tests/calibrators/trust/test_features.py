"""Features of predictions: invariant, local, mirrored with the image."""

import numpy as np
import pytest
import torch
from scipy.ndimage import distance_transform_edt, uniform_filter

from segcal.calibrators.trust import features as module
from segcal.calibrators.trust.features import (
    NAMES,
    REACH,
    boundary_distance,
    disagreement,
    features,
    voxel_maps,
    window_sum,
)
from segcal.calibrators.trust.tiles import Images, tiles
from segcal.synthetic import scenes


def logits(size=(70, 90), seed=0):
    return scenes(1, size=size, seed=seed)[0].logits


def of(z):
    maps = voxel_maps(z, torch.tensor(1.0))
    return features(maps, maps.totals)


def test_an_offset_of_every_voxel_changes_nothing():
    z = logits().double()
    offsets = torch.randint(-50, 50, (1, 1, *z.shape[2:]), generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(of(z + offsets), of(z), atol=2e-6, rtol=0)
    assert of(z).shape[1] == len(NAMES)


@pytest.mark.parametrize("axes", [(2,), (3,), (2, 3)])
def test_mirrored_images_have_mirrored_features(axes):
    z = logits()
    torch.testing.assert_close(of(z.flip(axes)), of(z).flip(axes), atol=2e-6, rtol=0)


def test_tiles_have_the_features_of_the_whole(monkeypatch):
    z = logits((200, 60))
    images = Images(tuple(z.shape), z.device, lambda rows: z[:, :, rows])
    (whole,) = tiles(images, torch.tensor(0.7))
    monkeypatch.setattr("segcal.calibrators.trust.tiles._TILE_VALUES", 6 * 60 * 37)
    parts = list(tiles(images, torch.tensor(0.7)))
    assert len(parts) > 4
    assert torch.equal(torch.cat([part.features for part in parts], 2), whole.features)
    assert torch.equal(parts[0].summary, whole.summary)


def test_a_slice_of_a_volume_has_the_features_of_its_plane_but_for_those_of_the_image():
    z = scenes(1, size=(4, 30, 40))[0].logits
    plane = of(z[:, :, 2])
    torch.testing.assert_close(of(z)[:, :-3, 2], plane[:, :-3], atol=2e-6, rtol=0)


def test_window_sums_are_those_of_a_plain_filter():
    values = torch.randint(0, 9, (1, 20, 31), generator=torch.Generator().manual_seed(0))
    padded = np.pad(values[0].numpy().astype(float), 7)
    expected = uniform_filter(padded, 15)[7:-7, 7:-7] * 225
    np.testing.assert_allclose(window_sum(values, 15)[0].numpy(), expected, atol=1e-6)


def test_distances_are_scipys_up_to_the_reach():
    winner = logits((90, 120), seed=3).argmax(1)
    edge = np.zeros(winner.shape[1:], bool)
    for axis in (0, 1):
        change = np.diff(winner[0].numpy(), axis=axis) != 0
        where = [slice(None)] * 2
        for part in (slice(0, -1), slice(1, None)):
            where[axis] = part
            edge[tuple(where)] |= change
    expected = np.minimum(distance_transform_edt(~edge), REACH)
    np.testing.assert_allclose(boundary_distance(winner)[0].numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("size", [(70, 3), (3, 70)])
def test_distances_in_narrow_images_are_those_along_their_length(size, recorded, monkeypatch):
    monkeypatch.setattr(module, "recording", lambda: recorded)
    winner = torch.zeros(1, *size, dtype=torch.int64)
    winner[0, :1, :1] = 1
    near = torch.tensor([[0, 1], [1, 0], [0, 0]])  # the voxels beside another prediction
    there = torch.stack(torch.meshgrid(*map(torch.arange, size), indexing="ij"), -1)
    expected = torch.stack([(there - own).double().norm(dim=-1) for own in near]).amin(0).clamp(max=REACH)
    torch.testing.assert_close(boundary_distance(winner)[0].double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [0, 2**30], ids=["torch", "compiled"])
def test_point_features_are_what_their_names_say(size):
    z, beta = torch.randn(2, 4, 6, 7, generator=torch.Generator().manual_seed(0)), torch.tensor(1.7)
    maps = voxel_maps(z, beta, size)
    log_p = (beta * z.double()).log_softmax(1)
    ranked = log_p.sort(1, descending=True).values
    p = ranked.exp()
    expected = [
        torch.log1p(-p[:, 0]), p[:, 0], ranked[:, 0] - ranked[:, 1], ranked[:, 1] - ranked[:, 2],
        -(p * ranked).sum(1),
    ]  # fmt: skip
    torch.testing.assert_close(maps.point.double(), torch.stack(expected, 1), atol=1e-5, rtol=1e-5)
    summary = maps.totals.summary().double()
    torch.testing.assert_close(summary[:, :5], torch.stack(expected, 1).mean((2, 3)), atol=1e-5, rtol=1e-5)
    winner = z.argmax(1)
    changes = (winner[:, :, 1:] != winner[:, :, :-1]).double().sum((1, 2)) / (6 * 7)
    torch.testing.assert_close(summary[:, 5], (changes + 1e-4).log(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("size", [0, 2**30], ids=["torch", "compiled"])
@pytest.mark.parametrize("space", [(6, 7), (3, 5, 4)])
def test_features_of_the_image_are_shares_and_means_over_it(space, size):
    z = torch.randn(2, 4, *space, generator=torch.Generator().manual_seed(0))
    maps = voxel_maps(z, torch.tensor(1.7), size)
    share, *means = features(maps, maps.totals, size)[:, -3:].unbind(1)
    p1 = (1.7 * z.double()).softmax(1).amax(1)
    for n, winner in enumerate(z.argmax(1)):
        for label in range(4):
            own = winner == label
            torch.testing.assert_close(share[n][own].double(), own.double().mean().expand(int(own.sum())))
        for found, values in zip(means, (p1[n], torch.log1p(-p1[n])), strict=True):
            torch.testing.assert_close(found[n].double(), values.mean().expand(space), atol=1e-5, rtol=1e-5)


def test_without_a_plane_every_voxel_is_an_image_of_its_own():
    z = 3 * torch.randn(40, 4, 1, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(of(z), of(z.unsqueeze(3)).squeeze(3))
    lines = z.view(2, 20, 4).movedim(2, 1)
    torch.testing.assert_close(of(lines).movedim(1, 2).flatten(0, 1), of(z).squeeze(2))


def test_members_disagree_by_the_mutual_information():
    members = [3 * torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed)).double() for seed in range(3)]
    p = torch.stack([z.softmax(1) for z in members])
    mean = p.mean(0)
    expected = (p * (p / mean).log()).sum(2).mean(0)
    torch.testing.assert_close(disagreement(members)[:, 0], expected)


def test_without_a_boundary_everything_is_as_far_as_can_be():
    assert bool((boundary_distance(torch.zeros(1, 4, 5, dtype=torch.int64)) == REACH).all())


@pytest.mark.parametrize("shape", [(1, 3, 2, 2), (1, 3, 1, 1), (2, 3, 1, 4, 3), (5, 3, 1), (2, 3, 7)])
def test_small_images_and_points_have_features(shape):
    found = of(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    assert found.shape == (shape[0], len(NAMES), *shape[2:])
    assert bool(torch.isfinite(found).all())
