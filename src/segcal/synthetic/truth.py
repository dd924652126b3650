"""True calibration error: the distance of predicted probabilities to the posterior, which is known for scenes only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from segcal.errors import InputError
from segcal.types import row_slices


@dataclass(frozen=True)
class TrueCalibrationError:
    """Sums over voxels, which add up over parts. The means are NaN without voxels.

    Examples:
        >>> half = TrueCalibrationError(kl_sum=1.0, l1_sum=2.0, voxels=10)
        >>> (half + half).kl, (half + half).voxels
        (0.1, 20)
    """

    kl_sum: float
    l1_sum: float
    voxels: int

    @property
    def kl(self) -> float:
        """Mean of ``KL(p || q) = sum_k p_k log(p_k / q_k)``, in nats."""
        return self.kl_sum / self.voxels if self.voxels else math.nan

    @property
    def l1(self) -> float:
        """Mean of ``sum_k |p_k - q_k|``, from 0 to 2."""
        return self.l1_sum / self.voxels if self.voxels else math.nan

    def __add__(self, other: TrueCalibrationError) -> TrueCalibrationError:
        return TrueCalibrationError(self.kl_sum + other.kl_sum, self.l1_sum + other.l1_sum, self.voxels + other.voxels)


def true_calibration_error(log_probs: Tensor, posterior: Tensor, mask: Tensor | None = None) -> TrueCalibrationError:
    """The distance of calibrated log-probabilities from the posterior: mean KL(p || q) and mean L1 over the voxels.

    The expected NLL of q is the entropy of p plus this KL, so the KL is the NLL that calibration can still remove.

    Args:
        log_probs: ``log q (N, C, *spatial)``, normalised; ``-inf`` is allowed; the KL is infinite only where p > 0.
        posterior: ``p (N, C, *spatial)``.
        mask: ``(N, *spatial)`` bool, True where a voxel counts.

    Examples:
        >>> import torch
        >>> p = torch.tensor([[0.5, 0.5]])
        >>> round(true_calibration_error(torch.tensor([[0.25, 0.75]]).log(), p).l1, 6)
        0.5
    """
    if log_probs.ndim < 2 or log_probs.shape != posterior.shape:
        raise InputError(
            f"log_probs have shape {tuple(log_probs.shape)}, posterior {tuple(posterior.shape)}",
            expected="(N, C, *spatial) for both",
        )
    voxel_shape = (log_probs.shape[0], *log_probs.shape[2:])
    if mask is None:
        mask = torch.ones(voxel_shape, dtype=torch.bool, device=log_probs.device)
    if tuple(mask.shape) != voxel_shape or mask.dtype != torch.bool:
        raise InputError(f"mask is {mask.dtype} of shape {tuple(mask.shape)}", expected=f"bool of shape {voxel_shape}")
    if log_probs.ndim == 2:  # (N, C): the batch becomes the rows.
        log_probs, posterior, mask = log_probs.T[None], posterior.T[None], mask[None]
    total = TrueCalibrationError(0.0, 0.0, 0)
    for rows in row_slices(tuple(log_probs.shape)):
        total += _rows(log_probs[:, :, rows], posterior[:, :, rows], mask[:, rows])
    return total


def _rows(log_q: Tensor, p: Tensor, mask: Tensor) -> TrueCalibrationError:
    log_q, p = (scores.double().movedim(1, -1)[mask] for scores in (log_q, p))
    q = log_q.exp()
    _check_sums(q, "exp(log_probs)", fix="apply torch.log_softmax(logits, 1) first")
    _check_sums(p, "posterior")
    cross = torch.where(p > 0, p * log_q, 0.0)  # 0 * -inf = 0 here.
    kl = torch.special.xlogy(p, p).sum() - cross.sum()
    return TrueCalibrationError(float(kl), float((p - q).abs().sum()), len(p))


def _check_sums(probabilities: Tensor, name: str, fix: str | None = None) -> None:
    # Half precision changes a sum over classes by a few thousandths; logits and NaN are off by far more.
    sums = probabilities.sum(1)
    off = ~((sums - 1).abs() < 0.02)
    if bool(off.any()):
        raise InputError(
            f"{name} sums to {float(sums[off][0]):.4g} at {int(off.sum())} of {len(sums)} voxels",
            expected="probabilities, which sum to 1",
            fix=fix,
        )
