"""The reference trainer: the papers' protocol. On a CPU, a resumed run ends with the same bits."""

from __future__ import annotations

import csv
import json
import math
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal.cases import CaseSet
from segcal.cases.pack import DATASET
from segcal.errors import ConfigError, DataError, InputError, OutputError, SegcalError
from segcal.files.atomic import atomic_path, check_writable
from segcal.files.folders import OwnFolder
from segcal.losses import CRaC
from segcal.losses.checks import checked_before
from segcal.training.config import TrainingConfig, build_loss, load_config
from segcal.training.data import Scan, hold, open_dataset
from segcal.training.late import LATE_STEPS, LateNumbers
from segcal.training.networks import load_network, new_network
from segcal.training.prediction import Scores, predictions, validate, write_logits
from segcal.training.processes import join
from segcal.training.samples import Batch, Samples, Schedule, borders_note

Progress = Callable[[str], None]
LAST, BEST, LOG = "last.pt", "best.safetensors", "log.csv"
# Format and version of checkpoints. They hold tensors and plain values, no code.
_CHECKPOINT = {"format": "segcal.training", "version": 1}
# Keys that may differ from the checkpoint's when a run is resumed, because they do not change the steps made so far.
# Names and sizes of the scans are compared, wherever they are.
_FREE = ("data", "output", "epochs", "save_every", "device", "compile", "workers", "logits", "encoder")
# The parts of a trainer with a state of their own.
_STATEFUL = ("network", "optimiser", "scaler", "loss")
# What the journal of the output folder says that it holds.
_RUN = "a training run"
LOGITS = {"validation": "logits-val", "test": "logits-test"}


@dataclass(frozen=True)
class TrainingReport:
    """The outcome of a run; ``dice``, ``nll`` and ``ece`` are those of the best model on the validation scans.

    ``best_epoch`` is 0 if none was validated yet.
    """

    epochs: int
    best_epoch: int
    dice: float
    nll: float
    ece: float
    seconds: float
    output: Path


def train(
    config: TrainingConfig | str | Path, *, resume: bool = False, progress: Progress = lambda step: None
) -> TrainingReport:
    """Train a network and write checkpoints, a log and logits.

    Args:
        config: A ``segcal.training.config.TrainingConfig``, or a TOML file of one.
        resume: Continue from the last checkpoint in the output folder.
        progress: Called before every step with the epoch and the loss, then with the name of every case written.
    """
    trainer = Trainer(config if isinstance(config, TrainingConfig) else load_config(config), resume=resume)
    report = trainer.fit(progress)
    trainer.write_logits(progress)
    return report


class Trainer:
    """A training run: ``fit`` trains, ``write_logits`` writes the best model's logits of validation and test scans.

    The constructor checks all input, and seeds torch's generators for the first weights.
    """

    def __init__(self, config: TrainingConfig, *, resume: bool = False) -> None:
        self.config, self.output = config, Path(config.output)
        check_writable(self.output, folder=True)
        if not resume and (there := [name for name in (LAST, BEST, LOG) if (self.output / name).exists()]):
            raise OutputError(
                f"holds a run already ({', '.join(there)})",
                where=str(self.output),
                expected="a new folder",
                fix="choose another output, or --resume",
            )
        self._own = OwnFolder(self.output, _RUN, resume=resume, shared=True)
        # A run that was stopped before its first checkpoint has a journal only, and begins anew.
        begun = self._own.begun and not (self.output / LAST).exists()
        state = load_checkpoint(self.output / LAST) if resume and not begun else None
        self.dataset = open_dataset(config)
        for folder in LOGITS.values():  # Fail now, not after hours of training.
            OwnFolder(self.output / folder, DATASET, inputs=self.dataset.folders, resume=resume)
        self.parts = self.dataset.parts(config.split, config.seed)
        intensities: dict[str, Any] = {}
        if config.normalise == "train":
            self.dataset = self.dataset.normalised_by(self.parts["train"])
            one = next(iter(self.dataset.scans.values()))
            intensities = {"mean": one.mean, "std": one.std}
        self.loss = build_loss(config.loss, self.dataset.classes, self.dataset.ignore_index)
        # These losses learn their multipliers on the validation set.
        self.controllers = [module for module in self.loss.modules() if isinstance(module, CRaC)]
        if self.controllers and not self.parts["validation"]:
            raise InputError(
                "CRaC needs a validation set, and it is empty",
                where="split",
                expected="validation scans: the multipliers are learned on them",
                fix="give validation a share of the split",
            )
        if self.controllers and config.validate_every > 1:
            raise ConfigError(
                f"validate_every = {config.validate_every} with CRaC",
                expected="validate_every = 1: its multipliers are learned after every epoch",
            )
        if state is not None:
            self._compare(state)
        self.processes = join(config.device)
        torch.manual_seed(config.seed)
        options = {name: getattr(config, name) for name in ("network", "width", "depth", "layers", "norm", "dims")}
        channels, classes = self.dataset.channels, self.dataset.classes
        encoder = config.encoder if state is None else None
        self.network = new_network(channels, classes, encoder=encoder, **options, **intensities)
        self.network.to(self.processes.device)
        self.loss.to(self.processes.device)
        processes = self.processes
        on_gpu = processes.device.type == "cuda"
        # One kernel for all weights, where several for each would take longer to launch than to run.
        self.optimiser = torch.optim.Adam(self.network.parameters(), config.learning_rate, fused=on_gpu)
        old = on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False)
        self.half = torch.float16 if old else torch.bfloat16
        # bfloat16 has the range of float32 and needs no scaling.
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=config.amp and old)
        views = max(getattr(module, "views", 1) for module in self.loss.modules())
        scans, self.validation = self._scans_of("train"), self._scans_of("validation")
        if on_gpu:
            held = hold([*scans, *self.validation], processes.device)
            scans, self.validation = list(held[: len(scans)]), list(held[len(scans) :])
        self.samples = Samples(scans, config, self.dataset.ignore_index, views)
        self.schedule = Schedule(len(self.samples), config.batch, config.seed, processes.rank, processes.world)
        self.done = self.saved = 0
        self.history: list[dict[str, float]] = []
        self.best: dict[str, float] = {}
        # The weights of the best model until they are written, beside the next checkpoint.
        self._unsaved: dict[str, Tensor] | None = None
        if state is not None:
            self._restore(state)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know before the training."""
        return borders_note([scan.spatial for scan in self._scans_of("train")], self.config, self.network.multiple)

    @property
    def steps_left(self) -> int:
        """The number of steps that ``fit`` will make."""
        return max(0, self.config.epochs - self.done) * self.schedule.steps

    @property
    def cases_to_write(self) -> int:
        """The number of cases that ``write_logits`` will write."""
        return sum(len(self.parts[part]) for part in LOGITS) if self.processes.first else 0

    def fit(self, progress: Progress = lambda step: None, stop: Callable[[], bool] = lambda: False) -> TrainingReport:
        """Train to the last epoch. Every ``validate_every``, validate; every ``save_every``, write log and checkpoint.

        If ``stop()`` is true after an epoch, that epoch is saved and the run ends there, to be resumed later.
        """
        with self._own if self.processes.first else nullcontext() as own:
            if own is not None:
                own.begin()
            return self._fit(progress, stop)

    def _fit(self, progress: Progress, stop: Callable[[], bool]) -> TrainingReport:
        started = time.perf_counter()
        # The compiled network shares its weights with the plain one, which predicts.
        compiled: Any = torch.compile(self.network, dynamic=False) if self.config.compile else self.network
        model = self.processes.wrap(compiled)
        for epoch in range(self.done + 1, self.config.epochs + 1):
            loss = self._train_epoch(model, epoch, progress)
            self.processes.share_buffers(self.network)
            last = epoch == self.config.epochs
            self._end_epoch(epoch, loss, self._validate() if last or epoch % self.config.validate_every == 0 else None)
            ends = any(self.processes.gather([stop()]))
            if self.processes.first and (ends or last or epoch % self.config.save_every == 0):
                self._save()
            if ends:
                break
        self.processes.leave()
        best = self.best or {"epoch": 0, "dice": math.nan, "nll": math.nan, "ece": math.nan}
        seconds = time.perf_counter() - started
        return TrainingReport(
            self.done, int(best["epoch"]), best["dice"], best["nll"], best["ece"], seconds, self.output
        )

    def _validate(self) -> Scores:
        """The scores on the validation scans, from which CRaC learns, too."""
        scores = validate(
            self.network, self.validation, self.processes, self.dataset.classes, self.config, self.controllers
        )
        for controller in self.controllers:
            controller.update()
        return scores

    def write_logits(self, progress: Progress = lambda case: None) -> None:
        """Write the best model's logits as datasets, in the first process only."""
        if not self.processes.first:
            return
        for part, folder in LOGITS.items():
            if self.parts[part]:
                write_logits(self.predictions(part), self.output / folder, self.config, progress)

    def predictions(self, part: str) -> CaseSet:
        """The best model's logits of ``train``, ``validation`` or ``test`` scans as cases, computed when used."""
        if not self.best:
            raise InputError(
                "no epoch has been validated yet", where="predictions", expected="a best model", fix="train longer"
            )
        best = load_network(self.output / BEST).to(self.processes.device)
        return predictions(best, self.dataset, self._scans_of(part), self.config)

    def _train_epoch(self, model: torch.nn.Module, epoch: int, progress: Progress) -> float:
        """Train on all samples once; returns the mean loss of the steps."""
        model.train()
        for group in self.optimiser.param_groups:
            group["lr"] = self.config.learning_rate_at(epoch)
        self.samples.epoch = epoch
        # Dropout depends on seed, epoch and process only, so that a resumed run makes the same steps.
        state = np.random.SeedSequence((self.config.seed, epoch, self.processes.rank)).generate_state(1)
        torch.manual_seed(int(state[0]))
        steps = list(self.schedule.of(epoch))
        on_gpu = self.processes.device.type == "cuda"
        losses, late = [], LateNumbers(LATE_STEPS if on_gpu else 0)

        def read(values: Iterator[float]) -> None:
            for value in values:
                losses.append(value)
                if not math.isfinite(value):
                    raise self._diverged(f"the loss is {value}", epoch, len(losses))

        batches = self.samples.batches([chosen for chosen, _ in steps], pin=on_gpu)
        for batch, (chosen, share) in zip(batches, steps, strict=True):
            shown = f"{losses[-1]:.4f}" if losses else "-"
            progress(f"epoch {epoch}/{self.config.epochs}, loss {shown}")
            # To compile for a smaller last batch, too, would take longer than it saves.
            plain = len(chosen) < len(steps[0][0]) and self.processes.world == 1
            read(late.add(self._step(self.network if plain else model, batch, share)))
        read(late.rest())
        finite = torch.stack([parameter.isfinite().all() for parameter in self.network.parameters()])
        if not bool(finite.all()):
            raise self._diverged("weights are not finite", epoch, len(steps))
        return sum(self.processes.gather([sum(losses) / len(steps)])) / self.processes.world

    def _step(self, model: torch.nn.Module, batch: Batch, share: float) -> Tensor:
        """Make a step and return its loss, which on a GPU may not be computed yet."""
        device = self.processes.device
        images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
        with torch.autocast(device.type, self.half, enabled=self.config.amp):
            logits = model(images)
        with checked_before():  # when the dataset was opened
            loss = share * self.loss(logits, labels)
        self.optimiser.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimiser)
        self.scaler.update()
        value: Tensor = loss.detach()
        return value

    def _diverged(self, problem: str, epoch: int, step: int) -> SegcalError:
        kept = f"the checkpoint of epoch {self.saved} is kept" if self.saved else "there is no checkpoint yet"
        return SegcalError(
            f"{problem}; {kept}",
            where=f"epoch {epoch}, step {step}",
            expected="a finite loss and finite weights",
            fix="lower learning_rate or the weight of the penalty, or turn amp off",
        )

    def _scans_of(self, part: str) -> list[Scan]:
        return [self.dataset.scans[name] for name in self.parts[part]]

    def _end_epoch(self, epoch: int, loss: float, validated: Scores | None) -> None:
        """Add the epoch to the history, and keep the model if it was validated and is the best so far."""
        self.done = epoch
        scores = validated or Scores((math.nan,) * self.dataset.classes, math.nan, math.nan)
        dice = scores.mean_dice(None if self.config.background else self.dataset.background)
        names = self.dataset.declared.class_names or tuple(map(str, range(self.dataset.classes)))
        row = {
            "wall_time": time.time(),
            "epoch": epoch,
            "step": epoch * self.schedule.steps,
            "learning_rate": self.config.learning_rate_at(epoch),
            "train/loss": loss,
            "val/dice": dice,
            **{f"val/dice/{name}": value for name, value in zip(names, scores.dice, strict=True)},
            "val/nll": scores.nll,
            "val/ece": scores.ece,
        }
        for number, controller in enumerate(self.controllers):
            entry = controller.multipliers.trace[-1]
            tag = f"crac{number}" if number else "crac"
            for region, values in zip(("inner", "outer"), entry["multipliers"], strict=True):
                row |= {f"{tag}/lambda/{region}/{name}": v for name, v in zip(names, values, strict=True)}
        self.history.append(row)
        # Without a validation set the latest model counts as the best.
        better = (math.isnan(dice) and not self.parts["validation"]) or dice > self.best.get("dice", -math.inf)
        if validated and (better or not self.best):
            self.best = {"epoch": epoch, "dice": dice, "nll": scores.nll, "ece": scores.ece}
            self._unsaved = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}

    def _save(self) -> None:
        """Write the best model, the log, one line per epoch, and everything that a run needs to resume exactly.

        Columns of the log are named like TensorBoard tags. Torch's generators are seeded anew in every epoch.
        """
        if self._unsaved is not None:
            self.network.save(self.output / BEST, self._unsaved)
            self._unsaved = None
        with atomic_path(self.output / LOG) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self.history[0]))
            writer.writeheader()
            writer.writerows(self.history)
        state = {
            **_CHECKPOINT,
            "config": json.dumps(self.config.to_dict()),
            "scans": self._sizes(),
            "epoch": self.done,
            **{name: getattr(self, name).state_dict() for name in _STATEFUL},
            "history": self.history,
            "best": self.best,
        }
        save_checkpoint(self.output / LAST, state)
        self.saved = self.done

    def _sizes(self) -> dict[str, dict[str, list[int]]]:
        """The size of every scan by part and name."""
        return {part: {scan.id: list(scan.spatial) for scan in self._scans_of(part)} for part in self.parts}

    def _compare(self, state: dict[str, Any]) -> None:
        """Raise unless the checkpoint belongs to this run."""
        # Keys that were added since have their defaults.
        defaults = TrainingConfig(data=(), output="").to_dict()
        mine, was = self.config.to_dict(), {**defaults, **json.loads(state["config"])}
        names = [name for name in sorted({*mine, *was} - {*_FREE}) if mine.get(name) != was.get(name)]
        different = [f"{name} ({mine.get(name)!r}, was {was.get(name)!r})" for name in names]
        if state["scans"] != self._sizes():
            different.append("the scans of " + ", ".join(self.config.data))
        if different:
            raise ConfigError(
                f"differs from the run to be resumed in {', '.join(different)}",
                where=str(self.output / LAST),
                expected="the configuration and data of that run",
                fix="put them back, or start a new run in another output folder",
            )

    def _restore(self, state: dict[str, Any]) -> None:
        for name in _STATEFUL:
            if state[name] or name != "scaler":  # It is empty where gradients were not scaled.
                getattr(self, name).load_state_dict(state[name])
        self.done, self.history, self.best = state["epoch"], list(state["history"]), dict(state["best"])
        self.saved = self.done


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint."""
    with atomic_path(path) as temporary:
        try:
            torch.save(state, temporary)
        except RuntimeError as error:  # torch reports a full disk this way.
            raise OSError("torch could not write all of it") from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint."""
    if not path.is_file():
        raise DataError(
            "there is no checkpoint to resume from",
            where=str(path),
            expected="the output folder of a run that finished an epoch",
            fix="start without --resume",
        )
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(
            f"cannot be read ({type(error).__name__})", where=str(path), expected="a checkpoint of segcal train"
        ) from None
    if not isinstance(state, dict) or not state.items() >= _CHECKPOINT.items():
        expected = "{format}, version {version}".format(**_CHECKPOINT)
        raise DataError("is not a checkpoint of this version", where=str(path), expected=expected)
    return state
