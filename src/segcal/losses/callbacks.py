"""Update CRaC's multipliers from a plain training loop or from nnU-Net's trainer.

For Lightning see ``segcal.integrations.lightning``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segcal.losses.adaptive import CRaC


def update_multipliers(loss: CRaC, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Observe a model on validation batches ``(images, labels)``, update the multipliers, return the new trace entry.

    The model runs in evaluation mode without gradients, and then each of its parts returns to the mode it was in.

    Examples:
        >>> loss, model = CRaC(num_classes=2), nn.Conv2d(1, 2, 1)
        >>> entry = update_multipliers(loss, model, [(torch.randn(1, 1, 4, 4), torch.ones(1, 4, 4, dtype=torch.long))])
        >>> entry["epoch"], model.training
        (1, True)
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            for images, labels in batches:
                loss.observe(model(images), labels)
    finally:
        for module, training in modes.items():
            module.training = training
    loss.update()
    return loss.multipliers.trace[-1]


def hook_nnunet(trainer: Any, loss: CRaC) -> None:
    """Make an nnU-Net v2 trainer update the multipliers in its validation epochs; call it after ``initialize()``.

    ``loss`` is, or is part of, ``trainer.loss``. Batches without gradients are taken for validation batches. Of deeply
    supervised outputs the full resolution counts. nnU-Net's checkpoints do not hold the state of a loss, so it is
    written to and read from a file beside them, ``<checkpoint>.crac``. If that file is missing, the log says that the
    multipliers start from scratch.
    """

    def observe(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            loss.observe(*full_resolution(*arguments))

    def beside(checkpoint: Any) -> Path:
        return Path(f"{checkpoint}.crac")

    def save(checkpoint: Any) -> None:
        # All processes have the same multipliers; the first one writes them, if nnU-Net writes checkpoints at all.
        if getattr(trainer, "local_rank", 0) or getattr(trainer, "disable_checkpointing", False):
            return
        unfinished = beside(f"{checkpoint}.part")
        torch.save(loss.multipliers.state_dict(), unfinished)
        unfinished.replace(beside(checkpoint))

    def load(checkpoint: Any) -> None:
        if not isinstance(checkpoint, str | Path):  # nnU-Net also accepts a loaded checkpoint.
            return
        if beside(checkpoint).exists():
            # By way of the CPU, because this machine may have other devices than the one that wrote the file.
            state = torch.load(beside(checkpoint), map_location="cpu", weights_only=True)
            loss.multipliers.load_state_dict(state)
        else:
            trainer.print_to_log_file(f"{beside(checkpoint)} is missing: CRaC's multipliers start from scratch")

    trainer.loss.register_forward_pre_hook(observe)
    trainer.on_validation_epoch_end = _then(trainer.on_validation_epoch_end, lambda _: loss.update())
    trainer.save_checkpoint = _then(trainer.save_checkpoint, save)
    trainer.load_checkpoint = _then(trainer.load_checkpoint, load)


def full_resolution(*outputs: Any) -> tuple[Tensor, ...]:
    """Of deeply supervised outputs or targets, those of the full resolution, which come first."""
    return tuple(part[0] if isinstance(part, list | tuple) else part for part in outputs)


def _then(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], None]:
    def both(argument: Any) -> None:
        first(argument)
        second(argument)

    return both
