"""``trust``: how sure the winner is, and how the losers share the rest, each fitted by what it needs."""

from segcal.calibrators.trust.calibrator import TrustCalibration

__all__ = ["TrustCalibration"]
