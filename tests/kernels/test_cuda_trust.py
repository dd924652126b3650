"""The triton kernels of trust against its torch definitions: on a GPU if there is one, else in triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from segcal.calibrators.trust.features import _LOWEST, _UNIT, _WIDEST, REACH, WINDOWS, features, voxel_maps
from segcal.calibrators.trust.levelling import BELOW, level
from segcal.calibrators.trust.network import _WIDEST as WIDEST
from segcal.calibrators.trust.network import TrustNetwork
from segcal.calibrators.trust.rising import apply_rising, bin_centres
from segcal.calibrators.trust.slopes import COLUMNS, linear_correction
from segcal.synthetic import scenes

pytest.importorskip("triton", minversion="3.4")
cuda_trust = pytest.importorskip("segcal.kernels.cuda_trust")

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, where the interpreter subtracts infinities
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BETA = 0.7


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other, and takes as long for a large block as for a small one."""
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_trust, "_ROW", 4096)
        monkeypatch.setattr(cuda_trust, "_BLOCK", 1024)


def logits(classes: int = 5, size: tuple[int, ...] = (45, 52)) -> torch.Tensor:
    """Two images with an impossible class, ties, and voxels without a softmax."""
    z = torch.cat([case.logits for case in scenes(2, size=size, num_classes=classes)])
    z[:, 1, :9] = -torch.inf
    z[:, -1, 20:30] = z[:, 0, 20:30]
    z[0, 0, 33, 3], z[0, 1, 34, 4], z[1, :, 35, 5] = torch.nan, torch.inf, -torch.inf
    return z


def describe(z: torch.Tensor) -> list[torch.Tensor]:
    return [own.cpu() for own in cuda_trust.describe(z.to(DEVICE), BETA, _LOWEST, _WIDEST, _UNIT)]


@pytest.mark.parametrize("classes", [2, 3, 19])
def test_point_features_and_sums(classes: int) -> None:
    z = logits(classes)
    winner, point, rounded, *sums = describe(z)
    expected = voxel_maps(z, torch.tensor(BETA), 0)
    assert torch.equal(winner, expected.winner)
    torch.testing.assert_close(point, expected.point, atol=1e-5, rtol=1e-5)
    assert (rounded - expected.rounded).abs().max() <= 16  # units of 2^-20
    assert torch.equal(sums[0], expected.totals.predicted)
    assert torch.equal(sums[2], expected.totals.changes)
    assert torch.equal(sums[1][:, :2], rounded.flatten(2).long().sum(2))
    torch.testing.assert_close(
        sums[1].double() / winner[0].numel() / _UNIT, expected.totals.means(), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("shape", [(44, 45), (2, 35, 12), *([(1, 40)] if DEVICE == "cuda" else [])])
def test_features_of_neighbourhoods(shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    coarse = torch.randn(2, 4, *(-(-side // 8) for side in shape), generator=random)
    mode = "bilinear" if len(shape) == 2 else "trilinear"
    z = 4 * torch.nn.functional.interpolate(coarse, size=shape, mode=mode)
    z[..., -9:] = z[..., :1]  # far from every boundary
    maps = voxel_maps(z, torch.tensor(BETA), 0)
    expected = features(maps, maps.totals, 0)
    share, means = maps.totals.predicted / maps.winner[0].numel(), maps.totals.means()[:, [1, 0]]
    given = [own.to(DEVICE) for own in (maps.point, maps.winner, maps.rounded, share, means)]
    found = cuda_trust.features(*given[:3], tuple(given[3:]), WINDOWS, _UNIT, REACH)
    torch.testing.assert_close(found.cpu(), expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("inputs", [18, 19])
def test_networks(inputs: int) -> None:
    random = torch.Generator().manual_seed(0)
    network = TrustNetwork(19, 5, 4).requires_grad_(False)
    network.reset(1)
    for weight in (network.mean, network.classes, network.second_bias, network.last):
        weight.copy_(torch.randn(weight.shape, generator=random))
    x, winner = torch.randn(2, inputs, 9, 11, generator=random), torch.randint(5, (2, 9, 11), generator=random)
    expected = network(x.movedim(1, -1).reshape(-1, inputs), winner.flatten()).mean(0).view(winner.shape)
    weights = (network.first, network.classes, network.second, network.second_bias, network.last)
    found = cuda_trust.correct(x.to(DEVICE), winner.to(DEVICE), (network.mean, network.scale, *weights), WIDEST)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_odds(share: float) -> None:
    random = torch.Generator().manual_seed(0)
    x, winner = -3 * torch.rand(2, 18, 15, 26, generator=random), torch.randint(4, (2, 15, 26), generator=random)
    slopes = 0.3 * torch.randn(4, COLUMNS, generator=random).double()
    correction = torch.randn(2, 15, 26, generator=random)
    maps, judged = (0.5 * bin_centres() - 0.2, 0.9 * bin_centres().clamp(-8, 8)), torch.tensor([1.0, 0.25]).double()
    exact = x[:, 0].double()
    plain = torch.log1p(-exact.clamp(max=-1e-6).exp()) - exact
    mapped = apply_rising(maps[0], plain)
    if share:
        mapped = apply_rising(maps[1], mapped + share * (correction + linear_correction(slopes, x, winner, mapped)))
    expected = torch.lerp(plain, mapped, judged.view(2, 1, 1))
    given = correction.to(DEVICE) if share else None
    found = cuda_trust.odds(x.to(DEVICE), winner.to(DEVICE), given, (*maps, slopes), share, judged.to(DEVICE))
    torch.testing.assert_close(found.cpu().double(), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("classes", [2, 3, 19])
def test_levelling(classes: int) -> None:
    random = torch.Generator().manual_seed(classes)
    winner = torch.randint(classes, (2, 20, 13), generator=random)
    odds = 2 * torch.randn(winner.shape, generator=random) - 0.5
    scores = 3 * torch.randn(2, classes, 20, 13, generator=random)
    scores[:, :, :5] = -torch.inf  # no loser is possible
    scores[:, 0, 5:9] = -torch.inf
    slow, moved = level(odds.double(), scores.double(), winner)
    fast = scores.to(DEVICE)
    also_moved = cuda_trust.level(fast, odds.to(DEVICE), winner.to(DEVICE), BELOW).cpu()
    torch.testing.assert_close(fast.cpu().exp().double(), slow.exp(), atol=2e-6, rtol=0)
    assert torch.equal(torch.isinf(fast.cpu()), torch.isinf(slow))
    assert torch.equal(moved, also_moved)
    assert torch.equal(fast.argmax(1).cpu(), winner)
    assert classes == 2 or moved.any()
