"""segcal makes the confidence of segmentation networks true."""

from segcal import scores, synthetic
from segcal.cases import CaseSet, open_cases, write_dataset
from segcal.check import CheckReport, check
from segcal.errors import SegcalError
from segcal.types import Case, Chunk

__version__ = "0.1.0"

__all__ = [
    "Case",
    "CaseSet",
    "CheckReport",
    "Chunk",
    "SegcalError",
    "check",
    "open_cases",
    "scores",
    "synthetic",
    "write_dataset",
]
