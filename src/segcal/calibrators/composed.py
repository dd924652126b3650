"""One calibrator after another: how the first is named, stored and fitted, and how cases pass through it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from segcal.calibrators.base import CALIBRATORS, Calibrator
from segcal.cases import CaseRef, CaseSet
from segcal.cases.calibrated import case_scores
from segcal.errors import check_name
from segcal.fitting.data import FitData
from segcal.types import Case, CaseSource

#: A calibrator, its id, its id and arguments as a file stores them, or None.
Base = str | Mapping[str, Any] | Calibrator | None

_PREFIX = "base."


class ComposedCalibrator(Calibrator):
    """A calibrator that includes another one, its ``base``, which is fitted, stored and loaded with it."""

    def __init__(self, base: Base) -> None:
        super().__init__()
        self.base = base_calibrator(base)

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments; the base as its id and its own arguments."""
        base = self.base
        described = None if base is None else {"id": base.id, "arguments": base.arguments()}
        return {**super().arguments(), "base": described}

    def allocate(self, num_classes: int) -> None:
        """Prepare the base for parameters that are loaded."""
        if self.base is not None:
            self.base.allocate(num_classes)
            self.base.num_classes = num_classes

    def shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the base's tensors."""
        shapes = {} if self.base is None else self.base.shapes(num_classes)
        return {_PREFIX + name: shape for name, shape in shapes.items()}

    def upgraded(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of the base as it has them now."""
        if self.base is None:
            return tensors
        of_base = {name.removeprefix(_PREFIX): t for name, t in tensors.items() if name.startswith(_PREFIX)}
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(_PREFIX)}
        return own | {_PREFIX + name: tensor for name, tensor in self.base.upgraded(of_base).items()}

    def _fit_base(self, data: FitData) -> list[str]:
        """Fit the base, if there is one; returns its notes."""
        if self.base is None:
            return []
        self.base.fit(data.cases, validation=data.validation, voxels=data.voxels, seed=data.seed)
        assert self.base.fit_report is not None
        return [f"base {self.base.id}: {note}" for note in self.base.fit_report.notes]


def base_calibrator(base: Base) -> Calibrator | None:
    """The calibrator that ``base`` names.

    Examples:
        >>> base_calibrator("ts"), base_calibrator(None)
        (TemperatureScaling(), None)
    """
    if base is None or isinstance(base, Calibrator):
        return base
    name, arguments = (base, {}) if isinstance(base, str) else (base.get("id"), base.get("arguments", {}))
    check_name("base", name, CALIBRATORS, expected=f"a calibrator or one of {', '.join(CALIBRATORS)}")
    return CALIBRATORS[str(name)](**arguments)


def mapped(cases: CaseSet, base: Calibrator | None) -> CaseSet:
    """The cases with logits that went through the base."""
    if base is None:
        return cases

    def ref(old: CaseRef) -> CaseRef:
        return CaseRef(old.id, lambda: Case(_MappedSource(old.open(), base)))

    return CaseSet([ref(old) for old in cases.refs], cases.num_classes, cases.ignore_index)


class _MappedSource:
    """A case with logits that went through a calibrator."""

    def __init__(self, case: Case, base: Calibrator) -> None:
        source: CaseSource = case.source
        self.id, self.batch, self.num_classes = source.id, source.batch, source.num_classes
        self.spatial, self.spacing, self.ignore_index = source.spatial, source.spacing, source.ignore_index
        self.sliceable = source.sliceable and not base.spatial
        self.labels, self.mask, self.image, self.posterior = source.labels, source.mask, source.image, source.posterior
        self._case, self._base = case, base

    @torch.no_grad()
    def logits(self, rows: slice) -> Tensor:
        """Calibrated log-probabilities of some rows."""
        if not self._base.spatial:
            log_probs: Tensor = self._base(self._case.rows("logits", rows))
            return log_probs
        return case_scores(self._case, self._base)[:, :, rows]
