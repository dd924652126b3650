"""Ensemble temperature scaling: the mixture of scaled, original and uniform probabilities."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators.base import Calibrator, ParameterCount
from segcal.calibrators.temperature import HasTemperature, TemperatureScaling
from segcal.cases import CaseSet
from segcal.cases.shares import added, in_shares
from segcal.errors import check_name
from segcal.fitting.data import FitData, Fitted, over_chunks
from segcal.fitting.first_pass import FirstPass
from segcal.fitting.limits import BETA, Limits
from segcal.kernels import AffineMap, fast_maps
from segcal.kernels.dispatch import fast_rows
from segcal.kernels.pieces_cpu import in_ranges
from segcal.parallel.threads import blas_threads
from segcal.scores import keep_argmax, keep_order, only_possible, some_impossible
from segcal.solvers import Newton, minimise
from segcal.types import Case, Chunk, FloatArray

__all__ = ["EnsembleTemperatureScaling"]

T = TypeVar("T")
Objective = Literal["nll", "mse"]
Terms = tuple[float, FloatArray, FloatArray]

# Voxels that the mixture is fitted to.
MIXTURE_VOXELS = 400_000
# The weights to start from: inside the simplex, so that no label has probability zero.
_START = (0.9, 0.05, 0.05)
# The weights of temperature scaling and of the identity.
_ALONE, _IDENTITY = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)


class EnsembleTemperatureScaling(HasTemperature, Calibrator):
    """``ets``: ``w1 S(z / T) + w2 S(z) + w3 / C``, weights on the simplex (Zhang et al., ICML 2020). Keeps the order.

    T is that of ``ts``. The weights then minimise the NLL, which is convex, or with ``objective="mse"`` the squared
    error, as in the paper (on a sample, whatever ``voxels`` is).

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), plant=[segcal.synthetic.Temperature(2.0)])
        >>> calibrator = EnsembleTemperatureScaling().fit(cases)
        >>> calibrator.fit_report.converged, round(float(calibrator.weights.sum()), 6)
        (True, 1.0)
    """

    id = "ets"
    title = "Ensemble temperature scaling"
    translation_invariant = True
    preserves = "order"
    weights: Tensor

    def __init__(self, objective: Objective = "nll") -> None:
        super().__init__()
        check_name("objective", objective, ("nll", "mse"))
        self.objective = objective
        self.register_buffer("beta", torch.ones((), dtype=torch.float64))
        self.register_buffer("weights", torch.tensor(_IDENTITY, dtype=torch.float64))

    def limits(self) -> dict[str, Limits]:
        """The bounds of ``ts``, and the simplex."""
        return {"beta": BETA, "weights": Limits(0.0, 1.0, total=1.0)}

    def _scores(self, logits: Tensor) -> Tensor:
        parts = _log_parts(logits, self.beta.to(logits))
        weights = self.weights.to(logits).log()
        scores = torch.stack([part + weight for part, weight in zip(parts, weights, strict=True)]).logsumexp(0)
        return keep_order(torch.where(torch.isneginf(logits), -torch.inf, scores), logits)

    def _fast(self, kernels: Any, logits: Tensor) -> Any:
        scaled, plain, uniform = self.weights.log().tolist()
        if logits.is_cuda:
            return kernels.apply_mixture(logits, float(self.beta), (scaled, plain, uniform))
        if not AffineMap(self.beta).suits(logits) or (uniform > -math.inf and some_impossible(logits)):
            return None  # the uniform part covers only possible classes, whose number varies
        if plain == uniform == -math.inf:
            return kernels.apply_temperature(logits, float(self.beta))
        exact = logits.float()
        log_probs: Tensor = kernels.apply_temperature(exact, float(self.beta)).add_(scaled)
        if plain > -math.inf:
            log_probs = torch.logaddexp(log_probs, kernels.apply_temperature(exact, 1.0).add_(plain))
        if uniform > -math.inf:
            log_probs = torch.logaddexp(log_probs, torch.tensor(uniform - math.log(logits.shape[1])))
        log_probs, winner = kernels.keep_order(log_probs, exact)
        return keep_argmax(log_probs.to(logits.dtype), winner)

    @blas_threads(1)
    def _fit(self, data: FitData) -> Fitted:
        first = FirstPass.over(data.cases, MIXTURE_VOXELS, data.seed)
        scaling = TemperatureScaling()
        scaled = scaling.refine(data.cases, first.beta(), first.nll, first.total)
        sample, streaming = first.sample, data.voxels == "all" and not first.sample.complete
        weights_of_sample = sample.weights / sample.total
        drawn = _log_parts_of_rows(sample.logits, sample.labels, scaling.beta)

        def total(function: Callable[[FloatArray, FloatArray], T]) -> T:
            """The function of the label's log-probabilities ``(n, 3)`` and the voxels' weights, summed over all."""
            if not streaming:
                return function(drawn, weights_of_sample)
            sums: T = in_shares(_mixture_sums, data.cases, function, scaling.beta, 1 / first.total, merge=added)
            return sums

        if self.objective == "nll":
            solution = minimise(Newton(lambda w: _nll(w, drawn, weights_of_sample)), _START, 0.0, 1.0)
            if streaming:
                # Start inside the simplex: at the sample's optimum, a label that was not drawn may be impossible.
                whole = Newton(lambda w: total(partial(_nll, w)))
                solution = minimise(whole, 0.999 * solution.value + 0.001 * np.array(_START), 0.0, 1.0)
            weights, converged, certificate = solution.value, solution.converged, solution.certificate
            steps = solution.iterations
        else:
            weights = _least_squares(sample.logits, sample.labels, weights_of_sample, scaling.beta)
            converged, certificate, steps = True, 0.0, 0
        weights = weights / weights.sum()

        # The NLL of the temperature is that of all voxels. What the mixture adds to it is small, and may be sampled.
        rise = total(partial(_mean_rise, weights))
        notes, used = list(scaled.notes), first.total if streaming else len(sample)
        if used < first.total:
            notes.append(f"weights fitted to {sample.note(_rise(weights, drawn))}")
        if rise > (0.0 if self.objective == "nll" else total(partial(_mean_rise, np.array(_IDENTITY)))):
            notes.append("no mixture is better than the temperature alone, which is kept")
            weights, rise = np.array(_ALONE), 0.0
        self.beta.copy_(scaling.beta)
        self.weights.copy_(torch.from_numpy(weights))
        converged, steps = converged and scaled.converged, scaled.iterations + steps
        return Fitted(first.nll, scaled.nll_after + rise, converged, certificate, steps, used, notes)

    def _summary(self) -> str:
        weights = " / ".join(f"{weight:.4f}" for weight in self.weights.tolist())
        return f"T = {self.temperature:.4g}, weights {weights}"

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount:
        """A temperature, and three weights that sum to one."""
        return ParameterCount(4, 3)


def _label_log_parts(logits: Tensor, labels: Tensor, beta: Tensor, valid: Tensor | None = None) -> FloatArray:
    """The label's log-probability in each of the three distributions ``(n, 3)``, for the valid voxels."""
    kernels = fast_maps(logits)
    if kernels is None or some_impossible(logits):
        parts = _log_parts(only_possible(logits), beta.to(logits))
    else:
        scaled, plain = (kernels.apply_temperature(logits, scale) for scale in (float(beta), 1.0))
        parts = scaled, plain, torch.tensor(-math.log(logits.shape[1])).expand(logits.shape)
    index = labels.long().clamp(0, logits.shape[1] - 1).unsqueeze(1)  # ignored labels may have any value
    chosen = [part.gather(1, index)[:, 0] for part in parts]
    flat = [part.flatten() if valid is None else part[valid] for part in chosen]
    return torch.stack(flat, 1).cpu().double().numpy()


def _log_parts_of_rows(logits: Tensor, labels: Tensor, beta: Tensor) -> FloatArray:
    """The same for the rows ``(n, C)`` of a sample, in float64."""
    if (loops := fast_rows(logits)) is None:
        return _label_log_parts(logits.double(), labels, beta)
    given, out = (logits.contiguous().numpy(), labels.contiguous().numpy(), float(beta)), np.empty((len(logits), 3))
    in_ranges(lambda start, stop: loops.mixture_parts(*given, start, stop, out), len(out))
    return out


def _log_parts(logits: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logarithms of the three distributions ``(N, C, *spatial)``; the uniform one covers only possible classes."""
    relative = logits - logits.amax(1, keepdim=True)
    possible = (~torch.isneginf(logits)).to(logits)
    uniform = -possible.sum(1, keepdim=True).log()
    return (relative * beta).log_softmax(1), relative.log_softmax(1), uniform.expand_as(logits)


def _nll(w: FloatArray, log_parts: FloatArray, weights: FloatArray) -> Terms:
    """Value, gradient and Hessian of ``sum(w) - mean log(parts w)``, whose minimum over ``w >= 0`` sums to one.

    The terms of parts of the voxels add up to those of all.
    """
    share, loops = float(weights.sum()), fast_rows(torch.from_numpy(log_parts))
    if loops is None:
        parts = np.exp(log_parts)
        mixed = np.maximum(parts @ w, np.finfo(np.float64).tiny)
        ratio = parts / mixed[:, None]
        with np.errstate(over="ignore", invalid="ignore"):  # near w = 0, which solvers try and reject
            value, gradient, hessian = -(weights @ np.log(mixed)), -(weights @ ratio), (ratio.T * weights) @ ratio
    else:
        given = log_parts, weights, np.asarray(w)
        found = in_ranges(lambda start, stop: loops.add_mixture(*given, start, stop), len(weights))
        values, gradients, hessians = zip(*found, strict=True)
        value, gradient, hessian = sum(values), np.sum(gradients, 0), np.sum(hessians, 0)
    return float(share * w.sum() + value), share + gradient, hessian


def _rise(w: FloatArray, log_parts: FloatArray) -> FloatArray:
    """By how much each voxel's NLL ``(n,)`` exceeds that of temperature scaling."""
    rise, logs = np.empty(len(log_parts)), np.log(w[w > 0])

    def part(start: int, stop: int) -> None:
        own = log_parts[start:stop]
        rise[start:stop] = own[:, 0] - np.logaddexp.reduce(own[:, w > 0] + logs, axis=1)

    in_ranges(part, len(rise))
    return rise


def _mean_rise(w: FloatArray, log_parts: FloatArray, weights: FloatArray) -> float:
    return float(weights @ _rise(w, log_parts))


def _mixture_sums(cases: CaseSet, function: Callable[[FloatArray, FloatArray], T], beta: Tensor, weight: float) -> T:
    """The sum over chunks of a function of the label's log-probabilities ``(n, 3)`` and of every voxel's weight."""

    def of_chunk(_: Case, chunk: Chunk) -> T:
        log_parts = _label_log_parts(chunk.logits, chunk.labels, beta, chunk.valid)
        return function(log_parts, np.full(len(log_parts), weight))

    return reduce(added, over_chunks(cases, of_chunk))


def _least_squares(logits: Tensor, labels: Tensor, weights: FloatArray, beta: Tensor) -> FloatArray:
    """The weights on the simplex of least mean squared error, found by trying every set of positive weights."""
    gram, target = np.zeros((3, 3)), np.zeros(3)
    for few in torch.split(torch.arange(len(labels)), 2**16):
        parts = torch.stack(_log_parts(logits[few].double(), beta), 1).exp()
        own = torch.from_numpy(weights[few.numpy()])
        gram += torch.einsum("nic,njc,n->ij", parts, parts, own).numpy()
        target += (parts.gather(2, labels[few, None, None].expand(-1, 3, 1))[:, :, 0].T @ own).numpy()
    best, least = np.array(_ALONE), np.inf
    for size in (1, 2, 3):
        for chosen in itertools.combinations(range(3), size):
            index = list(chosen)
            system = np.ones((size + 1, size + 1))  # last row: the weights sum to one
            system[:size, :size], system[size, size] = gram[np.ix_(index, index)], 0
            w = np.zeros(3)
            w[index] = np.linalg.lstsq(system, np.append(target[index], 1.0), rcond=None)[0][:size]
            error = float(w @ gram @ w - 2 * target @ w)
            if (w >= 0).all() and error < least:
                best, least = w, error
    return best
