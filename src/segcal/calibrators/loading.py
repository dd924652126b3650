"""Reading calibrators from files: everything is checked before anything is allocated, and nothing is unpickled."""

from __future__ import annotations

from pathlib import Path

from segcal.calibrators.base import CALIBRATORS, Calibrator
from segcal.calibrators.storage import Stored, read_calibrator
from segcal.errors import DataError, SegcalError


def load(path: str | Path) -> Calibrator:
    """Read a calibrator that ``Calibrator.save`` wrote; whatever is wrong with the file is a ``DataError``.

    Examples:
        >>> import segcal, tempfile, torch
        >>> calibrator = segcal.calibrators.TemperatureScaling().fit(torch.randn(500, 3), torch.randint(0, 3, (500,)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     calibrator.save(f"{folder}/cal.safetensors")
        ...     load(f"{folder}/cal.safetensors").temperature == calibrator.temperature
        True
    """
    stored = read_calibrator(Path(path), tuple(CALIBRATORS))
    try:
        if not stored.channels:
            return _built(stored)
        whole = CALIBRATORS[stored.id](**stored.arguments)
        return whole.take_channels(list(stored.channels), [_built(own) for own in stored.channels.values()])
    except SegcalError as error:
        raise DataError(error.problem, where=str(path), expected=error.expected, fix=error.fix) from None
    except Exception as error:  # arguments of any kind may come, and a constructor may raise anything
        raise DataError(
            f"cannot be a calibrator '{stored.id}' ({type(error).__name__}: {error})",
            where=str(path),
            expected="what Calibrator.save wrote",
            fix="fit and save it again",
        ) from None


def _built(stored: Stored) -> Calibrator:
    """The calibrator of one map."""
    calibrator = CALIBRATORS[stored.id](**stored.arguments)
    wanted, tensors = calibrator.shapes(stored.num_classes), calibrator.upgraded(stored.tensors)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != found:
        raise DataError(f"holds the tensors {found}", expected=f"{wanted} for '{stored.id}'")
    calibrator.allocate(stored.num_classes)
    calibrator.num_classes, calibrator.class_names = stored.num_classes, stored.class_names
    calibrator.load_state_dict(tensors)
    calibrator.fit_report = stored.fit_report
    return calibrator
