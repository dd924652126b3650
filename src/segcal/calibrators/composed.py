"""One calibrator after another: how the one that comes first is named, stored, fitted and passed through."""

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

#: A calibrator, its id, its id and arguments as ``describe`` gives them, or none.
Base = str | Mapping[str, Any] | Calibrator | None


def base_calibrator(base: Base) -> Calibrator | None:
    """The calibrator that is meant.

    Examples:
        >>> base_calibrator("ts"), base_calibrator(None)
        (TemperatureScaling(), None)
    """
    if base is None or isinstance(base, Calibrator):
        return base
    name, arguments = (base, {}) if isinstance(base, str) else (base.get("id"), base.get("arguments", {}))
    check_name("base", name, CALIBRATORS, expected=f"a calibrator or one of {', '.join(CALIBRATORS)}")
    return CALIBRATORS[str(name)](**arguments)


def describe(base: Calibrator | None) -> dict[str, Any] | None:
    """Id and arguments of the base, as a file stores them."""
    return None if base is None else {"id": base.id, "arguments": base.arguments()}


def allocate(base: Calibrator | None, num_classes: int) -> None:
    """Make the base ready for parameters that are loaded."""
    if base is not None:
        base.allocate(num_classes)
        base.num_classes = num_classes


def base_shapes(base: Calibrator | None, num_classes: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the base's tensors, by their names in what it is the base of."""
    shapes = {} if base is None else base.shapes(num_classes)
    return {f"base.{name}": shape for name, shape in shapes.items()}


def fit_base(base: Calibrator, data: FitData) -> list[str]:
    """Fit the base; what there is to note."""
    base.fit(data.cases, validation=data.validation, voxels=data.voxels, seed=data.seed)
    assert base.fit_report is not None
    return [f"base {base.id}: {note}" for note in base.fit_report.notes]


def mapped(cases: CaseSet, base: Calibrator | None) -> CaseSet:
    """The cases as the base leaves them."""
    if base is None:
        return cases

    def ref(old: CaseRef) -> CaseRef:
        return CaseRef(old.id, lambda: Case(_MappedSource(old.open(), base)))

    return CaseSet([ref(old) for old in cases.refs], cases.num_classes, cases.ignore_index)


class _MappedSource:
    """A case whose logits went through a calibrator."""

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
