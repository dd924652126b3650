"""Statistics on a device without triton against the definition; on the CPU where there is no device."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from segcal.errors import InputError, SegcalError
from segcal.kernels import device_torch, dispatch, fitting_passes, reference
from segcal.kernels.fitting_passes import _sums as temperature_definition
from segcal.kernels.grid import BinGrid
from segcal.kernels.voxels import AffineMap, Voxels

pytestmark = pytest.mark.cuda
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLASS_GRID = BinGrid.classwise((15, 50), (1e-3,))
TOP_GRID = BinGrid.top_label((15, 50), CLASS_GRID)
SIZE = (3, 40, 50)


def voxels(classes: int = 5, dtype: torch.dtype = torch.float32, size: tuple[int, ...] = SIZE, **more) -> Voxels:
    """Random logits with ties, an impossible class and voxels to ignore, which hold anything."""
    random = torch.Generator().manual_seed(classes)
    z = (torch.randn(size[0], classes, *size[1:], generator=random) * 4).to(dtype)
    z[0, 1, :3] = z[0, 0, :3]
    z[0, 1, 4] = -torch.inf
    draw = torch.randint(classes, size, generator=random)
    y = torch.where(torch.rand(size, generator=random) < 0.7, z.argmax(1), draw)
    y[0, 4] = 0
    y[torch.rand(size, generator=random) < 0.05] = 255
    y[0, 0, :2] = 255
    z[0, :, 0, 0], z[0, 0, 0, 0], z[0, :, 0, 1] = 1000.0, torch.nan, torch.inf
    given = {"top_grid": TOP_GRID, "class_grid": CLASS_GRID, "ignore_index": 255} | more
    return Voxels(z.to(DEVICE), y.to(DEVICE), **given)


def marks(seed: int = 0) -> torch.Tensor:
    return torch.rand(SIZE, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_same(given: Voxels) -> None:
    """Counts are equal, but for confidences at an edge, and sums agree to 1e-6."""
    found, shift = device_torch.shifted_tally(given)
    expected = reference.tally(dataclasses.replace(given, energy_shift=shift), 1)
    for name, one, other in zip(found._fields, found, expected, strict=True):
        assert one.shape == other.shape, name
        assert one.dtype == other.dtype, name
        moved = np.abs(one - other) > 1e-6 * np.abs(other) + 1e-9
        assert np.count_nonzero(moved) <= (4 if "count" in name or "confidence" in name else 0), name
        assert np.allclose(one.sum(), other.sum(), rtol=1e-6), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("classes", [2, 19, 70])
def test_every_statistic_equals_the_reference(classes: int, dtype: torch.dtype) -> None:
    assert_same(voxels(classes, dtype))


@pytest.mark.parametrize("step", [1000, 2**24])
def test_masks_slots_flips_and_pieces(step: int, monkeypatch) -> None:
    monkeypatch.setattr(device_torch, "_MATRIX_SIZE", step)
    monkeypatch.setattr(device_torch, "PIECE_VOXELS", step)
    more = {"mask": marks() < 0.8, "slots": (marks(1) * 3).to(torch.uint8), "num_slots": 3}
    for score_map in (None, AffineMap.temperature(1.7)):
        assert_same(voxels(6, **more, score_map=score_map))
    assert_same(voxels(6, **more, uncalibrated=(marks(2) * 6).long()))
    # The matrix product is float32 here and float64 in the definition, and its rounding depends on the size of pieces:
    # scores of 40 are off by 2e-6, more than the tolerance. Of numbers with few digits it is exact.
    given = voxels(6, **more, score_map=AffineMap(torch.eye(6) + 0.25, torch.arange(6) / 8))
    assert_same(dataclasses.replace(given, logits=(given.logits * 256).round() / 256))


def test_without_classes_and_without_voxels() -> None:
    assert_same(voxels(7, class_grid=None))
    given = voxels(3)
    assert_same(dataclasses.replace(given, logits=given.logits[:0], labels=given.labels[:0]))
    assert_same(dataclasses.replace(given, labels=torch.full_like(given.labels, 255)))


def test_labels_far_below_the_best() -> None:
    logits, labels = torch.tensor([[3e38, -3e38], [0.0, -2000.0]], device=DEVICE), torch.tensor([1, 1], device=DEVICE)
    for map_, expected in ((None, 6e38 + 2000), (AffineMap.temperature(2.0), torch.inf)):
        found = device_torch.tally(Voxels(logits, labels, TOP_GRID, score_map=map_), 1)
        assert found.losses[0, 0, 0] == pytest.approx(expected, rel=1e-6)


def test_all_voxels_may_be_in_one_cell() -> None:
    """As many as a histogram ever counts at a time, all of them at the upper edge of a bin, and one more."""
    logits = torch.tensor([[60.0], [0.0]], device=DEVICE).expand(1, 2, device_torch._MOST + 1)
    found = device_torch.tally(Voxels(logits, torch.zeros_like(logits[:, 0], dtype=torch.uint8), TOP_GRID), 1)
    assert found.top_count[0, 1, -1] == found.top_count.sum() == device_torch._MOST + 1
    assert found.top_confidence.sum() == pytest.approx(device_torch._MOST + 1)


def test_the_same_data_give_the_same_bits() -> None:
    given = voxels(19)
    for one, other in zip(device_torch.tally(given, 1), device_torch.tally(given, 1), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("classes", "beta"), [(2, 0.01), (19, 0.7), (70, 5.0)])
def test_temperature_sums(classes: int, beta: float, dtype: torch.dtype, monkeypatch) -> None:
    """Whatever the size of pieces; several parts are added up together."""
    monkeypatch.setattr(fitting_passes, "device_kernels", lambda _: device_torch)
    given = voxels(classes, dtype, mask=marks() < 0.8)
    expected = temperature_definition(given, beta)
    assert fitting_passes.temperature_sums(given, beta) == pytest.approx(expected, rel=1e-6)
    monkeypatch.setattr(device_torch, "_MATRIX_SIZE", 1)
    monkeypatch.setattr(device_torch, "PIECE_VOXELS", 300)
    total = fitting_passes.end_sums(fitting_passes.begin_sums(own, beta) for own in [given] * 3)
    assert total == pytest.approx([3 * own for own in expected], rel=1e-6)


def test_temperature_sums_of_unfit_voxels(monkeypatch) -> None:
    monkeypatch.setattr(fitting_passes, "device_kernels", lambda _: device_torch)
    given = voxels(3)
    given.labels[1, 5, 6] = given.labels[2, 7, 7] = 0
    given.logits[2, 0, 7, 7] = -torch.inf
    with pytest.raises(InputError, match="some voxels are labelled with a class whose logit is -inf"):
        fitting_passes.temperature_sums(given, 1.0)
    given.logits[1, :, 5, 6] = torch.nan
    with pytest.raises(InputError, match=r"\(1, 5, 6\)"):
        fitting_passes.temperature_sums(given, 1.0)
    given.labels[1, 2, 3] = 7
    with pytest.raises(InputError, match=r"label 7 at voxel \(1, 2, 3\)"):
        fitting_passes.temperature_sums(given, 1.0)
    assert np.isnan(fitting_passes.end_sums([fitting_passes.begin_sums(given, 1.0)]).nll)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_first_unfit_voxel_is_named(value: float) -> None:
    given = voxels(3)
    given.logits[1, :, 5, 6] = given.logits[2, :, 7, 7] = value
    given.labels[1, 5, 6] = given.labels[2, 7, 7] = 0
    with pytest.raises(InputError, match=r"\(1, 5, 6\)"):
        device_torch.tally(given, 1)
    given.labels[1, 2, 3] = 7
    with pytest.raises(InputError, match=r"label 7 at voxel \(1, 2, 3\)"):
        device_torch.tally(given, 1)


@pytest.mark.parametrize(("version", "compiles"), [("3.3.1", False), ("3.4.0+git1", True), ("4.0.0", True)])
def test_a_triton_that_cannot_compile_the_loops_is_not_used(monkeypatch, version: str, compiles: bool) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "_DEVICES", {"numba": "none", "triton": DEVICE})
    monkeypatch.setattr("triton.__version__", version)
    given = voxels(4)
    assert (dispatch._kernels(given, "auto") is device_torch) != compiles
    assert (dispatch.fast_distances(torch.ones(3, 3, device=DEVICE)) is None) == (DEVICE == "cpu" or not compiles)
    if not compiles:
        with pytest.raises(SegcalError, match=r"needs triton 3\.4 or newer.*torch>=2\.8"):
            dispatch._kernels(given, "triton")


def test_it_is_chosen_where_triton_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "_DEVICES", {"numba": "none", "triton": DEVICE})
    monkeypatch.setattr(dispatch, "_compiled", lambda _: None)
    given = voxels(4)
    assert dispatch._kernels(given, "auto") is device_torch
    assert dispatch._kernels(dataclasses.replace(given, logits=given.logits.double()), "auto") is reference
    assert dispatch.device_kernels(given.logits) is device_torch
    found, shift = dispatch.tally(given)
    assert np.array_equal(found.confusion, reference.tally(given, 1).confusion)
    assert shift == device_torch.shifted_tally(given)[1]
