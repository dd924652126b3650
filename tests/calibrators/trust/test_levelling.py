"""Levelling: the winner stays the largest class at the least change of the losers."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from segcal.calibrators.trust.levelling import level


def draw(count, classes, seed=0):
    random = np.random.default_rng(seed)
    r = random.dirichlet(np.full(classes - 1, 0.4), count)
    winner = random.integers(classes, size=count)
    losers = np.full((count, classes), -np.inf)
    others = np.arange(classes) != winner[:, None]
    losers[others] = np.log(np.maximum(r, 1e-300)).ravel()
    odds = random.normal(-0.5, 2, count)
    return torch.tensor(odds), torch.tensor(losers), torch.tensor(winner)


@pytest.mark.parametrize("classes", [2, 3, 5, 19])
def test_it_gives_a_distribution_whose_largest_class_is_the_winner(classes):
    odds, losers, winner = draw(4000, classes)
    log_probs, levelled = level(odds, losers, winner)
    p = log_probs.exp()
    torch.testing.assert_close(p.sum(1), torch.ones(4000).double(), atol=1e-12, rtol=0)
    top = p.gather(1, winner[:, None])
    assert bool((p.scatter(1, winner[:, None], 0.0) < top).all())
    q = torch.sigmoid(odds)
    kept = q > 1 / classes
    assert torch.allclose(top[kept, 0], q[kept], atol=1e-12)  # q moves only below an equal share
    assert torch.allclose(top[~kept, 0], torch.full_like(q[~kept], 1 / classes), atol=1e-5)
    before = (losers.exp() * (1 - q[:, None])).scatter(1, winner[:, None], 0.0)
    assert torch.allclose(p[~levelled].scatter(1, winner[~levelled, None], 0.0), before[~levelled], atol=1e-12)
    if classes > 2:
        assert 0.05 < float(levelled.double().mean()) < 0.95


def test_odds_below_the_cap_are_kept_and_it_is_idempotent():
    odds, losers, winner = draw(4000, 6, seed=1)
    log_probs, levelled = level(odds, losers, winner)
    top = log_probs.gather(1, winner[:, None])
    below = (log_probs < top - 1e-4) & (torch.arange(6) != winner[:, None])
    ratio = torch.where(below, log_probs - losers, torch.nan)  # one number for all losers of a voxel
    spread = ratio.nan_to_num(-torch.inf).amax(1) - ratio.nan_to_num(torch.inf).amin(1)
    assert bool((spread[below.sum(1) > 1] < 1e-9).all())
    rest = torch.log1p(-top.exp())
    again, _ = level((top - rest)[:, 0], log_probs - rest, winner)
    assert torch.allclose(again, log_probs, atol=1e-9)
    assert bool(levelled.any())


@pytest.mark.parametrize("seed", range(4))
def test_no_distribution_under_the_cap_is_closer_in_kl_divergence_either_way_round(seed):
    random = np.random.default_rng(seed)
    r, q = random.dirichlet(np.full(4, 0.5)), 0.3
    losers = torch.tensor(np.log(np.concatenate(([1e-300], r))))[None]
    log_probs, _ = level(torch.logit(torch.tensor([q]).double()), losers, torch.tensor([0]))
    mine = log_probs[0, 1:].exp().numpy() / (1 - q)
    for divergence in (lambda x: np.sum(x * np.log(x / r)), lambda x: np.sum(r * np.log(r / x))):
        cap = q / (1 - q)
        best = minimize(
            divergence, np.full(4, 0.25), bounds=[(1e-9, cap)] * 4, method="SLSQP",
            constraints={"type": "eq", "fun": lambda x: x.sum() - 1}, options={"maxiter": 500, "ftol": 1e-14},
        )  # fmt: skip
        assert divergence(mine) <= best.fun + 1e-5
        np.testing.assert_allclose(mine, best.x, atol=2e-3)


def test_impossible_classes_stay_impossible_and_do_not_count_in_the_equal_share():
    losers = torch.tensor([[0.0, 0.6, 0.4, 0.0]]).double().log()
    log_probs, levelled = level(torch.tensor([-3.0]).double(), losers, torch.tensor([0]))
    assert bool(levelled)
    assert log_probs[0, 3] == -torch.inf
    torch.testing.assert_close(log_probs[0, :3].exp(), torch.full((3,), 1 / 3).double(), atol=1e-5, rtol=0)
