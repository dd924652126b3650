"""The compiled loops of trust are their torch definitions."""

import pytest
import torch

from segcal.calibrators.trust.features import features, voxel_maps
from segcal.calibrators.trust.levelling import BELOW, level
from segcal.calibrators.trust.network import TrustNetwork
from segcal.calibrators.trust.rising import apply_rising, bin_centres
from segcal.calibrators.trust.slopes import COLUMNS, linear_correction
from segcal.kernels import trust_cpu
from segcal.synthetic import scenes

BETA = torch.tensor(0.7)


def logits(classes=6, size=(90, 110), seed=0):
    z = scenes(1, size=size, num_classes=classes, seed=seed)[0].logits
    z[:, 1, :9] = -torch.inf  # an impossible class, and ties
    z[:, -1, 20:30] = z[:, 0, 20:30]
    return z


@pytest.mark.parametrize("classes", [2, 3, 6, 19])
def test_features(classes):
    z = logits(classes)
    fast, slow = (voxel_maps(z, BETA, size) for size in (2**30, 0))
    assert torch.equal(fast.winner, slow.winner)
    assert torch.equal(fast.winner, z.argmax(1))
    torch.testing.assert_close(fast.point, slow.point, atol=1e-5, rtol=1e-5)
    assert (fast.rounded - slow.rounded).abs().max() <= 16  # units of 2^-20
    assert torch.equal(fast.totals.predicted, slow.totals.predicted)
    assert torch.equal(fast.totals.changes, slow.totals.changes)
    torch.testing.assert_close(fast.totals.means(), slow.totals.means(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(features(slow, slow.totals, 2**30), features(slow, slow.totals, 0), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("place", "value"), [((0, 40, 3), torch.nan), ((3, 41, 4), torch.inf), ((slice(None), 42, 5), -torch.inf)]
)
def test_voxels_without_a_softmax_count_as_undecided(place, value):
    z = logits()
    z[0][place] = value
    clean = z.masked_fill(~z.amax(1, keepdim=True).isfinite(), 0.0)
    for size in (2**30, 0):
        found, expected = voxel_maps(z, BETA, size), voxel_maps(clean, BETA, size)
        assert torch.equal(found.point, expected.point)
        assert torch.equal(found.totals.sums, expected.totals.sums)


@pytest.mark.parametrize("size", [(130, 110), (3, 70, 40)])
def test_threads_share_planes_and_change_no_bit(size, monkeypatch):
    maps = voxel_maps(logits(size=size), BETA, 2**30)
    expected = features(maps, maps.totals, 2**30)
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    assert torch.equal(features(maps, maps.totals, 2**30), expected)
    again = voxel_maps(logits(size=size), BETA, 2**30)
    assert torch.equal(again.point, maps.point)
    assert all(map(torch.equal, again.totals, maps.totals))


@pytest.mark.parametrize("classes", [2, 3, 6, 19])
def test_levelling(classes):
    generator = torch.Generator().manual_seed(classes)
    z = logits(classes)
    winner = z.argmax(1)
    odds = 2 * torch.randn(winner.shape, generator=generator) - 0.5
    scores = 3 * torch.randn(z.shape, generator=generator)
    scores[:, :, :5] = -torch.inf  # no loser is possible
    scores[:, 0, 5:9] = -torch.inf
    slow, moved = level(odds.double(), scores.double(), winner)
    fast = scores.clone()
    also_moved = trust_cpu.level(fast, odds, winner, BELOW)
    torch.testing.assert_close(fast.exp().double(), slow.exp(), atol=2e-6, rtol=0)
    assert (moved == also_moved).double().mean() > 0.9999
    assert torch.equal(fast.argmax(1), winner)
    if classes > 2:
        assert moved.any()


@pytest.mark.parametrize("inputs", [18, 19])
def test_networks(inputs):
    generator = torch.Generator().manual_seed(0)
    network = TrustNetwork(19, 5, 4).requires_grad_(False)
    network.reset(1)
    for weight in (network.classes, network.second_bias, network.last):
        weight.copy_(torch.randn(weight.shape, generator=generator))
    x = 2 * torch.randn(1, inputs, 130, 150, generator=generator)
    winner = torch.randint(5, (1, 130, 150), generator=generator)
    rows = x.movedim(1, -1).reshape(-1, inputs)
    expected = network(rows, winner.flatten())
    torch.testing.assert_close(network.correction(x, winner).flatten(), expected.mean(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(network.correction(x, winner, 2).flatten(), expected[2], atol=1e-4, rtol=1e-4)


def test_odds():
    generator = torch.Generator().manual_seed(0)
    x = -3 * torch.rand(2, 18, 50, 60, generator=generator).double()
    winner = torch.randint(4, (2, 50, 60), generator=generator)
    slopes = 0.3 * torch.randn(4, COLUMNS, generator=generator).double()
    correction = torch.randn(2, 50, 60, generator=generator).double()
    first, second = 0.5 * bin_centres() - 0.2, 0.9 * bin_centres().clamp(-8, 8)
    judged = torch.tensor([1.0, 0.25]).double()
    plain = torch.log1p(-x[:, 0].clamp(max=-1e-6).exp()) - x[:, 0]
    start = apply_rising(first, plain)
    linear = torch.stack([
        slopes[k, 0] + slopes[k, 1] * s + slopes[k, 2:] @ point
        for k, s, point in zip(winner.flatten(), start.flatten(), x[:, :5].movedim(1, -1).reshape(-1, 5), strict=True)
    ]).view(winner.shape)  # fmt: skip
    torch.testing.assert_close(linear_correction(slopes, x, winner, start), linear)
    mapped = apply_rising(second, start + 0.5 * (correction + linear))
    expected = torch.lerp(plain, mapped, judged.view(2, 1, 1))
    found = trust_cpu.odds(x.float(), winner, correction.float(), (first, second, slopes), 0.5, judged)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
