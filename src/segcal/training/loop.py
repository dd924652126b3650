"""The reference trainer: the papers' protocol. On a CPU, a resumed run ends with the same bits."""

from __future__ import annotations

import csv
import json
import math
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from segcal.cases.pack import DATASET
from segcal.errors import ConfigError, DataError, InputError, OutputError, SegcalError
from segcal.files.atomic import atomic_path, check_writable
from segcal.files.folders import OwnFolder
from segcal.losses import CRaC
from segcal.training.config import TrainingConfig, build_loss, load_config
from segcal.training.data import Scan, open_dataset
from segcal.training.networks import UNet, load_network
from segcal.training.prediction import Scores, validate, write_logits
from segcal.training.processes import join
from segcal.training.samples import Batch, Samples, Schedule

Progress = Callable[[str], None]
LAST, BEST, LOG = "last.pt", "best.safetensors", "log.csv"
# Format and version of checkpoints. They hold tensors and plain values, no code.
_CHECKPOINT = {"format": "segcal.training", "version": 1}
# Keys that may differ from the checkpoint's when a run is resumed, because they do not change the steps made so far.
# The scans themselves are compared, wherever they are.
_FREE = ("data", "output", "epochs", "device", "workers", "logits")
# The parts of a trainer with a state of their own.
_STATEFUL = ("network", "optimiser", "scaler", "loss")
LOGITS = {"validation": "logits-val", "test": "logits-test"}


@dataclass(frozen=True)
class TrainingReport:
    """The outcome of a run; ``dice``, ``nll`` and ``ece`` are those of the best model on the validation scans."""

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
        state = load_checkpoint(self.output / LAST) if resume else None
        self.dataset = open_dataset(config)
        for folder in LOGITS.values():  # Fail now, not after hours of training.
            OwnFolder(self.output / folder, DATASET, inputs=self.dataset.folders, resume=resume)
        self.parts = self.dataset.parts(config.split, config.seed)
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
        if state is not None:
            self._compare(state)
        self.processes = join(config.device)
        torch.manual_seed(config.seed)
        options = {name: getattr(config, name) for name in ("network", "width", "depth", "norm", "dims")}
        self.network = UNet(self.dataset.channels, self.dataset.classes, **options).to(self.processes.device)
        self.loss.to(self.processes.device)
        self.optimiser = torch.optim.Adam(self.network.parameters(), config.learning_rate)
        device = self.processes.device.type
        self.scaler = torch.amp.GradScaler(device, enabled=config.amp and device == "cuda")
        views = max(getattr(module, "views", 1) for module in self.loss.modules())
        self.samples = Samples(self._scans_of("train"), config, self.dataset.ignore_index, views)
        processes = self.processes
        self.schedule = Schedule(len(self.samples), config.batch, config.seed, processes.rank, processes.world)
        self.done = 0
        self.history: list[dict[str, float]] = []
        self.best: dict[str, float] = {}
        if state is not None:
            self._restore(state)

    @property
    def steps_left(self) -> int:
        """The number of steps that ``fit`` will make."""
        return max(0, self.config.epochs - self.done) * self.schedule.steps

    @property
    def cases_to_write(self) -> int:
        """The number of cases that ``write_logits`` will write."""
        return sum(len(self.parts[part]) for part in LOGITS) if self.processes.first else 0

    def fit(self, progress: Progress = lambda step: None) -> TrainingReport:
        """Train to the last epoch. After every epoch, validate, write a line of the log and save a checkpoint."""
        started = time.perf_counter()
        model = self.processes.wrap(self.network)
        for epoch in range(self.done + 1, self.config.epochs + 1):
            loss = self._train_epoch(model, epoch, progress)
            self.processes.share_buffers(self.network)
            scans = self._scans_of("validation")
            scores = validate(self.network, scans, self.processes, self.dataset.classes, self.config, self.controllers)
            for controller in self.controllers:
                controller.update()
            self._end_epoch(epoch, loss, scores)
        self.processes.leave()
        best, seconds = self.best, time.perf_counter() - started
        return TrainingReport(
            self.done, int(best["epoch"]), best["dice"], best["nll"], best["ece"], seconds, self.output
        )

    def write_logits(self, progress: Progress = lambda case: None) -> None:
        """Write the best model's logits as datasets, in the first process only."""
        if not self.processes.first:
            return
        best = load_network(self.output / BEST).to(self.processes.device)
        for part, folder in LOGITS.items():
            if scans := self._scans_of(part):
                write_logits(best, self.dataset, scans, self.output / folder, self.config, progress)

    def _train_epoch(self, model: torch.nn.Module, epoch: int, progress: Progress) -> float:
        """Train on all samples once; returns the mean loss of the steps."""
        model.train()
        for group in self.optimiser.param_groups:
            group["lr"] = self.config.learning_rate_at(epoch)
        self.samples.epoch = epoch
        steps = list(self.schedule.of(epoch))
        loader: DataLoader[Any] = DataLoader(
            self.samples,
            batch_sampler=[chosen for chosen, _ in steps],
            collate_fn=self.samples.collate,
            num_workers=self.config.workers,
            pin_memory=self.processes.device.type == "cuda",
            generator=torch.Generator(),  # Otherwise every epoch would draw from the global generator.
        )
        total, shown = 0.0, "-"
        for step, (batch, (_, share)) in enumerate(zip(loader, steps, strict=True), 1):
            progress(f"epoch {epoch}/{self.config.epochs}, loss {shown}")
            value = self._step(model, batch, share)
            if not math.isfinite(value):
                raise self._diverged(f"the loss is {value}", epoch, step)
            total += value
            shown = f"{value:.4f}"
        if not all(bool(parameter.isfinite().all()) for parameter in self.network.parameters()):
            raise self._diverged("weights are not finite", epoch, len(steps))
        return sum(self.processes.gather([total / len(steps)])) / self.processes.world

    def _step(self, model: torch.nn.Module, batch: Batch, share: float) -> float:
        device = self.processes.device
        images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
        half = torch.float16 if device.type == "cuda" else torch.bfloat16
        with torch.autocast(device.type, half, enabled=self.config.amp):
            logits = model(images)
        loss = share * self.loss(logits, labels)
        self.optimiser.zero_grad()
        value = float(loss.detach())
        if math.isfinite(value):
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimiser)
            self.scaler.update()
        return value

    def _diverged(self, problem: str, epoch: int, step: int) -> SegcalError:
        kept = f"the checkpoint of epoch {self.done} is kept" if self.done else "there is no checkpoint yet"
        return SegcalError(
            f"{problem}; {kept}",
            where=f"epoch {epoch}, step {step}",
            expected="a finite loss and finite weights",
            fix="lower learning_rate or the weight of the penalty, or turn amp off",
        )

    def _scans_of(self, part: str) -> list[Scan]:
        return [self.dataset.scans[name] for name in self.parts[part]]

    def _end_epoch(self, epoch: int, loss: float, scores: Scores) -> None:
        """Log the epoch, save the model if it is the best so far, and save a checkpoint."""
        self.done = epoch
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
        if better or not self.best:
            self.best = {"epoch": epoch, "dice": dice, "nll": scores.nll, "ece": scores.ece}
            if self.processes.first:
                self.network.save(self.output / BEST)
        if self.processes.first:
            self._save()

    def _save(self) -> None:
        """Write the log, one line per epoch, and everything that a run needs to resume exactly.

        Columns of the log are named like TensorBoard tags. Once weights are drawn, nothing uses torch's generators.
        """
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

    def _sizes(self) -> dict[str, dict[str, list[int]]]:
        """The size of every scan by part and name."""
        return {part: {scan.id: list(scan.spatial) for scan in self._scans_of(part)} for part in self.parts}

    def _compare(self, state: dict[str, Any]) -> None:
        """Raise unless the checkpoint belongs to this run."""
        mine, was = self.config.to_dict(), json.loads(state["config"])
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
            getattr(self, name).load_state_dict(state[name])
        self.done, self.history, self.best = state["epoch"], list(state["history"]), dict(state["best"])


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
