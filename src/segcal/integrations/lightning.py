"""Calibration in a Lightning trainer, of ``lightning`` or of ``pytorch_lightning``.

``validation_step`` must return a dict with ``logits (B, C, *S)`` and ``labels (B, *S)``, for all callbacks.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segcal.calibrators import CALIBRATORS, Calibrator, load
from segcal.cases import CaseSet, cases_from
from segcal.errors import DataError, InputError, MissingExtraError, check_name
from segcal.evaluation.evaluate import evaluate_many
from segcal.evaluation.plan import Plan
from segcal.losses import CRaC

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# Where the state of the callback, in a checkpoint, has the file of the calibrator, as a tensor of bytes.
_KEY = "segcal.calibrator"


def calibration_callback(
    method: str | Calibrator = "ts",
    *,
    metrics: Sequence[str] = ("nll", "ece"),
    held_out: float = 0.3,
    ignore_index: int = 255,
    name: str = "calibration",
    seed: int = 0,
) -> Any:
    """A Lightning callback that fits a calibrator at the end of every validation epoch and logs what it changes.

    It logs ``calibration/ece_before`` and ``calibration/ece_after``, and likewise for the other metrics, which
    ``ModelCheckpoint`` and ``EarlyStopping`` can monitor. The calibrator, ``callback.calibrator``, is part of the
    checkpoints; ``calibrator_of`` reads it from there.

    The logits of the validation images are kept in a temporary folder until the end of the epoch, so memory does not
    grow with their number. Training goes on as it would without the callback. The sanity check is skipped. Images of
    several validation loaders count together. Needs a single device.

    Args:
        method: An id of ``segcal.CALIBRATORS``, or a calibrator with other options.
        metrics: Metrics to log, as in ``segcal.evaluate``.
        held_out: Share of the validation images that the calibrator is not fitted to. They are what is measured, before
            and after. With 0, the images of the fit are measured: a little too good for calibrators with many
            parameters.
        ignore_index: The label of voxels to ignore.
        name: What logged names start with.
        seed: Seed of the split, which is the same in every epoch, and of the fit.
    """
    base = _callback_class("calibration_callback")
    if isinstance(method, str):
        check_name("method", method, CALIBRATORS)
        method = CALIBRATORS[method]()
    unfitted: Calibrator = method
    if not 0 <= held_out < 1:
        raise InputError(f"held_out is {held_out}", expected="a share, from 0 to less than 1")
    Plan.make(metrics)

    class FitCalibrator(base):  # type: ignore[misc, valid-type]
        calibrator: Calibrator | None = None
        _kept: _Kept | None = None

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if trainer.world_size > 1:
                raise InputError(
                    f"the trainer has {trainer.world_size} processes",
                    where="calibration_callback",
                    expected="one, which sees all validation images",
                    fix="train without this callback, then fit: "
                    "Trainer(devices=1, num_nodes=1, callbacks=[calibration_callback()]).validate(model, loader)",
                )

        def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self._kept = None if trainer.sanity_checking else _Kept()

        def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any, **__: Any) -> None:
            if self._kept is not None:
                self._kept.add(*_logits_and_labels(outputs))

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            kept, self._kept = self._kept, None
            if kept is None:
                return
            # Lightning validates in inference mode, where nothing can be fitted.
            with torch.inference_mode(False), torch.enable_grad():
                device = pl_module.device if pl_module.device.type == "cuda" else "cpu"
                cases = cases_from(kept, ignore_index=ignore_index).on(device)
                self.calibrator, values = _fit(unfitted, cases, metrics, held_out, seed)
            pl_module.log_dict({f"{name}/{key}": value for key, value in values.items()}, batch_size=1)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._kept = None

        def state_dict(self) -> dict[str, Any]:
            return {} if self.calibrator is None else {_KEY: _as_bytes(self.calibrator)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if _KEY in state_dict:
                self.calibrator = _from_bytes(state_dict[_KEY])

    return FitCalibrator()


def calibrator_of(checkpoint: str | Path | Mapping[str, Any]) -> Calibrator:
    """The calibrator that ``calibration_callback`` put into a checkpoint, given as its file or as loaded.

    Of the file, only tensors and plain values are unpickled. If it holds more, load it yourself and pass it on.
    """
    where = None if isinstance(checkpoint, Mapping) else str(checkpoint)
    loaded = checkpoint
    if not isinstance(loaded, Mapping):
        try:
            loaded = torch.load(loaded, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise DataError(
                f"cannot be read ({type(error).__name__})",
                where=where,
                expected="a checkpoint of tensors and plain values",
                fix="torch.load it yourself, if you trust it, and give what it returns",
            ) from None
    states = loaded.get("callbacks", {}).values()
    found = [state[_KEY] for state in states if isinstance(state, Mapping) and _KEY in state]
    if len(found) != 1:
        raise DataError(
            f"the checkpoint holds {len(found) or 'no'} calibrators",
            where=where,
            expected="one, of a trainer with callbacks=[segcal.integrations.lightning.calibration_callback()]",
        )
    return _from_bytes(found[0])


def crac_callback(loss: CRaC | None = None) -> Any:
    """A Lightning callback that updates the multipliers of CRaC losses after every validation epoch.

    The sanity check before training and ``validate`` outside of it do not change the multipliers. A loss in the
    LightningModule is part of its checkpoints; a loss given here is saved with the callback.

    Args:
        loss: The loss to update; by default all CRaC losses in the LightningModule.
    """
    base = _callback_class("crac_callback")

    class UpdateMultipliers(base):  # type: ignore[misc, valid-type]
        def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any, **__: Any) -> None:
            if not _training(trainer):
                return
            logits, labels = _logits_and_labels(outputs)
            for controlled in _losses(loss, pl_module):
                controlled.observe(logits, labels)

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


class _Kept:
    """Batches in a temporary folder, which goes when this goes."""

    def __init__(self) -> None:
        self.folder, self.count = Path(tempfile.mkdtemp(prefix="segcal-validation-")), 0
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        # Plain clones: a view would be stored with all that it is a view of, and MONAI's tensors with their metadata.
        plain = tuple(tensor.as_subclass(Tensor).cpu().clone() for tensor in (logits, labels))
        torch.save(plain, self.folder / f"{self.count}.pt")
        self.count += 1

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(self.count):
            yield torch.load(self.folder / f"{index}.pt", mmap=True, weights_only=True)


def _fit(
    unfitted: Calibrator, cases: CaseSet, metrics: Sequence[str], held_out: float, seed: int
) -> tuple[Calibrator, dict[str, float]]:
    """A fitted copy, and the metrics before and after."""
    part = cases.split(1 - held_out, 0.0, held_out, seed=seed)
    calibrator = copy.deepcopy(unfitted).fit(part.calibration, seed=seed)
    measured = part.test if held_out else part.calibration
    plan = Plan.make(metrics)
    found = evaluate_many(plan, measured, {"before": None, "after": calibrator})
    ids = [column.id for column in plan.columns]
    return calibrator, {f"{metric}_{when}": own.value(metric) for metric in ids for when, own in found.items()}


def _as_bytes(calibrator: Calibrator) -> Tensor:
    """The file of a calibrator as a tensor, which every way of loading checkpoints allows."""
    return torch.frombuffer(bytearray(calibrator.to_bytes()), dtype=torch.uint8)


def _from_bytes(content: Tensor) -> Calibrator:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "calibrator of the checkpoint")
        path.write_bytes(content.cpu().numpy().tobytes())
        return load(path)


def _callback_class(purpose: str) -> Any:
    """The ``Callback`` class of the package in use, as trainers do not accept the other package's callbacks."""
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise MissingExtraError("lightning", "lightning", purpose) from None


def _logits_and_labels(outputs: Any) -> tuple[Tensor, Tensor]:
    """What ``validation_step`` has returned."""
    if not isinstance(outputs, Mapping) or not {"logits", "labels"} <= outputs.keys():
        came = f"a dict with {', '.join(outputs)}" if isinstance(outputs, Mapping) else type(outputs).__name__
        raise InputError(
            f"validation_step returned {came}",
            expected="a dict with 'logits' and 'labels'",
            fix='return {"logits": logits, "labels": labels} from validation_step',
        )
    return outputs["logits"].detach(), outputs["labels"]


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
