"""nnU-Net v2: segcal's losses in its trainers, calibration inside its prediction."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from segcal.calibrators import Calibrator, load
from segcal.cases.nnunet import described
from segcal.cases.written import as_probabilities
from segcal.errors import InputError, check_name
from segcal.losses import LOSSES, CRaC, CrossEntropyDice, Dice, Loss
from segcal.losses.callbacks import full_resolution, hook_nnunet
from segcal.scores import canonical_logits


class LossMixin:
    """A loss of segcal in any trainer of nnU-Net: ``class MyTrainer(LossMixin, nnUNetTrainer): loss_id = "nacl"``.

    ``segcal nnunet install-trainers`` gives nnU-Net such a trainer for every loss. Where the loss goes depends on it:

    - Penalties (``nacl``, ``crac``, ``mbls``, ``ecp``, ``meep``, ``mmce``, ``ml1-ace``, ``bwcr``) are added to the
      deeply supervised loss of nnU-Net, at full resolution: neighbourhoods mean something else in smaller images.
    - Losses of voxels (``ce``, ``focal``, ``ls``, ``svls``) take the place of cross-entropy in nnU-Net's Dice and
      cross-entropy, at all resolutions.
    - ``dice`` and ``ce-dice`` replace both, at all resolutions.

    CRaC's multipliers are learned in the validation epochs, and saved beside the checkpoints as ``<checkpoint>.crac``;
    see ``segcal.losses.callbacks.hook_nnunet``. ``bwcr`` compares two views of each image, so its batches are twice as
    large; the second view has other contrast, brightness and noise. Overlapping regions are refused.

    Attributes:
        loss_id: An id of ``segcal.LOSSES``.
        loss_options: Keywords of the loss, such as ``{"margin": 5.0}``.
        segcal_loss: The loss, after ``initialize``.
    """

    loss_id: ClassVar[str]
    loss_options: ClassVar[dict[str, Any]] = {}
    segcal_loss: Loss

    def initialize(self) -> None:
        """Put the loss into the one that nnU-Net builds."""
        super().initialize()  # type: ignore[misc]
        check_name("loss_id", self.loss_id, LOSSES)
        labels: Any = self.label_manager  # type: ignore[attr-defined]
        if labels.has_regions:
            raise InputError(
                "the dataset has overlapping regions, with a sigmoid each",
                where="label_manager",
                expected="mutually exclusive classes, because the losses are of softmax logits",
            )
        kind = LOSSES[self.loss_id]
        penalty = "base" in kind.defaults()
        # No label is negative, so that without an ignore label every voxel counts.
        ignored = -1 if labels.ignore_label is None else int(labels.ignore_label)
        options = {"ignore_index": ignored, **({"base": None} if penalty else {}), **self.loss_options}
        self.segcal_loss = kind.of_classes(labels.num_segmentation_heads, **options)
        self.segcal_loss.to(self.device)  # type: ignore[attr-defined]
        own: nn.Module = self.loss
        if isinstance(self.segcal_loss, CRaC):
            # The hook observes the input of the loss it finds, which must be that of the penalty: full resolution.
            self.loss: nn.Module = self.segcal_loss
            hook_nnunet(self, self.segcal_loss)
        if penalty:
            self.loss = _WithPenalty(own, self.segcal_loss)
        else:
            self.loss = _replaced(own, self.segcal_loss)

    def train_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A step of nnU-Net, with two views of each image if the loss compares views."""
        found: dict[str, Any] = super().train_step(batch if self.segcal_loss.views == 1 else _two_views(batch))  # type: ignore[misc]
        return found

    def load_checkpoint(self, filename_or_checkpoint: Any) -> None:
        """Load a checkpoint, with CRaC's multipliers."""
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

    def __init__(self, own: nn.Module, penalty: Loss) -> None:
        super().__init__()
        self.own, self.penalty = own, penalty

    def forward(self, outputs: Any, targets: Any) -> Tensor:
        total: Tensor = self.own(outputs, targets)
        if self.penalty.views > 1 and not torch.is_grad_enabled():  # Validation batches have one view.
            return total
        logits, labels = full_resolution(outputs, targets)
        penalty: Tensor = self.penalty(logits, labels.long())
        return total + penalty


class _WholeLabels(nn.Module):
    """A loss of labels that nnU-Net may keep as floating-point numbers."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        value: Tensor = self.loss(logits, labels.long())
        return value


def _replaced(own: nn.Module, loss: Loss) -> nn.Module:
    """nnU-Net's loss with another one in place of its cross-entropy, or of all of it, at every resolution."""
    ours = _WholeLabels(loss)
    deep = getattr(own, "weight_factors", None) is not None  # nnU-Net's wrapper for deep supervision
    if isinstance(loss, Dice | CrossEntropyDice):  # Nothing is left of nnU-Net's.
        if not deep:
            return ours
        own.loss = ours
        return own
    inner: Any = own.loss if deep else own
    if not hasattr(inner, "ce"):
        raise InputError(
            f"the trainer's loss is {type(inner).__name__}",
            where="trainer",
            expected="nnU-Net's Dice and cross-entropy, of which the latter is replaced",
        )
    inner.ce = ours
    return own


def _two_views(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch followed by another view of it, with a random change of contrast, brightness and noise."""
    data, target = batch["data"], batch["target"]
    per_image = (len(data), *(1,) * (data.ndim - 1))
    contrast, brightness = 0.8 + 0.4 * torch.rand(per_image), 0.4 * torch.rand(per_image) - 0.2
    view = data * contrast.to(data) + brightness.to(data) + 0.1 * torch.randn_like(data)
    twice = [torch.cat((one, one)) for one in target] if isinstance(target, list) else torch.cat((target, target))
    return {**batch, "data": torch.cat((data, view)), "target": twice}


# -- prediction -------------------------------------------------------------------------------------------------------


def calibrate_predictor(predictor: Any, calibrator: Calibrator | str | Path) -> Any:
    """Make an nnU-Net predictor write and return calibrated probabilities; returns the predictor.

    Call it after ``predictor.initialize_from_trained_model_folder(...)``. The logits are calibrated where nnU-Net would
    apply softmax or sigmoid: after the blending of windows, mirrored images and folds, and after resampling to the
    image. That is what ``segcal nnunet fit`` and ``apply`` see, so the probabilities are those of ``segcal nnunet
    apply``; only calibrators that look at neighbours differ, near the border of the region that nnU-Net crops to.
    Segmentations change only if the calibrator may move labels.

    Args:
        predictor: An ``nnUNetPredictor``.
        calibrator: A fitted calibrator, or its file.
    """
    fitted = calibrator if isinstance(calibrator, Calibrator) else load(calibrator)
    if getattr(predictor, "plans_manager", None) is None:
        raise InputError(
            "the predictor has no model",
            where="predictor",
            expected="an nnUNetPredictor after initialize_from_trained_model_folder",
        )
    _check_fits(predictor, fitted)
    plans = copy.copy(predictor.plans_manager)
    # An attribute of the instance, because nnU-Net's worker processes get the plans and make their own label managers.
    plans.get_label_manager = _CalibratedLabels(predictor.plans_manager, fitted)
    predictor.plans_manager = plans
    predictor.label_manager = plans.get_label_manager(predictor.dataset_json)
    return predictor


def _check_fits(predictor: Any, calibrator: Calibrator) -> None:
    """Raise unless the calibrator was fitted to the classes or regions of the model, and needs nothing but logits."""
    found = described(predictor.dataset_json)
    ours = ("regions" if found.regions else "classes", found.names)
    names = calibrator.class_names if calibrator.channel_names is None else calibrator.channel_names
    theirs = ("classes" if calibrator.channel_names is None else "regions", names)
    same_names = theirs[1] is None or theirs[1] == ours[1]
    if ours[0] != theirs[0] or not same_names:
        raise InputError(
            f"the calibrator is for the {theirs[0]} {', '.join(theirs[1] or ('?',))}",
            where="calibrator",
            expected=f"the {ours[0]} of the model, {', '.join(ours[1] or ())}",
        )
    if calibrator.image_channels:
        raise InputError(
            "the calibrator looks at images", where="calibrator", expected="one that needs nothing but logits"
        )


class _CalibratedLabels:
    """``PlansManager.get_label_manager``, with a calibrated nonlinearity. Worker processes get a pickled copy."""

    def __init__(self, plans: Any, calibrator: Calibrator) -> None:
        self.plans, self.calibrator = plans, calibrator

    def __call__(self, dataset_json: dict[str, Any], **options: Any) -> Any:
        manager = self.plans.get_label_manager(dataset_json, **options)
        manager.inference_nonlin = _CalibratedNonlinearity(
            manager.inference_nonlin, self.calibrator, manager.has_regions
        )
        if self.calibrator.preserves is None:
            manager.convert_logits_to_segmentation = _FromProbabilities(manager)
        return manager


class _CalibratedNonlinearity:
    """From logits ``(C, *spatial)`` to calibrated probabilities, by way of the probabilities that nnU-Net writes."""

    def __init__(self, own: Any, calibrator: Calibrator, regions: bool) -> None:
        self.own, self.calibrator, self.regions = own, calibrator, regions

    def __call__(self, logits: Tensor) -> Tensor:
        scores = canonical_logits(self.own(logits)[None], "probs", multilabel=self.regions)
        # nnU-Net keeps an axis of length 1 in 2D images; calibrators of neighbourhoods do not.
        flat = self.calibrator.spatial and scores.shape[2] == 1
        log_probs = self.calibrator.to(scores.device)(scores.squeeze(2) if flat else scores)
        log_probs = log_probs.unsqueeze(2) if flat else log_probs
        return as_probabilities(log_probs, torch.float32, multilabel=self.regions)


class _FromProbabilities:
    """``LabelManager.convert_logits_to_segmentation`` for calibrators that may move labels."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    def __call__(self, logits: Any) -> Any:
        return self.manager.convert_probabilities_to_segmentation(self.manager.apply_inference_nonlin(logits))
