"""``segcal demo``: the whole workflow on synthetic scenes."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from rich.markup import escape
from typer import Option

from segcal import synthetic
from segcal.calibrators import Calibrator, load
from segcal.cases import CaseSet, open_cases, write_dataset
from segcal.cases.calibrated import score_pieces
from segcal.cli.compare import show_study
from segcal.cli.console import out, progress, study_progress
from segcal.cli.data import seed_option, show_check
from segcal.cli.evaluate import show_results
from segcal.errors import OutputError
from segcal.evaluation.check import check
from segcal.evaluation.evaluate import evaluate
from segcal.files.atomic import writing
from segcal.files.folders import OwnFolder
from segcal.study import compare

# Enough for a study. More would take longer and show the same.
_IMAGES = 32
_REPEATS = 2
# One of every kind: global, class-conditional and local temperatures, maps that change labels, selectors, curves.
_METHODS = ("trust", "ts", "ets", "dc", "cms-ap", "cms-op", "lts-ti", "selective", "meta-cal", "isotonic", "histogram")
_METRICS = ("nll", "ece", "ba-ece", "dsc")
# Subfolders of the output folder.
_SCENES, _REPORT = "scenes", "report"


def demo_command(
    output: Annotated[
        Path, Option("--output", "-o", help="Folder to write to. An earlier demo in it is replaced.")
    ] = Path("segcal-demo"),
    seed: Annotated[int, seed_option("The same seed gives the same scenes.")] = 0,
) -> None:
    """Run segcal on synthetic scenes: write, check and evaluate them, and compare ten calibrators.

    The simulated network is overconfident, most of all at boundaries and for some classes. The study
    finds that out and recommends a calibrator. Takes one to two minutes.

    Example: segcal demo
    """
    with OwnFolder(output, "a demo", shared=True) as own:
        _remove_earlier(own)
        own.begin()
        try:
            _demonstrate(output / _SCENES, output / _REPORT, seed)
        finally:  # What was written is recorded even if the demo fails.
            own.note({"wrote": _states(output)})


def _demonstrate(data: Path, report: Path, seed: int) -> None:
    scenes = synthetic.demo_scenes(seed)[0][:_IMAGES]
    _say("1. Synthetic scenes: images, labels and the logits of an overconfident network", f"segcal check {data}")
    with progress("writing", len(scenes)) as step:
        write_dataset(scenes, data, progress=step)
    with progress("checking", len(scenes)) as step:
        show_check(check(data, progress=step))
    _say("2. How wrong is its confidence?", f"segcal evaluate {data} --metrics {','.join(_METRICS)}")
    cases = open_cases(data)
    with progress("evaluating", len(cases)) as step:
        show_results(evaluate(cases, metrics=_METRICS, progress=step))
    workers = min(2, os.cpu_count() or 1)
    command = ("segcal", "compare", str(data), "--methods", ",".join(_METHODS), "--repeats", str(_REPEATS),
               "--workers", str(workers), "--seed", str(seed), "-o", str(report))  # fmt: skip
    _say(f"3. Which calibrator fixes it? {len(_METHODS)} of them on {_REPEATS} random splits", shlex.join(command))
    with study_progress() as step:
        study = compare(
            cases, _METHODS, _REPEATS, output=report, workers=workers, seed=seed,
            name="synthetic scenes", command=shlex.join(command), progress=step,
        )  # fmt: skip
    from segcal.report import write_report  # matplotlib is slow to import

    show_study(study, write_report(report))
    _say("4. The true error, which is known for synthetic scenes")
    test = cases.select(study.document["splits"][0]["test"])
    before = _true_error(test, None)
    out.print(f"uncalibrated: KL {before.kl:.4f} nats, L1 {before.l1:.4f} per voxel")
    if study.recommendation["file"]:
        after = _true_error(test, load(report / study.recommendation["file"]))
        out.print(f"recommended calibrator: KL {after.kl:.4f} nats, L1 {after.l1:.4f} per voxel")
    out.print(f"\nOpen [bold]{escape(str(report / 'index.html'))}[/] in a browser.")


def _say(title: str, command: str | None = None) -> None:
    out.print(f"\n[bold]{escape(title)}[/]")
    if command:
        out.print(f"[dim]$ {escape(command)}[/]\n")


def _true_error(cases: CaseSet, calibrator: Calibrator | None) -> synthetic.TrueCalibrationError:
    error = synthetic.TrueCalibrationError(0.0, 0.0, 0)
    for case in cases:
        assert case.posterior is not None
        for rows, scores in score_pieces(case, calibrator):
            error += synthetic.true_calibration_error(scores.log_softmax(1), case.posterior[:, :, rows])
    return error


def _remove_earlier(own: OwnFolder) -> None:
    """Remove the files that the last demo recorded. If any other file is there, or one has changed, remove none."""
    wrote: dict[str, list[int]] = next((record["wrote"] for record in reversed(own.records) if "wrote" in record), {})
    there = _states(own.folder)
    if foreign := [name for name, state in there.items() if wrote.get(name) != state]:
        raise OutputError(
            f"has {foreign[0]}, which no demo wrote" + (f", and {len(foreign) - 1} more" if foreign[1:] else ""),
            where=str(own.folder),
            expected=f"no {_SCENES} and no {_REPORT}, or unchanged ones of an earlier demo",
            fix="choose another folder with -o, or move these files away",
        )
    with writing(own.folder):
        for name in there:
            (own.folder / name).unlink()
        for folder in sorted({parent for name in there for parent in Path(name).parents[:-1]}, reverse=True):
            with suppress(OSError):  # Folders that someone else created stay.
                (own.folder / folder).rmdir()


def _states(output: Path) -> dict[str, list[int]]:
    """Size and modification time of every file in the demo's subfolders."""
    files = (path for name in (_SCENES, _REPORT) for path in sorted((output / name).rglob("*")) if not path.is_dir())
    return {path.relative_to(output).as_posix(): [path.lstat().st_size, path.lstat().st_mtime_ns] for path in files}
