"""Plots of calibration. They need the extra ``plots`` (matplotlib), which is imported when the first one is drawn.

Every function draws on ``figure`` (a matplotlib figure or subfigure, best made with ``layout="constrained"``) or on a
new one, and returns the whole figure; ``save`` writes it. pyplot and rcParams are not used.

In all plots, vermillion means overconfident and blue underconfident.
"""

from segcal.plots.boundary import BoundaryProfile, boundary_curve
from segcal.plots.case import local_reliability, spatial_maps
from segcal.plots.figures import case_figures, reliability_figures
from segcal.plots.logits import LogitHistogram, logit_magnitudes
from segcal.plots.reliability import bootstrap_band, classwise_diagram, reliability_diagram
from segcal.plots.style import class_colours, save

__all__ = [
    "BoundaryProfile",
    "LogitHistogram",
    "bootstrap_band",
    "boundary_curve",
    "case_figures",
    "class_colours",
    "classwise_diagram",
    "local_reliability",
    "logit_magnitudes",
    "reliability_diagram",
    "reliability_figures",
    "save",
    "spatial_maps",
]
