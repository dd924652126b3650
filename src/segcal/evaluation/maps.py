"""Voxel maps of confidence, correctness and distance to the boundary, for plots and files.

Memory is a few values per voxel: scores are processed in pieces, whatever the number of classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal.checks import checked_labels
from segcal.kernels import Voxels
from segcal.kernels.atoms import check_tensors
from segcal.parallel.threads import torch_threads
from segcal.regions import CaseRegions
from segcal.types import row_slices

#: The names of the maps.
MAPS = ("confidence", "prediction", "error", "confidence-balance", "band")
# Scores converted to float64 at once: 8 MB, and about four such tensors live at a time.
_PIECE_VALUES = 2**20


@torch_threads(1)
def voxel_maps(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = 255,
    mask: Tensor | None = None,
    spacing: Sequence[float] | None = None,
) -> dict[str, Tensor]:
    """The maps of one case or batch, each ``(N, *spatial)``.

    ========================  ==========================================  ======================
    name                      value                                       if ignored or masked
    ========================  ==========================================  ======================
    ``confidence``            max_k p_k                                   as elsewhere
    ``prediction``            argmax_k p_k, int64                         as elsewhere
    ``error``                 1 where the prediction is wrong, else 0     NaN
    ``confidence-balance``    -log p_y - entropy(p): > 0 overconfident    NaN
    ``band``                  distance band 0..3 to the boundary, int8    -1
    ========================  ==========================================  ======================

    Sums are in float64; maps are float32, or float64 for float64 logits. The balance is that of Ding et al. (LTS,
    definitions 4-6); bands are those of ``segcal.regions.band_index``.

    Args:
        logits: Logits or log-probabilities ``(N, C, *spatial)`` or ``(N, C)``.
        labels: Integers ``(N, *spatial)``.
        ignore_index: Voxels with this label are not valid.
        mask: ``(N, *spatial)`` bool, True where a voxel is valid.
        spacing: Voxel size per spatial axis; None measures distances in voxels.

    Examples:
        >>> logits = torch.tensor([[[2.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
        >>> maps = voxel_maps(logits, torch.tensor([[1, 0, 255]]))
        >>> maps["prediction"], maps["error"]
        (tensor([[0, 0, 1]]), tensor([[1., 0., nan]]))
        >>> maps["band"]
        tensor([[ 0,  0, -1]], dtype=torch.int8)
    """
    regions = CaseRegions(labels, spacing=spacing, ignore_index=ignore_index, mask=mask)
    return {**score_maps(logits, labels, regions.valid), "band": regions.bands}


@torch_threads(1)
def score_maps(logits: Tensor, labels: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """The maps of ``voxel_maps`` that do not depend on neighbours, of a whole case or any part of it.

    Examples:
        >>> maps = score_maps(torch.zeros(1, 2, 3), torch.tensor([[0, 1, 1]]), torch.tensor([[True, True, False]]))
        >>> maps["error"], maps["confidence-balance"]
        (tensor([[0., 1., nan]]), tensor([[0., 0., nan]]))
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    maps = {
        name: torch.full(labels.shape, torch.nan, dtype=dtype, device=logits.device)
        for name in ("confidence", "error", "confidence-balance")
    }
    maps["prediction"] = torch.zeros(labels.shape, dtype=torch.int64, device=logits.device)
    for part in checked_parts(logits, labels, valid):
        # Taken before normalisation: subtracting the logsumexp can create ties.
        winner = part.scores.max(1).indices
        log_p = part.scores.log_softmax(1)
        nll = -log_p.gather(1, part.labels.masked_fill(~part.valid, 0).unsqueeze(1)).squeeze(1)
        entropy = torch.special.entr(log_p.exp()).sum(1)
        values = {
            "confidence": log_p.amax(1).exp(),
            "prediction": winner,
            "error": (winner != part.labels).double().masked_fill(~part.valid, torch.nan),
            "confidence-balance": (nll - entropy).masked_fill(~part.valid, torch.nan),
        }
        for name, value in values.items():
            part.of(maps[name]).copy_(value)
    return maps


class ScorePart(NamedTuple):
    """Some rows of a case: ``scores (N, C, rows, ...)`` in float64, ``labels`` and ``valid (N, rows, ...)``."""

    rows: slice
    scores: Tensor
    labels: Tensor
    valid: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        """The same rows of another ``(N, *spatial)`` tensor, as a view."""
        return (tensor if tensor.ndim > 1 else tensor[None])[:, self.rows]

    @property
    def columns(self) -> Tensor:
        """The scores of the valid voxels, ``(C, v)``."""
        return self.scores.movedim(1, 0)[:, self.valid]


def checked_parts(logits: Tensor, labels: Tensor, valid: Tensor) -> Iterator[ScorePart]:
    """The scores piece by piece. Raises if a valid voxel has a label out of range, NaN, or only ``-inf`` scores.

    ``(N, C)`` scores are treated as one line of N voxels, ``(1, C, N)``.

    Examples:
        >>> parts = checked_parts(torch.zeros(1, 3, 2, 2), torch.zeros(1, 2, 2).long(), torch.ones(1, 2, 2).bool())
        >>> [part.columns.shape for part in parts]
        [torch.Size([3, 4])]
    """
    labels = checked_labels(logits, labels)
    voxels = Voxels(logits, labels, mask=valid)
    check_tensors(logits.shape[1], voxels)
    whole = logits.detach()
    if logits.ndim == 2:
        whole, labels, valid = whole.t()[None], labels[None], valid[None]
    # MPS has no float64, so its tensors are processed on the CPU.
    device = torch.device("cpu") if logits.device.type == "mps" else logits.device
    for rows in row_slices(tuple(whole.shape), _PIECE_VALUES):
        scores = whole[:, :, rows].to(device, torch.float64)
        part = ScorePart(rows, scores, labels[:, rows].to(device, torch.int64), valid[:, rows].to(device))
        bad = (part.labels < 0) | (part.labels >= logits.shape[1]) | ~torch.isfinite(part.scores.amax(1))
        bad &= part.valid
        if bool(bad.any()):
            item, row, *rest = bad.nonzero()[0].tolist()
            voxel = int(np.ravel_multi_index((item, row + rows.start, *rest), tuple(labels.shape)))
            raise voxels.bad_voxel(voxel)  # the same error as that of the kernels
        yield part
