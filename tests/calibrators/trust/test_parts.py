"""How voxels are drawn, trained on and binned, and how a share is chosen, against plain loops."""

import math

import numpy as np
import pytest
import torch

from segcal.calibrators.trust import fit, network
from segcal.calibrators.trust.network import Sample, TrustNetwork, held_out_loss, train


def test_drawn_voxels_stand_for_all_and_the_doubtful_are_drawn_more_often():
    log_odds = torch.linspace(-1, 9, 20_000)
    chosen, weights = fit._draw(log_odds, 4000.0, np.random.default_rng(0))
    assert len(chosen) == pytest.approx(4000, rel=0.05)
    assert float(weights.sum()) == pytest.approx(20_000, rel=0.05)
    assert float(weights @ log_odds[chosen]) == pytest.approx(float(log_odds.sum()), rel=0.05)
    assert (weights >= 1).all()
    doubt = fit._CONFIDENT + torch.sigmoid(-log_odds[chosen]).double()
    free = weights > 1  # where not every voxel is taken, the chance is in proportion to the doubt
    products = (weights[free].double() * doubt[free]).numpy()
    assert products.max() == pytest.approx(products.min(), rel=1e-5)
    everything, ones = fit._draw(log_odds, 1e9, np.random.default_rng(0))
    assert torch.equal(everything, torch.arange(20_000))
    assert (ones == 1).all()


def test_bins_hold_what_numpy_finds():
    log_odds = torch.tensor([-50.0, -1.0, 0.0, 0.3, 2.0, 2.1, 50.0])
    right = torch.tensor([False, True, True, False, True, True, True])
    nll, table = fit._binned(log_odds, right)
    q = 1 / (1 + np.exp(-log_odds.double().numpy()))
    p = np.where(right, q, 1 / (1 + np.exp(log_odds.double().numpy())))
    assert nll == pytest.approx(-np.log(p).sum())
    place = np.clip(np.ceil(q * 15).astype(int) - 1, 0, 14)
    for row, values in zip(table, (np.ones(7), q, right.numpy().astype(float)), strict=True):
        np.testing.assert_allclose(row, np.bincount(place, values, 15))


@pytest.mark.parametrize("images", [1, 6])
def test_the_share_chosen_has_the_lowest_nll_of_those_near_the_lowest_ece(images):
    random = np.random.default_rng(images)
    shares, bins = len(fit.SHARES), 15
    count = random.integers(1, 50, (images, 1, bins)).repeat(shares, 1).astype(float)
    confidence = count * random.random((images, shares, bins))
    tables = np.stack((count, confidence, np.floor(confidence)), 2)
    nll, maps = random.random(shares) * 100, [torch.full((2,), float(k)) for k in range(shares)]
    best, found = fit._chosen(nll, tables, maps)
    eces = np.array(
        [
            [
                sum(abs(c - r) for c, r in zip(tables[i, w, 1], tables[i, w, 2], strict=True)) / count[i, w].sum()
                for w in range(shares)
            ]
            for i in range(images)
        ]
    )
    lowest = eces.mean(0).argmin()
    for w, choice in enumerate(found):
        assert (choice.share, choice.values) == (fit.SHARES[w], maps[w])
        assert choice.ece == pytest.approx(eces[:, w].mean())
        assert choice.nll == pytest.approx(nll[w] / count[:, 0].sum())
        gaps = eces[:, w] - eces[:, lowest]
        if images > 1 and w != lowest:
            assert choice.excess == pytest.approx(gaps.mean() / (gaps.std(ddof=1) / math.sqrt(images)))
    assert best.nll == min(choice.nll for choice in found if choice.excess <= 1)


def sample(count=600, seed=0):
    """Right where the second feature is high, but for the voxels of hardly any weight, where it is the other way."""
    random = torch.Generator().manual_seed(seed)
    features = torch.tensor([5.0, -2.0, 0.0]) + torch.tensor([1.0, 10.0, 0.1]) * torch.randn(count, 3, generator=random)
    light = torch.arange(count) % 4 == 0
    right = ((features[:, 1] > -2) != light).float()
    winner = torch.randint(0, 2, (count,), generator=random)
    return Sample(features, winner, torch.zeros(count), right, torch.where(light, 1e-3, 2.0), torch.arange(count) % 3)


def test_networks_learn_from_what_has_weight(monkeypatch):
    monkeypatch.setattr(network, "_BATCH", 100)
    monkeypatch.setattr(network, "_RATE", 2e-2)
    voxels, trust = sample(), TrustNetwork(4, 2, 3)  # the fourth feature is missing
    offsets = torch.zeros(3, len(voxels.right))
    start = held_out_loss(trust, voxels, offsets)
    assert start == pytest.approx(math.log(2))
    train(trust, voxels, offsets, seed=1)
    assert held_out_loss(trust, voxels, offsets) < 0.4 * start
    weights = voxels.weights / voxels.weights.sum()
    mean = weights @ voxels.features
    torch.testing.assert_close(trust.mean[:3], mean)
    torch.testing.assert_close(trust.scale[:3], (weights @ (voxels.features - mean) ** 2).sqrt())
    assert (float(trust.mean[3]), float(trust.scale[3])) == (0, 1)
    again = TrustNetwork(4, 2, 3)
    train(again, voxels, offsets, seed=1)
    assert torch.equal(again.last, trust.last)


def test_a_network_does_not_see_its_own_fold(monkeypatch):
    monkeypatch.setattr(network, "_EPOCHS", 2)
    voxels, other = sample(), sample()
    other.right[other.folds == 1] = 1 - other.right[other.folds == 1]
    found = []
    for one in (voxels, other):
        trust = TrustNetwork(3, 2, 3)
        train(trust, one, torch.zeros(3, len(one.right)), seed=0)
        found.append(trust.last.detach())
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[1][0])


def test_one_fold_is_nothing_to_learn_from():
    voxels, trust = sample(), TrustNetwork(3, 2, 3)
    train(trust, voxels._replace(folds=torch.zeros_like(voxels.folds)), torch.zeros(3, 600), seed=0)
    assert not trust.last.any()


def test_the_loss_held_out_is_by_the_network_of_the_fold():
    voxels, trust = sample(60), TrustNetwork(3, 2, 3).requires_grad_(False)
    trust.reset(0)
    torch.nn.init.normal_(trust.last, generator=torch.Generator().manual_seed(0))
    offsets = torch.randn(3, 60, generator=torch.Generator().manual_seed(1))
    expected = 0.0
    for n in range(60):
        odds = trust(voxels.features[n : n + 1], voxels.winner[n : n + 1]) + offsets[:, n : n + 1]
        p = torch.sigmoid(odds[voxels.folds[n], 0].double())
        expected -= float(voxels.weights[n]) * math.log(p if voxels.right[n] else 1 - p)
    assert held_out_loss(trust, voxels, offsets) == pytest.approx(expected / float(voxels.weights.sum()), rel=1e-5)


def test_a_batch_of_each_network_may_have_fewer_voxels_than_features():
    trust = TrustNetwork(5, 2, 3).requires_grad_(False)
    trust.reset(0)
    torch.nn.init.normal_(trust.last, generator=torch.Generator().manual_seed(0))
    trust.mean.copy_(torch.arange(5.0))
    x, winner = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(1)), torch.tensor([[0, 1]] * 3)
    expected = [trust(x[fold], winner[fold])[fold] for fold in range(3)]
    torch.testing.assert_close(trust(x, winner), torch.stack(expected))


def test_networks_see_standardised_features_cut_off_at_four():
    trust, random = TrustNetwork(5, 2, 3).requires_grad_(False), torch.Generator().manual_seed(0)
    trust.reset(0)
    torch.nn.init.normal_(trust.last, generator=random)
    x, winner = torch.randn(20, 5, generator=random), torch.arange(20) % 2
    mean, scale = torch.arange(5.0), torch.tensor([0.1, 1.0, 3.0, 10.0, 0.5])
    plain = trust(x, winner)
    far = trust(x.sign() * 4, winner)
    trust.mean.copy_(mean)
    trust.scale.copy_(scale)
    torch.testing.assert_close(trust(mean + scale * x, winner), plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(trust(mean + 1e6 * x.sign() * scale, winner), far)
