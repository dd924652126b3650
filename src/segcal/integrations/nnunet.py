"""CRaC in nnU-Net v2: a mixin that makes a trainer of any nnU-Net trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from segcal.errors import InputError
from segcal.losses import CRaC
from segcal.losses.callbacks import hook_nnunet


class CRaCMixin:
    """Adds CRaC's penalty to a trainer's own loss and learns its multipliers in the validation epochs.

    nnU-Net finds trainers by name in its own folder ``nnunetv2/training/nnUNetTrainer``, newer ones also in those that
    the variable ``nnUNet_extTrainer`` lists: put a file there with an empty
    ``class nnUNetTrainerCRaC(CRaCMixin, nnUNetTrainer)`` and train with ``-tr nnUNetTrainerCRaC``. The penalty is on
    the full resolution of deeply supervised outputs. The multipliers are kept beside the checkpoints, as
    ``<checkpoint>.crac``; see ``segcal.losses.callbacks.hook_nnunet``.

    Attributes:
        crac_options: Keywords of ``segcal.losses.CRaC``, say ``{"margin": 5.0}``.
        crac: The loss, after ``initialize``.
    """

    crac_options: ClassVar[dict[str, Any]] = {}
    crac: CRaC

    def initialize(self) -> None:
        """Let nnU-Net build its loss, and add the penalty."""
        super().initialize()  # type: ignore[misc]
        labels: Any = self.label_manager  # type: ignore[attr-defined]
        if labels.has_regions:
            raise InputError(
                "the dataset has overlapping regions, with a sigmoid each",
                where="label_manager",
                expected="classes that exclude one another: CRaC constrains softmax logits",
            )
        ignored = 255 if labels.ignore_label is None else int(labels.ignore_label)
        self.crac = CRaC(labels.num_segmentation_heads, base=None, ignore_index=ignored, **self.crac_options)
        self.crac.to(self.device)  # type: ignore[attr-defined]
        own = self.loss
        # The hook watches the loss it finds, and shall see the penalty's input: whole labels, full resolution.
        self.loss: nn.Module = self.crac
        hook_nnunet(self, self.crac)
        self.loss = _WithPenalty(own, self.crac)

    def load_checkpoint(self, filename_or_checkpoint: Any) -> None:
        """Load the multipliers, too."""
        if self.was_initialized:  # type: ignore[attr-defined]
            super().load_checkpoint(filename_or_checkpoint)  # type: ignore[misc]
            return
        self.initialize()  # puts the hook in place, through which this must go
        self.load_checkpoint(filename_or_checkpoint)

    def on_train_end(self) -> None:
        """Let nnU-Net delete its latest checkpoint, and delete the multipliers that were beside it."""
        super().on_train_end()  # type: ignore[misc]
        latest = Path(self.output_folder, "checkpoint_latest.pth")  # type: ignore[attr-defined]
        if not latest.exists():
            Path(f"{latest}.crac").unlink(missing_ok=True)


class _WithPenalty(nn.Module):
    """A trainer's own loss plus a penalty on the full resolution."""

    def __init__(self, own: nn.Module, penalty: nn.Module) -> None:
        super().__init__()
        self.own, self.penalty = own, penalty

    def forward(self, outputs: Any, targets: Any) -> Tensor:
        total: Tensor = self.own(outputs, targets) + self.penalty(_full(outputs), _full(targets).long())
        return total


def _full(outputs: Any) -> Tensor:
    full: Tensor = outputs[0] if isinstance(outputs, list | tuple) else outputs
    return full
