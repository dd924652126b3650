"""Selective scaling: find predictions that are probably wrong, and reduce the confidence of only those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from segcal.calibrators.composed import Base, ComposedCalibrator
from segcal.calibrators.temperature import HasTemperature
from segcal.errors import check_name
from segcal.fitting.data import FitData, Fitted
from segcal.fitting.first_pass import SampleNLL, held_out_samples
from segcal.fitting.limits import COUNT, LOWEST, Limits
from segcal.fitting.measured import HasDetection, beside, detection_counts, mean_loss, missing_kind
from segcal.fitting.sampling import VoxelSample
from segcal.scores import keep_argmax
from segcal.solvers import Solution, Training, adam, newton_1d
from segcal.types import Case

__all__ = ["SelectiveScaling"]

Rule = Literal["nll", "paper"]

# Voxels to train the selector on, and as many to validate it on.
_VOXELS = 100_000
# Linear maps of the selector.
_LAYERS = 4
# Epochs, steps per epoch and voxels per batch of its training.
_EPOCHS, _STEPS, _SMALLEST_BATCH = 40, 25, 256
_RATE, _DECAY = 1e-3, 1e-6
# Candidate thresholds of the suspicion, as quantiles.
_THRESHOLDS = 50
# Log-probabilities are clamped to this before they enter the selector, which keeps them finite.
_LOWEST_INPUT = -30.0
# The paper's smallest and largest temperature, and the recalls between which it is interpolated.
_SMALL_T, _LARGE_T, _POOR, _GOOD = 2.0, 1e10, 0.35, 0.5


class SelectiveScaling(HasTemperature, HasDetection, ComposedCalibrator):
    """``selective``: ``S(u / T1)`` where a selector says that the prediction is wrong, u elsewhere (Wang et al. 2023).

    u are the log-probabilities of the ``base`` calibrator, or ``log S(z)`` without one. The selector is a small network
    that sees u at a voxel: linear maps C -> C (initially the identity), C -> 2C, 2C -> C, C -> 2, with batch norm and
    ReLU. It is trained on a stratified sample to tell wrong from correct predictions, both with the same total weight.
    T1 is at least 1, so no confidence rises. Translation invariance, order and labels are kept if the base keeps them.

    Args:
        base: A calibrator, or its id, that is fitted and applied first; None for the network's own scores.
        rule: How T1 is chosen on validation cases. ``"nll"``: T1 and the selector's threshold minimise the NLL.
            ``"paper"``: the threshold is 0, and T1 depends on the share of mispredictions that are found: 1e10 above
            0.5, 2 below 0.35, and geometric interpolation in between.

    ``detection`` says how well the selector does on validation cases; ``fit_report.notes`` repeats it.

    The selector is trained on 100,000 voxels, and validated on as many, whatever ``voxels`` is; ``voxels="all"`` makes
    the fit of the base exact. The NLL before and after is always that of all voxels.

    Examples:
        >>> import segcal
        >>> plant = [segcal.synthetic.ConfidentlyWrong()]
        >>> calibrator = SelectiveScaling().fit(segcal.synthetic.scenes(4, size=(32, 40), plant=plant))
        >>> calibrator.temperature > 1, calibrator.detection.recall > 0.5
        (True, True)
    """

    id = "selective"
    title = "Selective scaling"
    translation_invariant = True
    preserves = "order"

    def __init__(self, base: Base = None, rule: Rule = "nll") -> None:
        super().__init__(base)
        check_name("rule", rule, ("nll", "paper"))
        self.rule = rule
        if self.base is not None:
            for name in ("translation_invariant", "preserves", "spatial"):
                setattr(self, name, getattr(self.base, name))
        self.register_buffer("beta", torch.ones((), dtype=torch.float64))  # 1 / T1
        self.register_buffer("counts", torch.zeros(2, 2, dtype=torch.float64))

    def allocate(self, num_classes: int) -> None:
        """Create the selector, and prepare the base."""
        for name, shape in _selector_shapes(num_classes).items():
            self.register_buffer(name, torch.zeros(shape, device=self.beta.device))
        super().allocate(num_classes)

    def shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the selector, T1, the counts and the base."""
        return {"beta": (), "counts": (2, 2), **_selector_shapes(num_classes), **super().shapes(num_classes)}

    def limits(self) -> dict[str, Limits]:
        """T1 is at least 1."""
        return {"beta": Limits(1 / _LARGE_T, 1.0), "counts": COUNT}

    def _summary(self) -> str:
        return f"T1 = {self.temperature:.4g} where a selector of {self.size():,} parameters says wrong"

    def suspicion(self, log_probs: Tensor) -> Tensor:
        """Positive where the selector says that the prediction is wrong: ``(N, C, *spatial)`` to ``(N, *spatial)``."""
        hidden = log_probs.clamp(min=_LOWEST_INPUT).movedim(1, -1)
        *first, last = self._layers()
        for weight, bias in first:
            hidden = nn.functional.linear(hidden, weight.to(hidden), bias.to(hidden)).relu()
        correct, wrong = nn.functional.linear(hidden, *(own.to(hidden) for own in last)).unbind(-1)
        return wrong - correct

    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias of every linear map, which include batch norm."""
        return [(self.get_buffer(f"weight{index}"), self.get_buffer(f"bias{index}")) for index in range(_LAYERS)]

    def _of_base(self, scores: Tensor) -> Tensor:
        """The scores, divided by T1 where the selector suspects them."""
        scores = scores - scores.amax(1, keepdim=True)
        suspected = self.suspicion(scores.log_softmax(1)).unsqueeze(1) > 0
        return torch.where(suspected, scores * self.beta.to(scores), scores)

    def _pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        # A spatial base needs the whole case, with its image and members.
        if self.base is None or not self.base.spatial:
            yield from super()._pieces(case)
            return
        for rows, scores in self.base.pieces(case):
            log_probs = self._of_base(scores).log_softmax(1)
            yield rows, keep_argmax(log_probs, scores.argmax(1))

    def _fit(self, data: FitData) -> Fitted:
        before = mean_loss(data.cases)
        notes = self._fit_base(data)
        samples = held_out_samples(data, _VOXELS, self.base)
        sample, held_out, device = samples.train, samples.held_out, samples.device
        notes += samples.notes
        if data.voxels == "all" and len(sample) < sample.total:
            notes.append(f"voxels = 'all' is for the base: the selector is trained on {len(sample):,} voxels")
        beta, converged, certificate, steps = 1.0, True, 0.0, 0
        if missing := missing_kind(sample.wrong):
            notes.append(f"no {missing} among the calibration voxels: no selector can be trained, T1 = 1")
        else:
            training = self._train(sample, held_out, device, data.seed)
            best = self._choose(held_out, device)
            beta, converged, certificate, steps = best.value, best.converged, best.certificate, training.iterations
            epochs = len(training.history) - 1
            where = "" if device.type == "cpu" else f"trained on {device}, "
            notes.append(f"selector of epoch {training.best} of {epochs} kept; {where}{self.detection}")
            (kept, false), _ = self.counts.tolist()
            if false > kept:
                hint = "" if self.base else ", which base='ts' would find first"
                share = f"{false / (kept + false):.0%} of the correct predictions for wrong"
                notes.append(f"the selector takes {share}: T1 is nearly that of ts{hint}")
        after = self._measure(data, before.nll, beta, notes)
        return Fitted(before.nll, after, converged, certificate, steps, samples.voxels, notes)

    def _train(self, sample: VoxelSample, held_out: VoxelSample, device: torch.device, seed: int) -> Training:
        """Train a selector, and store it with batch norm folded into the linear maps."""
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            network = _network(sample.logits.shape[1]).to(device)
        own, other = (_selection_loss(network, part, device) for part in (sample, held_out))

        def batches(generator: torch.Generator) -> Iterator[Tensor]:
            order = torch.randperm(len(sample), generator=generator).to(device)
            # Batches of equal size: a last one of a single voxel would have no variance for batch norm.
            return iter(order.tensor_split(max(1, min(_STEPS, len(sample) // _SMALLEST_BATCH))))

        training = adam(
            network,
            own,
            batches,
            lambda: float(other(slice(None))),
            learning_rate=_RATE,
            weight_decay=_DECAY,
            max_epochs=_EPOCHS,
            patience=_EPOCHS,
            seed=seed,
        )
        network.eval()
        for layer, trained in zip(self._layers(), _folded(network), strict=True):
            for kept, new in zip(layer, trained, strict=True):
                kept.copy_(new.detach())
        return training

    def _choose(self, held_out: VoxelSample, device: torch.device) -> Solution[float]:
        """Set T1 and, by the NLL rule, the threshold; returns the 1 / T1 that the NLL rule would choose.

        T1 is exact, as the NLL is convex in 1 / T1; thresholds are quantiles.
        """
        suspicion = self.suspicion(held_out.logits.to(device).log_softmax(1))
        everything, thresholds = SampleNLL.of(held_out, device), [0.0]
        if self.rule == "nll":
            shares = torch.linspace(0, 1, _THRESHOLDS + 1, dtype=suspicion.dtype, device=device)
            thresholds = [beside(own, suspicion) for own in suspicion.quantile(shares).tolist()]
        tried = []
        for threshold in thresholds:
            function = everything.where(suspicion > threshold)
            solution = newton_1d(function, 1.0, (LOWEST, 1.0))
            tried.append((function(1.0)[0] - solution.objective, threshold, solution))
        _, threshold, best = max(tried, key=lambda own: own[0])  # of the largest gain
        _, bias = self._layers()[-1]
        bias[0] += threshold
        self.counts = detection_counts(held_out.wrong, (suspicion > threshold).cpu(), held_out.weights)
        paper = self.rule == "paper" and bool(held_out.wrong.any())
        self.beta.fill_(1 / paper_temperature(self.detection.recall) if paper else best.value)
        return best

    def _measure(self, data: FitData, before: float, best: float, notes: list[str]) -> float:
        """The NLL of the fit data; T1 is replaced if that would be worse than before."""
        after = mean_loss(data.cases, self).nll
        for beta in (best, 1.0):
            if after <= before or float(self.beta) == beta:
                continue
            notes.append(f"T1 = {self.temperature:.4g} is worse than the identity on the fit data: T1 = {1 / beta:.4g}")
            self.beta.fill_(beta)
            after = mean_loss(data.cases, self).nll
        identity = self.base is None and float(self.beta) == 1.0
        return before if identity else after  # which rounding alone sets apart


def paper_temperature(recall: float) -> float:
    """T1 by the share of mispredictions that are found (Wang et al. 2023, supplement; interpolated in between).

    Examples:
        >>> paper_temperature(0.2), round(paper_temperature(0.425)), paper_temperature(0.8)
        (2.0, 141421, 10000000000.0)
    """
    share = min(max((recall - _POOR) / (_GOOD - _POOR), 0.0), 1.0)
    return float(_SMALL_T * (_LARGE_T / _SMALL_T) ** share)


def _selection_loss(
    network: nn.Module, sample: VoxelSample, device: torch.device
) -> Callable[[Tensor | slice], Tensor]:
    """The cross-entropy of a selector on some voxels; wrong and correct ones have the same total weight."""
    wrong, weights = sample.wrong.long(), torch.from_numpy(sample.weights)
    totals = torch.zeros(2, dtype=weights.dtype).index_add_(0, wrong, weights)
    balanced = (weights / totals[wrong] * len(sample) / 2).float()
    inputs = sample.logits.log_softmax(1).clamp(min=_LOWEST_INPUT).float()
    inputs, wrong, balanced = (own.to(device) for own in (inputs, wrong, balanced))

    def loss(index: Tensor | slice) -> Tensor:
        losses = nn.functional.cross_entropy(network(inputs[index]), wrong[index], reduction="none")
        return (balanced[index] * losses).mean()

    return loss


def _sizes(num_classes: int) -> tuple[tuple[int, int], ...]:
    c = num_classes  # _LAYERS pairs
    return (c, c), (c, 2 * c), (2 * c, c), (c, 2)


def _selector_shapes(num_classes: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for index, (inputs, outputs) in enumerate(_sizes(num_classes)):
        shapes |= {f"weight{index}": (outputs, inputs), f"bias{index}": (outputs,)}
    return shapes


def _network(num_classes: int) -> nn.Sequential:
    *hidden, last = (nn.Linear(*size) for size in _sizes(num_classes))
    nn.init.eye_(hidden[0].weight)
    nn.init.zeros_(hidden[0].bias)
    layers = [layer for own in hidden for layer in (own, nn.BatchNorm1d(own.out_features), nn.ReLU())]
    return nn.Sequential(*layers, last)


def _folded(network: nn.Sequential) -> Iterator[tuple[Tensor, Tensor]]:
    """The linear maps of a trained network, each with the batch norm that follows it folded in."""
    *hidden, last = (layer for layer in network if isinstance(layer, nn.Linear))
    norms = (layer for layer in network if isinstance(layer, nn.BatchNorm1d))
    for layer, norm in zip(hidden, norms, strict=True):
        mean, variance = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
        scale = norm.weight / (variance + norm.eps).sqrt()
        yield scale[:, None] * layer.weight, scale * (layer.bias - mean) + norm.bias
    yield last.weight, last.bias
