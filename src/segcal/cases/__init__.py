"""Cases from files or batches: the only code that touches files."""

from segcal.cases.batches import Source, cases_from
from segcal.cases.caseset import CaseRef, CaseSet, Split
from segcal.cases.open import open_cases
from segcal.cases.output import OutputFolder
from segcal.cases.pack import PackReport, write_dataset

__all__ = [
    "CaseRef",
    "CaseSet",
    "OutputFolder",
    "PackReport",
    "Source",
    "Split",
    "cases_from",
    "open_cases",
    "write_dataset",
]
