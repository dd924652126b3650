"""Adam with early stopping: for functions that are not convex, and to compare with papers that use it throughout."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from segcal.errors import InputError
from segcal.solvers.recorded import RecordedStep, recordable
from segcal.solvers.solution import refuse_start

Batch = TypeVar("Batch")

# The relative decrease of the validation objective that counts as an improvement.
_IMPROVEMENT = 1e-5


@dataclass(frozen=True)
class Epoch:
    """One line of a training's history.

    Attributes:
        loss: Mean loss of the batches while training; NaN in the first entry, which is the start.
        validation: The validation objective afterwards.
        learning_rate: That of the epoch.
        skipped: Batches left out because their loss or gradient was not finite.
    """

    loss: float
    validation: float
    learning_rate: float
    skipped: int


@dataclass(frozen=True)
class Training:
    """The outcome of ``adam``; the module it trained holds the best state.

    Attributes:
        objective: The lowest validation objective, which is that of the state kept.
        converged: True where the validation objective stopped falling; there is no certificate of a minimum.
        best: The epoch of the state kept; 0 is the start.
        iterations: Steps of the optimiser.
        message: The outcome in words.
        history: The start and every epoch.
    """

    objective: float
    converged: bool
    best: int
    iterations: int
    message: str
    history: tuple[Epoch, ...]


def adam(
    module: nn.Module,
    loss: Callable[[Batch], Tensor],
    batches: Callable[[torch.Generator], Iterable[Batch]],
    validation: Callable[[], float],
    *,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    max_epochs: int = 200,
    patience: int = 20,
    seed: int = 0,
) -> Training:
    """Train a module in place and keep the state that is best on validation data, the start included.

    Adam (Kingma and Ba, ICLR 2015) with decoupled weight decay (Loshchilov and Hutter, ICLR 2019) on gradients clipped
    to norm ``clip``. An epoch counts as an improvement if the validation objective falls by a relative 1e-5. The
    learning rate halves after every ``patience // 4`` epochs in a row without one, and training ends after ``patience``
    such epochs. Batches whose loss or gradient is not finite are skipped. The same seed gives the same bits on the same
    machine: it seeds the generator given to ``batches`` and torch's own generators, whose states are restored
    afterwards. On a CUDA device a step is recorded and repeated, so the loss must not wait for the device; its values
    are read once an epoch.

    Args:
        module: What is trained: all its parameters that require a gradient, on one device. It is in training mode for
            the batches and in evaluation mode for validation.
        loss: The differentiable mean loss of a batch.
        batches: Called at every epoch with the generator that is to shuffle them.
        validation: The objective to be lowered, without gradients; NaN counts as infinite.
        learning_rate: The learning rate at the start.
        weight_decay: Of the parameters, per step and unit of the learning rate.
        clip: The largest norm of a gradient.
        max_epochs: Epochs at most.
        patience: Epochs without improvement before the end.
        seed: Of the generators.

    Examples:
        >>> line = nn.Linear(1, 1)
        >>> x = torch.linspace(-1, 1, 32)[:, None]
        >>> def loss(rows):
        ...     return (line(x[rows]) - 3 * x[rows]).square().mean()
        >>> def batches(generator):
        ...     return torch.randperm(32, generator=generator).split(8)
        >>> training = adam(line, loss, batches, lambda: loss(slice(None)).item(), learning_rate=0.1)
        >>> training.converged, training.objective < 1e-4, round(line.weight.item(), 2)
        (True, True, 3.0)
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not parameters:
        raise InputError("the module has no parameters that require a gradient", expected="at least one")
    device = parameters[0].device
    on_device = device.type == "cuda"
    # what a recorded step reads must lie on the device, the learning rate too
    rate: Any = torch.tensor(learning_rate, device=device) if on_device else learning_rate
    optimiser: Any = torch.optim.AdamW(
        parameters, lr=rate, weight_decay=weight_decay, fused=on_device, capturable=on_device
    )

    def step(batch: Batch) -> Tensor:
        """The loss of a batch; NaN if it led to no step."""
        optimiser.zero_grad()
        value = loss(batch)
        value.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(parameters, clip)
        finite = torch.isfinite(value.detach()) & torch.isfinite(norm)
        if on_device:
            optimiser.found_inf = (~finite).float()  # the optimiser reads there whether to change nothing
        if on_device or finite:
            optimiser.step()
        return torch.where(finite, value.detach(), torch.nan)

    taken = RecordedStep(step) if on_device else step

    def train(batches: Iterable[Batch]) -> tuple[list[float], int]:
        """The losses of the batches that led to a step, and how many were skipped."""
        module.train()
        losses = [taken(batch) for batch in batches]
        if not losses:
            raise InputError("batches gave nothing in an epoch", expected="at least one batch")
        values = [value for value in torch.stack(losses).tolist() if not math.isnan(value)]
        return values, len(losses) - len(values)

    def validate() -> float:
        module.eval()
        with torch.no_grad():
            value = float(validation())
        return value if math.isfinite(value) else math.inf

    was_training = module.training
    with recordable(device), torch.random.fork_rng([device.index] if on_device else []):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        reference = validate()
        if reference == math.inf:
            raise refuse_start(reference)
        history = [Epoch(math.nan, reference, learning_rate, 0)]
        best, state, steps, stale = 0, copy.deepcopy(module.state_dict()), 0, 0
        try:
            while len(history) <= max_epochs and stale < patience:
                losses, skipped = train(batches(generator))
                steps += len(losses)
                mean = sum(losses) / len(losses) if losses else math.nan
                value = validate()
                history.append(Epoch(mean, value, learning_rate, skipped))
                if value < history[best].validation:
                    best, state = len(history) - 1, copy.deepcopy(module.state_dict())
                improved = value < reference - _IMPROVEMENT * abs(reference)
                reference, stale = (value, 0) if improved else (reference, stale + 1)
                if stale and stale % max(1, patience // 4) == 0:
                    learning_rate /= 2
                    if on_device:
                        rate.fill_(learning_rate)
                    else:
                        optimiser.param_groups[0]["lr"] = learning_rate
        finally:  # also when interrupted: the best state so far, never a half-trained one
            module.load_state_dict(state)
            module.train(was_training)
    converged, skipped = stale >= patience, sum(epoch.skipped for epoch in history)
    message = f"converged: no improvement in {stale} epochs" if converged else "not converged: the epochs ran out"
    message += f"; kept epoch {best} of {len(history) - 1}"
    if skipped:
        message += f"; {skipped} batches skipped because they were not finite"
    return Training(history[best].validation, converged, best, steps, message, tuple(history))
