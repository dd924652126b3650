"""Selective scaling: find the predictions that are probably wrong, and make those, and only those, less confident."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from segcal.calibrators.composed import Base, ComposedCalibrator, mapped
from segcal.errors import InputError
from segcal.fitting.data import FitData, Fitted
from segcal.fitting.first_pass import SampleNLL
from segcal.fitting.held_out import held_out_samples
from segcal.fitting.limits import COUNT, LOWEST, Limits
from segcal.fitting.measured import Detection, detection_counts, mean_loss
from segcal.fitting.sampling import VoxelSample
from segcal.scores import keep_argmax
from segcal.solvers import Training, adam, newton_1d
from segcal.types import Case

__all__ = ["SelectiveScaling"]

Rule = Literal["nll", "paper"]

# Voxels that the selector is trained on, and as many to validate on.
_VOXELS = 100_000
_LAYERS = 4
_EPOCHS, _STEPS, _SMALLEST_BATCH = 40, 25, 256
_RATE, _DECAY = 1e-3, 1e-6
# Quantiles of the suspicion at which it may begin to count.
_THRESHOLDS = 50
# Log-probabilities below this tell the selector nothing more; -inf would tell it nonsense.
_LOWEST_INPUT = -30.0
# The paper's temperatures, and the shares of mispredictions found between which they are interpolated.
_SMALL_T, _LARGE_T, _POOR, _GOOD = 2.0, 1e10, 0.35, 0.5


class SelectiveScaling(ComposedCalibrator):
    """``selective``: ``S(u / T1)`` where a selector says that the prediction is wrong, u elsewhere (Wang et al. 2023).

    u are the log-probabilities of the ``base`` calibrator, ``log S(z)`` without one. The selector is a small network
    that sees u at a voxel: linear C -> C, started at the identity, C -> 2C, 2C -> C, C -> 2, with batch norm and ReLU,
    trained to tell wrong from correct on a stratified sample, both weighing the same. T1 is at least 1, so no
    confidence is raised. Translation invariance, order and labels are kept where the base keeps them.

    Args:
        base: A calibrator, or its id, that comes first and is fitted along; None for the network's own scores.
        rule: How T1 is chosen, on validation cases. ``"nll"``: it and the selector's threshold have the least NLL.
            ``"paper"``: the threshold is that of the balanced training, and T1 follows from the share of mispredictions
            that are found: 1e10 above 0.5, 2 below 0.35, in between geometric interpolation.

    ``detection`` says how well the selector does on validation cases; ``fit_report.notes`` repeats it.

    The sample has 100,000 voxels whatever ``voxels`` is, for they train a selector this small, and as many to validate
    on; ``voxels="all"`` makes the fit of the base exact. The NLL before and after is always that of all voxels.

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
    beta: Tensor
    counts: Tensor

    def __init__(self, base: Base = None, rule: Rule = "nll") -> None:
        super().__init__(base)
        if rule not in ("nll", "paper"):
            raise InputError(f"rule is {rule!r}", expected="'nll' or 'paper'")
        self.rule = rule
        if self.base is not None:
            for name in ("translation_invariant", "preserves", "spatial"):
                setattr(self, name, getattr(self.base, name))
        self.register_buffer("beta", torch.ones((), dtype=torch.float64))  # 1 / T1
        self.register_buffer("counts", torch.zeros(2, 2, dtype=torch.float64))

    def allocate(self, num_classes: int) -> None:
        """A selector, and what the base needs."""
        for index, (inputs, outputs) in enumerate(_sizes(num_classes)):
            self.register_buffer(f"weight{index}", torch.zeros(outputs, inputs, device=self.beta.device))
            self.register_buffer(f"bias{index}", torch.zeros(outputs, device=self.beta.device))
        super().allocate(num_classes)

    def shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        """Of the selector, T1 and the counts, and those of the base."""
        own: dict[str, tuple[int, ...]] = {"beta": (), "counts": (2, 2)}
        for index, (inputs, outputs) in enumerate(_sizes(num_classes)):
            own |= {f"weight{index}": (outputs, inputs), f"bias{index}": (outputs,)}
        return own | super().shapes(num_classes)

    def limits(self) -> dict[str, Limits]:
        """T1 raises no confidence."""
        return {"beta": Limits(1 / _LARGE_T, 1.0), "counts": COUNT}

    @property
    def temperature(self) -> float:
        """T1."""
        return 1 / float(self.beta)

    def _summary(self) -> str:
        return f"T1 = {self.temperature:.4g} where a selector of {self.size():,} parameters says wrong"

    @property
    def detection(self) -> Detection:
        """How well the selector finds mispredictions, estimated on the validation cases."""
        return Detection.of(self.counts)

    def suspicion(self, log_probs: Tensor) -> Tensor:
        """Positive where the selector takes the prediction for wrong: ``(N, C, *spatial)`` to ``(N, *spatial)``."""
        hidden = _selector_input(log_probs).movedim(1, -1)
        *first, last = self._layers()
        for weight, bias in first:
            hidden = nn.functional.linear(hidden, weight.to(hidden), bias.to(hidden)).relu()
        correct, wrong = nn.functional.linear(hidden, *(own.to(hidden) for own in last)).unbind(-1)
        return wrong - correct

    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias of every linear map, batch norm included."""
        return [(self.get_buffer(f"weight{index}"), self.get_buffer(f"bias{index}")) for index in range(_LAYERS)]

    def _scores(self, logits: Tensor) -> Tensor:
        return self._flattened(logits if self.base is None else self.base(logits))

    def _flattened(self, scores: Tensor) -> Tensor:
        """Scores of the base, divided by T1 where the selector suspects them."""
        scores = scores - scores.amax(1, keepdim=True)
        suspected = self.suspicion(scores.log_softmax(1)).unsqueeze(1) > 0
        return torch.where(suspected, scores * self.beta.to(scores), scores)

    def _pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        # The base sees the case, images and members included.
        if self.base is None or not self.base.spatial:
            yield from super()._pieces(case)
            return
        for rows, scores in self.base.pieces(case):
            log_probs = self._flattened(scores).log_softmax(1)
            yield rows, keep_argmax(log_probs, scores.argmax(1))

    def _fit(self, data: FitData) -> Fitted:
        before = mean_loss(data.cases)
        notes = self._fit_base(data)
        samples = held_out_samples(data, _VOXELS, lambda cases: mapped(cases, self.base))
        sample, held_out = samples.first.sample, samples.held_out
        notes += samples.notes
        if data.voxels == "all" and len(sample) < sample.total:
            notes.append(f"voxels = 'all' is for the base: the selector is trained on {len(sample):,} voxels")
        training, choice = None, _Choice(0.0, 1.0, 0.0, converged=True, certificate=0.0)
        if one_sided := _one_sided(sample):
            notes.append(f"no {one_sided} among the calibration voxels: no selector can be trained, T1 = 1")
        else:
            training = self._train(sample, held_out, data.seed)
            choice = self._choose(held_out)
            epochs = len(training.history) - 1
            notes += [f"selector of epoch {training.best} of {epochs} kept; {self.detection}", *self._degenerate()]
        after = self._measure(data, before.nll, choice, notes)
        return Fitted(
            nll_before=before.nll,
            nll_after=after,
            converged=choice.converged,
            certificate=choice.certificate,
            iterations=0 if training is None else training.iterations,
            voxels_used=samples.voxels,
            notes=notes,
        )

    def _degenerate(self) -> list[str]:
        """What there is to say of a selector that does not select."""
        (kept, false), _ = self.counts.tolist()
        if not false > kept:
            return []
        share, hint = false / (kept + false), "" if self.base else ", which base='ts' would find first"
        return [f"the selector takes {share:.0%} of the correct predictions for wrong: T1 is nearly that of ts{hint}"]

    def _train(self, sample: VoxelSample, held_out: VoxelSample, seed: int) -> Training:
        """Train a selector, and keep it with batch norm folded into the linear maps."""
        own, other = _Selection.of(sample), _Selection.of(held_out)
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            network = _network(sample.logits.shape[1])

        def loss(index: Tensor) -> Tensor:
            return own.loss(network, index)

        def batches(generator: torch.Generator) -> Iterator[Tensor]:
            order = torch.randperm(len(sample), generator=generator)
            # Batches of equal size: a last one of a single voxel would have no variance to norm by.
            return iter(order.tensor_split(max(1, min(_STEPS, len(sample) // _SMALLEST_BATCH))))

        training = adam(
            network,
            loss,
            batches,
            lambda: float(other.loss(network, slice(None))),
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

    def _choose(self, held_out: VoxelSample) -> _Choice:
        """Set T1 and, with the rule of the NLL, where suspicion begins; what the NLL rule would choose."""
        suspicion = self.suspicion(held_out.logits.log_softmax(1))
        wrong = held_out.logits.argmax(1) != held_out.labels
        choice = _least_nll(held_out, suspicion, begins=None if self.rule == "nll" else 0.0)
        _, bias = self._layers()[-1]
        bias[0] += choice.begins
        self.counts = detection_counts(wrong, suspicion > choice.begins, held_out.weights)
        paper = self.rule == "paper" and bool(wrong.any())
        self.beta.fill_(1 / paper_temperature(self.detection.recall) if paper else choice.beta)
        return choice

    def _measure(self, data: FitData, before: float, choice: _Choice, notes: list[str]) -> float:
        """The NLL of the fit data; T1 gives way where it would be worse than before."""
        after = mean_loss(data.cases, self).nll
        for beta in (choice.beta, 1.0):
            if after <= before or float(self.beta) == beta:
                continue
            notes.append(f"T1 = {self.temperature:.4g} is worse than the identity on the fit data: T1 = {1 / beta:.4g}")
            self.beta.fill_(beta)
            after = mean_loss(data.cases, self).nll
        return after


def paper_temperature(recall: float) -> float:
    """T1 by the share of mispredictions that are found (Wang et al. 2023, supplement, with the gap between filled).

    Examples:
        >>> paper_temperature(0.2), round(paper_temperature(0.425)), paper_temperature(0.8)
        (2.0, 141421, 10000000000.0)
    """
    share = min(max((recall - _POOR) / (_GOOD - _POOR), 0.0), 1.0)
    return float(_SMALL_T * (_LARGE_T / _SMALL_T) ** share)


class _Selection(NamedTuple):
    """What a selector learns from: inputs ``(n, C)``, 1 where wrong ``(n,)``, and weights, equal in sum for both."""

    inputs: Tensor
    wrong: Tensor
    weights: Tensor

    @classmethod
    def of(cls, sample: VoxelSample) -> _Selection:
        wrong = (sample.logits.argmax(1) != sample.labels).long()
        weights = torch.from_numpy(sample.weights)
        totals = torch.zeros(2, dtype=torch.float64).index_add_(0, wrong, weights)
        balanced = weights / totals[wrong] * len(sample) / 2
        return cls(_selector_input(sample.logits.log_softmax(1)).float(), wrong, balanced.float())

    def loss(self, network: nn.Module, index: Tensor | slice) -> Tensor:
        losses = nn.functional.cross_entropy(network(self.inputs[index]), self.wrong[index], reduction="none")
        return (self.weights[index] * losses).mean()


def _sizes(num_classes: int) -> tuple[tuple[int, int], ...]:
    c = num_classes  # as many pairs as _LAYERS
    return (c, c), (c, 2 * c), (2 * c, c), (c, 2)


def _selector_input(log_probs: Tensor) -> Tensor:
    return log_probs.clamp(min=_LOWEST_INPUT)


def _network(num_classes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    *hidden, last = _sizes(num_classes)
    for inputs, outputs in hidden:
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(*last))
    first = network[0]
    assert isinstance(first, nn.Linear)
    nn.init.eye_(first.weight)
    nn.init.zeros_(first.bias)
    return network


def _folded(network: nn.Sequential) -> Iterator[tuple[Tensor, Tensor]]:
    """The linear maps of a trained network, with the batch norm that follows each made part of it."""
    layers = [layer for layer in network if not isinstance(layer, nn.ReLU)]
    for layer, norm in zip(layers, [*layers[1:], None], strict=True):
        if not isinstance(layer, nn.Linear):
            continue
        if not isinstance(norm, nn.BatchNorm1d):
            yield layer.weight, layer.bias
            continue
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        yield scale[:, None] * layer.weight, scale * (layer.bias - norm.running_mean) + norm.bias


def _one_sided(sample: VoxelSample) -> str | None:
    """What the sample lacks, in words."""
    wrong = sample.logits.argmax(1) != sample.labels
    if not bool(wrong.any()):
        return "misprediction"
    return "correct prediction" if bool(wrong.all()) else None


class _Choice(NamedTuple):
    """Where suspicion begins, the 1 / T1 that is best for what lies beyond, and by how much it lowers the mean NLL."""

    begins: float
    beta: float
    gain: float
    converged: bool
    certificate: float


def _least_nll(sample: VoxelSample, suspicion: Tensor, begins: float | None) -> _Choice:
    """The choice of least NLL: T1 exactly, as that is convex, where suspicion begins among some of its quantiles."""
    everything = SampleNLL.of(sample)
    shares = torch.linspace(0, 1, _THRESHOLDS + 1, dtype=suspicion.dtype)
    thresholds = [begins] if begins is not None else suspicion.quantile(shares).tolist()
    choices = []
    for threshold in thresholds:
        function = everything.where(suspicion > threshold)
        solution = newton_1d(function, 1.0, (LOWEST, 1.0))
        gain = function(1.0)[0] - solution.objective
        choices.append(_Choice(threshold, solution.value, gain, solution.converged, solution.certificate))
    return max(choices, key=lambda choice: choice.gain)
