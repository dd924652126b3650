"""segcal makes the confidence of segmentation networks true."""

from segcal import calibrators, fusion, losses, metrics, regions, scores, synthetic
from segcal.calibrators import CALIBRATORS, load
from segcal.cases import CaseSet, open_cases, write_dataset
from segcal.errors import SegcalError
from segcal.evaluation.apply import apply
from segcal.evaluation.check import CheckReport, check
from segcal.evaluation.evaluate import evaluate
from segcal.evaluation.results import Results
from segcal.losses import LOSSES
from segcal.metrics import METRICS
from segcal.regions import REGIONS
from segcal.statistics import VoxelStatistics
from segcal.study import Study, compare
from segcal.study.forecast import Forecast, plan
from segcal.study.tuning import tune
from segcal.types import Case, Chunk, FitReport

__version__ = "0.1.0"

__all__ = [
    "CALIBRATORS",
    "LOSSES",
    "METRICS",
    "REGIONS",
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
    "calibrators",
    "check",
    "compare",
    "evaluate",
    "fusion",
    "load",
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
