"""``segcal train`` and ``segcal convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.markup import escape
from typer import Argument, Option

from segcal.cli.console import err, new_table, out, progress, show_notes, show_table, waiting
from segcal.cli.data import seed_option
from segcal.training import Trainer, convert, load_config


def train_command(
    config: Annotated[Path, Argument(metavar="CONFIG", help="A TOML file with at least 'data' and 'output'.")],
    resume: Annotated[bool, Option("--resume", help="Continue from the last checkpoint.")] = False,
) -> None:
    """Train a network with any of segcal's losses.

    Writes checkpoints, a log, and the logits of the validation and test scans.

    On several GPUs: torchrun --nproc-per-node 4 -m segcal train run.toml

    Example: segcal train run.toml && segcal evaluate run/logits-test
    """
    trainer = Trainer(load_config(config), resume=resume)
    if not trainer.processes.first:  # Only the first process prints.
        trainer.fit()
        return
    show_notes(trainer.notes, err)
    with progress("training", trainer.steps_left) as step:
        report = trainer.fit(step)
    with progress("writing logits", trainer.cases_to_write) as step:
        trainer.write_logits(step)
    table = new_table()
    table.add_row("epochs", f"{report.epochs}, {report.seconds:.1f} s" + (" since resuming" if resume else ""))
    scans = ", ".join(f"{len(names)} {part}" for part, names in trainer.parts.items())
    table.add_row("scans", f"{scans}; {len(trainer.samples)} samples per epoch")
    scores = f"Dice {report.dice:.4f}, NLL {report.nll:.4f}, ECE {report.ece:.4f}"
    table.add_row("best epoch", f"{report.best_epoch}, validation {scores}")
    table.add_row("written to", escape(str(report.output)))
    show_table(table)
    if trainer.parts["test"]:
        out.print(f"Next: segcal evaluate {escape(str(report.output))}/logits-test")


def convert_command(
    packed: Annotated[Path, Argument(metavar="PACKED", help="An npz file with encoded images and labels.")],
    output: Annotated[Path, Argument(metavar="OUT", help="Folder to write to; new or empty.")],
    patients: Annotated[int | None, Option(min=1, help="Use only this many patients, drawn at random.")] = None,
    seed: Annotated[int, seed_option("Seed of the draw and of the 70/10/20 split.")] = 0,
    groups: Annotated[str, Option(help="Regular expression for the patient in a file name.")] = r"^([^_]+)",
    class_names: Annotated[str | None, Option(help="Comma-separated; not needed for acdc and camvid.")] = None,
    ignore_index: Annotated[int | None, Option(help="The ignored label; default 255, or 11 for camvid.")] = None,
) -> None:
    """Unpack an image dataset for training.

    Writes images/, labels/, and a segcal.toml with classes and splits.

    Example: segcal convert acdc.npz acdc/ --patients 12
    """
    names = None if class_names is None else [name.strip() for name in class_names.split(",")]
    with waiting("converting") as step:
        report = convert(
            packed,
            output,
            patients=patients,
            seed=seed,
            groups=groups,
            class_names=names,
            ignore_index=ignore_index,
            progress=step,
        )
    parts = ", ".join(f"{count} {part}" for part, count in report.parts.items())
    out.print(
        f"{report.scans} scans of {report.groups} patients, {report.classes} classes ({parts}) in {escape(str(output))}"
    )
