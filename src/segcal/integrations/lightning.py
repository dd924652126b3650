"""CRaC in a Lightning trainer, of ``lightning`` or of ``pytorch_lightning``."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch import nn

from segcal.errors import InputError, MissingExtraError
from segcal.losses import CRaC

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def crac_callback(loss: CRaC | None = None) -> Any:
    """A Lightning callback that updates the multipliers of CRaC losses after every validation epoch.

    ``validation_step`` must return a dict with ``logits (B, C, *S)`` and ``labels (B, *S)``. The sanity check before
    training and ``validate`` outside of it do not change the multipliers. A loss in the LightningModule is part of its
    checkpoints; a loss given here is saved with the callback.

    Args:
        loss: The loss to update; by default all CRaC losses in the LightningModule.
    """
    base = _callback_class()

    class UpdateMultipliers(base):  # type: ignore[misc, valid-type]
        def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any, **__: Any) -> None:
            if not _training(trainer):
                return
            if not isinstance(outputs, dict) or not {"logits", "labels"} <= outputs.keys():
                came = f"a dict with {', '.join(outputs)}" if isinstance(outputs, dict) else type(outputs).__name__
                raise InputError(
                    f"validation_step returned {came}",
                    expected="a dict with 'logits' and 'labels'",
                    fix='return {"logits": logits, "labels": labels} from validation_step',
                )
            for controlled in _losses(loss, pl_module):
                controlled.observe(outputs["logits"].detach(), outputs["labels"])

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if _training(trainer):
                for controlled in _losses(loss, pl_module):
                    controlled.update()

        def state_dict(self) -> dict[str, Any]:
            return {} if loss is None else loss.multipliers.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if loss is not None:
                loss.multipliers.load_state_dict(state_dict)

    return UpdateMultipliers()


def _callback_class() -> Any:
    """The ``Callback`` class of the package in use, as trainers do not accept the other package's callbacks."""
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise MissingExtraError("lightning", "lightning", "crac_callback") from None


def _training(trainer: Any) -> bool:
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def _losses(given: CRaC | None, module: nn.Module) -> list[CRaC]:
    found = [part for part in module.modules() if isinstance(part, CRaC)] if given is None else [given]
    if not found:
        raise InputError(
            f"{type(module).__name__} has no CRaC loss",
            expected="a loss among its submodules, such as self.loss = segcal.losses.CRaC(4)",
            fix="add one, or pass it: crac_callback(loss)",
        )
    return found
