"""CRaC in nnU-Net v2: a mixin for any nnU-Net trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from segcal.errors import InputError
from segcal.losses import CRaC
from segcal.losses.callbacks import full_resolution, hook_nnunet


class CRaCMixin:
    """Adds CRaC's penalty to a trainer's own loss and updates its multipliers in the validation epochs.

    nnU-Net finds trainers by name in its own folder ``nnunetv2/training/nnUNetTrainer``; newer versions also search the
    folders in the variable ``nnUNet_extTrainer``. Put a file there with an empty
    ``class nnUNetTrainerCRaC(CRaCMixin, nnUNetTrainer)`` and train with ``-tr nnUNetTrainerCRaC``. The penalty applies
    to the full resolution of deeply supervised outputs. The multipliers are saved beside the checkpoints, as
    ``<checkpoint>.crac``; see ``segcal.losses.callbacks.hook_nnunet``.

    Attributes:
        crac_options: Keywords of ``segcal.losses.CRaC``, such as ``{"margin": 5.0}``.
        crac: The loss, after ``initialize``.
    """

    crac_options: ClassVar[dict[str, Any]] = {}
    crac: CRaC

    def initialize(self) -> None:
        """Add the penalty to the loss that nnU-Net builds."""
        super().initialize()  # type: ignore[misc]
        labels: Any = self.label_manager  # type: ignore[attr-defined]
        if labels.has_regions:
            raise InputError(
                "the dataset has overlapping regions, with a sigmoid each",
                where="label_manager",
                expected="mutually exclusive classes, because CRaC constrains softmax logits",
            )
        ignored = 255 if labels.ignore_label is None else int(labels.ignore_label)
        self.crac = CRaC(labels.num_segmentation_heads, base=None, ignore_index=ignored, **self.crac_options)
        self.crac.to(self.device)  # type: ignore[attr-defined]
        own = self.loss
        # The hook observes the input of the loss it finds, which must be that of the penalty: full resolution.
        self.loss: nn.Module = self.crac
        hook_nnunet(self, self.crac)
        self.loss = _WithPenalty(own, self.crac)

    def load_checkpoint(self, filename_or_checkpoint: Any) -> None:
        """Load a checkpoint with its multipliers."""
        if self.was_initialized:  # type: ignore[attr-defined]
            super().load_checkpoint(filename_or_checkpoint)  # type: ignore[misc]
            return
        self.initialize()  # installs the hook that loads the multipliers
        self.load_checkpoint(filename_or_checkpoint)

    def on_train_end(self) -> None:
        """After nnU-Net has deleted its latest checkpoint, delete the multipliers beside it."""
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
        logits, labels = full_resolution(outputs, targets)
        total: Tensor = self.own(outputs, targets) + self.penalty(logits, labels.long())
        return total
