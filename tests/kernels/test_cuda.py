"""The triton kernels against the definitions: on a GPU if there is one, else in triton's interpreter."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from segcal.errors import InputError
from segcal.kernels import fitting_passes, reference
from segcal.kernels.experts import ExpertMap
from segcal.kernels.fitting_passes import FineHistogram, logit_centres
from segcal.kernels.fitting_passes import _sums as temperature_definition
from segcal.kernels.fitting_passes import _survey as survey_definition
from segcal.kernels.grid import BinGrid
from segcal.kernels.voxels import AffineMap, Voxels

pytest.importorskip("triton", minversion="3.4")
cuda = pytest.importorskip("segcal.kernels.cuda")
cuda_tally = pytest.importorskip("segcal.kernels.cuda_tally")

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, where the interpreter divides by zero
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLASS_GRID = BinGrid.classwise((15, 50), (1e-3,))
TOP_GRID = BinGrid.top_label((15, 50), CLASS_GRID)
# Of many classes: the interpreter runs blocks of 64 voxels one after the other, and takes seconds for each.
SIZE = (2, 9, 8) if DEVICE == "cuda" else (1, 9, 8)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """The interpreter takes as long for every program, however little it does."""
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_tally, "_FINISH", 4096)
        monkeypatch.setattr(cuda_tally, "_COPIES", 3)


def voxels(classes: int = 5, dtype: torch.dtype = torch.float32, size: tuple[int, ...] = (2, 9, 8), **more) -> Voxels:
    """Random logits with ties and an impossible class, and labels that are mostly right."""
    random = torch.Generator().manual_seed(classes)
    z = (torch.randn(size[0], classes, *size[1:], generator=random) * 4).to(dtype)
    z[0, 1, :3] = z[0, 0, :3]
    z[0, 1, 4] = -torch.inf
    y = torch.where(
        torch.rand(size, generator=random) < 0.7, z.argmax(1), torch.randint(classes, size, generator=random)
    )
    y[0, 4] = 0
    y[torch.rand(size, generator=random) < 0.05] = 255
    given = {"top_grid": TOP_GRID, "class_grid": CLASS_GRID, "ignore_index": 255} | more
    return Voxels(z.to(DEVICE), y.to(DEVICE), **given)


def marks(size: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_same(found, expected) -> None:
    """Counts are equal and sums agree to 1e-6; a confidence on an edge may move one voxel to the next bin."""
    for name, one, other in zip(found._fields, found, expected, strict=True):
        moved = 1 if name in ("top_count", "top_confidence") else 0
        wrong = np.abs(one - other) > 1e-6 * np.abs(other) + 1e-9
        assert np.count_nonzero(wrong) <= 2 * moved, name
        assert np.allclose(one.sum(), other.sum(), rtol=1e-6), name


# The kernels of few and of many classes, each with every type.
@pytest.mark.parametrize(
    ("classes", "dtype"),
    [*itertools.product((2, 40), (torch.float32, torch.float16, torch.bfloat16)), (19, torch.float32)],
)
def test_every_statistic_equals_the_reference(classes: int, dtype: torch.dtype) -> None:
    given = voxels(classes, dtype, (2, 9, 8) if classes == 2 else SIZE, energy_shift=3.0)
    assert_same(cuda.tally(given, 1), reference.tally(given, 1))


def test_masks_slots_and_a_temperature() -> None:
    size = (2, 9, 8)
    more = {"mask": marks(size) < 0.8, "slots": (marks(size, 1) * 3).to(torch.uint8), "num_slots": 3}
    given = voxels(6, **more, score_map=AffineMap.temperature(1.7))
    assert_same(cuda.tally(given, 1), reference.tally(given, 1))


def test_flips_are_counted_against_the_uncalibrated_argmax() -> None:
    given = voxels(4)
    other = (given.logits + 3 * marks(tuple(given.logits.shape))).argmax(1)
    given = voxels(4, uncalibrated=other)
    found, expected = cuda.tally(given, 1), reference.tally(given, 1)
    assert_same(found, expected)
    assert found.flips[0, 1:].sum() > 0


def test_a_matrix_is_applied_first() -> None:
    given = voxels(3, score_map=AffineMap(torch.eye(3) + 0.3, torch.tensor([0.5, 0.0, -0.5])))
    assert_same(cuda.tally(given, 1), reference.tally(given, 1))


def test_labels_far_below_the_best() -> None:
    logits, labels = torch.tensor([[3e38, -3e38], [0.0, -2000.0]], device=DEVICE), torch.tensor([1, 1], device=DEVICE)
    for map_, expected in ((None, [6e38, 2000.0]), (AffineMap.temperature(2.0), [torch.inf, torch.inf])):
        found = [
            cuda.tally(Voxels(logits[i : i + 1], labels[i : i + 1], TOP_GRID, score_map=map_), 1).losses[0, 0, 0]
            for i in range(2)
        ]
        assert found == pytest.approx(expected, rel=1e-6)


def test_without_classwise_histograms() -> None:
    given = voxels(7, class_grid=None)
    assert_same(cuda.tally(given, 1), reference.tally(given, 1))


def test_channels_last_and_flat_logits() -> None:
    given = voxels(5)
    flat = given.logits.movedim(1, -1).reshape(-1, 5)
    last = given.logits.contiguous(memory_format=torch.channels_last)
    expected = reference.tally(given, 1)
    assert_same(cuda.tally(Voxels(last, given.labels, TOP_GRID, CLASS_GRID, 255), 1), expected)
    assert_same(cuda.tally(Voxels(flat, given.labels.reshape(-1), TOP_GRID, CLASS_GRID, 255), 1), expected)


def test_the_same_data_give_the_same_bits() -> None:
    given = voxels(19, size=SIZE)
    for one, other in zip(cuda.tally(given, 1), cuda.tally(given, 1), strict=True):
        assert np.array_equal(one, other)


def test_a_cell_has_room_for_all_voxels_of_a_launch() -> None:
    """At the upper edge of their bin: positions stay below the count, and the count below the sign."""
    ends = cuda_tally.ends
    assert 2**ends.COUNT_BIT.value > cuda_tally._LAUNCH * 2**ends.POSITION_BITS
    assert cuda_tally._LAUNCH * 2**ends.COUNT_BIT.value + 2**ends.COUNT_BIT.value <= 2**63


@pytest.mark.parametrize("classes", [3, 26])
def test_voxels_that_do_not_count_may_hold_anything(classes: int) -> None:
    given = voxels(classes, size=(1, 9, 8))
    given.labels[0, 0] = 255
    given.logits[0, :, 0], given.logits[0, 0, 0] = 1000.0, torch.nan
    given.logits[0, :, 0, 3:] = torch.inf
    found, shift = cuda.shifted_tally(given)
    assert_same(found, reference.tally(dataclasses.replace(given, energy_shift=shift), 1))
    assert shift == given.logits[0, :, 1][:, given.labels[0, 1] != 255][:, 0].amax()


def test_many_launches_equal_one(monkeypatch) -> None:
    given = voxels(4, size=(2, 9, 8))
    whole = cuda.tally(given, 1)
    monkeypatch.setattr(cuda_tally, "_LAUNCH", 64)
    assert_same(cuda.tally(given, 1), whole)


def test_without_voxels() -> None:
    given = voxels(4)
    none = dataclasses.replace(given, logits=given.logits[:0], labels=given.labels[:0])
    found, shift = cuda.shifted_tally(none)
    assert_same(found, reference.tally(none, 1))
    assert shift == 0
    found, shift = cuda.shifted_tally(dataclasses.replace(given, labels=torch.full_like(given.labels, 255)))
    assert_same(found, reference.tally(none, 1))
    assert shift == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_first_unfit_voxel_is_named(value: float, monkeypatch) -> None:
    given = voxels(3)
    given.logits[1, :, 5, 6] = value
    given.logits[1, :, 7, 7] = value
    given.labels[1, 5, 6] = given.labels[1, 7, 7] = 0
    with pytest.raises(InputError, match=r"\(1, 5, 6\)"):
        cuda.tally(given, 1)
    monkeypatch.setattr(fitting_passes, "device_kernels", lambda _: cuda)
    with pytest.raises(InputError, match=r"\(1, 5, 6\)"):
        fitting_passes.temperature_sums(given, 1.0)
    parts = [fitting_passes.begin_sums(own, 1.0) for own in (voxels(3), given)]
    assert math.isnan(fitting_passes.end_sums(parts).nll)


def test_a_label_out_of_range_is_named() -> None:
    given = voxels(3)
    given.labels[1, 2, 3] = 7
    with pytest.raises(InputError, match=r"label 7 at voxel \(1, 2, 3\)"):
        cuda.tally(given, 1)


@pytest.mark.parametrize("beta", [0.01, 0.7, 5.0])
def test_temperature_sums(beta: float, monkeypatch) -> None:
    given = voxels(5, mask=marks((2, 9, 8)) < 0.8)
    expected = temperature_definition(given, beta)
    monkeypatch.setattr(fitting_passes, "device_kernels", lambda _: cuda)
    assert fitting_passes.temperature_sums(given, beta) == pytest.approx(expected, rel=1e-6)


def test_temperature_sums_of_more_launches_than_are_added_up_together(monkeypatch) -> None:
    monkeypatch.setattr(fitting_passes, "device_kernels", lambda _: cuda)
    monkeypatch.setattr(fitting_passes, "_TOGETHER", 2)
    given = [voxels(3)] * 5
    total = fitting_passes.end_sums(fitting_passes.begin_sums(own, 0.7) for own in given)
    assert total == pytest.approx([5 * own for own in temperature_definition(given[0], 0.7)], rel=1e-6)


def test_survey() -> None:
    given, edges = voxels(5), np.array((0.6, 0.9, 0.99, 0.999), np.float32)
    strata, nll, impossible = cuda.survey(given, torch.from_numpy(edges))
    expected = survey_definition(given, edges)
    assert np.array_equal(strata.cpu().numpy(), expected.strata)
    assert nll == pytest.approx(expected.nll, rel=1e-6)
    assert impossible == expected.impossible


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_temperature_scaling_keeps_the_argmax(dtype: torch.dtype) -> None:
    z = voxels(19, dtype, SIZE).logits
    found, exact = cuda.apply_temperature(z, 0.7), z.double()
    expected = ((exact - exact.amax(1, keepdim=True)) * 0.7).log_softmax(1)
    assert torch.equal(found.argmax(1), z.argmax(1))
    assert found.dtype == dtype
    assert_close(found, expected)


def assert_close(found: torch.Tensor, expected: torch.Tensor, terms: float = 0.0) -> None:
    """Within the rounding of the type, of values and of the ``terms`` they are sums of; the same are impossible."""
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(found), finite)
    scale = 1 + max(terms, float(expected[finite].abs().max()))
    assert ((found.double() - expected)[finite] / scale).abs().max() < max(1e-6, torch.finfo(found.dtype).eps)


def expert_maps() -> list[tuple[str, bool, int]]:
    """Features, whether the winner chooses the expert, and classes: 26 take another kernel, slow if imitated."""
    kinds = [(features, False) for features in ("logits", "own-logit", "log-probs", "margins", "gaps")]
    kinds += [(features, True) for features, _ in kinds if features != "own-logit"]
    return [(*kind, classes) for kind in kinds for classes in (2, 5)] + [("logits", False, 26), ("gaps", True, 26)]


@pytest.mark.parametrize(("features", "routed", "classes"), expert_maps())
def test_expert_maps(features: str, routed: bool, classes: int) -> None:
    random = torch.Generator().manual_seed(1)
    outputs, experts = classes - (features == "gaps"), classes if routed else 1
    inputs = 1 if features == "own-logit" else outputs
    weight = torch.rand(experts, outputs, inputs, generator=random) + 0.1
    bias = torch.rand(experts, outputs, generator=random) + 1e-3
    mapping = ExpertMap(features, weight.to(DEVICE), bias.to(DEVICE))
    size, some = ((2, 9, 8), None) if classes < 26 else (SIZE, 60)
    z, keep = voxels(classes, size=size).logits, features in ("margins", "gaps")
    found = cuda.apply_experts(z, mapping, keep=keep)
    margins = z.amax(1, keepdim=True) - z
    terms = float(weight.sum(-1).max() * margins[margins.isfinite()].max())
    assert_close(found, mapping(z.double()).log_softmax(1), terms)
    assert not keep or torch.equal(found.argmax(1), z.argmax(1))
    flat, same = (own.movedim(1, -1).reshape(-1, classes)[:some] for own in (z, found.double()))
    assert_close(cuda.apply_experts(flat, mapping, keep=keep), same, terms)


@pytest.mark.parametrize("changed", ["weight", "bias"])
def test_a_map_whose_parameters_change_in_place_maps_otherwise(changed: str) -> None:
    weight, bias = torch.eye(3, device=DEVICE)[None] + 0.1, torch.full((1, 3), 0.1, device=DEVICE)
    mapping, z = ExpertMap("margins", weight, bias), voxels(3).logits
    before = cuda.apply_experts(z, mapping, keep=True)
    assert torch.equal(cuda.apply_experts(z, mapping, keep=True), before)
    getattr(mapping, changed).mul_(3)
    after = cuda.apply_experts(z, mapping, keep=True)
    assert torch.equal(after, cuda.apply_experts(z, ExpertMap("margins", weight.clone(), bias.clone()), keep=True))
    assert not torch.equal(after, before)


def test_bins_and_knots() -> None:
    z = voxels(4).logits
    log_p = z.double().log_softmax(1)
    centres = torch.from_numpy(logit_centres())
    found = cuda.apply_knots(z, centres, centres)
    assert_close(found, log_p)
    assert torch.equal(found.argmax(1), z.argmax(1))
    edges, values = torch.tensor([[-2.0, -0.5]] * 4), torch.tensor([[0.1, 0.3, 0.9]] * 4).log()
    place = torch.searchsorted(edges[0].double().to(DEVICE), log_p.contiguous())
    scores = values[0].to(DEVICE)[place].double().masked_fill(torch.isneginf(log_p), -torch.inf)
    assert_close(cuda.apply_bins(z, edges, values), scores.log_softmax(1))


def test_voxels_without_softmax_become_nan() -> None:
    z = voxels(3).logits
    z[0, 0, 0, 0], z[0, :, 1, 1], z[0, 1, 2, 2] = torch.nan, -torch.inf, torch.inf
    lost = torch.isnan(cuda.apply_temperature(z, 1.3)).all(1)
    assert lost.sum() == 3
    assert lost[0, 0, 0]
    assert lost[0, 1, 1]
    assert lost[0, 2, 2]


def test_fine_histograms_of_a_device() -> None:
    given = voxels(4)
    for classwise in (True, False):
        one, other = (FineHistogram(4, classwise=classwise) for _ in range(2))
        one._add(given)
        other._add_on_device(given)
        assert np.array_equal(one.counts, other.counts)
        assert np.array_equal(one.positive, other.positive)
        assert np.allclose(one.probability, other.probability, rtol=1e-8)


def test_histograms_of_a_single_bin() -> None:
    z = voxels(3).logits
    found = cuda.apply_bins(z, torch.zeros(3, 0), torch.tensor([[-1.0], [-2.0], [-3.0]]))
    expected = torch.tensor([-1.0, -2.0, -3.0], device=DEVICE).log_softmax(0).view(1, 3, 1, 1).expand_as(z)
    finite = torch.isfinite(z).all(1, keepdim=True).expand_as(z)
    torch.testing.assert_close(found[finite], expected[finite])
