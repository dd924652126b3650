"""How far an image is from those of the fit, and so how far it is judged by more than ``ts``.

An image is described by ``ImageTotals.summary``: how confident the network is in it, and how fragmented its prediction
is. Its distance is Mahalanobis', with the covariance of the images of the fit, shrunk to its diagonal if they are few.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: With fewer images than this their covariance says nothing, and no image counts as strange.
FEWEST_IMAGES = 8
# At least this share of further images of the same kind are judged in full; from this many times as far on as the reach
# they are not.
_USUAL, _STRANGE = 0.9, 1.5
# Standard deviations below this are rounding.
_SMALLEST = 1e-6


def fit_guard(summaries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From ``summaries (n, J)``: centre ``(J,)``, a matrix ``(J, J)`` that turns distances into lengths, reach.

    The reach is the conformal quantile of the distances of the images, each by all others: the ``0.9 (n + 1)``-th,
    rounded up, so that few images make it no shorter than it should be.

    Examples:
        >>> centre, whiten, reach = fit_guard(torch.randn(100, 5, dtype=torch.float64))
        >>> known(centre[None], centre, whiten, reach)
        tensor([1.], dtype=torch.float64)
    """
    count, centre = len(summaries), summaries.mean(0)
    away = summaries - centre
    scatter = away.T @ away
    whiten = _whiten(scatter / (count - 1), count)
    # Without image i the scatter loses n / (n - 1) d d', and its distance from the mean of the others is larger than d.
    outer = away.unsqueeze(2) * away.unsqueeze(1) * (count / (count - 1))
    others = _whiten((scatter - outer) / (count - 2), count - 1)
    distances = torch.einsum("nij,nj->ni", others, away * (count / (count - 1))).norm(dim=1)
    rank = min(count, math.ceil(_USUAL * (count + 1)))
    return centre, whiten, distances.kthvalue(rank).values.clamp(min=1.0)


def _whiten(covariance: Tensor, count: int) -> Tensor:
    """W with ``W C W' = 1`` for covariances ``(..., J, J)`` of ``count`` images, after shrinking."""
    size = covariance.shape[-1]
    variances = covariance.diagonal(dim1=-2, dim2=-1).clamp(min=_SMALLEST**2)
    shrunk = torch.lerp(covariance, variances.diag_embed(), torch.tensor(size / (size + count)).to(covariance))
    root = torch.linalg.cholesky(shrunk + 1e-3 * variances.diag_embed())
    inverse: Tensor = torch.linalg.inv(root)
    return inverse


def known(summary: Tensor, centre: Tensor, whiten: Tensor, reach: Tensor) -> Tensor:
    """1 for images ``(N, J)`` within the reach, falling to 0 for strange ones ``(N,)``."""
    away = (summary - centre.to(summary)) @ whiten.to(summary).T
    times: Tensor = away.norm(dim=1) / reach.to(summary)
    return ((_STRANGE - times) / (_STRANGE - 1)).clamp(0, 1)
