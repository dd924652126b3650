"""Compiled distances and their sums by slot against scipy and plain loops; the triton twins, in their interpreter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import distance_transform_edt

from segcal.kernels import distance_cpu
from segcal.kernels.atoms import add_distances
from segcal.kernels.grid import BinGrid
from segcal.kernels.tally import Tally
from segcal.kernels.voxels import Voxels
from segcal.regions import boundary as regions
from segcal.types import FloatArray

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [((3, 40), (0.1,)), ((2, 30, 41), (1.0, 1.0)), ((1, 23, 50), (0.7, 2.5)), ((2, 9, 12, 7), (2.5, 0.1, 0.3))]


def sparse(shape: tuple[int, ...], share: float = 0.02, seed: int = 0) -> torch.Tensor:
    """Few boundary voxels, and none in the last image of several."""
    boundary = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    boundary[0].view(-1)[7] = True
    if len(boundary) > 1:
        boundary[-1] = False
    return boundary


def by_scipy(boundary: torch.Tensor, spacing: tuple[float, ...]) -> FloatArray:
    return np.stack([
        distance_transform_edt(~own, sampling=spacing) if own.any() else np.full(own.shape, np.inf)
        for own in boundary.cpu().numpy()
    ])  # fmt: skip


@pytest.mark.parametrize(("shape", "spacing"), SHAPES)
def test_distances_are_those_of_scipy(shape, spacing):
    boundary = sparse(shape)
    found = distance_cpu.distances(boundary, spacing)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), by_scipy(boundary, spacing), rtol=1e-7)


def test_any_number_of_threads_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(distance_cpu, "_PART", 100)
    boundary = sparse((2, 31, 17, 11))
    one, three = (distance_cpu.distances(boundary, (0.3, 0.7, 1.1), threads) for threads in (1, 3))
    assert torch.equal(one, three)
    keep, slots = boundary | (one < 3), (one.clamp(max=4)).to(torch.uint8)
    sums = [distance_cpu.sums_by_slot(one, keep, slots, 5, threads) for threads in (1, 3)]
    assert np.array_equal(*sums)


def test_large_maps_are_compiled_to_the_same_numbers(monkeypatch):
    boundary, spacing = sparse((2, 160, 110), 1e-3), (0.1, 0.3)
    called = []
    compiled = distance_cpu.distances
    monkeypatch.setattr(distance_cpu, "distances", lambda *given: called.append(given) or compiled(*given))
    large = regions.distance_to(boundary, spacing)
    assert called
    monkeypatch.setattr(regions, "fast_distances", lambda voxels: None)
    assert torch.equal(large, regions.distance_to(boundary, spacing))


def test_strided_boundaries_and_thirty_voxels_of_a_tenth():
    boundary = sparse((1, 20, 30)).transpose(1, 2)
    expected = distance_cpu.distances(boundary.contiguous(), (1.0, 2.0))
    assert torch.equal(distance_cpu.distances(boundary, (1.0, 2.0)), expected)
    line = torch.zeros(1, 1, 40, dtype=torch.bool)
    line[..., 0] = True
    assert distance_cpu.distances(line, (1.0, 0.1))[0, 0, 30] == 3.0


def expected_sums(distance: torch.Tensor, keep: torch.Tensor, slots: torch.Tensor | None, count: int) -> FloatArray:
    """A loop over all voxels."""
    sums = np.zeros((count, 3))
    for index in np.ndindex(*distance.shape):
        if keep[index]:
            slot = 0 if slots is None else int(slots[index])
            far = float(distance[index])
            sums[slot] += (far, 1, 1) if math.isfinite(far) else (0, 0, 1)
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("slotted", [True, False])
def test_sums_by_slot(dtype, slotted):
    random = torch.Generator().manual_seed(1)
    distance = (torch.rand(2, 15, 20, generator=random) * 9).to(dtype)
    distance[0, 0, :4] = torch.tensor([torch.inf, torch.nan, -torch.inf, 0.0])
    keep = torch.rand(distance.shape, generator=random) < 0.8
    keep[0, 0, :4] = True
    slots = (torch.rand(distance.shape, generator=random) * 4).to(torch.uint8) if slotted else None
    found = distance_cpu.sums_by_slot(distance, keep, slots, 5)
    np.testing.assert_allclose(found, expected_sums(distance, keep, slots, 5), rtol=1e-13)


@pytest.mark.parametrize("ignored", [None, 255])
@pytest.mark.parametrize("masked", [True, False])
def test_what_does_not_count_adds_no_distance(ignored, masked):
    """Large maps, which are compiled, and small ones, by the definition."""
    random = torch.Generator().manual_seed(2)
    for size in ((1, 6, 7), (1, 130, 130)):
        labels = torch.randint(3, size, generator=random)
        labels[torch.rand(size, generator=random) < 0.1] = 255
        mask = torch.rand(size, generator=random) < 0.7
        distance = torch.rand(size, generator=random)
        given = {"ignore_index": ignored, "mask": mask if masked else None}
        voxels = Voxels(torch.zeros(size[0], 3, *size[1:]), labels, **given)
        tally = Tally.zeros(1, 3, BinGrid.top_label(()), None)
        add_distances(tally, distance, voxels)
        keep = (labels != 255 if ignored else torch.ones_like(mask)) & (mask if masked else True)
        kept = distance.double()[keep]
        np.testing.assert_allclose(tally.distance, [[float(kept.sum()), len(kept), len(kept)]], rtol=1e-12)


@pytest.mark.cuda
@pytest.mark.parametrize(("shape", "spacing"), SHAPES)
def test_the_triton_kernels_are_their_twins(shape, spacing, monkeypatch):
    pytest.importorskip("triton", minversion="3.4")
    cuda = pytest.importorskip("segcal.kernels.cuda_distance")
    if DEVICE == "cpu":  # The interpreter takes as long for every program, however little it does.
        monkeypatch.setattr(cuda, "_BLOCK", 1024)
    boundary = sparse(shape)
    expected = distance_cpu.distances(boundary, spacing)
    found = cuda.distances(boundary.to(DEVICE), spacing)
    assert found.dtype == torch.float32
    # Products may be rounded in another order there.
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-7, atol=0.0)
    random = torch.Generator().manual_seed(3)
    keep = torch.rand(shape, generator=random) < 0.8
    for slots in (None, (torch.rand(shape, generator=random) * 4).to(torch.uint8)):
        there = None if slots is None else slots.to(DEVICE)
        sums = cuda.sums_by_slot(found, keep.to(DEVICE), there, 5)
        np.testing.assert_allclose(sums, distance_cpu.sums_by_slot(expected, keep, slots, 5), rtol=1e-6)
        assert np.array_equal(sums, cuda.sums_by_slot(found, keep.to(DEVICE), there, 5))
