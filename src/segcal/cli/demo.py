"""``segcal demo``: the main job on the embedded scenes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from segcal import synthetic
from segcal.cases import open_cases, write_dataset
from segcal.check import check
from segcal.cli.console import out, progress
from segcal.cli.data import show_check


def demo_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write; replaced if it is a demo.")] = Path(
        "segcal-demo"
    ),
    seed: Annotated[int, typer.Option(help="Same seed, same scenes.")] = 0,
) -> None:
    """Run segcal on synthetic scenes with a known truth: write them, check them, pack them.

    Example: segcal demo
    """
    _clear(output)
    for name, cases in zip(("images", "volumes"), synthetic.demo_scenes(seed), strict=True):
        folder = output / name
        with progress(f"writing {name}", len(cases)) as step:
            write_dataset(cases, folder, progress=step)
        with progress(f"checking {name}", len(cases)) as step:
            show_check(check(folder, progress=step))
        error = synthetic.TrueCalibrationError(0.0, 0.0, 0)
        for case in open_cases(folder):
            assert case.posterior is not None
            error += synthetic.true_calibration_error(case.logits.log_softmax(1), case.posterior)
        out.print(f"true calibration error: KL {error.kl:.4f} nats, L1 {error.l1:.4f} per voxel\n")
    with progress("packing", 1) as step:
        report = write_dataset(open_cases(output / "images"), output / "packed", dtype="float16", progress=step)
    out.print(
        f"packed the images to float16: {report.bytes / 1e6:.1f} MB, "
        f"NLL moved by {report.nll_stored - report.nll_input:+.1e}"
    )
    out.print(f"\nThe datasets are in [bold]{escape(str(output))}[/]. Next: segcal check {escape(str(output))}/images")


def _clear(folder: Path) -> None:
    """Remove an earlier demo, and nothing else."""
    for name in ("images", "volumes", "packed"):
        if (folder / name / ".segcal-journal.jsonl").is_file():
            shutil.rmtree(folder / name)
