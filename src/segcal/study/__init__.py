"""``compare``: which calibrator to deploy, and how sure that is."""

from segcal.study.engine import compare
from segcal.study.progress import Step
from segcal.study.study import Study

__all__ = ["Step", "Study", "compare"]
