"""What each predicted class changes: a linear map of the log-odds and the point features, one for each winner.

The correction ``a_k + c_k s + sum_j d_kj f_j`` of the log-odds s is fitted by binary cross-entropy, which is convex, to
its minimum. A network takes far longer to learn that the predictions of one class are less sure than those of another.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators.trust.features import POINT
from segcal.calibrators.trust.network import SMALLEST_SCALE, Sample
from segcal.parallel.threads import blas_threads
from segcal.solvers import Newton, minimise
from segcal.types import FloatArray

#: Numbers of each class: the constant, the slope of the log-odds, those of the point features.
COLUMNS = 2 + POINT
# Half of this, times the squares of what belongs to standardised inputs, is added to the mean loss over all voxels, so
# that rare classes change little.
_RIDGE = 1e-5
# A bound that no sensible map comes near.
_LARGEST = 100.0


class Slopes(NamedTuple):
    """The maps of every fold and class ``(F, C, COLUMNS)``, fitted without the cases of the fold, and how it went."""

    values: Tensor
    certificate: float
    converged: bool


def linear_correction(slopes: Tensor, features: Tensor, winner: Tensor, odds: Tensor) -> Tensor:
    """The correction ``(N, *spatial)`` by ``slopes (C, COLUMNS)``.

    Of ``features (N, J, *spatial)`` the point features are read; ``winner`` and ``odds`` are ``(N, *spatial)``.
    """
    inputs = torch.cat((odds.unsqueeze(1), features[:, :POINT].to(odds)), 1).movedim(1, -1)
    own = slopes.to(odds)[winner]
    return own[..., 0] + (own[..., 1:] * inputs).sum(-1)


@blas_threads(1)  # the products are small
def fit_slopes(sample: Sample, num_classes: int, folds: int) -> Slopes:
    """Those of the lowest loss on the sample, whose ``offset (n,)`` is the log-odds."""
    weights = sample.weights.double() / sample.weights.double().sum()
    inputs = torch.cat((sample.offset[:, None], sample.features[:, :POINT]), 1).double()
    mean = weights @ inputs
    scale = (weights @ (inputs - mean).square()).sqrt().clamp(min=SMALLEST_SCALE)
    x = torch.nn.functional.pad((inputs - mean) / scale, (1, 0), value=1.0)
    parts = [own.double().cpu().numpy() for own in (x, sample.offset, sample.right, weights)]
    winner, fold_of = sample.winner.cpu().numpy(), sample.folds.cpu().numpy()
    values = np.zeros((folds, num_classes, COLUMNS))
    certificate, converged = 0.0, True
    for label in range(num_classes):
        own = winner == label
        for fold in range(folds):
            chosen = own & (fold_of != fold)
            if chosen.any():
                loss = partial(_loss, *(part[chosen] for part in parts))
                found = minimise(Newton(loss), np.zeros(COLUMNS), -_LARGEST, _LARGEST)
                values[fold, label] = found.value
                certificate, converged = max(certificate, found.certificate), converged and found.converged
    slopes = torch.from_numpy(values)
    slopes[..., 1:] /= scale.cpu()
    slopes[..., 0] -= slopes[..., 1:] @ mean.cpu()
    return Slopes(slopes, certificate, converged)


def _loss(
    x: FloatArray, offset: FloatArray, right: FloatArray, weights: FloatArray, b: FloatArray
) -> tuple[float, FloatArray, FloatArray]:
    """Penalised binary cross-entropy of log-odds ``offset + x b``, its gradient and Hessian."""
    odds = offset + x @ b
    q = torch.sigmoid(torch.from_numpy(odds)).numpy()
    value = float(weights @ (np.logaddexp(0, odds) - right * odds)) + 0.5 * _RIDGE * float(b @ b)
    hessian = (x.T * (weights * q * (1 - q))) @ x + _RIDGE * np.eye(len(b))
    return value, x.T @ (weights * (q - right)) + _RIDGE * b, hessian
