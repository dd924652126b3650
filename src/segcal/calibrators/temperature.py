"""Temperature scaling, fitted to the exact optimum in a few passes, and its mixture with the original scores."""

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
from segcal.cases import CaseSet
from segcal.cases.shares import added, in_shares
from segcal.errors import check_name
from segcal.fitting.data import FitData, Fitted, case_seed, check_voxels, in_groups, over_chunks
from segcal.fitting.first_pass import FirstPass
from segcal.fitting.limits import BETA, HIGHEST, LOWEST, Limits
from segcal.kernels import AffineMap, Voxels, fast_maps
from segcal.kernels.dispatch import fast_rows
from segcal.kernels.fitting_passes import TemperatureSums, begin_sums, end_sums, temperature_sums
from segcal.kernels.pieces_cpu import in_ranges, in_turn
from segcal.parallel.threads import blas_threads
from segcal.scores import keep_argmax, keep_order, only_possible, some_impossible
from segcal.solvers import Newton, minimise, newton_1d
from segcal.types import Case, Chunk, FloatArray

__all__ = ["EnsembleTemperatureScaling", "TemperatureScaling"]

T = TypeVar("T")
Objective = Literal["nll", "mse"]
Terms = tuple[float, FloatArray, FloatArray]

# Voxels of the sample that gives the starting point: its optimum is within about 0.5 % of that of all voxels.
SAMPLE_VOXELS = 40_000
# The passes end at this slope of the mean NLL by beta.
TOLERANCE = 1e-4
# A last Newton step below this share of beta needs no further pass: its error is about 1e-8, the kernel's precision.
_SMALL_STEP = 0.01
# The slope to reach if the curvature is so low that the last step would be longer.
_FLAT_TOLERANCE = 1e-9
# Voxels that the mixture is fitted to.
MIXTURE_VOXELS = 400_000
# The weights to start from: inside the simplex, so that no label has probability zero.
_START = (0.9, 0.05, 0.05)
# The weights of temperature scaling and of the identity.
_ALONE, _IDENTITY = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)


class HasTemperature:
    """A calibrator with a temperature, of which it keeps the inverse, ``beta``, as a buffer."""

    beta: Tensor

    @property
    def temperature(self) -> float:
        """The temperature T."""
        return 1 / float(self.beta)


class TemperatureScaling(HasTemperature, Calibrator):
    """``ts``: ``S(z / T)``, one temperature T for all voxels (Guo et al. 2017). Translation invariant, keeps the order.

    The NLL is convex in beta = 1/T. Newton's method on a sample gives the starting point, and then two passes over all
    voxels are usually enough. At the optimum NLL and entropy are equal (Ding et al. 2021, Theorem 4).

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), plant=[segcal.synthetic.Temperature(2.0)], coherence=0)
        >>> calibrator = TemperatureScaling().fit(cases)
        >>> 1.9 < calibrator.temperature < 2.1, calibrator.fit_report.converged
        (True, True)
    """

    id = "ts"
    title = "Temperature scaling"
    translation_invariant = True
    preserves = "order"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("beta", torch.ones((), dtype=torch.float64))

    def _summary(self) -> str:
        return f"T = {self.temperature:.4g}"

    def _affine(self) -> AffineMap:
        return AffineMap(self.beta)

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount:
        """The temperature."""
        return ParameterCount(1, 1)

    def limits(self) -> dict[str, Limits]:
        """The bounds of the fit."""
        return {"beta": BETA}

    def _scores(self, logits: Tensor) -> Tensor:
        # The difference from the maximum is exact; scaling large logits directly would round small margins away.
        return (logits - logits.amax(1, keepdim=True)) * self.beta.to(logits)

    def _fast(self, kernels: Any, logits: Tensor) -> Any:
        suits = logits.is_cuda or self._affine().suits(logits)
        return kernels.apply_temperature(logits, float(self.beta)) if suits else None

    def _fit(self, data: FitData) -> Fitted:
        identity, sample = _first_pass(data.cases, data.seed)
        start, before = 1.0, temperature_sums(sample, 1.0)
        if before.count:

            def on_sample(beta: float) -> tuple[float, float, float]:
                return (before if beta == 1.0 else temperature_sums(sample, beta)).by_beta(beta)

            start = newton_1d(on_sample, start, (LOWEST, HIGHEST), tolerance=TOLERANCE).value
        return self.refine(data.cases, start, identity.nll / identity.count, identity.count)

    def refine(self, cases: CaseSet, start: float, nll_before: float, voxels: int) -> Fitted:
        """Set 1 / temperature to the optimum of all cases, from a starting point near it."""
        known: dict[float, tuple[float, float, float]] = {}

        def whole(beta: float) -> tuple[float, float, float]:
            known[beta] = in_shares(_sums_at, cases, beta, merge=added).by_beta(beta)
            return known[beta]

        beta = start
        for tolerance in (TOLERANCE, _FLAT_TOLERANCE):
            solution = newton_1d(whole, beta, (LOWEST, HIGHEST), tolerance=tolerance)
            beta, after, (_, slope, curvature) = solution.value, solution.objective, known[solution.value]
            small = abs(slope) <= _SMALL_STEP * beta * curvature
            if small or solution.active:
                break
        if small and slope and not solution.active:
            beta = min(max(beta - slope / curvature, LOWEST), HIGHEST)
            after -= 0.5 * slope**2 / curvature
        if after > nll_before:
            beta, after = 1.0, nll_before
        self.beta.fill_(beta)
        notes = []
        if solution.active:
            notes.append(f"1/T = {beta:g} is at its bound: the best map of these data is one-hot or uniform")
        outcome = solution.converged, solution.certificate, solution.evaluations
        return Fitted(nll_before, after, *outcome, voxels, notes)


def _sums_at(cases: CaseSet, beta: float) -> TemperatureSums:
    return end_sums(in_groups(cases, partial(begin_sums, beta=beta)))


_Drawn = dict[str, tuple[Tensor, Tensor]]  # logits (n, C) and labels (n,) of every case


def _first_pass(cases: CaseSet, seed: int) -> tuple[TemperatureSums, Voxels]:
    """The sums at T = 1, which also checks the data, and a random sample; of tensors on a GPU, the first chunk.

    Cases that have fewer voxels than would be drawn are taken whole.
    """
    share = 0.0 if cases.on_gpu else SAMPLE_VOXELS / len(cases)
    total, drawn = in_shares(_look, cases, share, seed, merge=added)
    if math.isnan(total.nll):
        for _ in over_chunks(cases, lambda _, chunk: temperature_sums(Voxels.of(chunk), 1.0)):
            pass  # raises at the unfit voxel
    check_voxels(total.count)
    if not share:
        return total, Voxels.of(next(cases[0].chunks()))
    logits, labels = zip(*(drawn[name] for name in cases.ids), strict=True)
    return total, Voxels(torch.cat(logits), torch.cat(labels))


def _look(cases: CaseSet, share: float, seed: int) -> tuple[TemperatureSums, _Drawn]:
    logits: dict[str, list[Tensor]] = {}
    labels: dict[str, list[Tensor]] = {}
    random: dict[str, np.random.Generator] = {}

    def draw(case: Case, chunk: Chunk) -> None:
        voxels, per_image = chunk.labels.numel(), chunk.labels[0].numel()
        in_case = math.prod((case.shape[0], *case.shape[2:]))
        if in_case <= share:
            drawn = torch.arange(voxels, device=chunk.logits.device)
        else:
            own = random.setdefault(case.id, np.random.default_rng(case_seed(seed, case.id)))
            part = math.ceil(share * voxels / in_case)
            drawn = torch.from_numpy(own.integers(voxels, size=part)).to(chunk.logits.device)
        valid = chunk.labels.flatten()[drawn] != chunk.ignore_index
        drawn = drawn[valid if chunk.mask is None else valid & chunk.mask.flatten()[drawn]]
        scores, item, place = chunk.logits.flatten(2).movedim(1, -1), drawn // per_image, drawn % per_image
        if scores.device.type == "cpu" and scores.dtype != torch.bfloat16:  # torch's threads would wait for each other
            found = torch.from_numpy(scores.detach().numpy()[item.numpy(), place.numpy()])
        else:
            found = scores[item, place].cpu()
        logits.setdefault(case.id, []).append(found)
        labels.setdefault(case.id, []).append(chunk.labels.flatten()[drawn].cpu().long())

    def draw_case(case: Case) -> None:
        for chunk in case.chunks():
            draw(case, chunk)

    def look(case: Case, chunk: Chunk) -> TemperatureSums | Tensor:
        if share:
            draw(case, chunk)
        return begin_sums(Voxels.of(chunk), 1.0)

    if all(ref.memory == "cpu" for ref in cases.refs):  # read twice at no cost
        total = _sums_at(cases, 1.0)
        in_turn(lambda ref: draw_case(ref.open()), cases.refs)
    else:
        total = end_sums(over_chunks(cases, look))
    return total, {name: (torch.cat(logits[name]), torch.cat(labels[name])) for name in logits}


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
