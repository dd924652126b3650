"""The reference trainer: the papers' protocol. On a CPU, a resumed run ends with the same bits."""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from segcal.cases.pack import DATASET
from segcal.errors import ConfigError, InputError, OutputError, SegcalError
from segcal.files.atomic import atomic_path, check_writable
from segcal.files.folders import OwnFolder
from segcal.training import checkpoint
from segcal.training.config import TrainingConfig, differences, load_config
from segcal.training.data import open_dataset
from segcal.training.networks import UNet, load_network
from segcal.training.objective import build_loss, controllers, views
from segcal.training.prediction import Scores, validate, write_logits
from segcal.training.processes import join
from segcal.training.samples import Batch, Samples, Schedule

Progress = Callable[[str], None]
LAST, BEST, LOG = "last.pt", "best.safetensors", "log.csv"
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

    The constructor checks all input and seeds the random generators of torch, NumPy and Python.
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
        state = checkpoint.load(self.output / LAST) if resume else None
        self.dataset = open_dataset(config)
        for folder in LOGITS.values():  # Fail now, not after hours of training.
            OwnFolder(self.output / folder, DATASET, inputs=self.dataset.folders, resume=resume)
        self.parts = self.dataset.parts(config.split, config.seed)
        self.loss = build_loss(config.loss, self.dataset.classes, self.dataset.ignore_index)
        self.controllers = controllers(self.loss)
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
        checkpoint.seed_everything(config.seed)
        self.network = UNet(
            self.dataset.channels,
            self.dataset.classes,
            network=config.network,
            width=config.width,
            depth=config.depth,
            norm=config.norm,
            dims=config.dims,
        ).to(self.processes.device)
        self.loss.to(self.processes.device)
        self.optimiser = torch.optim.Adam(self.network.parameters(), config.learning_rate)
        device = self.processes.device.type
        self.scaler = torch.amp.GradScaler(device, enabled=config.amp and device == "cuda")
        self._stateful: dict[str, Any] = {
            "network": self.network, "optimiser": self.optimiser, "scaler": self.scaler, "loss": self.loss
        }  # fmt: skip
        self.samples = Samples(
            [self.dataset.scans[name] for name in self.parts["train"]],
            config.dims,
            config.seed,
            self.dataset.ignore_index,
            config.augment,
            config.crop,
            views(self.loss),
        )
        self.schedule = Schedule(
            len(self.samples), config.batch, config.seed, self.processes.rank, self.processes.world
        )
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
            scores = self._validate()
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
        for part, folder_name in LOGITS.items():
            if self.parts[part]:
                names, folder = self.parts[part], self.output / folder_name
                write_logits(best, self.dataset, names, folder, self.config, progress)

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

    def _validate(self) -> Scores:
        self.processes.share_buffers(self.network)
        names = self.parts["validation"]
        if not names:
            return Scores((math.nan,) * self.dataset.classes, math.nan, math.nan)
        scans = [self.dataset.scans[name] for name in names]
        return validate(self.network, scans, self.processes, self.dataset.classes, self.config, self.controllers)

    def _end_epoch(self, epoch: int, loss: float, scores: Scores) -> None:
        """Log the epoch, save the model if it is the best so far, and save a checkpoint."""
        self.done = epoch
        dice = scores.mean_dice(None if self.config.background else self.dataset.background)
        names = self.dataset.class_names or tuple(map(str, range(self.dataset.classes)))
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
            write_log(self.output / LOG, self.history)
            checkpoint.save(self.output / LAST, self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "config": json.dumps(self.config.to_dict()),
            "scans": self._scans(),
            "epoch": self.done,
            **{name: part.state_dict() for name, part in self._stateful.items()},
            "random": checkpoint.random_states(),
            "history": self.history,
            "best": self.best,
        }

    def _scans(self) -> dict[str, dict[str, list[int]]]:
        """The size of every scan by part and name."""
        return {
            part: {name: list(self.dataset.scans[name].spatial) for name in names} for part, names in self.parts.items()
        }

    def _compare(self, state: dict[str, Any]) -> None:
        """Raise unless the checkpoint belongs to this run."""
        different = differences(self.config.to_dict(), json.loads(state["config"]))
        if state["scans"] != self._scans():
            different.append("the scans of " + ", ".join(self.config.data))
        if different:
            raise ConfigError(
                f"differs from the run to be resumed in {', '.join(different)}",
                where=str(self.output / LAST),
                expected="the configuration and data of that run",
                fix="put them back, or start a new run in another output folder",
            )

    def _restore(self, state: dict[str, Any]) -> None:
        for name, part in self._stateful.items():
            part.load_state_dict(state[name])
        checkpoint.set_random_states(state["random"])
        self.done, self.history, self.best = state["epoch"], list(state["history"]), dict(state["best"])


def write_log(path: Path, history: list[dict[str, float]]) -> None:
    """Write one line per epoch; columns are named like TensorBoard tags."""
    with atomic_path(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(history[0]))
        writer.writeheader()
        writer.writerows(history)
