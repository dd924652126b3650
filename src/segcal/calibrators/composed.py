"""One calibrator after another: how the first is named, stored and fitted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from segcal.calibrators.base import CALIBRATORS, Calibrator
from segcal.errors import check_name
from segcal.fitting.data import FitData
from segcal.scores import at_least_float32, keep_argmax, only_possible

#: A calibrator, its id, its id and arguments as a file stores them, or None.
Base = str | Mapping[str, Any] | Calibrator | None

_PREFIX = "base."


class ComposedCalibrator(Calibrator):
    """A calibrator that includes another one, its ``base``, which is fitted, stored and loaded with it."""

    def __init__(self, base: Base) -> None:
        super().__init__()
        self.base = base_calibrator(base)
        self.image_channels = 0 if self.base is None else self.base.image_channels

    @abstractmethod
    def _of_base(self, scores: Tensor) -> Tensor:
        """Calibrated scores, up to a constant per voxel, of those that the base gives, or of the logits without one."""

    def _scores(self, logits: Tensor) -> Tensor:
        return self._of_base(logits if self.base is None else self.base(logits))

    def _log_probs(self, logits: Tensor | Sequence[Tensor], image: Tensor | None) -> Tensor:
        if self.base is None or not self.image_channels:
            return super()._log_probs(logits, image)
        logits = self._checked(logits, image)
        scores = self._of_base(self.base(only_possible(at_least_float32(logits)), image))
        log_probs = scores.log_softmax(1).to(logits.dtype)
        return log_probs if self.preserves is None else keep_argmax(log_probs, logits.argmax(1))

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
