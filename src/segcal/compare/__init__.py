"""``compare``: which calibrator to deploy, and how sure that is."""

from segcal.compare.engine import compare
from segcal.compare.progress import Step
from segcal.compare.study import Study

__all__ = ["Step", "Study", "compare"]
