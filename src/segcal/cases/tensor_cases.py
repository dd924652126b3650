"""Tensors as cases, for users without a dataset on disk."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from segcal.cases import CaseRef, CaseSet
from segcal.errors import InputError
from segcal.types import CHUNK_VALUES, Case, CaseSource

# The number of cases that the images of a tensor are divided into, if there are that many.
_TENSOR_CASES = 10


def tensors_as_cases(logits: Tensor, labels: Tensor | None, ignore_index: int, mask: Tensor | None) -> CaseSet:
    """Check logits ``(N, C, *spatial)`` or ``(N, C)`` and labels, and divide them into cases.

    Examples:
        >>> len(tensors_as_cases(torch.zeros(20, 3, 8, 8), torch.zeros(20, 8, 8).long(), 255, None))
        10
    """
    assert labels is not None
    if logits.ndim < 2 or logits.shape[1] < 2 or not logits.is_floating_point():
        raise InputError(
            f"logits have shape {tuple(logits.shape)} and dtype {logits.dtype}",
            expected="(N, C, *spatial), floating point, at least two classes",
        )
    like = (logits.shape[0], *logits.shape[2:])
    for name, tensor in (("labels", labels), ("mask", mask)):
        if tensor is not None and tuple(tensor.shape) != like:
            raise InputError(f"{name} have shape {tuple(tensor.shape)}", expected=f"{like} for these logits")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(f"labels have dtype {labels.dtype}", expected="class indices, integers", fix="labels.long()")
    if mask is not None and mask.dtype != torch.bool:
        raise InputError(f"the mask has dtype {mask.dtype}", expected="bool, True where voxels count", fix="mask > 0")
    if logits.ndim == 2:  # (N, C) is a row of N voxels
        logits, labels = logits.T[None], labels[None]
        mask = None if mask is None else mask[None]
    refs = []
    # Several images make a case: few enough to hold some cases out, enough to keep the overhead per case small.
    size = max(1, min(len(logits) // _TENSOR_CASES, CHUNK_VALUES // max(1, logits[:1].numel())))
    for n in range(0, len(logits), size):
        some = slice(n, n + size)
        source = _TensorSource(
            f"tensors[{n}]", logits[some].detach(), labels[some], None if mask is None else mask[some], ignore_index
        )
        refs.append(CaseRef(source.id, partial(Case, source)))
    return CaseSet(refs, num_classes=logits.shape[1], ignore_index=ignore_index)


class _TensorSource(CaseSource):
    """Tensors as a case."""

    sliceable, spacing = True, None

    def __init__(self, id: str, logits: Tensor, labels: Tensor, mask: Tensor | None, ignore_index: int) -> None:
        self.id = id
        self.batch, self.num_classes, *spatial = logits.shape
        self.spatial, self.ignore_index = tuple(spatial), ignore_index
        self._logits, self._labels, self._mask = logits, labels, mask

    def logits(self, rows: slice) -> Tensor:
        return self._logits[:, :, rows]

    def labels(self, rows: slice) -> Tensor:
        return self._labels[:, rows]

    def mask(self, rows: slice) -> Tensor | None:
        return None if self._mask is None else self._mask[:, rows]
