"""segcal makes the confidence of segmentation networks true."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segcal import calibrators, fusion, losses, metrics, regions, scores, synthetic
    from segcal.calibrators import CALIBRATORS, load
    from segcal.cases import CaseSet, cases_from, open_cases, write_dataset
    from segcal.errors import SegcalError
    from segcal.evaluation.apply import apply
    from segcal.evaluation.check import CheckReport, check
    from segcal.evaluation.evaluate import evaluate
    from segcal.evaluation.results import Results
    from segcal.integrations.onnx import export
    from segcal.losses import LOSSES
    from segcal.metrics import METRICS
    from segcal.models import CalibratedNetwork, calibrate, load_calibrated
    from segcal.regions import REGIONS
    from segcal.statistics import VoxelStatistics
    from segcal.study import Study, compare
    from segcal.study.forecast import Forecast, plan
    from segcal.study.tuning import tune
    from segcal.types import Case, Chunk, FitReport

__version__ = "0.2.0"

# Names are imported when they are first used: ``import segcal`` and ``segcal --help`` need not wait for PyTorch.
_HOMES = {
    "segcal.calibrators": ("CALIBRATORS", "load"),
    "segcal.cases": ("CaseSet", "cases_from", "open_cases", "write_dataset"),
    "segcal.errors": ("SegcalError",),
    "segcal.evaluation.apply": ("apply",),
    "segcal.evaluation.check": ("CheckReport", "check"),
    "segcal.evaluation.evaluate": ("evaluate",),
    "segcal.evaluation.results": ("Results",),
    "segcal.integrations.onnx": ("export",),
    "segcal.losses": ("LOSSES",),
    "segcal.metrics": ("METRICS",),
    "segcal.models": ("CalibratedNetwork", "calibrate", "load_calibrated"),
    "segcal.regions": ("REGIONS",),
    "segcal.statistics": ("VoxelStatistics",),
    "segcal.study": ("Study", "compare"),
    "segcal.study.forecast": ("Forecast", "plan"),
    "segcal.study.tuning": ("tune",),
    "segcal.types": ("Case", "Chunk", "FitReport"),
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CALIBRATORS",
    "LOSSES",
    "METRICS",
    "REGIONS",
    "CalibratedNetwork",
    "Case",
    "CaseSet",
    "CheckReport",
    "Chunk",
    "FitReport",
    "Forecast",
    "Results",
    "SegcalError",
    "Study",
    "VoxelStatistics",
    "apply",
    "calibrate",
    "calibrators",
    "cases_from",
    "check",
    "compare",
    "evaluate",
    "export",
    "fusion",
    "load",
    "load_calibrated",
    "losses",
    "metrics",
    "open_cases",
    "plan",
    "regions",
    "scores",
    "synthetic",
    "tune",
    "write_dataset",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'segcal' has no attribute {name!r}")
    home = _NAMES.get(name)
    value = import_module(f"segcal.{name}") if home is None else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
