"""A user's model with a calibrator behind it: fitted to a loader, used as one module, kept in one file."""

from segcal.models.from_loader import calibrate
from segcal.models.network import CalibratedNetwork, load_calibrated

__all__ = ["CalibratedNetwork", "calibrate", "load_calibrated"]
