"""Meta-Cal in the form that keeps labels: uncertain predictions become uniform, the rest is temperature-scaled."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.calibrators.base import Calibrator
from segcal.calibrators.temperature import HasTemperature
from segcal.errors import InputError
from segcal.fitting.data import FitData, Fitted
from segcal.fitting.first_pass import FirstPass, SampleNLL
from segcal.fitting.limits import BETA, COUNT, HIGHEST, LOWEST, Limits
from segcal.fitting.measured import HasDetection, beside, compared, detection_counts, mean_loss, missing_kind
from segcal.scores import log_probabilities
from segcal.solvers import Solution, newton_1d

__all__ = ["MetaCal"]

# Voxels of the sample: enough for two parameters.
_VOXELS = 200_000
#: 1 / temperature of rejected voxels, which become uniform but keep their order.
REJECTED = 1e-10


class MetaCal(HasTemperature, HasDetection, Calibrator):
    """``meta-cal``: ``S(z / 1e10)`` where the entropy is above gamma, ``S(z / T)`` elsewhere.

    Ma and Blaschko (ICML 2021) rank predictions by entropy and answer at random above a threshold. Here, as in Wang et
    al. (2023), the distribution becomes uniform there and the label stays. Gamma is the entropy that a share
    ``miscoverage`` of the correct predictions exceeds; T minimises the NLL of the voxels below it. If rejection makes
    the NLL of the fit data worse than the identity's, nothing is rejected, and this is temperature scaling.

    Args:
        miscoverage: Share of the correct predictions that may be rejected.

    Gamma and T are fitted to a stratified sample of at most 200,000 voxels, whatever ``voxels`` is. The NLL before and
    after is always that of all voxels.

    ``detection`` says how well the threshold finds mispredictions, on the validation cases if some were given, else on
    the fit data; ``fit_report.notes`` repeats it.

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
    gamma: Tensor

    def __init__(self, miscoverage: float = 0.05) -> None:
        super().__init__()
        if not 0 <= miscoverage < 1:
            raise InputError(f"miscoverage is {miscoverage}", expected="a share from 0 to less than 1")
        self.miscoverage = float(miscoverage)
        self.register_buffer("beta", torch.ones((), dtype=torch.float64))  # 1 / T
        self.register_buffer("gamma", torch.zeros((), dtype=torch.float64))
        self.register_buffer("counts", torch.zeros(2, 2, dtype=torch.float64))

    def _summary(self) -> str:
        return f"T = {self.temperature:.4g}, uniform above an entropy of {float(self.gamma):.4g} nats"

    def limits(self) -> dict[str, Limits]:
        """The bounds of ``ts``, and an entropy above which nothing can be rejected."""
        assert self.num_classes is not None
        return {"beta": BETA, "gamma": Limits(0.0, _above_all_entropies(self.num_classes)), "counts": COUNT}

    def _scores(self, logits: Tensor) -> Tensor:
        rejected = (entropy(logits) > self.gamma.to(logits)).unsqueeze(1)
        gaps = logits - logits.amax(1, keepdim=True)
        return torch.where(rejected, gaps * REJECTED, gaps * self.beta.to(gaps))

    def _fit(self, data: FitData) -> Fitted:
        first = FirstPass.over(data.cases, _VOXELS, data.seed)
        sample = first.sample
        if data.validation is not None:
            sample = FirstPass.over(data.validation, _VOXELS, data.seed).sample
        uncertain, wrong = entropy(sample.logits.double()), sample.wrong
        notes = []
        if data.voxels == "all" and len(sample) < sample.total:
            notes.append(f"gamma and T are fitted to {len(sample):,} voxels: voxels = 'all' does not change that")

        def reject_above(gamma: float) -> tuple[Solution[float], float]:
            """Set gamma, and T to minimise the NLL of what is not rejected; returns the NLL of all voxels, too."""
            self.gamma.fill_(gamma)
            self.counts = detection_counts(wrong, uncertain > self.gamma, sample.weights)
            kept = entropy(first.sample.logits.double()) <= self.gamma
            solution = newton_1d(SampleNLL.of(first.sample).where(kept), 1.0, (LOWEST, HIGHEST))
            self.beta.fill_(solution.value)
            return solution, mean_loss(data.cases, self).nll

        nowhere = _above_all_entropies(first.num_classes)
        if missing := missing_kind(wrong):
            notes.append(f"no {missing} to rank the others against: nothing is rejected")
            solution, after = reject_above(nowhere)
        else:
            correct = uncertain[~wrong], sample.weights[~wrong.numpy()]
            solution, after = reject_above(beside(_exceeded(*correct, self.miscoverage), uncertain))
        if not after <= first.nll:
            worse = f"rejecting gives an NLL of {compared(after, first.nll)} that of the identity ({self.detection})"
            notes.append(f"{worse}: nothing is rejected")
            solution, after = reject_above(nowhere)
        if not after <= first.nll:
            self.beta.fill_(1.0)
            after = first.nll
        used = len(first.sample) + (0 if data.validation is None else len(sample))
        outcome = solution.converged, solution.certificate, solution.iterations
        return Fitted(first.nll, after, *outcome, used, [*notes, str(self.detection)])


def entropy(logits: Tensor) -> Tensor:
    """The entropy of the softmax in nats: ``(N, C, *spatial)`` to ``(N, *spatial)``.

    Examples:
        >>> entropy(torch.zeros(1, 4)).exp()
        tensor([4.])
    """
    log_p = log_probabilities(logits)
    p = log_p.exp()
    return -torch.where(p > 0, p * log_p, 0.0).sum(1)


def _above_all_entropies(num_classes: int) -> float:
    """An entropy that no distribution exceeds."""
    return math.log(num_classes) + 1


def _exceeded(values: Tensor, weights: NDArray[np.float64], share: float) -> float:
    """The smallest value that at most this share of the total weight exceeds."""
    ordered, order = values.sort()
    beyond = 1 - np.cumsum(weights[order.numpy()]) / weights.sum()
    return float(ordered[int(np.argmax(beyond <= share + 1e-12))])
