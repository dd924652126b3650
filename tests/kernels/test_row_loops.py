"""Compiled loops over rows do what their definitions do."""

import numpy as np
import pytest
import torch

from segcal.calibrators.ensemble_temperature import _label_log_parts, _log_parts_of_rows, _nll
from segcal.fitting.expert_sums import Rows
from segcal.kernels import row_loops
from segcal.kernels.pieces_cpu import in_ranges, in_turn

FEATURES = ("logits", "own-logit", "log-probs", "margins", "gaps")


@pytest.mark.parametrize("experts", [1, 7])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("features", FEATURES)
def test_rows_are_those_of_the_definition(features, dtype, hard, experts):
    """With ties, impossible classes, and offsets beyond those that count."""
    random = torch.Generator().manual_seed(0)
    z = (4 * torch.randn(20_000, 7, generator=random)).round(decimals=1)
    labels = z.argmax(1)
    if hard:
        z[torch.rand(z.shape, generator=random) < 0.1] = -torch.inf
        z[::3] -= 3e4
        z[:, 0].nan_to_num_(neginf=0.0)
        z[::5, 2] = z.amax(1)[::5] - 1e4
        labels = z.argmax(1)
    weights = torch.rand(len(z), generator=random).double().numpy()
    given = z.to(dtype), labels, weights, features, experts
    expected, found = Rows._of(*given), Rows._of_fast(row_loops, *given)
    assert (found.impossible is not None) == hard
    for name in Rows._fields:
        own, other = getattr(found, name), getattr(expected, name)
        if name == "x":
            np.testing.assert_allclose(own, other, rtol=1e-14, atol=1e-14)
        elif other is not None:
            np.testing.assert_array_equal(own, other, err_msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_are_those_of_torch(dtype):
    random = torch.Generator().manual_seed(0)
    z, labels = 20 * torch.randn(20_000, 7, generator=random).to(dtype), torch.arange(20_000) % 7
    z[::2, 0] = -torch.inf
    out = np.empty(len(z))
    in_ranges(lambda start, stop: row_loops.losses(z.numpy(), labels.numpy(), start, stop, out), len(z), threads=3)
    expected = torch.nn.functional.cross_entropy(z.double(), labels, reduction="none").numpy()
    np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-13)


def test_rows_are_taken_from_images():
    z = torch.randn(3, 5, 400, generator=torch.Generator().manual_seed(0))
    random = np.random.default_rng(0)
    item, place = random.integers(3, size=20_000), random.integers(400, size=20_000)
    out = np.empty((len(item), 5), np.float32)
    source = z.movedim(1, -1).numpy()
    in_ranges(lambda start, stop: row_loops.take(source, item, place, start, stop, out), len(item), threads=3)
    np.testing.assert_array_equal(out, source[item, place])


@pytest.mark.parametrize("beta", [0.3, 1.0, 5.0])
def test_sums_of_a_temperature_are_those_of_torch(beta):
    """With impossible classes, whose gap is infinite."""
    random = torch.Generator().manual_seed(0)
    z, labels = 3 * torch.randn(20_000, 5, generator=random).double(), torch.arange(20_000) % 4
    z[::2, 4] = -torch.inf
    gaps, weights = z - z.amax(1, keepdim=True), torch.rand(len(z), generator=random).double()
    at = torch.tensor(beta, dtype=torch.float64, requires_grad=True)
    possible = torch.isfinite(gaps)
    scores = torch.where(possible, at * torch.where(possible, gaps, 0.0), -torch.inf)
    value = weights @ torch.nn.functional.cross_entropy(scores, labels, reduction="none")
    (slope,) = torch.autograd.grad(value, at, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, at)
    given = gaps.numpy(), gaps.gather(1, labels[:, None])[:, 0].numpy(), weights.numpy(), beta
    parts = in_ranges(lambda start, stop: row_loops.add_temperature(*given, start, stop), len(z), threads=3)
    np.testing.assert_allclose(np.sum(parts, 0), [own.item() for own in (value, slope, curvature)], rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_parts_of_a_mixture_are_those_of_the_definition(dtype):
    """With impossible classes, which the uniform part leaves out."""
    z, labels = 5 * torch.randn(60_000, 5, generator=torch.Generator().manual_seed(0)), torch.arange(60_000) % 4
    z[::2, 4] = -torch.inf
    z, beta = z.to(dtype), torch.tensor(0.7, dtype=torch.float64)
    expected = _label_log_parts(z.double(), labels, beta)
    np.testing.assert_allclose(_log_parts_of_rows(z, labels, beta), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("w", [(0.9, 0.05, 0.05), (0.3, 0.0, 0.7), (0.0, 0.0, 1e-3)])
def test_sums_of_a_mixture_are_those_of_its_parts(w):
    """Of many rows compiled loops make the sums, of few numpy."""
    random = np.random.default_rng(0)
    log_parts, weights, w = -5 * random.random((200_000, 3)), random.random(200_000), np.array(w)
    log_parts[::7, :2] = -800.0  # whose exponential is zero, or nearly so
    whole, few = _nll(w, log_parts, weights), np.array_split(np.arange(len(weights)), 20)
    for own, parts in zip(whole, zip(*(_nll(w, log_parts[k], weights[k]) for k in few), strict=True), strict=True):
        np.testing.assert_allclose(own, sum(parts), rtol=1e-11)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_return_results_in_the_order_of_the_items(threads):
    assert in_turn(lambda number: number**2, range(50), threads) == [number**2 for number in range(50)]
    assert in_turn(str, [], threads) == []
    with pytest.raises(ZeroDivisionError):
        in_turn(lambda number: 1 // (number - 7), range(20), threads)
