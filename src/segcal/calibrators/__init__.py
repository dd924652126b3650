"""Post-hoc calibrators, and their registry.

A new calibrator is one more line here: the star imports what its file lists in ``__all__``, and the registry finds its
class. The order of the lines is the order in which methods are listed. CONTRIBUTING.md shows one.

Examples:
    >>> from segcal.synthetic import Temperature, scenes
    >>> cal = CALIBRATORS["ts"]().fit(scenes(4, size=(32, 40), plant=[Temperature(2.0)]))
    >>> 1.7 < float(cal.temperature) < 2.3, cal.preserves
    (True, 'order')
"""
# ruff: noqa: I001

from __future__ import annotations

from segcal.calibrators.base import CALIBRATORS as CALIBRATORS, Calibrator as Calibrator, registered
from segcal.calibrators.loading import load as load
from segcal.calibrators.temperature import *
from segcal.calibrators.ensemble_temperature import *
from segcal.calibrators.experts import *
from segcal.calibrators.local import *
from segcal.calibrators.selective import *
from segcal.calibrators.meta import *
from segcal.calibrators.nonparametric import *
from segcal.calibrators.ensemble import *
from segcal.calibrators.trust import *

CALIBRATORS.update(registered())
