"""Meta-Cal, in the form that keeps the labels: what is uncertain becomes uniform, the rest is temperature-scaled."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.calibrators.base import Calibrator
from segcal.errors import InputError
from segcal.fitting.data import FitData, Fitted
from segcal.fitting.first_pass import FirstPass, SampleNLL
from segcal.fitting.limits import BETA, COUNT, HIGHEST, LOWEST, Limits
from segcal.fitting.measured import Detection, compared, detection_counts, mean_loss
from segcal.scores import log_probabilities
from segcal.solvers import Solution, newton_1d

__all__ = ["MetaCal"]

# Two parameters need no more.
_VOXELS = 200_000
#: 1 / temperature of what is rejected: uniform, but for the order.
REJECTED = 1e-10


class MetaCal(Calibrator):
    """``meta-cal``: ``S(z / 1e10)`` where the entropy is above gamma, ``S(z / T)`` elsewhere.

    Ma and Blaschko (ICML 2021) rank predictions by entropy and answer at random above a threshold; here, as in Wang et
    al. (2023), the distribution becomes uniform there and the label stays. Gamma is the entropy that a share
    ``miscoverage`` of the correct predictions exceeds, and T has the least NLL of what lies below. Where rejecting
    makes the NLL of the fit data worse than the identity's, nothing is rejected, and this is temperature scaling.

    Args:
        miscoverage: Share of the correct predictions that may be rejected.

    Gamma and T rest on at most 200,000 voxels, each standing for as many as its stratum has, whatever ``voxels`` is:
    two numbers need no more. The NLL before and after is always that of all voxels.

    ``detection`` says how well the threshold finds mispredictions, on the validation cases where some were given and
    on the fit data otherwise; ``fit_report.notes`` repeats it.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), plant=[segcal.synthetic.Temperature(4.0)])
        >>> calibrator = MetaCal(miscoverage=0.01).fit(cases)
        >>> calibrator.temperature > 2, calibrator.detection.precision > 0.3
        (True, True)
    """

    id = "meta-cal"
    title = "Meta-Cal"
    translation_invariant = True
    preserves = "order"
    beta: Tensor
    gamma: Tensor
    counts: Tensor

    def __init__(self, miscoverage: float = 0.05) -> None:
        super().__init__()
        if not 0 <= miscoverage < 1:
            raise InputError(f"miscoverage is {miscoverage}", expected="a share from 0 to less than 1")
        self.miscoverage = float(miscoverage)
        self.register_buffer("beta", torch.ones((), dtype=torch.float64))  # 1 / T
        self.register_buffer("gamma", torch.zeros((), dtype=torch.float64))
        self.register_buffer("counts", torch.zeros(2, 2, dtype=torch.float64))

    @property
    def temperature(self) -> float:
        """T."""
        return 1 / float(self.beta)

    def _summary(self) -> str:
        return f"T = {self.temperature:.4g}, uniform above an entropy of {float(self.gamma):.4g} nats"

    @property
    def detection(self) -> Detection:
        """How well the threshold finds mispredictions."""
        return Detection.of(self.counts)

    def limits(self) -> dict[str, Limits]:
        """An entropy beyond which nothing is rejected, and temperatures of ``ts``."""
        assert self.num_classes is not None
        return {"beta": BETA, "gamma": Limits(0.0, _nothing(self.num_classes)), "counts": COUNT}

    def _scores(self, logits: Tensor) -> Tensor:
        rejected = (entropy(logits) > self.gamma.to(logits)).unsqueeze(1)
        gaps = logits - logits.amax(1, keepdim=True)
        return torch.where(rejected, gaps * REJECTED, gaps * self.beta.to(gaps))

    def _fit(self, data: FitData) -> Fitted:
        first = FirstPass.over(data.cases, _VOXELS, data.seed)
        sample = first.sample
        if data.validation is not None:
            sample = FirstPass.over(data.validation, _VOXELS, data.seed).sample
        uncertain = entropy(sample.logits.double())
        wrong = sample.logits.argmax(1) != sample.labels
        notes = []
        if data.voxels == "all" and len(sample) < sample.total:
            notes.append(f"gamma and T rest on {len(sample):,} voxels: voxels = 'all' does not change that")
        if bool(wrong.all()) or not bool(wrong.any()):
            kind = "correct prediction" if bool(wrong.all()) else "misprediction"
            notes.append(f"no {kind} to rank the others against: nothing is rejected")
            self.gamma.fill_(_nothing(first.num_classes))
        else:
            self.gamma.fill_(_exceeded(uncertain[~wrong], sample.weights[~wrong.numpy()], self.miscoverage))
        self.counts = detection_counts(wrong, uncertain > self.gamma, sample.weights)
        solution = self._set_temperature(first)
        after = mean_loss(data.cases, self).nll
        if not after <= first.nll:
            worse = f"rejecting gives an NLL of {compared(after, first.nll)} that of the identity ({self.detection})"
            notes.append(f"{worse}: nothing is rejected")
            self.gamma.fill_(_nothing(first.num_classes))
            self.counts = detection_counts(wrong, uncertain > self.gamma, sample.weights)
            solution = self._set_temperature(first)
            after = mean_loss(data.cases, self).nll
        if not after <= first.nll:
            self.beta.fill_(1.0)
            after = first.nll
        return Fitted(
            nll_before=first.nll,
            nll_after=after,
            converged=solution.converged,
            certificate=solution.certificate,
            iterations=solution.iterations,
            voxels_used=len(first.sample) + (0 if data.validation is None else len(sample)),
            notes=[*notes, str(self.detection)],
        )

    def _set_temperature(self, first: FirstPass) -> Solution[float]:
        """T by the NLL of what is not rejected."""
        sample = first.sample
        kept = entropy(sample.logits.double()) <= self.gamma
        solution = newton_1d(SampleNLL.of(sample).where(kept), 1.0, (LOWEST, HIGHEST))
        self.beta.fill_(solution.value)
        return solution


def entropy(logits: Tensor) -> Tensor:
    """Of the softmax, in nats: ``(N, C, *spatial)`` to ``(N, *spatial)``.

    Examples:
        >>> entropy(torch.zeros(1, 4)).exp()
        tensor([4.])
    """
    log_p = log_probabilities(logits)
    p = log_p.exp()
    return -torch.where(p > 0, p * log_p, 0.0).sum(1)


def _nothing(num_classes: int) -> float:
    """An entropy that no distribution exceeds."""
    return math.log(num_classes) + 1


def _exceeded(values: Tensor, weights: NDArray[np.float64], share: float) -> float:
    """The smallest of the values that at most this share of the weight exceeds."""
    ordered, order = values.sort()
    beyond = 1 - np.cumsum(weights[order.numpy()]) / weights.sum()
    return float(ordered[int(np.argmax(beyond <= share + 1e-12))])
