"""``segcal check``, ``segcal pack`` and ``segcal scenes``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.markup import escape
from rich.table import Table
from typer import Argument, BadParameter, Exit, Option

from segcal import synthetic
from segcal.cases import CaseSet, open_cases, write_dataset
from segcal.cases.config import CONFIG_NAME
from segcal.cases.formats import SCORE_FORMATS, split_suffix
from segcal.cases.open import find_cases
from segcal.cases.pack import StoredType
from segcal.cases.shares import check_same
from segcal.cli.console import err, new_table, out, progress, show_notes, show_table
from segcal.errors import InputError, OutputError, check_seed
from segcal.evaluation.check import GLANCE, CheckReport, check
from segcal.files.atomic import check_writable
from segcal.files.folders import same_place
from segcal.files.remote import as_path
from segcal.metrics import confidence_balance

Data = Annotated[
    Path,
    Argument(
        parser=as_path,
        metavar="DATA",
        help="A dataset folder (logits/ or probs/, labels/, ...), its URL, or a segcal.toml.",
    ),
]
Layout = Annotated[
    Literal["plain", "nnunet"] | None, Option(help="'nnunet' reads an nnU-Net prediction or results folder as it is.")
]
Labels = Annotated[
    Path | None, Option(parser=as_path, metavar="PATH", help="Folder of the ground truth, if it is not DATA/labels.")
]
Workers = Annotated[int, Option(min=1, help="Number of processes that share the work.")]
FormatOption = Annotated[
    str, Option(help=f"One of: {', '.join(SCORE_FORMATS)}. npy is the fastest; zarr is sharded, for huge volumes.")
]
DeviceOption = Annotated[
    str, Option("--device", help="Where to compute: auto (a GPU if there is one), cpu, cuda or cuda:N.")
]
Resume = Annotated[bool, Option("--resume", help="Skip outputs that are finished and intact.")]
Json = Annotated[bool, Option("--json", help="Print JSON instead of tables.")]


def seed_option(help: str) -> Any:
    """The option ``--seed`` of a command."""
    # Not checked by typer, which would print the long range in the help.
    return Option(callback=_checked_seed, help=help)


def _checked_seed(seed: int) -> int:
    try:
        check_seed(seed)
    except InputError as error:
        raise BadParameter(str(error)) from None
    return seed


def split_names(text: str | None, option: str) -> tuple[str, ...]:
    """The comma-separated names that an option was given; none if it was not given."""
    if text is None:
        return ()
    names = tuple(item.strip() for item in text.split(",") if item.strip())
    if not names:
        raise InputError("nothing was asked for", where=option, expected="at least one name")
    return names


def declared(layout: Layout, labels: Labels) -> dict[str, Any]:
    """Options of the command line as keywords of ``segcal.open_cases``; paths are relative to the current folder."""
    given = {"layout": layout, "labels": str(labels.absolute()) if labels else None}
    return {name: value for name, value in given.items() if value}


def open_data(
    data: Path | Sequence[Path],
    layout: Layout = None,
    labels: Labels = None,
    *,
    need_labels: bool = True,
    device: str = "cpu",
) -> CaseSet:
    """Open a dataset, or several folders of nnU-Net, and print notes on standard error, such as files without a case.

    In a torchrun job, all ranks must see the same files.
    """
    cases = open_cases(data, need_labels=need_labels, **declared(layout, labels))
    check_same(cases)
    show_notes(cases.notes, err)
    return cases.on(device)


def check_files(files: Sequence[Path | None], cases: CaseSet, calibrator: Path | None = None) -> None:
    """Raise before the work unless every output file can be written, is named once, and is not an input."""
    asked = [file for file in files if file is not None]
    for number, file in enumerate(asked):
        check_writable(file)
        if any(os.path.realpath(file) == os.path.realpath(other) for other in asked[:number]):
            raise OutputError("is named for two results", where=str(file), expected="a different file for each")
        if file.exists() and (_belongs_to(file, cases) or (calibrator is not None and file.samefile(calibrator))):
            raise OutputError("is also an input", where=str(file), expected="a file apart from the input")


def _belongs_to(file: Path, cases: CaseSet) -> bool:
    """Whether an existing file describes a dataset, or is an array in a folder of the cases."""
    file = file.resolve()
    if file.name in (CONFIG_NAME, "dataset.json", "plans.json"):
        return True
    inside = any(same_place(file.parent, folder) for folder in cases.folders)
    return inside and split_suffix(file.name) is not None


def check_command(data: Data, layout: Layout = None, labels: Labels = None, as_json: Json = False) -> None:
    """Validate a dataset and show what it holds.

    Reads every file of every case, lists all problems of all cases, and exits with 1 if there are any.

    Example: segcal check study/
    """
    options = declared(layout, labels)
    with progress("checking", len(find_cases(data, **options).cases)) as step:
        report = check(data, progress=step, **options)
    if as_json:
        out.print_json(json.dumps(report.to_dict(), allow_nan=False))
    else:
        show_check(report)
    if report.problems:
        raise Exit(1)


def pack_command(
    data: Data,
    output: Annotated[
        Path,
        Argument(parser=as_path, metavar="OUT", help="The folder to write, or its URL; new, empty, or with --resume."),
    ],
    layout: Layout = None,
    labels: Labels = None,
    dtype: Annotated[StoredType, Option(help="float16 halves the size and keeps every argmax.")] = "float16",
    format: FormatOption = "npy",
    resume: Resume = False,
) -> None:
    """Convert any dataset to the fast layout: one uncompressed, memory-mapped array per case.

    Ensembles are pooled, probabilities become logits. Every file is written under a temporary name, read back and
    compared, then renamed.

    Example: segcal pack predictions/ packed/ --layout nnunet --labels labelsTs/
    """
    cases = open_data(data, layout, labels)
    with progress("packing", len(cases)) as step:
        report = write_dataset(cases, output, dtype=dtype, format=format, resume=resume, progress=step)
    table = new_table()
    table.add_row("written", f"{report.cases - report.skipped} cases to {escape(str(output))}")
    if report.skipped:
        table.add_row("skipped", f"{report.skipped} finished cases, verified")
    table.add_row("size", f"{report.bytes / 1e6:,.1f} MB in {report.seconds:.1f} s")
    if report.voxels:
        table.add_row("NLL", f"{report.nll_input:.6f} as read, {report.nll_stored - report.nll_input:+.1e} as stored")
    table.add_row("labels", "every argmax kept, every file read back and compared")
    show_table(table)


def scenes_command(
    output: Annotated[Path, Argument(parser=as_path, metavar="OUT", help="The folder to write; new or empty.")],
    volumes: Annotated[bool, Option("--volumes", help="Write the 12 volumes instead of the 64 images.")] = False,
    seed: Annotated[int, seed_option("The same seed gives the same scenes.")] = 0,
    dtype: Annotated[StoredType, Option(help="Precision of the stored logits.")] = "float32",
    format: FormatOption = "npy",
) -> None:
    """Write synthetic scenes as a dataset: images, labels, overconfident logits, and the true posterior.

    The labels are drawn from the posterior, so the true calibration error of anything is known.

    Example: segcal scenes scenes/ && segcal check scenes/
    """
    cases = synthetic.demo_scenes(seed)[int(volumes)]
    with progress("writing", len(cases)) as step:
        report = write_dataset(cases, output, dtype=dtype, format=format, progress=step)
    out.print(f"{report.cases} scenes, {report.bytes / 1e6:,.1f} MB, in {escape(str(output))}")


def show_check(report: CheckReport) -> None:
    """Print a check report as tables."""
    facts = new_table(title=escape(report.root))
    facts.add_column(style="bold")
    facts.add_row("cases", str(report.cases))
    scores = f"{report.kind}, {' / '.join(report.dtypes) or '?'}, {' / '.join(report.formats) or '?'}"
    facts.add_row("scores", scores + (f", layout {report.layout}" if report.layout != "plain" else ""))
    if report.members:
        names = escape(", ".join(report.members))
        facts.add_row("ensemble", f"{len(report.members)} members ({names}), pooled as {report.pooling}")
    if report.multilabel:
        facts.add_row("channels", f"{report.channels or '?'}, which may overlap: each is measured on its own")
    else:
        facts.add_row("classes", str(report.channels or "?"))
        facts.add_row("background", "none" if report.background is None else f"class {report.background}")
    shapes = [f"{' x '.join(map(str, shape))} ({count})" for shape, count in report.shapes.most_common(4)]
    more = len(report.shapes) - 4
    facts.add_row("shapes", ", ".join(shapes) + (f", {more} more" if more > 0 else ""))
    spacings = [" x ".join(f"{v:g}" for v in spacing) for spacing in report.spacings if spacing]
    if spacings:
        facts.add_row("spacing", ", ".join(spacings[:3]) + (f", {len(spacings) - 3} more" if len(spacings) > 3 else ""))
    if report.voxels:
        facts.add_row("voxels", f"{report.voxels:,}" + (", all channels together" if report.multilabel else ""))
        facts.add_row("ignored", f"{report.ignored / report.voxels:.2%} (label {report.ignore_index})")
        masked = "masked or exterior" if report.layout == "nnunet" else "masked"
        facts.add_row(masked, f"{report.masked / report.voxels:.2%}")
    if report.valid:
        mean = f", mean over {len(report.channel_names)} channels" if report.multilabel else ""
        glance = {name: f"{report.mean(metric):.4f}" for name, metric in GLANCE.items()}
        facts.add_row("accuracy", glance["accuracy"] + mean)
        facts.add_row("confidence", glance["confidence"] + mean)
        facts.add_row("NLL, entropy", f"{glance['nll']}, {glance['entropy']}{mean}")
        balance = f"(NLL - entropy = {report.mean(confidence_balance):+.4f}{mean})"
        facts.add_row("at a glance", f"{escape(report.verdict)} {balance}")
    show_table(facts)
    if report.valid:
        show_table(_channel_table(report) if report.multilabel else _class_table(report))
    show_notes(report.notes)
    for problem in report.problems:
        out.print(f"[bold red]problem[/] {escape(str(problem))}")
    count = len(report.problems)
    out.print(f"[bold red]{count} problem{'s' if count > 1 else ''}[/]" if count else "[bold green]no problems[/]")


def _class_table(report: CheckReport) -> Table:
    table = new_table("class", "name", "labels", "predicted", left=("name",))
    names = report.class_names or ("",) * len(report.label_counts)
    for index, (name, *counts) in enumerate(zip(names, report.label_counts, report.predicted_counts, strict=True)):
        table.add_row(str(index), escape(name), *(f"{count / report.valid:.3%}" for count in counts))
    return table


def _channel_table(report: CheckReport) -> Table:
    columns = ("channel", "inside", "predicted", "accuracy", "NLL", "entropy", "at a glance")
    table = new_table(*columns, left=("channel", "at a glance"))
    for row in report.per_channel:
        shares = (f"{row[name] / row['valid']:.3%}" if row["valid"] else "-" for name in ("labels", "predicted"))
        means = (f"{row[name]:.4f}" for name in ("accuracy", "nll", "entropy"))
        table.add_row(escape(row["name"]), *shares, *means, row["verdict"])
    return table
