"""``segcal demo``: the main job on the embedded scenes."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from segcal import synthetic
from segcal.calibrators import Calibrator, load
from segcal.case_scores import score_pieces
from segcal.cases import CaseSet, open_cases, write_dataset
from segcal.check import check
from segcal.cli.compare import study_progress
from segcal.cli.console import out, progress
from segcal.cli.data import show_check
from segcal.cli.evaluate import show_results
from segcal.cli.study import show_study
from segcal.compare import compare
from segcal.evaluate import evaluate

# Enough for a study; more would take longer and show the same.
_IMAGES = 32
_REPEATS = 2
# One of every kind: one temperature, class-conditional and local ones, maps that move labels, selectors, curves.
_METHODS = ("ts", "ets", "dc", "cms-ap", "cms-op", "lts-ti", "selective", "meta-cal", "isotonic", "histogram")
_METRICS = ("nll", "ece", "ba-ece", "dsc")


def demo_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write; replaced if it is a demo.")] = Path(
        "segcal-demo"
    ),
    seed: Annotated[int, typer.Option(help="Same seed, same scenes.")] = 0,
) -> None:
    """Run segcal on synthetic scenes with a known truth: write, check, evaluate, and compare ten calibrators.

    The network of the scenes is too sure of itself, more so at boundaries and for some classes; the study finds that
    out and says what mends it. Takes about a minute.

    Example: segcal demo
    """
    data, report = output / "scenes", output / "report"
    _clear(data, ".segcal-journal.jsonl")
    _clear(report, "work")
    scenes = synthetic.demo_scenes(seed)[0][:_IMAGES]
    _say("1. Scenes: images, labels and the logits of an overconfident network", f"segcal check {data}")
    with progress("writing", len(scenes)) as step:
        write_dataset(scenes, data, progress=step)
    with progress("checking", len(scenes)) as step:
        show_check(check(data, progress=step))
    _say("2. How far its confidence is off", f"segcal evaluate {data} --metrics {','.join(_METRICS)}")
    cases = open_cases(data)
    with progress("evaluating", len(cases)) as step:
        show_results(evaluate(cases, metrics=_METRICS, regions=("everything", "boundary"), progress=step))
    workers = min(2, os.cpu_count() or 1)
    command = ("segcal", "compare", str(data), "--methods", ",".join(_METHODS), "--repeats", str(_REPEATS),
               "--workers", str(workers), "--seed", str(seed), "-o", str(report))  # fmt: skip
    _say(f"3. What mends it: {len(_METHODS)} calibrators, {_REPEATS} random splits", shlex.join(command))
    with study_progress() as told:
        study = compare(
            cases, _METHODS, _REPEATS, output=report, workers=workers, seed=seed,
            name="synthetic scenes", command=shlex.join(command), progress=told,
        )  # fmt: skip
    from segcal.report import write_report  # matplotlib is slow to import

    show_study(study, write_report(report))
    _say("4. The truth, which only scenes can tell")
    test = cases.select(study.document["splits"][0]["test"])
    before = _true_error(test, None)
    out.print(f"true calibration error as it is: KL {before.kl:.4f} nats, L1 {before.l1:.4f} per voxel")
    if study.recommendation["file"]:
        after = _true_error(test, load(report / study.recommendation["file"]))
        out.print(f"with the recommended calibrator: KL {after.kl:.4f} nats, L1 {after.l1:.4f} per voxel")
    out.print(f"\nOpen [bold]{escape(str(report / 'index.html'))}[/] in a browser.", soft_wrap=True)


def _say(title: str, command: str | None = None) -> None:
    out.print(f"\n[bold]{escape(title)}[/]", soft_wrap=True)
    if command:
        out.print(f"[dim]$ {escape(command)}[/]\n", soft_wrap=True)


def _true_error(cases: CaseSet, calibrator: Calibrator | None) -> synthetic.TrueCalibrationError:
    error = synthetic.TrueCalibrationError(0.0, 0.0, 0)
    for case in cases:
        assert case.posterior is not None
        for rows, scores in score_pieces(case, calibrator):
            error += synthetic.true_calibration_error(scores.log_softmax(1), case.posterior[:, :, rows])
    return error


def _clear(folder: Path, mark: str) -> None:
    """Remove what an earlier demo wrote, which has this in it, and nothing else."""
    if (folder / mark).exists():
        shutil.rmtree(folder)
