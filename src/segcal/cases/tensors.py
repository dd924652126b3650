"""Tensors and numpy arrays as cases: one batch of logits and labels, checked."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from segcal.cases.caseset import CaseRef, CaseSet
from segcal.cases.disk import check_labels
from segcal.checks import checked_labels, checked_mask, holding
from segcal.errors import InputError, check_name
from segcal.scores import canonical_logits, sum_to_one
from segcal.types import CHUNK_VALUES, Case, CaseSource, Kind

# The number of cases that the images of a tensor are divided into, if there are that many.
_TENSOR_CASES = 10
# Types that torch holds but has no minimum or comparison for.
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True)
class Batch:
    """Scores ``(N, C, *spatial)``, labels and mask ``(N, *spatial)`` of N images, and their names if they have any.

    Labels of multi-label data are ``(N, C, *spatial)``: 0 outside and 1 inside of each channel.
    """

    scores: Tensor
    labels: Tensor
    mask: Tensor | None
    kind: Kind
    ids: tuple[str, ...] | None = None
    multilabel: bool = False

    @classmethod
    def of(cls, given: Any, kind: Kind, *, multilabel: bool = False) -> Batch:
        """Check a pair ``(logits, labels)`` or a dict with these names, of tensors or arrays."""
        check_name("kind", kind, get_args(Kind))
        if isinstance(given, Mapping):
            names = [name for name in ("logits", "probs") if name in given]
            if len(names) != 1 or "labels" not in given:
                have = ", ".join(map(str, given)) or "nothing"
                raise InputError(f"the batch holds {have}", expected="logits or probs, labels, and perhaps mask and id")
            if names[0] == "logits" and kind == "probs":
                raise InputError("the batch holds logits", expected="probs, as kind='probs' says")
            kind = "logits" if names[0] == "logits" else "probs"
            scores, labels, mask, ids = (given.get(name) for name in (kind, "labels", "mask", "id"))
        elif is_pair(given):
            (scores, labels), mask, ids = given, None, None
        else:
            raise InputError(
                f"the batch is {_in_words(given)}",
                expected="(logits, labels), or a dict of logits or probs, labels, and perhaps mask and id",
            )
        return cls.checked(scores, labels, mask, kind, ids, multilabel=multilabel)

    @classmethod
    def checked(
        cls, scores: Any, labels: Any, mask: Any, kind: Kind, ids: Any = None, *, multilabel: bool = False
    ) -> Batch:
        """Check shapes and types. Labels and masks may have a channel axis of length 1."""
        scores, labels = _tensor("logits", scores), _tensor("labels", labels)
        if 0 in scores.shape:
            raise InputError(f"logits have shape {tuple(scores.shape)}", expected="at least one voxel")
        labels = _channel_labels(scores, labels) if multilabel else checked_labels(scores, labels)
        if mask is not None:
            mask, like = _tensor("mask", mask), labels[:, 0] if multilabel else labels
            mask = checked_mask(mask.squeeze(1) if mask.ndim == like.ndim + 1 else mask, like, "mask")
        if scores.ndim == 2:  # (N, C) is a row of N voxels
            scores, labels, mask = scores.T[None], labels[None], None if mask is None else mask[None]
        if kind == "logits" and (_in_unit_interval(scores) if multilabel else sum_to_one(scores)):
            sums, map = ("", "sigmoid") if multilabel else (" and sum to 1 over the classes", "softmax")
            raise InputError(
                f"the values are in [0, 1]{sums}: these look like probabilities",
                expected="logits, as declared",
                fix=f"say kind='probs', or give the values before the {map}",
            )
        names = None if ids is None else _names(ids, len(scores))
        return cls(scores.detach(), labels, mask, kind, names, multilabel)

    def __len__(self) -> int:
        return len(self.scores)

    def check_values(self, ignore_index: int) -> None:
        """Raise if a label that counts is of no class."""
        classes = 2 if self.multilabel else self.scores.shape[1]
        lowest, highest = torch.stack(torch.aminmax(self.labels)).tolist()
        if lowest < 0 or highest >= classes:
            mask = self._mask_of_labels()
            labels = self.labels.long()  # A small type may not hold the ignored label.
            counting = labels if mask is None else labels.where(mask, ignore_index)
            check_labels(counting.cpu().numpy(), classes, ignore_index)

    def _mask_of_labels(self) -> Tensor | None:
        """The mask, for every channel of multi-label data."""
        return self.mask.unsqueeze(1).expand_as(self.labels) if self.multilabel and self.mask is not None else self.mask

    def image(self, index: int) -> Batch:
        """One of the images."""
        parts = (None if part is None else part[index : index + 1] for part in (self.scores, self.labels, self.mask))
        scores, labels, mask = (None if part is None else _usual(part) for part in parts)
        assert scores is not None
        assert labels is not None
        return replace(self, scores=scores, labels=labels, mask=mask)

    def _harmless(self, ignore_index: int) -> Tensor:
        """The scores, without NaN and infinities where voxels do not count."""
        labels, mask = self.labels.long(), self._mask_of_labels()
        ignored = labels == ignore_index if mask is None else (labels == ignore_index) | ~mask
        unfit = ~self.scores.isfinite() & (ignored if self.multilabel else ignored.unsqueeze(1))
        if not bool(unfit.any()):
            return self.scores
        unfit = unfit if self.multilabel else unfit.any(1, keepdim=True)
        return self.scores.masked_fill(unfit, 0.0 if self.kind == "logits" else 1 / self.scores.shape[1])

    def case(self, id: str, ignore_index: int) -> Case:
        """The images as a case, with logits in float32 as files give them."""
        labels, mask = self.labels.long(), self._mask_of_labels()
        logits = canonical_logits(self._harmless(ignore_index), self.kind, multilabel=self.multilabel).float()
        if self.multilabel:
            labels, mask = labels.flatten(0, 1), None if mask is None else mask.flatten(0, 1)
        return Case(TensorSource(id, logits, labels, mask, ignore_index))


def is_pair(given: Any) -> bool:
    """Whether this is logits and labels, tensors or arrays."""
    return (
        isinstance(given, tuple | list)
        and len(given) == 2
        and all(isinstance(one, Tensor | np.ndarray) for one in given)
    )


def tensors_as_cases(logits: Any, labels: Any, ignore_index: int, mask: Any) -> CaseSet:
    """Check logits ``(N, C, *spatial)`` or ``(N, C)`` and labels, and divide them into cases for a fit.

    Examples:
        >>> len(tensors_as_cases(torch.zeros(20, 3, 8, 8), torch.zeros(20, 8, 8).long(), 255, None))
        10
    """
    return batch_as_cases(Batch.checked(logits, labels, mask, "logits"), ignore_index)


def batch_as_cases(batch: Batch, ignore_index: int) -> CaseSet:
    """The images of a batch as about ten cases."""
    logits = batch.scores if batch.kind == "logits" else canonical_logits(batch.scores, batch.kind)
    logits, labels, mask = _usual(logits), _usual(holding(batch.labels, ignore_index)), batch.mask
    refs = []
    # Several images make a case: few enough to hold some cases out, enough to keep the overhead per case small.
    size = max(1, min(len(logits) // _TENSOR_CASES, CHUNK_VALUES // max(1, logits[:1].numel())))
    for n in range(0, len(logits), size):
        some = slice(n, n + size)
        source = TensorSource(
            f"tensors[{n}]", logits[some], labels[some], None if mask is None else mask[some], ignore_index
        )
        refs.append(CaseRef(source.id, partial(Case, source), memory=logits.device.type))
    return CaseSet(refs, num_classes=logits.shape[1], ignore_index=ignore_index)


class TensorSource(CaseSource):
    """Tensors as a case."""

    sliceable, spacing = True, None

    def __init__(self, id: str, logits: Tensor, labels: Tensor, mask: Tensor | None, ignore_index: int) -> None:
        self.id = id
        self.batch, self.num_classes, *spatial = logits.shape
        self.spatial, self.ignore_index = tuple(spatial), ignore_index
        self._logits, self._labels, self._mask = logits, labels, mask

    def logits(self, rows: slice) -> Tensor:  # noqa: D102
        return self._logits[:, :, rows]

    def labels(self, rows: slice) -> Tensor:  # noqa: D102
        return self._labels[:, rows]

    def mask(self, rows: slice) -> Tensor | None:  # noqa: D102
        return None if self._mask is None else self._mask[:, rows]


def _tensor(name: str, given: Any) -> Tensor:
    """A plain tensor, or an array as one that shares its memory if that is possible."""
    if isinstance(given, Tensor):
        plain = given.as_subclass(Tensor)  # What MONAI keeps with a tensor would be carried along, also into files.
        return plain.long() if plain.dtype in _UNSIGNED else plain
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "fiub":
        raise InputError(f"{name} are {_in_words(given)}", expected="a tensor or a numpy array of numbers")
    array = np.ascontiguousarray(given, dtype=np.int64 if given.dtype.kind == "u" else given.dtype.newbyteorder("="))
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():  # Nothing writes into it.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def _channel_labels(scores: Tensor, labels: Tensor) -> Tensor:
    """Labels ``(N, K, *spatial)`` of scores of K channels; ``(N, *spatial)`` will do for one channel."""
    if scores.ndim < 3 or not scores.is_floating_point():
        raise InputError(
            f"logits have shape {tuple(scores.shape)} and dtype {scores.dtype}",
            expected="(N, channels, *spatial), floating point",
        )
    if scores.shape[1] == 1 and labels.ndim == scores.ndim - 1:
        labels = labels.unsqueeze(1)
    if labels.shape != scores.shape:
        raise InputError(
            f"labels have shape {tuple(labels.shape)}",
            expected=f"{tuple(scores.shape)}, as the logits have: for every channel 0 outside and 1 inside",
        )
    return whole_numbers(labels)


def whole_numbers(labels: Tensor) -> Tensor:
    """Labels of an integer type: bool or floats that are whole numbers are converted, others are an error.

    Examples:
        >>> whole_numbers(torch.tensor([0.0, 1.0]))
        tensor([0, 1])
    """
    if not labels.is_floating_point() and labels.dtype != torch.bool:
        return labels
    whole = labels.long()
    if not torch.equal(whole.to(labels.dtype), labels):
        raise InputError(f"labels have dtype {labels.dtype}, and are not all whole numbers", expected="class indices")
    return whole


def _in_unit_interval(scores: Tensor) -> bool:
    """Whether logits of sigmoid channels look like probabilities."""
    lowest, highest = torch.aminmax(scores)
    return bool((lowest >= 0) & (highest <= 1))


def _usual(tensor: Tensor) -> Tensor:
    """A tensor that gradients can be computed with, which those made in inference mode are not."""
    return tensor.clone() if tensor.is_inference() else tensor


def _names(ids: Any, count: int) -> tuple[str, ...]:
    names = [ids] if isinstance(ids, str) else ids.tolist() if isinstance(ids, Tensor | np.ndarray) else ids
    if not isinstance(names, Sequence) or len(names) != count:
        raise InputError(f"id is {ids!r}", expected=f"a name for each of the {count} images of the batch")
    return tuple(map(str, names))


def _in_words(given: Any) -> str:
    if isinstance(given, Tensor | np.ndarray):
        return f"a {type(given).__name__} of shape {tuple(given.shape)} and dtype {given.dtype}"
    if isinstance(given, tuple | list):
        return f"a {type(given).__name__} of {len(given)} ({', '.join(type(one).__name__ for one in given[:5])})"
    return f"of type {type(given).__name__}"
