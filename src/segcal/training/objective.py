"""The loss of a training run, built from its specification."""

from __future__ import annotations

from typing import Any

from torch import nn

from segcal.cases.toml import check_known
from segcal.errors import ConfigError, check_name
from segcal.losses import LOSSES, CombinedLoss, CRaC
from segcal.training.config import LossSpec

# Options that the dataset and the trainer set.
_GIVEN = ("ignore_index", "reduction")


def build_loss(specs: tuple[LossSpec, ...], classes: int, ignore_index: int) -> nn.Module:
    """The loss, or the weighted sum of several. Options are the keywords of the loss; ``base = "none"`` means None.

    ``base`` may also be the id of another loss, which then has its default options.

    Examples:
        >>> build_loss((LossSpec("nacl", options={"weight": 0.2, "base": "dice"}),), 4, 255).base
        Dice(smooth=1.0, ignore_index=255, reduction='mean')
    """
    parts = [(spec.factor, _build(spec, classes, ignore_index)) for spec in specs]
    return parts[0][1] if len(parts) == 1 and parts[0][0] == 1 else CombinedLoss(parts)


def controllers(loss: nn.Module) -> list[CRaC]:
    """The CRaC losses in a loss, which learn their multipliers on the validation set."""
    return [module for module in loss.modules() if isinstance(module, CRaC)]


def views(loss: nn.Module) -> int:
    """How many views of each image the loss needs in a batch."""
    return max(getattr(module, "views", 1) for module in loss.modules())


def _build(spec: LossSpec, classes: int, ignore_index: int) -> nn.Module:
    cls = LOSSES[spec.id]
    known = [name for name in cls.defaults() if name not in _GIVEN]
    options: dict[str, Any] = dict(spec.options)
    check_known("option", options, known, f" of loss '{spec.id}'")
    base = options.get("base", "ce")
    if base == "none":
        options["base"] = None
    elif base != "ce":
        check_name("base", base, ("none", *LOSSES), error=ConfigError)
        options["base"] = _build(LossSpec(base), classes, ignore_index)
    try:
        return cls.of_classes(classes, ignore_index=ignore_index, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss '{spec.id}' with {dict(spec.options)}: {error}") from None
