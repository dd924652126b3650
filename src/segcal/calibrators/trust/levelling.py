"""Levelling: lower the losers just enough that the winner stays the largest class.

Where some loser would reach the winner's probability q, the losers' conditional distribution r becomes
``r' = min(cap, c r)`` with ``cap = q / (1 - q)``, less a hair, and the c that keeps the sum at one. The losers' odds
below the cap stay as they were, and q itself moves only where it is below the share ``1 / m`` of m possible classes.

``r'`` is the closest distribution below the cap in every f-divergence ``sum_j r_j f(r'_j / r_j)``, so in KL divergence
both ways round: stationarity asks that ``f'(r'_j / r_j)`` be the same for all losers below the cap, and f' rises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.kernels import recording

#: The cap is below q / (1 - q) by this share, so that rounding leaves the winner strictly the largest.
BELOW = 1e-6


def level(log_odds: Tensor, losers: Tensor, winner: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all classes, and where they were levelled.

    Args:
        log_odds: ``log(q / (1 - q))`` of the winner, ``(N, *spatial)``.
        losers: Their scores, ``log r (N, C, *spatial)`` up to a constant per voxel; what the winner has is not read.
        winner: ``(N, *spatial)``, class indices.

    Examples:
        >>> r = torch.tensor([[-torch.inf, 0.9, 0.1]]).log()
        >>> log_probs, levelled = level(torch.zeros(1), r, torch.tensor([0]))
        >>> log_probs.exp(), levelled
        (tensor([[0.5000, 0.4500, 0.0500]]), tensor([False]))
        >>> level(torch.tensor([-0.4055]), r, torch.tensor([0]))[0].exp()  # q = 0.4, and 0.54 would be above it
        tensor([[0.4000, 0.4000, 0.2000]])
    """
    index = winner.unsqueeze(1)
    log_r = losers.scatter(1, index, -torch.inf)
    log_odds, moved = _above_equal_share(log_odds, (log_r > -torch.inf).sum(1))
    log_r = log_r.log_softmax(1).masked_fill(log_r == -torch.inf, -torch.inf)
    log_cap = log_odds.unsqueeze(1) + torch.log1p(torch.tensor(-BELOW, dtype=log_r.dtype, device=log_r.device))
    levelled = moved | (log_r.amax(1) > log_cap.squeeze(1))
    rows, caps = log_r.movedim(1, -1).reshape(-1, log_r.shape[1]), log_cap.flatten()[:, None]
    if recording():  # the number of levelled voxels is not known: all are lowered, and most are left as they were
        rows = torch.where(levelled.flatten()[:, None], _lower(rows, caps), rows)
    else:
        chosen = levelled.flatten().nonzero().squeeze(1)
        rows = rows.index_copy(0, chosen, _lower(rows[chosen], caps[chosen]))
    log_r = rows.view(*winner.shape, log_r.shape[1]).movedim(-1, 1)
    log_q, log_rest = (torch.nn.functional.logsigmoid(odds).unsqueeze(1) for odds in (log_odds, -log_odds))
    return (log_r + log_rest).scatter(1, index, log_q), levelled


def _above_equal_share(log_odds: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Odds of at least one to each of the ``others``, and where they were raised; infinite ones without others."""
    least = -others.to(log_odds).log() + 2 * BELOW
    moved = log_odds < least
    return torch.where(moved, least, log_odds), moved & (others > 0)


def _lower(log_r: Tensor, log_cap: Tensor) -> Tensor:
    """``log min(cap, c r)`` of ``log_r (n, C)``, with the c for which it sums to one; needs ``m cap >= 1``."""
    falling, order = log_r.sort(1, descending=True)
    ranks = torch.arange(log_r.shape[1], dtype=log_r.dtype, device=log_r.device)
    tail = falling.flip(1).logcumsumexp(1).flip(1)  # of this rank and all below it
    # With the first m at the cap, the rest share what they leave: c = (1 - m cap) / (r_m + r_{m+1} + ...).
    left = 1 - ranks * log_cap.exp()
    log_c = torch.where(left > 0, left.clamp_min(torch.finfo(log_r.dtype).tiny).log(), -torch.inf) - tail
    log_c = torch.where(torch.isneginf(tail), -torch.inf, log_c)
    fits = falling + log_c <= log_cap  # the first rank that stays below the cap, and so all after it
    first = fits.to(torch.int8).argmax(1, keepdim=True)
    capped = ranks < first
    lowered = torch.where(capped, log_cap, falling + log_c.gather(1, first))
    return torch.empty_like(lowered).scatter_(1, order, lowered)
