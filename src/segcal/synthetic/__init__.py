"""Scenes with a known posterior, so that the true calibration error of a calibrator can be measured.

No real dataset gives the probability of a label at a voxel; a scene does. Labels are drawn from the posterior, and
logits are made from it by planted miscalibrations whose exact inverse is known.

Examples:
    >>> case = scenes(1, size=(32, 40), plant=[Temperature(2.0)])[0]
    >>> true_calibration_error(case.logits.log_softmax(1), case.posterior).kl > 0.01
    True
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache, partial

from torch import Tensor

from segcal.cases.caseset import CaseRef, CaseSet
from segcal.errors import InputError, check_whole
from segcal.scores import pool
from segcal.synthetic.plants import (
    ClassAffine,
    ClassConditional,
    ConfidentlyWrong,
    GaugeOffsets,
    ImageTemperature,
    Plant,
    SpatialTemperature,
    Temperature,
    demo_plant,
)
from segcal.synthetic.scene import IGNORE_INDEX, Scene, SceneSpec, draw_labels
from segcal.synthetic.truth import TrueCalibrationError, true_calibration_error
from segcal.types import Case, Kind

__all__ = [
    "ClassAffine",
    "ClassConditional",
    "ConfidentlyWrong",
    "GaugeOffsets",
    "ImageTemperature",
    "Plant",
    "Scene",
    "SceneSpec",
    "SpatialTemperature",
    "Temperature",
    "TrueCalibrationError",
    "demo_plant",
    "demo_scenes",
    "draw_labels",
    "scene_of",
    "scenes",
    "true_calibration_error",
]


def scenes(
    count: int,
    *,
    size: Sequence[int] = (128, 160),
    num_classes: int = 6,
    seed: int = 0,
    plant: Sequence[Plant] | None = None,
    coherence: float = 2.0,
    members: int | None = None,
    member_noise: float = 1.0,
    shift: float = 0.0,
    ignored: float = 0.0,
    class_names: Sequence[str] | None = None,
) -> CaseSet:
    """``count`` scenes, generated when opened. Scene i depends on the seed and i only.

    Args:
        count: Number of scenes.
        size: ``(height, width)`` for images, ``(depth, height, width)`` for volumes, which have spacing (2, 1, 1).
        num_classes: Class 0 surrounds the others; from 4 classes on the last one is rare and the one before it thin.
        seed: Seed of everything random in the scenes.
        plant: Miscalibrations, applied in order to the log posterior; without any the network is exactly calibrated.
        coherence: Correlation length of the label noise in (in-plane) voxels; 0 draws voxels independently.
        members: Size of an ensemble, whose members differ by independent smooth noise. Their logits are averaged;
            ``CaseSet.pooled`` and ``CaseSet.members`` change that.
        member_noise: Standard deviation of that noise.
        shift: Covariate shift s in [0, 1]: labels follow ``S(log p / (1 + s) + s b)`` with a fixed random b in [-1, 1]
            per class, while the network still predicts p, and the image loses contrast. ``vs`` recovers it.
        ignored: Share of the voxels labelled 255, in patches.
        class_names: One for each class.

    Examples:
        >>> import torch
        >>> cases = scenes(100, size=(32, 40), plant=[Temperature(2.0), GaugeOffsets(5.0)])
        >>> case = cases[7]
        >>> case.id, case.logits.shape, case.posterior.shape
        ('image-007', torch.Size([1, 6, 32, 40]), torch.Size([1, 6, 32, 40]))
        >>> true_calibration_error(torch.log_softmax(case.logits / 2.0, 1), case.posterior).kl < 1e-6
        True
    """
    check_whole("count", count, 1)
    if plant is not None and not isinstance(plant, Sequence):
        raise InputError(f"plant is {plant!r}", expected="a list of plants, applied in order")
    if class_names is not None and len(class_names) != num_classes:
        raise InputError(f"class_names has {len(class_names)} names", expected=f"{num_classes}, one for each class")
    plants = tuple(plant or ())
    spec = SceneSpec(tuple(size), num_classes, seed, plants, coherence, members, member_noise, shift, ignored)
    refs = [CaseRef(_name(spec, index), partial(_open, spec, index)) for index in range(count)]
    names = None if class_names is None else tuple(class_names)
    return CaseSet(refs, num_classes=num_classes, ignore_index=IGNORE_INDEX, class_names=names, num_members=members)


def demo_scenes(seed: int = 0) -> tuple[CaseSet, CaseSet]:
    """The demo: 64 images (128 x 160, 6 classes) and 12 volumes (24 x 64 x 64, 4 classes) of an overconfident network.

    Examples:
        >>> images, volumes = demo_scenes()
        >>> len(images), len(volumes), volumes.class_names
        (64, 12, ('matrix', 'body', 'fibre', 'speck'))
    """
    six, four = ("matrix", "field", "island", "core", "fibre", "speck"), ("matrix", "body", "fibre", "speck")
    images = scenes(64, seed=seed, plant=demo_plant(6), ignored=0.02, class_names=six)
    volumes = scenes(12, size=(24, 64, 64), num_classes=4, seed=seed, plant=demo_plant(4), class_names=four)
    return images, volumes


def scene_of(case: Case) -> Scene:
    """All tensors of a synthetic case, including the planted temperature field and the ensemble members.

    Examples:
        >>> scene_of(scenes(1, size=(32, 40), plant=[Temperature(3.0)])[0]).temperature.unique()
        tensor([3.])
    """
    if not isinstance(case.source, _SceneSource):
        raise InputError("not a synthetic scene", case=case.id, expected="a case of segcal.synthetic.scenes")
    return case.source.scene()


class _SceneSource:
    """A scene as the source of a case, generated on first use and freed with the case."""

    batch = 1
    ignore_index = IGNORE_INDEX
    sliceable = True

    def __init__(self, spec: SceneSpec, index: int) -> None:
        self.id = _name(spec, index)
        self.num_classes, self.spatial, self.spacing = spec.num_classes, spec.size, spec.spacing
        self.num_members, self._chosen = spec.members, tuple(range(spec.members or 0))
        self.pooling: Kind = "logits"
        self.scene = cache(partial(spec.generate, index))  # shared with the copies that ``pooled`` makes

    def logits(self, rows: slice) -> Tensor:
        if not self._chosen:
            return self.scene().logits[None, :, rows]
        return pool((self.member(index, rows) for index in range(len(self._chosen))), self.pooling)

    def member(self, index: int, rows: slice) -> Tensor:
        return self.scene().members[self._chosen[index]][None, :, rows]

    def pooled(self, members: Sequence[int], space: Kind) -> _SceneSource:
        other = copy.copy(self)
        other._chosen = tuple(self._chosen[index] for index in members)
        other.num_members, other.pooling = len(other._chosen), space
        return other

    def labels(self, rows: slice) -> Tensor:
        return self.scene().labels[None, rows]

    def mask(self, rows: slice) -> None:
        return None

    def image(self, rows: slice) -> Tensor:
        return self.scene().image[None, :, rows]

    def posterior(self, rows: slice) -> Tensor:
        return self.scene().posterior[None, :, rows]


def _name(spec: SceneSpec, index: int) -> str:
    return f"{'image' if len(spec.size) == 2 else 'volume'}-{index:03d}"


def _open(spec: SceneSpec, index: int) -> Case:
    return Case(_SceneSource(spec, index))
