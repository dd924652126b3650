"""Cases on disk: the only code that touches files."""

from segcal.cases.caseset import CaseRef, CaseSet, Split
from segcal.cases.open import open_cases
from segcal.cases.output import OutputFolder
from segcal.cases.pack import PackReport, write_dataset

__all__ = ["CaseRef", "CaseSet", "OutputFolder", "PackReport", "Split", "open_cases", "write_dataset"]
