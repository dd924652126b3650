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
from segcal.cli.evaluate import show_results
from segcal.evaluate import evaluate


def demo_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write; replaced if it is a demo.")] = Path(
        "segcal-demo"
    ),
    seed: Annotated[int, typer.Option(help="Same seed, same scenes.")] = 0,
) -> None:
    """Run segcal on synthetic scenes with a known truth: write them, check them, evaluate them, pack them.

    Example: segcal demo
    """
    _clear(output)
    for name, cases in zip(("images", "volumes"), synthetic.demo_scenes(seed), strict=True):
        folder = output / name
        with progress(f"writing {name}", len(cases)) as step:
            write_dataset(cases, folder, progress=step)
        with progress(f"checking {name}", len(cases)) as step:
            show_check(check(folder, progress=step))
        cases = open_cases(folder)
        with progress(f"evaluating {name}", len(cases)) as step:
            results = evaluate(cases, regions=("everything", "boundary"), progress=step)
        results.to_json(output / f"{name}.json")
        show_results(results)
        error = synthetic.TrueCalibrationError(0.0, 0.0, 0)
        for case in cases:
            assert case.posterior is not None
            error += synthetic.true_calibration_error(case.logits.log_softmax(1), case.posterior)
        out.print(f"true calibration error: KL {error.kl:.4f} nats, L1 {error.l1:.4f} per voxel\n")
    with progress("packing", 1) as step:
        report = write_dataset(open_cases(output / "images"), output / "packed", dtype="float16", progress=step)
    out.print(
        f"packed the images to float16: {report.bytes / 1e6:.1f} MB, "
        f"NLL moved by {report.nll_stored - report.nll_input:+.1e}"
    )
    out.print(f"\nDatasets and results are in [bold]{escape(str(output))}[/].")
    out.print(
        f"Next: segcal evaluate {escape(str(output))}/images --plots figures/ --regions everything,boundary,local"
    )


def _clear(folder: Path) -> None:
    """Remove an earlier demo, and nothing else."""
    for name in ("images", "volumes", "packed"):
        if (folder / name / ".segcal-journal.jsonl").is_file():
            shutil.rmtree(folder / name)
