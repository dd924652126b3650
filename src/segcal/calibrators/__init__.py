"""Post-hoc calibrators, and their registry."""

from __future__ import annotations

from pathlib import Path

from segcal.calibrators import loading
from segcal.calibrators.affine import (
    DirichletCalibration,
    MatrixScaling,
    TranslationInvariantMatrixScaling,
    VectorScaling,
)
from segcal.calibrators.base import CALIBRATORS, Calibrator
from segcal.calibrators.conditional import ClassConditionalDirichlet, CMSArgmaxPreserving, CMSOrderPreserving
from segcal.calibrators.ensemble import Ensemble
from segcal.calibrators.ensemble_temperature import EnsembleTemperatureScaling
from segcal.calibrators.local import (
    ImageTemperatureScaling,
    LocalTemperatureScaling,
    TranslationInvariantLocalTemperature,
)
from segcal.calibrators.meta import MetaCal
from segcal.calibrators.nonparametric import HistogramBinning, IsotonicRegression
from segcal.calibrators.selective import SelectiveScaling
from segcal.calibrators.temperature import TemperatureScaling

__all__ = [
    "CALIBRATORS",
    "CMSArgmaxPreserving",
    "CMSOrderPreserving",
    "Calibrator",
    "ClassConditionalDirichlet",
    "DirichletCalibration",
    "Ensemble",
    "EnsembleTemperatureScaling",
    "HistogramBinning",
    "ImageTemperatureScaling",
    "IsotonicRegression",
    "LocalTemperatureScaling",
    "MatrixScaling",
    "MetaCal",
    "SelectiveScaling",
    "TemperatureScaling",
    "TranslationInvariantLocalTemperature",
    "TranslationInvariantMatrixScaling",
    "VectorScaling",
    "load",
]

# Calibrator id to class, as METHODS.md section 2 names them.
CALIBRATORS.update(
    (cls.id, cls)
    for cls in (
        TemperatureScaling,
        EnsembleTemperatureScaling,
        VectorScaling,
        MatrixScaling,
        TranslationInvariantMatrixScaling,
        DirichletCalibration,
        ClassConditionalDirichlet,
        CMSArgmaxPreserving,
        CMSOrderPreserving,
        LocalTemperatureScaling,
        TranslationInvariantLocalTemperature,
        ImageTemperatureScaling,
        SelectiveScaling,
        MetaCal,
        IsotonicRegression,
        HistogramBinning,
        Ensemble,
    )
)


def load(path: str | Path) -> Calibrator:
    """Read a calibrator that ``Calibrator.save`` wrote.

    Examples:
        >>> import tempfile, torch
        >>> calibrator = TemperatureScaling().fit(torch.randn(500, 3), torch.randint(0, 3, (500,)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     calibrator.save(f"{folder}/cal.safetensors")
        ...     load(f"{folder}/cal.safetensors").temperature == calibrator.temperature
        True
    """
    return loading.load(path, CALIBRATORS)
