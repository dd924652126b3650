"""``tune``: how strongly to regularise a calibrator, chosen on images it was not fitted to.

A rich map at its exact optimum overfits its calibration images. Shrinking it toward temperature scaling, by a strength
chosen on other images, keeps what generalises.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from segcal.calibrators import CALIBRATORS, Calibrator
from segcal.calibrators.experts import ExpertCalibrator
from segcal.calibrators.per_channel import for_each_channel
from segcal.cases import CaseSet, Source, cases_from
from segcal.cases.calibrated import check_classes
from segcal.cases.shares import added, in_shares
from segcal.errors import InputError, check_name, check_seed, check_whole, import_extra, naming
from segcal.evaluation.measure import CaseVoxels
from segcal.evaluation.plan import DEFAULT_BINS, Plan
from segcal.fitting.data import VoxelBudget
from segcal.fitting.expert_exact import SAMPLE_VOXELS
from segcal.fitting.first_pass import FirstPass
from segcal.metrics import Measure, brier, ece, nll
from segcal.parallel.threads import blas_threads
from segcal.statistics import EVERYTHING, VoxelStatistics
from segcal.study.settings import Select

#: The metrics of one image.
Values = dict[Select, Measure]

#: Shrinkages of the path, from infinite (temperature scaling itself) to none.
STRENGTHS = (math.inf, 1000.0, 300.0, 100.0, 30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.0)
_METRICS: dict[Select, Callable[[VoxelStatistics], Measure]] = {"nll": nll, "ece": ece, "brier": brier}
# Folds of the cross-validation without validation images.
_FOLDS = 5
#: Voxels that the calibrators of a path are fitted to. The chosen one is then fitted to the usual number.
PATH_VOXELS = 100_000


@dataclass(frozen=True)
class Trial:
    """Arguments that were tried, and the mean metrics they gave on images that were not fitted to."""

    arguments: dict[str, Any]
    nll: float
    ece: float
    brier: float
    channel: str = ""  # of multi-label data

    @classmethod
    def of(cls, arguments: dict[str, Any], images: Sequence[Values]) -> Trial:
        """Average the values of all images."""
        mean = {name: float(Measure.mean(own[name] for own in images)) for name in _METRICS}
        return cls(arguments, mean["nll"], mean["ece"], mean["brier"])


def tune(
    calibrator: Calibrator | str,
    calibration: Source,
    validation: Source | None = None,
    *,
    select: Select = "nll",
    strengths: Sequence[float] = STRENGTHS,
    trials: int = 20,
    voxels: VoxelBudget = "auto",
    seed: int = 0,
    progress: Callable[[str], None] = lambda step: None,
) -> Calibrator:
    """A fitted calibrator with the hyperparameters that do best on validation images.

    Exact expert maps (``vs``, ``ms``, ``ms-c``, ``dc``, ``cdc``, ``cms-ap``, ``cms-op``) follow a path of falling
    ``shrinkage`` toward the fitted temperature scaling; each fit starts from the one before. Without validation images,
    the strength is chosen by 5-fold cross-validation, and the map is then fitted to all images. Calibrators with a
    search space (``solver="adam"``, networks) take ``trials`` draws of Optuna's TPE sampler (extra ``tune``). Those
    without hyperparameters are simply fitted. Each channel of multi-label data is tuned on its own.

    ``select="nll"`` gives the best probabilities overall. ``"ece"`` gives the best top-label confidence, at some cost
    in NLL: rich maps lower the NLL of all classes while their top-label calibration may get worse. ``"brier"`` is in
    between.

    Args:
        calibrator: A calibrator, whose other arguments are kept, or an id of ``segcal.CALIBRATORS``.
        calibration: Images to fit to: cases, or anything else that ``segcal.cases_from`` takes.
        validation: Images to choose on.
        select: The metric to minimise, a mean over the validation images. If strengths are within a standard error of
            each other in ECE or Brier score, their NLL decides.
        strengths: The path; infinity is temperature scaling itself.
        trials: Number of draws of the sampler.
        voxels: ``"all"`` makes the final fit exact, as in ``Calibrator.fit``, and every trial of the sampler.
            Strengths of the path are always compared on a sample.
        seed: Seed of the samples, the folds and the sampler.
        progress: Called with the name of every step.

    Returns:
        The fitted calibrator; ``tuning`` lists the ``Trial`` of every choice, and the report's notes say which won.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(6, size=(32, 40), plant=[segcal.synthetic.Temperature(2.0)])
        >>> calibrator = tune("dc", cases[:4], cases[4:], strengths=(1.0, 0.01))
        >>> len(calibrator.tuning), calibrator.fit_report.nll_after < calibrator.fit_report.nll_before
        (2, True)
    """
    check_seed(seed)
    check_whole("trials", trials, 1)
    check_name("select", select, _METRICS)
    check_name("voxels", voxels, ("auto", "all"))
    if isinstance(calibrator, str):
        check_name("calibrator", calibrator, CALIBRATORS)
        calibrator = CALIBRATORS[calibrator]()
    cases, others = cases_from(calibration), None if validation is None else cases_from(validation)
    if others is not None:
        check_classes(others, cases, have="validation has", whose="calibration")
    return _Tuning(calibrator, cases, others, select, strengths, trials, voxels, seed, progress).tuned()


@dataclass(frozen=True)
class _Tuning:
    """The arguments of ``tune``, checked."""

    calibrator: Calibrator
    calibration: CaseSet
    validation: CaseSet | None
    select: Select
    strengths: Sequence[float]
    trials: int
    voxels: VoxelBudget
    seed: int
    progress: Callable[[str], None]

    def tuned(self) -> Calibrator:
        """Tune in the way that suits the calibrator."""
        if self.calibration.channel_names is not None:
            return self._channels(self.calibration.channel_names)
        if isinstance(self.calibrator, ExpertCalibrator) and self.calibrator.solver == "exact":
            return self._follow_path(self.calibrator)
        if self.calibrator.search_space:
            return self._search()
        tuned = copy.deepcopy(self.calibrator)
        tuned.fit(self.calibration, validation=self.validation, voxels=self.voxels, seed=self.seed)
        tuned.tuning = ()
        return tuned

    def _channels(self, names: Sequence[str]) -> Calibrator:
        """Tune each channel of multi-label data on its own."""

        def tuned(index: int, own: CaseSet, chosen_on: CaseSet | None) -> Calibrator:
            one = replace(self, calibrator=self.calibrator.single(), calibration=own, validation=chosen_on)
            return replace(one, progress=lambda step: self.progress(f"{names[index]}: {step}")).tuned()

        channels = for_each_channel(tuned, self.calibration, self.validation)
        whole = self.calibrator.single().take_channels(names, channels)
        whole.tuning = tuple(
            replace(trial, channel=name) for name, own in zip(names, channels, strict=True) for trial in own.tuning
        )
        return whole

    def _follow_path(self, calibrator: ExpertCalibrator) -> Calibrator:
        """Fit with falling strengths, choose the best on other images, and fit with that strength."""
        calibration, validation, select, seed = self.calibration, self.validation, self.select, self.seed
        if not self.strengths or not all(s >= 0 for s in self.strengths):
            raise InputError(f"strengths are {tuple(self.strengths)}", expected="penalties, zero or more, at least one")
        calibrator.check_size(calibration.num_classes)
        falling = sorted(set(self.strengths), reverse=True)
        if validation is not None:
            parts = [(calibration, validation)]
        else:
            _check_two_groups(calibration)
            parts = calibration.folds(min(_FOLDS, len(set(calibration.case_groups.values()))), seed=seed)
        values: list[list[Values]] = [[] for _ in falling]
        for number, (fitted_to, chosen_on) in enumerate(parts):
            self.progress(f"path {number + 1} of {len(parts)}")
            first = FirstPass.over(fitted_to, SAMPLE_VOXELS, seed)
            path = _path(calibrator, first, fitted_to, falling)
            for own, images in zip(values, _measure(path, chosen_on), strict=True):
                own += images
        tried = [Trial.of({"shrinkage": strength}, own) for strength, own in zip(falling, values, strict=True)]
        best = _choose(values, select)
        self.progress("fitting with the strength chosen")
        tuned = type(calibrator)(**{**calibrator.arguments(), "shrinkage": falling[best]})
        if self.voxels == "all":
            tuned.fit(calibration, voxels="all", seed=seed)
        else:
            if validation is None:
                first = FirstPass.over(calibration, SAMPLE_VOXELS, seed)
            with blas_threads(1):
                tuned.fit_from(first, calibration, path[best])
        chosen_on_what = "validation images" if validation is not None else f"{len(parts)} folds of left-out images"
        alike = "" if select == "nll" else f" among those of {select} within a standard error of the lowest"
        note = f"of {len(tried)} tried, shrinkage {falling[best]:g} has the lowest nll{alike}, on {chosen_on_what}"
        return _with_trials(tuned, tried, note)

    def _search(self) -> Calibrator:
        """Search hyperparameters with Optuna."""
        optuna = import_extra("optuna", "tune", f"tuning '{self.calibrator.id}'")
        calibration, validation, select, seed = self.calibration, self.validation, self.select, self.seed
        if validation is None:
            _check_two_groups(calibration)
            calibration, validation, _ = calibration.split(0.8, 0.2, 0.0, seed=seed)
        tried: list[Trial] = []
        fitted: list[Calibrator] = []

        def objective(trial: Any) -> float:
            self.progress(f"trial {len(tried) + 1} of {self.trials}")
            arguments = {name: values.suggest(trial, name) for name, values in self.calibrator.search_space.items()}
            candidate = type(self.calibrator)(**{**self.calibrator.arguments(), **arguments})
            candidate.fit(calibration, validation=validation, voxels=self.voxels, seed=seed)
            tried.append(Trial.of(arguments, _measure([candidate], validation)[0]))
            value: float = getattr(tried[-1], select)
            if min(tried, key=lambda trial: getattr(trial, select)) is tried[-1]:  # the first of equal ones
                fitted[:] = [candidate]
            return value

        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            sampler = optuna.samplers.TPESampler(seed=seed)
            optuna.create_study(sampler=sampler).optimize(objective, n_trials=self.trials)
        finally:
            optuna.logging.set_verbosity(before)
        best = min(tried, key=lambda trial: getattr(trial, select))
        chosen = ", ".join(f"{name} {value:.3g}" for name, value in best.arguments.items())
        return _with_trials(fitted[0], tried, f"{chosen} has the lowest validation {select} of {len(tried)} trials")


def _check_two_groups(cases: CaseSet) -> None:
    if len(set(cases.case_groups.values())) < 2:
        what = "one case" if len(cases) < 2 else f"{len(cases)} cases of one group"
        raise InputError(f"{what} and no validation cases", expected="at least two cases (groups) to choose by")


def _choose(values: Sequence[Sequence[Values]], select: Select) -> int:
    """The index of the best strength, from the values of all images at each strength.

    ECE and Brier score differ little between strengths. So all strengths count as equal whose excess over the lowest
    mean is within its own standard error (paired by image), and the one of them with the lowest NLL wins.
    """
    table = {name: np.array([[own[name] for own in images] for images in values]) for name in ("nll", select)}
    if np.isnan(table["nll"]).all():
        raise InputError("no valid voxel in the validation images", expected="labels to choose a strength by")
    means = np.nanmean(table[select], 1)
    excess = table[select] - table[select][np.argmin(means)]
    images = np.maximum(1, np.isfinite(excess).sum(1))
    alike = np.nanmean(excess, 1) <= (0 if select == "nll" else np.nanstd(excess, 1) / np.sqrt(images))
    return int(np.argmin(np.where(alike, np.nanmean(table["nll"], 1), np.inf)))


def _path(
    calibrator: ExpertCalibrator, first: FirstPass, cases: CaseSet, strengths: Sequence[float]
) -> list[ExpertCalibrator]:
    """Calibrators fitted with each strength to the same part of the sample, which is enough to compare them."""
    part = replace(first, sample=first.sample.thin(PATH_VOXELS)) if len(first.sample) > PATH_VOXELS else first
    path: list[ExpertCalibrator] = []
    with blas_threads(1):
        for strength in strengths:
            arguments = {**calibrator.arguments(), "shrinkage": strength}
            path.append(type(calibrator)(**arguments).fit_from(part, cases, path[-1] if path else None))
    return path


def _measure(calibrators: Sequence[Calibrator], cases: CaseSet) -> list[list[Values]]:
    """For each calibrator, the metrics of every case. The cases are read once."""
    found = in_shares(_case_values, cases, calibrators, merge=added)
    return [list(own) for own in zip(*(found[name] for name in cases.ids), strict=True)]


def _case_values(cases: CaseSet, calibrators: Sequence[Calibrator]) -> dict[str, list[Values]]:
    """By case, the metrics of each calibrator."""
    plan, threads = Plan.make(tuple(_METRICS), (EVERYTHING,)), torch.get_num_threads()
    found = {}
    for case in cases:
        with naming(case=case.id):
            voxels = CaseVoxels(plan, case, dict(enumerate(calibrators)), threads)
            own = [VoxelStatistics(cases.num_classes, (DEFAULT_BINS,), classwise=False) for _ in calibrators]
            for index, view, piece in voxels.pieces():
                view.add_to(own[index], piece)
        found[case.id] = [{name: metric(one) for name, metric in _METRICS.items()} for one in own]
        del case
    return found


def _with_trials(calibrator: Calibrator, tried: Sequence[Trial], note: str) -> Calibrator:
    assert calibrator.fit_report is not None
    calibrator.fit_report = replace(calibrator.fit_report, notes=(note, *calibrator.fit_report.notes))
    calibrator.tuning = tuple(tried)
    return calibrator
