"""Expert maps by the fast kernel, against the definition in torch, in float64, and on awkward input."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from segcal.errors import InputError
from segcal.fitting.expert_sums import Rows, expert_sums
from segcal.kernels.apply_cpu import apply_experts
from segcal.kernels.expert_cpu import expert_gradient, sorting_pairs
from segcal.kernels.experts import ExpertMap
from segcal.scores import keep_argmax

FEATURES = ("logits", "log-probs", "margins", "gaps")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CLASSES = (2, 3, 6, 19, 40)
KINDS = ("random", "tied", "one ulp", "offset", "impossible", "sure", "one winner")


def example(shape, seed=0, scale=3.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def awkward(classes, kind, dtype=torch.float32):
    """Voxels (1025, C) of one kind."""
    z = example((1025, classes)).to(dtype)
    random = torch.Generator().manual_seed(1)
    first, second = torch.rand(z.shape, generator=random).topk(2, 1).indices.T
    rows = torch.arange(len(z))
    if kind == "tied":
        z = z.round() * torch.where(torch.rand(z.shape, generator=random) < 0.5, -1, 1)  # 0 and -0 are tied as well
        z[rows, second] = z.amax(1)
    elif kind == "one ulp":
        z[rows, first] = z.amax(1)
        z[rows, second] = z.amax(1) * (1 + torch.finfo(dtype).eps)
    elif kind == "offset":
        z = z + torch.tensor(1e4, dtype=dtype)
    elif kind == "impossible":
        z[torch.rand(z.shape, generator=random) < 0.3] = -torch.inf
        z[rows, second] = 1.0
    elif kind == "sure":
        z[rows, second] = 60.0
    elif kind == "one winner":  # in the first block, not in the last voxel
        z[:1024, 1] = z[:1024].amax(1) + 1
    return z


def example_map(features, classes, experts, seed=3, floor=1e-3):
    random = torch.Generator().manual_seed(seed)
    size = classes - (features == "gaps")
    weight = torch.eye(size) + 0.3 / size * torch.rand(experts, size, size, generator=random)
    bias = floor + 0.2 * torch.rand(experts, size, generator=random)
    if features in ("logits", "log-probs"):
        weight, bias = weight - 0.15 / size, bias - 0.1
    return ExpertMap(features, weight.double(), bias.double())


def in_float64(expert_map, logits, keep):
    """The definition, and for each voxel the largest number on the way to it."""
    exact = expert_map(logits.double()).log_softmax(1)
    exact = keep_argmax(exact, logits.argmax(1)) if keep else exact
    return exact, exact.abs().where(torch.isfinite(exact), torch.zeros((), dtype=torch.float64)).amax(1, keepdim=True)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("features", FEATURES)
def test_the_map_is_the_definition(features, classes, dtype, keep):
    for experts, kind in itertools.product({1, classes}, KINDS):
        expert_map = example_map(features, classes, experts)
        z = awkward(classes, kind, dtype)
        values = apply_experts(z, expert_map, keep=keep)
        exact, largest = in_float64(expert_map, z, keep)
        assert values.dtype == dtype
        assert torch.equal(torch.isneginf(values), torch.isneginf(z))
        possible = ~torch.isneginf(z)
        eps = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
        allowed = 1e-6 * (1 + largest) + 2 * eps * exact.abs()
        assert ((values.double() - exact).abs() <= allowed)[possible].all(), (experts, kind)
        if keep:
            assert torch.equal(values.argmax(1), z.argmax(1)), (experts, kind)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", CLASSES)
def test_gaps_keep_the_order_in_every_precision(classes, dtype):
    for experts, kind in itertools.product({1, classes}, KINDS):
        z = awkward(classes, kind, dtype)
        if kind == "impossible":  # a class 30 below the best may stand ahead of one yet lower: not a question of order
            continue
        values = apply_experts(z, example_map("gaps", classes, experts), keep=True).float()
        order = z.sort(dim=1, descending=True, stable=True).indices
        assert (values.gather(1, order).diff(dim=1) <= 0).all(), (experts, kind)


@pytest.mark.parametrize("features", ["margins", "gaps"])
def test_the_identity_gives_the_softmax(features):
    z = example((3, 5, 20, 30))
    size = 5 - (features == "gaps")
    for experts in (1, 5):
        identity = ExpertMap(features, torch.eye(size).expand(experts, -1, -1), torch.zeros(experts, size))
        assert torch.allclose(apply_experts(z, identity, keep=True), z.log_softmax(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("experts", [1, 3])
def test_layouts_and_threads_do_not_matter(features, experts):
    expert_map = example_map(features, 3, experts)
    z = example((2, 3, 190, 180))
    expected = apply_experts(z, expert_map, keep=True, threads=1)
    assert torch.equal(apply_experts(z, expert_map, keep=True, threads=3), expected)
    last = z.movedim(1, -1).contiguous().movedim(-1, 1)
    assert torch.equal(apply_experts(last, expert_map, keep=True), expected)
    rows = apply_experts(z.movedim(1, -1).reshape(-1, 3), expert_map, keep=True)
    assert torch.equal(rows, expected.movedim(1, -1).reshape(-1, 3))
    assert torch.equal(apply_experts(z[:1, :, :1, :1], expert_map, keep=True), expected[:1, :, :1, :1])


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("experts", [1, 4])
def test_voxels_without_softmax_are_nan_and_harm_no_other(features, experts):
    expert_map = example_map(features, 4, experts)
    z = example((1, 4, 600))
    expected = apply_experts(z, expert_map, keep=True)
    z[0, 0, 3], z[0, 2, 4], z[0, 3, 5], z[0, :, 6] = torch.nan, torch.nan, torch.inf, -torch.inf
    values = apply_experts(z, expert_map, keep=True)
    undefined = torch.zeros(600, dtype=torch.bool)
    undefined[3:7] = True
    assert torch.equal(values.isnan(), undefined.expand(1, 4, 600))
    assert torch.equal(values[..., 7:], expected[..., 7:])


def test_a_map_of_other_classes_is_refused():
    vector = ExpertMap("own-logit", torch.ones(1, 4, 1), torch.zeros(1, 4))
    for expert_map in (example_map("gaps", 4, 4), vector):
        with pytest.raises(InputError, match="logits have 3 classes; expected 4"):
            apply_experts(torch.zeros(5, 3), expert_map, keep=True)
    with pytest.raises(InputError, match="logits have 5 classes; expected 4"):
        expert_gradient(torch.zeros(2, 5), torch.zeros(2), torch.ones(2, dtype=torch.bool), expert_map)


def test_sorting_pairs_sort():
    for length in range(2, 13):  # what sorts all zeros and ones sorts everything (TAOCP 5.3.4, theorem Z)
        columns = np.array(list(itertools.product((0, 1), repeat=length))).T.copy()
        for upper, lower in sorting_pairs(length):
            columns[upper], columns[lower] = columns[[upper, lower]].max(0), columns[[upper, lower]].min(0)
        assert (np.diff(columns, axis=0) <= 0).all()
    assert len(sorting_pairs(19)) == 91


def problem(classes, shape, seed=5):
    z = example((shape[0], classes, *shape[1:]), seed)
    random = torch.Generator().manual_seed(seed)
    noise = -torch.log(-torch.log(torch.rand(z.shape, generator=random)))
    labels = (z / 1.5 + noise).argmax(1)
    return z, labels, torch.rand(labels.shape, generator=random) < 0.8


def by_autograd(z, labels, valid, expert_map):
    """Sums by expert of the NLL of the map itself, and torch's derivatives of them."""
    weight, bias = expert_map.weight.clone().requires_grad_(), expert_map.bias.clone().requires_grad_()
    rows = z.movedim(1, -1)[valid].double()
    losses = cross_entropy(ExpertMap(expert_map.features, weight, bias)(rows), labels[valid], reduction="none")
    expert = rows.argmax(1) if len(weight) > 1 else torch.zeros(len(rows), dtype=torch.int64)
    losses.sum().backward()
    nll = torch.zeros(len(weight), dtype=torch.float64).index_add(0, expert, losses.detach())
    return nll.numpy(), torch.cat((weight.grad, bias.grad[:, :, None]), 2).numpy()


def assert_sums_agree(found, expected):
    for values, exact in zip(found, expected, strict=True):
        assert values.shape == exact.shape
        assert values.dtype == np.float64
        scale = np.abs(exact).reshape(len(exact), -1).max(1).reshape(-1, *[1] * (exact.ndim - 1))
        assert (np.abs(values - exact) <= 1e-6 * scale).all()


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("classes", CLASSES)
def test_the_gradient_is_that_of_the_definition(features, classes):
    z, labels, valid = problem(classes, (2, 45, 37))
    for experts in (1, classes):
        expert_map = example_map(features, classes, experts)
        found = expert_gradient(z, labels, valid, expert_map)
        assert_sums_agree(found, by_autograd(z, labels, valid, expert_map))


@pytest.mark.parametrize("features", FEATURES)
def test_the_gradient_survives_offset_impossible_classes_and_sure_voxels(features):
    for kind in ("tied", "offset", "impossible", "sure", "one winner"):
        z = awkward(6, kind)
        labels = z.argmax(1)
        labels[::7] = (labels[::7] + 1) % 6
        for experts in (1, 6):
            expert_map = example_map(features, 6, experts)
            rows = Rows.of(z, labels, np.ones(len(z)), features, experts)
            theta = torch.cat((expert_map.weight, expert_map.bias[:, :, None]), 2).numpy()
            exact = expert_sums(rows, theta, features)
            found = expert_gradient(z, labels, torch.ones(len(z), dtype=torch.bool), expert_map)
            assert_sums_agree(found, (exact.nll, exact.gradient))


@pytest.mark.parametrize("features", FEATURES)
def test_the_gradient_of_sure_and_right_voxels_is_relatively_precise(features):
    z = example((1025, 3))
    z[:, 1] = 20 + 0.2 * z[:, 1]  # 1 - p is about 1e-7, most of what float32 has beside 1
    labels, valid = torch.ones(1025, dtype=torch.int64), torch.ones(1025, dtype=torch.bool)
    expert_map = example_map(features, 3, 1)
    assert_sums_agree(expert_gradient(z, labels, valid, expert_map), by_autograd(z, labels, valid, expert_map))


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("experts", [1, 3])
def test_gradients_add_up_and_threads_do_not_matter(features, experts):
    z, labels, valid = problem(3, (2, 250, 300))
    expert_map = example_map(features, 3, experts)
    whole = expert_gradient(z, labels, valid, expert_map, threads=1)
    for values, same in zip(whole, expert_gradient(z, labels, valid, expert_map, threads=3), strict=True):
        assert np.array_equal(values, same)
    parts = [expert_gradient(z[n : n + 1], labels[n : n + 1], valid[n : n + 1], expert_map) for n in range(2)]
    assert_sums_agree([a + b for a, b in zip(*parts, strict=True)], whole)


def test_what_is_not_valid_does_not_matter_whatever_it_holds():
    z, labels, valid = problem(4, (1, 60, 50))
    for features in FEATURES:
        expert_map = example_map(features, 4, 4)
        expected = expert_gradient(z, labels, valid, expert_map)
        other, other_labels = z.clone(), labels.clone()
        other.movedim(1, -1)[~valid] = torch.nan
        other_labels[~valid] = 255
        for values, same in zip(expected, expert_gradient(other, other_labels, valid, expert_map), strict=True):
            assert np.array_equal(values, same)
        nothing = expert_gradient(z, labels, torch.zeros_like(valid), expert_map)
        assert not nothing[0].any()
        assert not nothing[1].any()


@pytest.mark.parametrize("features", FEATURES)
def test_nan_of_a_valid_voxel_stays_with_its_expert(features):
    z, labels, _ = problem(4, (1, 60, 50))
    z[0, :, 0, 0] = torch.tensor([0.0, 9.0, torch.nan, 0.0])
    found = expert_gradient(z, labels, torch.ones_like(labels, dtype=torch.bool), example_map(features, 4, 4))
    for values in found:
        undefined = np.isnan(values).reshape(4, -1).any(1)
        assert undefined.sum() == 1
    assert np.isnan(found[0][1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", CLASSES)
def test_vector_scaling_is_the_matrix_with_its_diagonal(classes, dtype):
    random = torch.Generator().manual_seed(0)
    scale = 0.8 + 0.4 * torch.rand(classes, generator=random).double()
    bias = torch.randn(1, classes, generator=random).double()
    vector = ExpertMap("own-logit", scale.view(1, classes, 1), bias)
    matrix = ExpertMap("logits", scale.diag()[None], bias)
    for kind, keep in itertools.product(KINDS, (False, True)):
        z = awkward(classes, kind, dtype)
        assert torch.allclose(vector(z.double()), matrix(z.double()), rtol=1e-12, atol=1e-12)
        found, expected = (apply_experts(z, own, keep=keep) for own in (vector, matrix))
        assert found.dtype == dtype
        possible = ~torch.isneginf(expected)
        assert torch.equal(possible, ~torch.isneginf(found))
        size = expected.where(possible, torch.zeros((), dtype=dtype)).abs().amax(1, keepdim=True).double()
        allowed = (2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps) * (1 + size)
        assert ((found.double() - expected.double()).abs() <= allowed)[possible].all(), kind
        if keep:
            assert torch.equal(found.argmax(1), z.argmax(1))
        if kind != "impossible":
            y = torch.randint(0, classes, (len(z),), generator=random)
            valid = torch.rand(len(z), generator=random) < 0.8
            for counted in (valid, torch.ones_like(valid)):
                own_nll, own = expert_gradient(z, y, counted, vector)
                full_nll, full = expert_gradient(z, y, counted, matrix)
                assert own_nll == pytest.approx(full_nll, rel=1e-5)
                size = np.abs(z.double().numpy()).sum()
                assert np.abs(own[0, :, 0] - np.diag(full[0])).max() < 1e-6 * size
                assert np.abs(own[0, :, 1] - full[0, :, -1]).max() < 1e-5 * len(z)
