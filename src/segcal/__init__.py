"""segcal makes the confidence of segmentation networks true."""

from segcal import metrics, regions, scores, synthetic
from segcal.cases import CaseSet, open_cases, write_dataset
from segcal.check import CheckReport, check
from segcal.errors import SegcalError
from segcal.evaluate import evaluate
from segcal.metrics import METRICS
from segcal.regions import REGIONS
from segcal.results import Results
from segcal.statistics import VoxelStatistics
from segcal.types import Case, Chunk

__version__ = "0.1.0"

__all__ = [
    "METRICS",
    "REGIONS",
    "Case",
    "CaseSet",
    "CheckReport",
    "Chunk",
    "Results",
    "SegcalError",
    "VoxelStatistics",
    "check",
    "evaluate",
    "metrics",
    "open_cases",
    "regions",
    "scores",
    "synthetic",
    "write_dataset",
]
