"""``cases_from``: tensors, arrays, a DataLoader, or anything else that yields batches, as a ``CaseSet``."""

from __future__ import annotations

import pickle
import shutil
import tempfile
import warnings
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.sampler import BatchSampler

from segcal.cases.caseset import CHANNEL_CLASSES, CaseRef, CaseSet
from segcal.cases.splits import Groups
from segcal.cases.tensors import Batch, batch_as_cases, is_pair
from segcal.checks import check_ignored
from segcal.errors import InputError, naming
from segcal.types import Case, Kind

#: What ``cases_from`` takes.
Source = CaseSet | Tensor | Iterable[Any]

# Labels of an image that its fingerprint is made of, at most.
_FINGERPRINT = 4096


def cases_from(
    source: Source,
    labels: Any = None,
    *,
    kind: Kind = "logits",
    ignore_index: int = 255,
    mask: Any = None,
    ids: Sequence[str] | None = None,
    groups: Groups | Sequence[str] | None = None,
    channel_names: Sequence[str] | None = None,
) -> CaseSet:
    """Cases from what a network gives, without files. Every image is a case of its own.

    ``fit``, ``evaluate``, ``tune``, ``compare`` and ``plan`` call this for whatever they are given.

    Args:
        source: A batch, which is logits and labels (two arguments, a pair, or a dict of ``logits`` or ``probs``,
            ``labels``, and perhaps ``mask`` and ``id``), tensors or numpy arrays. Or a DataLoader, a list, or another
            iterable of batches, which is read again in every pass. Or a generator, which is read once and stored in a
            temporary folder. Or a case set, which is returned as it is.
        labels: ``(N, *spatial)`` or ``(N, 1, *spatial)``, if the source is logits ``(N, C, *spatial)``.
        kind: Whether scores are ``logits`` or ``probs``.
        ignore_index: The label of voxels to ignore.
        mask: ``(N, *spatial)`` bool, True for voxels to use, if the source is a single batch.
        ids: Names of all images, in order. By default those of the batches, or ``image 000``.
        groups: Images that belong together: as in ``CaseSet.split``, or the group of every image, in order.
        channel_names: For multi-label data: the names of the sigmoid channels. Labels are then ``(N, K, *spatial)``,
            for every channel 0 outside and 1 inside.

    Examples:
        >>> batches = [(torch.randn(2, 3, 8, 8), torch.zeros(2, 8, 8).long()) for _ in range(4)]
        >>> cases = cases_from(batches)
        >>> len(cases), cases.ids[7], cases[7].shape
        (8, 'image 007', (1, 3, 8, 8))
    """
    if isinstance(source, CaseSet):
        extra = {"labels": labels, "mask": mask, "ids": ids, "groups": groups, "channel_names": channel_names}
        if came := [name for name, given in extra.items() if given is not None]:
            raise InputError(f"{' and '.join(came)} come with cases", expected="cases alone")
        return source
    images: _Images
    declared = Declared.of(kind, ignore_index, channel_names)
    if (batch := single_batch(source, labels, kind, mask, multilabel=declared.multilabel)) is not None:
        images = _InMemory(batch, declared)
    elif isinstance(source, Iterator):
        images = _Stored(_Stream(source, declared).batches())
        warnings.warn(images.notes[0], stacklevel=2)
    else:
        images = stream = _Stream(source, declared)
        if ids is not None or groups is not None:
            check_order(source)
        stream.find_count(None if ids is None else len(ids))
    return _case_set(images, declared, ids, groups)


def stored_cases(batches: Iterable[Any], declared: Declared, groups: Groups | Sequence[str] | None = None) -> CaseSet:
    """``cases_from`` of batches that are read once, in this thread, and kept in a temporary folder.

    What holds for a thread, such as ``torch.autocast``, holds for the code that gives the batches.
    """
    return _case_set(_Stored(_checked_batches(batches, declared)), declared, None, groups)


class Declared(NamedTuple):
    """What scores are declared to be: logits or probabilities, and their channels if these are multi-label."""

    kind: Kind
    ignore_index: int
    channel_names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, kind: Kind, ignore_index: int, channel_names: Sequence[str] | None) -> Declared:
        """As the arguments of public functions say."""
        check_ignored(ignore_index)
        return cls(kind, ignore_index, None if channel_names is None else tuple(channel_names))

    @property
    def multilabel(self) -> bool:
        """Whether each channel is a two-class problem of its own."""
        return self.channel_names is not None

    def batch(self, given: Any, number: int, num_classes: int | None) -> Batch:
        """Check a batch of scores and labels, which has as many classes as the one before it, if there was one."""
        with naming(where=f"batch {number}"):
            batch = Batch.of(given, self.kind, multilabel=self.multilabel)
            self.check_channels(batch)
            classes = batch.scores.shape[1]
            if num_classes is not None and classes != num_classes:
                raise InputError(f"logits have {classes} classes", expected=f"{num_classes}, as in the first batch")
            batch.check_values(self.ignore_index)
        return batch

    def check_channels(self, batch: Batch) -> None:
        """Raise unless there is a name for every channel."""
        names, count = self.channel_names, batch.scores.shape[1]
        if names is not None and (len(names) != count or len(set(names)) < count or not all(names)):
            expected = f"{count} different names, none empty, one per channel"
            raise InputError(f"channel_names {', '.join(names)}", expected=expected)


def _checked_batches(batches: Iterable[Any], declared: Declared) -> Iterator[Batch]:
    num_classes = None
    for number, given in enumerate(batches):
        batch = declared.batch(given, number, num_classes)
        num_classes = batch.scores.shape[1]
        yield batch


def _case_set(
    images: _Images, declared: Declared, ids: Sequence[str] | None, groups: Groups | Sequence[str] | None
) -> CaseSet:
    names, ignored = _names(ids or images.ids, images.count), declared.ignore_index
    refs = [CaseRef(n, partial(_open, images, i, n, ignored), memory=images.memory) for i, n in enumerate(names)]
    grouped = dict(zip(names, _one_each("groups", groups, len(names)), strict=True)) if _listed(groups) else groups
    cases = CaseSet(refs, images.num_classes, ignored, groups=grouped, notes=images.notes)  # type: ignore[arg-type]
    if not declared.multilabel:
        return cases
    return replace(cases, num_classes=2, class_names=CHANNEL_CLASSES, channel_names=declared.channel_names)


def cases_to_fit(source: Source, labels: Any, ignore_index: int, mask: Any) -> CaseSet:
    """``cases_from``, but the images of a single batch become about ten cases, which are fitted faster."""
    check_ignored(ignore_index)
    batch = None if isinstance(source, CaseSet) else single_batch(source, labels, "logits", mask)
    if batch is None:
        return cases_from(source, labels, ignore_index=ignore_index, mask=mask)
    return batch_as_cases(batch, ignore_index)


def single_batch(source: Any, labels: Any, kind: Kind, mask: Any, *, multilabel: bool = False) -> Batch | None:
    """The batch that the source is, or None if it yields batches."""
    if labels is not None or isinstance(source, Tensor | np.ndarray):
        if labels is None:
            raise InputError("logits come without labels", expected="logits and labels, or batches of them")
        return Batch.checked(source, labels, mask, kind, multilabel=multilabel)
    if isinstance(source, str | Path):
        raise InputError(f"the source is {str(source)!r}", expected="cases", fix="segcal.open_cases opens a folder")
    if not isinstance(source, Iterable):
        expected = "cases, logits and labels, or an iterable of batches such as a DataLoader"
        raise InputError(f"the source is of type {type(source).__name__}", expected=expected)
    if is_pair(source):
        logits, labels = source
        return Batch.checked(logits, labels, mask, kind, multilabel=multilabel)
    if mask is not None:
        raise InputError("a mask comes with many batches", expected="dicts of logits, labels and mask as batches")
    return Batch.of(source, kind, multilabel=multilabel) if isinstance(source, Mapping) else None


class _Images(ABC):
    """Where images come from: how many there are, their names if they have any, and each of them as a batch of one."""

    count: int
    ids: list[str] | None
    num_classes: int
    memory: str | None = None
    notes: tuple[str, ...] = ()

    @abstractmethod
    def image(self, index: int) -> Batch: ...


def _open(images: _Images, index: int, id: str, ignore_index: int) -> Case:
    with naming(case=id):
        return images.image(index).case(id, ignore_index)


class _InMemory(_Images):
    """The images of one batch."""

    def __init__(self, batch: Batch, declared: Declared) -> None:
        batch.check_values(declared.ignore_index)
        declared.check_channels(batch)
        self.batch, self.count, self.num_classes = batch, len(batch), batch.scores.shape[1]
        self.ids = None if batch.ids is None else list(batch.ids)
        self.memory = batch.scores.device.type

    def image(self, index: int) -> Batch:
        return self.batch.image(index)


class _Stream(_Images):
    """The images of an iterable of batches, which goes on from where it is, or starts again.

    All batches are taken by a thread of their own: a generator that yields inside ``torch.no_grad()`` or
    ``torch.inference_mode()`` leaves them switched on in the thread that it runs in.
    """

    def __init__(self, source: Iterable[Any], declared: Declared) -> None:
        self.source, self.declared = source, declared
        self.count, self._fingerprints, self._warned = 0, dict[int, int](), False
        self._begin()
        if (first := self._thread.submit(self._next).result()) is None:
            raise InputError("the source yields no batch", expected="at least one")
        self.num_classes, self._first = first.scores.shape[1], len(first)
        self.ids = None if first.ids is None else list(first.ids)

    def _begin(self) -> None:
        threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "segcal-batches", initializer=torch.set_num_threads, initargs=(threads,))
        self._iterator: Iterator[Any] | None = None
        self._batch: Batch | None = None
        self._start = self._end = self._number = 0

    def __getstate__(self) -> dict[str, Any]:
        try:
            source = pickle.dumps(self.source)
        except Exception as error:
            raise InputError(
                f"the source of the cases cannot be sent to worker processes ({error})",
                expected="a source that can be pickled",
                fix="workers=1, or classes and functions at the top of a module",
            ) from None
        own = ("declared", "count", "ids", "num_classes", "_first", "_fingerprints", "_warned")
        return {"source": source, **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, source=pickle.loads(state["source"]))
        self._begin()

    def image(self, index: int) -> Batch:
        batch, offset = self._thread.submit(self._find, index).result()
        return batch.image(offset)

    def batches(self) -> Iterator[Batch]:
        """All batches of the pass that has begun with the first."""
        batch = self._batch
        while batch is not None:
            yield batch
            batch = self._thread.submit(self._next).result()

    def find_count(self, known: int | None) -> None:
        """Find the number of images: as given, from a DataLoader's length, or by a pass over all batches."""
        plain = _loader_length(self.source)
        if known is None and plain is not None and self.ids is None:
            size = getattr(self.source, "batch_size", None)
            known = plain if self._first == min(size or 0, plain) else None
        if known is not None:
            self.count = known
            return
        names: list[str] = []
        for batch in self.batches():
            self.count += len(batch)
            if (batch.ids is None) != (self.ids is None):
                raise InputError("some batches have ids and others have none", expected="ids in all or none")
            names += batch.ids or ()
        self.ids = names or None

    def _find(self, index: int) -> tuple[Batch, int]:
        """The batch that holds an image, and its place there."""
        if index < self._start or (index >= self._end and self._iterator is None):
            self._iterator, self._start, self._end, self._number = None, 0, 0, 0
            self._next()
        while index >= self._end:
            if self._next() is None:
                raise self._other_count(f"only {self._end}")
        batch, offset = self._batch, index - self._start
        assert batch is not None
        if index == self.count - 1 and self._iterator is not None:
            if self._end > self.count or next(self._iterator, None) is not None:
                raise self._other_count("more")
            self._iterator = None
        return batch, offset

    def _next(self) -> Batch | None:
        """Take the next batch; None at the end. After an error, the next pass starts again."""
        iterator = iter(self.source) if self._iterator is None else self._iterator
        self._iterator = None
        given = next(iterator, None)
        if given is None:
            return None
        batch = self.declared.batch(given, self._number, getattr(self, "num_classes", None))
        self._iterator, self._batch, self._number = iterator, batch, self._number + 1
        self._start, self._end = self._end, self._end + len(batch)
        for index, labels in enumerate(batch.labels, self._start):
            found = _fingerprint(labels)
            if self._fingerprints.setdefault(index, found) != found and not self._warned:
                self._warned = True
                warnings.warn(
                    f"image {index} is not the one that it was in an earlier pass: the source shuffles or changes its "
                    "images, so the same name stands for different ones. Use shuffle=False and no random augmentation",
                    stacklevel=2,
                )
        return batch

    def _other_count(self, found: str) -> InputError:
        expected = f"{self.count} images, by the number of ids, the length of the DataLoader, or an earlier pass"
        return InputError(f"the source yields {found} images", expected=expected)


class _Stored(_Images):
    """Images that can be read only once, in a temporary folder that goes when the last case goes."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self.folder, self.count = Path(tempfile.mkdtemp(prefix="segcal-batches-")), 0
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        names: list[str] = []
        for batch in batches:
            self.about, self.num_classes = (batch.kind, None, batch.multilabel), batch.scores.shape[1]
            self.device = batch.scores.device
            names += batch.ids or ()
            for index in range(len(batch)):
                one = batch.image(index)
                parts = [None if part is None else part.cpu().clone() for part in (one.scores, one.labels, one.mask)]
                torch.save(parts, self._path(self.count))
                self.count += 1
        if not self.count:
            raise InputError("the source yields no batch", expected="at least one")
        self.ids = names or None
        self.notes = (f"the source can be read only once: its {self.count} images are kept in {self.folder}",)

    def _path(self, index: int) -> Path:
        return self.folder / f"{index}.pt"

    def image(self, index: int) -> Batch:
        scores, labels, mask = torch.load(self._path(index), mmap=True, weights_only=True)
        there = self.device
        return Batch(scores.to(there), labels.to(there), None if mask is None else mask.to(there), *self.about)


def check_order(source: Any) -> None:
    """Raise if names or groups given in order cannot be those of the images."""
    if isinstance(source, DataLoader) and isinstance(source.sampler, RandomSampler):
        raise InputError("ids or groups come with a DataLoader that shuffles", expected="shuffle=False")


def _loader_length(source: Any) -> int | None:
    """The images of a DataLoader whose batches are of one size and whose dataset has a length."""
    if not isinstance(source, DataLoader) or isinstance(source.dataset, IterableDataset):
        return None
    if source.batch_size is None or type(source.batch_sampler) is not BatchSampler:
        return None
    count = len(source.sampler)  # type: ignore[arg-type]
    return count - count % source.batch_size if source.drop_last else count


def _fingerprint(labels: Tensor) -> int:
    some = labels.reshape(-1)[:: max(1, labels.numel() // _FINGERPRINT)]
    return zlib.crc32(repr(tuple(labels.shape)).encode() + some.long().cpu().numpy().tobytes())


def _names(ids: Sequence[str] | None, count: int) -> list[str]:
    if ids is None:
        return [f"image {index:03d}" for index in range(count)]
    names = _one_each("ids", ids, count)
    if len(set(names)) < count:
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"two images have the id {twice!r}", expected="different ids")
    return names


def _one_each(what: str, values: Any, count: int) -> list[str]:
    if len(values) != count:
        raise InputError(f"{len(values)} {what}", expected=f"{count}, one for each image")
    return [str(value) for value in values]


def _listed(groups: Any) -> bool:
    return isinstance(groups, Sequence) and not isinstance(groups, str)
