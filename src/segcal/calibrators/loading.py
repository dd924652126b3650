"""Reading calibrators from files: everything is checked before anything is allocated, and nothing is unpickled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from segcal.calibrators.storage import Stored, read_calibrator
from segcal.errors import DataError, SegcalError

if TYPE_CHECKING:
    from segcal.calibrators.base import Calibrator


def load(path: str | Path, calibrators: dict[str, type[Calibrator]]) -> Calibrator:
    """Read a calibrator that was saved; whatever is wrong with the file is a ``DataError``."""
    stored = read_calibrator(Path(path), tuple(calibrators))
    try:
        if not stored.channels:
            return _built(stored, calibrators)
        whole = calibrators[stored.id](**stored.arguments)
        channels = [_built(own, calibrators) for own in stored.channels.values()]
        return whole.take_channels(list(stored.channels), channels)
    except SegcalError as error:
        raise DataError(error.problem, where=str(path), expected=error.expected, fix=error.fix) from None
    except Exception as error:  # arguments of any kind may come, and a constructor may raise anything
        raise DataError(
            f"cannot be a calibrator '{stored.id}' ({type(error).__name__}: {error})",
            where=str(path),
            expected="what Calibrator.save wrote",
            fix="fit and save it again",
        ) from None


def _built(stored: Stored, calibrators: dict[str, type[Calibrator]]) -> Calibrator:
    """One map as it was stored."""
    calibrator = calibrators[stored.id](**stored.arguments)
    wanted = calibrator.shapes(stored.num_classes)
    tensors = calibrator.upgraded(stored.tensors)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != found:
        raise DataError(f"holds the tensors {found}", expected=f"{wanted} for '{stored.id}'")
    calibrator.allocate(stored.num_classes)
    calibrator.num_classes, calibrator.class_names = stored.num_classes, stored.class_names
    calibrator.load_state_dict(tensors)
    calibrator.fit_report = stored.fit_report
    return calibrator
