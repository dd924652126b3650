"""Pictures of calibration; needs the extra ``plots`` (matplotlib), which is imported when the first one is drawn.

Every function draws on ``figure`` (a matplotlib figure or subfigure, best made with ``layout="constrained"``) or on a
new one, and returns the whole figure; ``save`` writes it. Neither pyplot nor rcParams are touched.

Vermillion is overconfident and blue underconfident in all of them.
"""

from segcal.plots.boundary import BoundaryProfile, boundary_curve
from segcal.plots.colours import class_colours
from segcal.plots.figures import reliability_figures
from segcal.plots.local import local_reliability
from segcal.plots.logits import LogitHistogram, logit_magnitudes
from segcal.plots.reliability import bootstrap_band, classwise_diagram, reliability_diagram
from segcal.plots.spatial import spatial_maps
from segcal.plots.style import save

__all__ = [
    "BoundaryProfile",
    "LogitHistogram",
    "bootstrap_band",
    "boundary_curve",
    "class_colours",
    "classwise_diagram",
    "local_reliability",
    "logit_magnitudes",
    "reliability_diagram",
    "reliability_figures",
    "save",
    "spatial_maps",
]
