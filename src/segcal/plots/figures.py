"""The diagrams that belong to the results of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from segcal.evaluation.results import Results
from segcal.metrics.reliability import Reliability
from segcal.plots.reliability import classwise_diagram, reliability_diagram

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def reliability_figures(results: Results) -> Iterator[tuple[str, Figure]]:
    """Two named figures for every region: a diagram of the top label with its bootstrap band, and one per class.

    Those of a channel of multi-label data have ``channel-`` and its number before a slash, and its name in the title.

    Examples:
        >>> import segcal
        >>> results = segcal.evaluate(segcal.synthetic.scenes(2, size=(32, 40)), metrics=("ece",))
        >>> [name for name, figure in reliability_figures(results)]
        ['reliability-everything', 'classes-everything']
    """
    for index, channel in enumerate(results.channels):
        for name, figure in _figures(results.channel(channel), f"{channel}: "):
            yield f"channel-{index}/{name}", figure
    if not results.channels:
        yield from _figures(results, "")


def _figures(results: Results, before: str) -> Iterator[tuple[str, Figure]]:
    for region, found in results.reliability.items():
        cases = [_reliability(bins) for bins in found["cases"].values()]
        yield f"reliability-{region}", reliability_diagram(cases, title=before + region)
        classes = [_reliability(bins) for bins in found["classes"]]
        names = results.about.get("class_names")
        yield f"classes-{region}", classwise_diagram(classes, class_names=names, title=before + region)


def _reliability(bins: Mapping[str, Sequence[float]]) -> Reliability:
    """What ``Results.to_json`` keeps, as arrays again."""
    return Reliability(
        np.array(bins["count"], np.int64),
        np.array(bins["confidence"], np.float64),
        np.array(bins["correct"], np.int64),
    )
