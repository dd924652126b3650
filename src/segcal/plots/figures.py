"""The figures of an evaluation: diagrams of its results, and pictures of the cases behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from segcal.cases.calibrated import AnyCalibrator, case_scores, of_channel, score_pieces
from segcal.cases.caseset import CaseSet
from segcal.evaluation.results import Results
from segcal.files.atomic import file_name
from segcal.plots import style
from segcal.plots.boundary import BoundaryProfile, boundary_curve
from segcal.plots.case import local_reliability, spatial_maps
from segcal.plots.logits import LogitHistogram, logit_magnitudes
from segcal.plots.reliability import classwise_diagram, ece, from_bins, reliability_diagram
from segcal.regions import PATCH_SIZE, CaseRegions

# How many cases get pictures of their own.
_CASES_SHOWN = 4


def reliability_figures(results: Results) -> Iterator[tuple[str, style.Figure]]:
    """Two named figures for every region: the top-label diagram with its bootstrap band, and one diagram per class.

    For multi-label data, names begin with ``channel-``, the channel's number and a slash, and titles with its name.

    Examples:
        >>> import segcal
        >>> results = segcal.evaluate(segcal.synthetic.scenes(2, size=(32, 40)), metrics=("ece",))
        >>> [name for name, figure in reliability_figures(results)]
        ['reliability-everything', 'classes-everything', 'reliability-boundary', 'classes-boundary']
    """
    for _, own, prefix, channel in _channels(results):
        for region, found in own.reliability.items():
            title = f"{channel}: {region}" if channel else region
            cases = [from_bins(bins) for bins in found["cases"].values()]
            yield f"{prefix}reliability-{region}", reliability_diagram(cases, title=title)
            classes = [from_bins(bins) for bins in found["classes"]]
            names = own.about.get("class_names")
            yield f"{prefix}classes-{region}", classwise_diagram(classes, class_names=names, title=title)


def case_figures(
    results: Results,
    cases: CaseSet,
    calibrator: AnyCalibrator = None,
    *,
    progress: Callable[[str], None] = lambda case: None,
) -> Iterator[tuple[str, style.Figure]]:
    """Named figures that need the voxels, from one more read of the cases that were evaluated.

    ``boundary`` is the confidence and accuracy by distance to the boundary, ``logits`` the distribution of the logits,
    both over all cases. The four cases with the largest ECE also get spatial maps, and local reliability if they are
    larger than a patch.

    Args:
        results: The results of ``segcal.evaluate`` for these cases.
        cases: The cases that were evaluated.
        calibrator: The calibrator that they were evaluated through.
        progress: Called with the name of each case before it is read.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(2, size=(32, 40))
        >>> results = segcal.evaluate(cases, metrics=("ece",))
        >>> [name for name, figure in case_figures(results, cases)]
        ['cases/image-000-maps', 'cases/image-001-maps', 'boundary', 'logits']
    """
    for channel, own, prefix, title in _channels(results):
        mine = cases if channel is None else cases.channel(channel)
        through = calibrator if channel is None else of_channel(calibrator, channel)
        for name, figure in _case_figures(own, mine, through, title, progress):
            yield prefix + name, figure


def _channels(results: Results) -> Iterator[tuple[int | None, Results, str, str]]:
    """Index, results, prefix of file names and name of each channel; ordinary data count as one without a name."""
    if not results.channels:
        yield None, results, "", ""
    for index, name in enumerate(results.channels):
        yield index, results.channel(name), f"channel-{index}/", name


def _case_figures(
    results: Results, cases: CaseSet, calibrator: AnyCalibrator, title: str, progress: Callable[[str], None]
) -> Iterator[tuple[str, style.Figure]]:
    profile, histogram = BoundaryProfile(), LogitHistogram(cases.num_classes)
    worst, unit = _worst_cases(results), "voxels"
    for case in cases:
        progress(case.id)
        regions = CaseRegions(case.labels, spacing=case.spacing, ignore_index=case.ignore_index, mask=case.mask)
        unit = unit if case.spacing is None else "mm"
        for rows, scores in score_pieces(case, calibrator):
            labels, valid = case.labels[:, rows], regions.valid[:, rows]
            profile.update(scores, labels, regions.distance[:, rows], ignore_index=case.ignore_index, mask=valid)
            histogram.update(scores, labels, ignore_index=case.ignore_index, mask=valid)
        if case.id in worst and len(case.shape) in (4, 5):
            log_probs = None if calibrator is None else case_scores(case, calibrator)
            name = f"cases/{file_name(case.id)}"
            yield f"{name}-maps", spatial_maps(case, log_probs=log_probs, class_names=cases.class_names)
            if max(case.shape[2:]) > PATCH_SIZE:
                yield f"{name}-patches", local_reliability(case, log_probs=log_probs)
        del case  # Otherwise it would stay in memory while the next one is read.
    yield "boundary", boundary_curve(profile, unit=unit, title=title)
    yield "logits", logit_magnitudes(histogram, class_names=cases.class_names, title=title)


def _worst_cases(results: Results) -> list[str]:
    """The names of the cases with the largest ECE in the first region."""
    found: Mapping[str, Mapping[str, Sequence[float]]] = next(iter(results.reliability.values()))["cases"]
    errors = {name: ece(from_bins(bins)) for name, bins in found.items()}
    return sorted(errors, key=lambda name: np.nan_to_num(errors[name]), reverse=True)[:_CASES_SHOWN]
