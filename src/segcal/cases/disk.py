"""One case read from its files: scores are pooled, labels and masks checked, geometries compared."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from segcal.cases import oriented
from segcal.cases.config import SPACING_RANGE, DatasetConfig, is_spacing
from segcal.cases.formats import SCORE_FORMATS, Array, format_of, open_array
from segcal.cases.layout import CaseFiles
from segcal.cases.nnunet import connected_to_border
from segcal.cases.oriented import Oriented
from segcal.errors import ConfigError, DataError, naming
from segcal.files.remote import RemotePath
from segcal.scores import Pool, canonical_logits, one_channel
from segcal.transfer import moved
from segcal.types import CHUNK_VALUES, Kind, row_slices

# Scores pooled at once: 4 MB of float64, which stay in cache between the steps.
_POOL_VALUES = 2**19


class DiskCase:
    """The files of one case as a ``segcal.types.EnsembleSource``.

    ``whole`` is the case with all members if this one has only some. It defines nnU-Net's exterior, so that the valid
    voxels are the same whatever members are chosen.
    """

    def __init__(self, files: CaseFiles, config: DatasetConfig, whole: DiskCase | None = None) -> None:
        self.files, self.config, self.id, self._all_members = files, config, files.id, whole
        assert config.kind is not None
        assert config.ignore_index is not None
        self.kind, self.ignore_index, self.multilabel = config.kind, config.ignore_index, bool(config.multilabel)
        self.pooling: Kind = config.pooling or config.kind
        self._channels = slice(None)  # those that are read
        self.num_members = len(files.members) if len(files.members) > 1 or whole is not None else None
        self._partial: set[Path] = set()  # members with missing chunks
        self._extras: dict[Path, Oriented] = {}
        self._label = self._open_extra(files.label, oriented.LABEL_KEYS) if files.label else None
        self.members = [self._open_scores(path) for path in files.members]
        with self._naming(files.members[0]):
            self._check_shapes()
        with self._naming():
            self.spacing = self._spacing()

    # -- headers ------------------------------------------------------------------------------------------------------

    def _open_scores(self, path: Path) -> Oriented:
        with self._naming(path):
            scores = oriented.orient(path, 1, axes=self.config.axes, usual=oriented.SCORE_KEYS, key=self.config.key)
            file = scores.file
            if (format := format_of(path)) and not format.scores:
                expected = f"one of {', '.join(SCORE_FORMATS)}"
                raise DataError(f"{format.name} files cannot hold scores", expected=expected)
            if self.kind == "logits" and file.key in ("probabilities", "probs", "softmax"):
                problem = f"declared as logits, but the array is named '{file.key}'"
                fix = "put probabilities into probs/ or declare kind = 'probs'"
                raise DataError(problem, expected="one kind", fix=fix)
            if oriented.check_scores(file, sums_to_one=self.kind == "probs" and not self.multilabel):
                self._partial.add(path)
        # A 2D case of nnU-Net is (C, 1, H, W), a NIfTI vector image (C, 1, z, y, x): axis 1 is not a spatial axis.
        if self._label is not None:
            flat = len(file.shape) - len(self._label.shape) == 2
        else:
            flat = self.files.prediction is not None and self.files.prediction.suffix.lower() == ".png"
        return replace(scores, squeeze=flat and len(file.shape) > 3 and file.shape[1] == 1)

    def _check_shapes(self) -> None:
        first = self.members[0]
        channels, *spatial = first.shape
        if not spatial or 0 in first.shape:
            raise DataError(f"scores of shape {first.shape}", expected="(C, *spatial)")
        if channels == 1 and not self.multilabel:
            raise one_channel()
        for member in self.members[1:]:
            if member.shape != first.shape:
                raise DataError(
                    f"this ensemble member has shape {member.shape}",
                    where=str(member.file.path),
                    expected=f"{first.shape}, the shape of {first.file.path}",
                )
        if self.config.regions and len(self.config.regions) != channels:
            expected = f"{channels}, one per channel of the scores"
            raise ConfigError(f"{len(self.config.regions)} [regions]", expected=expected)
        self.batch, self.num_classes = (channels, 2) if self.multilabel else (1, channels)
        self.spatial = tuple(spatial)
        if self._label is not None:
            # Multi-label truth has a channel axis, unless regions define the channels from an integer map.
            leading = int(self.multilabel and not self.config.regions and len(self._label.shape) == len(first.shape))
            self._labels = replace(self._label, leading=leading)
            shape = self._labels.shape
            with self._naming(self.files.label):
                if shape[leading:] != self.spatial:
                    raise self._mismatch(shape[leading:])
                if leading and shape[0] != channels:
                    raise DataError(f"labels of {shape[0]} channels", expected=f"{channels}, one per score channel")
        if self.config.classes is not None and channels != self.config.classes:
            problem = f"{channels} channels (shape {first.shape})"
            raise DataError(problem, expected=f"{self.config.classes} classes, first axis")
        self.sliceable = all(member.file.sliceable for member in self.members)

    def _mismatch(self, label: tuple[int, ...]) -> DataError:
        shape = self.members[0].shape
        fix = "predict at the resolution of the labels, or resample before saving"
        problem = f"labels have shape {label}, scores {shape}"
        if label == self.spatial[::-1] and len(label) == 3:
            other = "zyx" if self.config.axes == "xyz" else "xyz"
            problem += ": the volume is transposed"
            fix = f"write axes = '{other}' into segcal.toml"
        elif shape[:-1] == label:
            problem += ": the channels come last"
            fix = "save channels first, numpy.moveaxis(scores, -1, 0)"
        elif len(label) == 3 and label[1:] == self.spatial and label[0] in (3, 4):
            problem = f"labels have {label[0]} colour channels"
            fix = "save class indices (one channel), not colours"
        return DataError(problem, expected=f"labels of shape {self.spatial}", fix=fix)

    def _spacing(self) -> tuple[float, ...] | None:
        """The voxel size, declared or from a header. Raises if the geometries of the files differ."""
        paths = (self.files.label, *self.files.members, self.files.prediction, self.files.mask, *self.files.images)
        placed = (path for path in paths if path and (format := format_of(path)) and format.geometry)
        known = [(path, geometry) for path in placed if (geometry := open_array(path).geometry)]
        for path, geometry in known[1:]:
            if not np.allclose(known[0][1].affine, geometry.affine, atol=1e-3):
                off = float(np.abs(known[0][1].affine - geometry.affine).max())
                raise DataError(
                    f"affine differs from that of {known[0][0]} by up to {off:.4g}",
                    where=str(path),
                    expected="the same geometry in all files of a case",
                    fix="resample one onto the other, or copy the correct header",
                )
        spacing = self.config.spacing
        if isinstance(spacing, Mapping):
            spacing = spacing.get(self.id)
        if spacing is None and known:
            spacing = known[0][1].zooms[: len(self.spatial)][::-1]
        if spacing is None:
            return None
        if len(spacing) != len(self.spatial):
            expected = f"one number for each of the {len(self.spatial)} spatial axes"
            raise DataError(f"spacing {spacing}", expected=expected)
        if not all(map(is_spacing, spacing)):
            raise DataError(
                f"spacing {spacing}",
                where=str(known[0][0]),
                expected=SPACING_RANGE,
                fix="correct the header, or declare spacing = [...] in segcal.toml",
            )
        return tuple(spacing)

    # -- values -------------------------------------------------------------------------------------------------------

    def logits(self, rows: slice) -> Tensor:
        """Canonical logits of some rows, pooled over the members."""
        return self._logits(rows, None)

    def logits_on(self, rows: slice, device: torch.device) -> Tensor:
        """The same on a device, where they are converted and pooled: it gets them as they are stored."""
        return self._logits(rows, device)

    def _logits(self, rows: slice, device: torch.device | None) -> Tensor:
        shape = (self.batch, self.num_classes, rows.stop - rows.start, *self.spatial[1:])
        if len(self.members) == 1:
            return self._read(self.members[0], rows, slice(0, shape[2]), device)
        # At least a stored chunk at a time: otherwise it would be decoded several times.
        per_row = math.prod(shape) // max(1, shape[2])
        least = max(member.rows_per_chunk for member in self.members)
        parts = list(row_slices(shape, max(_POOL_VALUES if device is None else CHUNK_VALUES, least * per_row)))
        with self._naming():
            pooled = torch.empty(shape, dtype=torch.float32, device=device)
            # Files that are decoded as a whole are decoded once each, and freed before the next.
            for together in [[part] for part in parts] if self.sliceable else [parts]:
                pools = [Pool(self.pooling) for _ in together]
                for member in self.members:
                    for part, running in zip(together, pools, strict=True):
                        running.add(self._read(member, rows, part, device))
                    member.file.forget()
                for part, running in zip(together, pools, strict=True):
                    pooled[:, :, part] = running.result()
            return pooled

    def member(self, index: int, rows: slice) -> Tensor:
        """Canonical logits of one member in some rows."""
        for other in self.members[:index] + self.members[index + 1 :]:
            other.file.forget()
        return self._read(self.members[index], rows, slice(0, rows.stop - rows.start))

    def pooled(self, members: Sequence[int], space: Kind) -> DiskCase:
        """The case with some of its members, pooled in this space."""
        files = replace(self.files, members=tuple(self.files.members[index] for index in members))
        return DiskCase(files, replace(self.config, pooling=space), self._all_members or self)

    def channel(self, index: int) -> DiskCase:
        """One channel of a multi-label case, read without the others."""
        own = copy.copy(self)
        own._channels, own.batch, own._all_members = slice(index, index + 1), 1, self._all_members or self
        return own

    def _read(self, member: Oriented, rows: slice, part: slice, device: torch.device | None = None) -> Tensor:
        """Canonical logits of one member in a part of the rows."""

        def convert(scores: Tensor) -> Tensor:
            if member.file.path in self._partial:
                oriented.check_sums(scores, member.file)
            return canonical_logits(scores, self.kind, multilabel=self.multilabel, first_row=first).float()

        with self._naming(member.file.path):
            first = rows.start + part.start
            here = slice(first, rows.start + part.stop)
            # One class at a time would wait for an object store once for each.
            near = member.file.sliceable and not isinstance(member.file.path, RemotePath)
            by_class = near and (member.file.chunk is None or member.file.chunk[0] == 1)
            if device is None and self.kind == "logits" and by_class and member.file.dtype == np.float16:
                # Converted class by class, so that the whole is never in memory in both precisions.
                channels = range(member.shape[0])[self._channels]
                narrow = (torch.from_numpy(member.read(here, slice(k, k + 1))) for k in channels)
                scores = torch.empty((1, len(channels), here.stop - first, *member.shape[2:]))
                for target, source in zip(scores[0], narrow, strict=True):
                    target.copy_(source[0])
                return convert(scores)
            scores = torch.from_numpy(member.read(here, self._channels))[None]
            logits = moved(scores, device, convert)
            assert logits is not None
            # Float32 scores still share the memory of the mapped file and must not outlive it.
            shared = logits.data_ptr() == scores.data_ptr()
            return logits.clone(memory_format=torch.contiguous_format) if shared else logits.contiguous()

    def labels(self, rows: slice) -> Tensor:
        """Labels of some rows, in range or ignored."""
        if self._label is None:
            raise DataError("has no label", case=self.id, expected=f"a file labels/{self.id}.*")
        regions = [*(self.config.regions or {}).values()]
        count = max(map(max, regions)) + 1 if regions else self.num_classes
        with self._naming(self.files.label):
            stored = self._labels.read(rows, self._channels)
            labels = check_labels(stored, count, self.ignore_index, rows.start, self._labels.leading)
            if regions:
                inside = np.stack([np.isin(labels, region) for region in regions[self._channels]])
                labels = np.where(labels == self.ignore_index, self.ignore_index, inside)
            labels = np.ascontiguousarray(labels, dtype=np.int64)
        return torch.from_numpy(labels).reshape(self.batch, -1, *self.spatial[1:])

    def mask(self, rows: slice) -> Tensor | None:
        """Valid voxels of some rows: the user's mask, without nnU-Net's padded exterior."""
        masks = []
        if self.files.mask is not None:
            found = self._extra(self.files.mask, oriented.MASK_KEYS, rows, leading=0)
            if found.dtype.kind == "f" and np.isnan(found).any():
                with self._naming(self.files.mask):
                    raise DataError("NaN in the mask", expected="0, or another number for voxels that count")
            masks.append(found != 0)
        if (outside := self.exterior(rows)) is not None:
            masks.append(~outside)
        if not masks:
            return None
        mask = torch.from_numpy(np.ascontiguousarray(np.logical_and.reduce(masks)))
        return mask.expand(self.batch, *mask.shape)

    def exterior(self, rows: slice) -> Array | None:
        """nnU-Net's padding in some rows, if it is to be masked."""
        return self._exterior[rows] if self.config.exterior == "mask" else None

    @cached_property
    def _exterior(self) -> Array:
        if self._all_members is not None:
            return self._all_members._exterior
        background = np.ones(self.spatial, bool)
        for member in self.members:
            for rows in row_slices((1, *member.shape), _POOL_VALUES):
                scores = member.read(rows)
                # Softmax padding is (1, 0, ..., 0); sigmoid channels have no background channel and are all 0.
                background[rows] &= (scores[0] == (0 if self.multilabel else 1)) & (scores[1:] == 0).all(0)
            if len(self.members) > 1:  # An only member is kept: its scores are read next.
                member.file.forget()
        return connected_to_border(background)

    def image(self, rows: slice) -> Tensor | None:
        """The image ``(1, channels, rows, ...)``, in the values of its files."""
        if not self.files.images:
            return None
        with self._naming():
            arrays = [self._extra(path, oriented.IMAGE_KEYS, rows) for path in self.files.images]
            channels = [array if array.ndim > len(self.spatial) else array[None] for array in arrays]
            return torch.from_numpy(np.ascontiguousarray(np.concatenate(channels), dtype=np.float32))[None]

    def posterior(self, rows: slice) -> Tensor | None:
        """The true posterior of a scene."""
        if self.files.posterior is None:
            return None
        array = self._extra(self.files.posterior, ("posterior",), rows, leading=1)
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))[None]

    def _extra(self, path: Path, usual: tuple[str, ...], rows: slice, leading: int | None = None) -> Array:
        """Some rows of a file beside the scores, with ``leading`` channel axes; None allows one or none."""
        with self._naming(path):
            if path not in self._extras:
                array = self._open_extra(path, usual)
                more = len(array.shape) - len(self.spatial)
                array = replace(array, leading=min(max(more, 0), 1) if leading is None else leading)
                if array.shape[array.leading :] != self.spatial:
                    problem = f"has spatial shape {array.shape[array.leading :]}"
                    raise DataError(problem, expected=f"{self.spatial}, the shape of the scores")
                self._extras[path] = array
            part = self._extras[path].read(rows)
            if rows.stop == self.spatial[0]:  # Rows are read in order, so this was the last part.
                self._extras[path].file.forget()
            return part

    def _open_extra(self, path: Path, usual: tuple[str, ...]) -> Oriented:
        with self._naming(path):
            array = oriented.orient(path, 0, axes=self.config.axes, usual=usual)
            oriented.check_values(array.file)
            return array

    @contextmanager
    def _naming(self, path: Path | None = None) -> Iterator[None]:
        """Add the case and the file to errors raised inside; running out of memory becomes such an error."""
        where = str(path) if path else None
        try:
            with naming(case=self.id, where=where):
                yield
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "allocate memory" not in str(error):  # torch's message
                raise
            raise DataError("does not fit into memory", case=self.id, where=where) from error

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files that this case depends on."""
        return self.files.paths + (self._all_members.paths if self._all_members is not None else ())

    @property
    def suffix(self) -> str:
        """How the names of the score files end."""
        return self.files.members[0].name.removeprefix(self.id)


def check_labels(labels: Array, count: int, ignore_index: int, first_row: int = 0, row_axis: int = 0) -> Array:
    """Labels as int64. Raises unless all are whole numbers below ``count`` or ignored; floating point is fine."""
    if labels.dtype.kind == "f":
        whole = np.isfinite(labels) & (labels == np.round(labels))
        if not whole.all():
            raise DataError(f"value {labels[~whole].flat[0]}", expected="whole numbers", fix="save a label map")
    # Types with values beyond int64.
    if labels.dtype.kind == "f" or labels.dtype == np.uint64:
        beyond = np.abs(labels) >= 2**63
        if beyond.any():
            raise DataError(f"label {labels[beyond].flat[0]}", expected="labels below 2^63", fix="remap the labels")
    labels = labels.astype(np.int64)
    bad = (labels != ignore_index) & ((labels < 0) | (labels >= count))
    if bad.any():
        index = np.argwhere(bad)[0]
        index[row_axis] += first_row
        values = np.unique(labels[bad])
        raise DataError(
            f"label {', '.join(map(str, values[:5]))} at {int(bad.sum())} voxels, first at {tuple(index.tolist())}",
            expected=f"0..{count - 1}, or {ignore_index} to ignore",
            fix=f"if {values[0]} means 'ignore', set ignore_index = {values[0]}; otherwise remap the labels",
        )
    return labels
