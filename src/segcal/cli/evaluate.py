"""``segcal evaluate``."""

from __future__ import annotations

import hashlib
import re
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer import Option

from segcal.calibrators import Calibrator, load
from segcal.cases import CaseSet
from segcal.cli.completion import one_of, several
from segcal.cli.console import WIDE, new_table, out, progress, show_notes, show_table
from segcal.cli.data import (
    Data,
    DeviceOption,
    Json,
    Labels,
    Layout,
    Workers,
    check_files,
    open_data,
    seed_option,
    split_names,
)
from segcal.errors import InputError
from segcal.evaluation.apply import open_maps, write_maps
from segcal.evaluation.evaluate import DEFAULT_METRICS, evaluate_many
from segcal.evaluation.picture import NOT_SURE, TOO_SURE
from segcal.evaluation.plan import DEFAULT_REGIONS, Plan, parse_metric
from segcal.evaluation.results import Results
from segcal.evaluation.unfinished import Unfinished
from segcal.files.atomic import check_writable
from segcal.files.folders import check_apart
from segcal.metrics import METRICS, PRESETS, Column, options_of, preset
from segcal.metrics.diagnosis import channels_in_words, verdicts_in_words
from segcal.regions import REGIONS
from segcal.study.work.store import class_key, content_key, fingerprints

Metrics = Annotated[
    str,
    Option(
        help="Comma-separated ids, with options as in 'ece\\[num_bins=50]', or 'all'.",
        autocompletion=several({id: own.title for id, own in METRICS.items()}, alone={"all": "every metric"}),
    ),
]
Regions = Annotated[
    str,
    Option(
        help="Comma-separated: " + ", ".join(REGIONS) + ".",
        autocompletion=several({id: own.description for id, own in REGIONS.items()}),
    ),
]
Part = Literal["calibration", "validation", "test"]
#: The default of ``--regions``, in every command.
REGIONS_DEFAULT = ",".join(DEFAULT_REGIONS)
_METRICS = ",".join(DEFAULT_METRICS)
# Up to this many classes have their table without being asked for.
_FEW_CLASSES = 30
# The characters of pictures for terminals that have no others.
_ASCII = str.maketrans("█▇▆▅▄▃▂▁░▒·│┤┼─", "#####   o+.||+-")


def evaluate_command(
    data: Data,
    layout: Layout = None,
    labels: Labels = None,
    split: Annotated[Part | None, Option(help="Only this part of the \\[splits] in segcal.toml.")] = None,
    calibrator: Annotated[Path | None, Option(help="Evaluate with this calibrator (segcal fit).")] = None,
    metrics: Metrics = _METRICS,
    regions: Regions = REGIONS_DEFAULT,
    preset_id: Annotated[
        str | None,
        Option(
            "--preset",
            help="A paper's table: " + ", ".join(PRESETS) + ".",
            autocompletion=one_of({id: own.paper for id, own in PRESETS.items()}),
        ),
    ] = None,
    output: Annotated[Path | None, Option("--output", "-o", help="Write the results as JSON.")] = None,
    per_class: Annotated[
        bool | None,
        Option("--per-class/--no-per-class", help="A table of the classes; by default if there are at most 30."),
    ] = None,
    picture: Annotated[
        bool, Option("--picture", help="Draw the reliability diagram in the terminal; with --calibrator, also before.")
    ] = False,
    csv: Annotated[Path | None, Option(help="Write the tidy rows as CSV.")] = None,
    plots: Annotated[Path | None, Option(help="Draw diagrams, and maps of the worst cases, into this folder.")] = None,
    maps: Annotated[Path | None, Option(help="Folder for voxel maps (confidence, error, balance, band).")] = None,
    exact: Annotated[bool, Option("--exact", help="Exact bins (ace-adaptive, tace): reads every case twice.")] = False,
    workers: Workers = 1,
    device: DeviceOption = "auto",
    seed: Annotated[int, seed_option("Seed of the local patches.")] = 0,
    resume: Annotated[bool, Option("--resume", help="Go on with an evaluation that was stopped. Needs -o.")] = False,
    as_json: Json = False,
) -> None:
    """Measure calibration and segmentation: metrics x regions, per image and pooled, with 95% intervals.

    Reads every case once, and again with --exact or --plots. Pooled values are of all voxels together, the mean is over
    images. Intervals are a bootstrap over images, or over the groups that segcal.toml declares.

    Example: segcal evaluate study/ --regions everything,boundary,local -o results.json
    """
    cases = open_data(data, layout, labels, device=device)
    if split:
        cases = cases.part(split)
    fitted = load(calibrator) if calibrator else None
    check_files([output, csv], cases, calibrator)
    if resume and output is None:
        raise InputError("came without --output", where="--resume", expected="-o, as in the command that was stopped")
    if picture and as_json:
        raise InputError("came with --json", where="--picture", expected="one of the two")
    if plots:
        from segcal.plots.style import canvas

        check_writable(plots, folder=True)
        check_apart(plots, cases.folders, may_hold=True)
        canvas(None, 1, 1)  # Raises now if matplotlib is missing.
    if maps:
        open_maps(cases, maps)
    if preset_id and (metrics, regions) != (_METRICS, REGIONS_DEFAULT):
        raise InputError("came with --metrics or --regions", where="--preset", expected="one or the other")
    columns: list[str | Column] = list(preset(preset_id).columns) if preset_id else list(split_metrics(metrics))
    areas = split_names(regions, "--regions")
    plan = Plan.make(columns, areas, seed=seed, exact=exact, background=cases.background)
    maps_of: dict[str, Calibrator | None] = {"after": fitted, **({"before": None} if picture and fitted else {})}
    unfinished = None
    if output:
        # With all that decides the results: another dataset or calibrator goes on from nothing.
        state = None if calibrator is None else hashlib.sha256(calibrator.read_bytes()).hexdigest()
        names = [column if isinstance(column, str) else column.key for column in columns]
        what = {"columns": names, "regions": areas, "exact": exact, "seed": seed, "classes": class_key(cases)}
        key = content_key(cases=fingerprints(cases), fit=state, maps=list(maps_of), **what)
        unfinished = Unfinished(output.with_name(f"{output.name}.unfinished"), key)
        if not resume:
            unfinished.remove()
    with progress("evaluating", len(cases) * (1 + exact)) as step:
        found = evaluate_many(plan, cases, maps_of, workers=workers, progress=step, unfinished=unfinished)
    results = found["after"]
    try:
        if output and unfinished:
            results.to_json(output)
            unfinished.remove()
        if csv:
            results.to_csv(csv)
        if plots:
            _draw(results, cases, fitted, plots)
        if maps:
            with progress("mapping", len(cases)) as step:
                write_maps(cases, maps, calibrator=fitted, progress=step)
    finally:  # Even if writing failed, the results are printed.
        if as_json:
            out.print_json(results.to_json())
        else:
            show_results(results, per_class)
    if picture:
        show_picture(results, found.get("before"))
    if fitted and cases.splits and not split and not as_json:
        show_notes(["all cases of all parts; --split test leaves out those of the fit"])


def show_results(results: Results, per_class: bool | None = None) -> None:
    """Print results as tables with the diagnosis in words; for multi-label data each channel, then the means.

    ``per_class`` asks for the table of classes; None means only if they are few.
    """
    for name in results.channels:
        out.print(f"[bold]{escape(name)}[/]")
        show_results(results.channel(name))
        out.print()
    if results.channels:
        out.print(f"[bold]mean over {len(results.channels)} channels[/]")
    # On a terminal too narrow for it, the interval goes below the value.
    wide = not out.is_terminal or out.width >= WIDE
    values = [[name, "95% interval"] if wide else [f"{name}\n95% interval"] for name in ("pooled", "per image")]
    table = new_table("region", "metric", *chain(*values), "images", left=("region", "metric"))
    previous = ""
    for row in (row for row in results.summary() if not row.channel):
        notes = [f"{row.undefined} undefined"] if row.undefined else []
        notes += [f"{row.missed} classes missed"] if row.missed else []
        table.add_row(
            row.region if row.region != previous else "",
            escape(row.metric),
            *_with_interval(row.pooled, row.pooled_low, row.pooled_high, wide),
            *_with_interval(row.mean, row.low, row.high, wide),
            f"{row.cases} ({', '.join(notes)})" if notes else str(row.cases or ""),
        )
        previous = row.region
    show_table(table)
    if not results.about.get("channel"):
        _show_notes(results)
        _show_classes(results, per_class)
    for line in diagnosis_in_words(results):
        out.print(line)


def _show_classes(results: Results, wanted: bool | None) -> None:
    few = len(results.classes) <= _FEW_CLASSES
    if wanted is None and not few:
        what = "channels" if results.channels else "classes"
        out.print(f"{len(results.classes)} {what}: --per-class shows each of them")
    if not (few if wanted is None else wanted):
        return
    out.print()
    show_table(_class_table(results))
    what = "channel's inside" if results.channels else "class"
    out.print(f"[dim]ECE of a {what} against the rest; balance: NLL - entropy where it is predicted[/]\n")


def _class_table(results: Results) -> Table:
    heads = ("channel" if results.channels else "class", "ECE", "Dice", "voxels", "predicted", "balance")
    table = new_table(*heads, left=heads[:1])
    for row in results.classes:
        balance = "-" if row.balance != row.balance else f"{row.balance:+.4f}"
        counts = (f"{row.voxels:,}", f"{row.predicted:,}")
        table.add_row(escape(row.name), _number(row.ece), _number(row.dice), *counts, balance)
    return table


def show_picture(results: Results, before: Results | None = None) -> None:
    """Print the reliability diagram, beside the one before or, where there is no room for both, below it.

    Gaps have colours where there are any. Where there is no Unicode, plain letters take its place.
    """
    picture = results.picture(before=before)
    if before is not None and out.is_terminal and max(map(len, picture.splitlines())) > out.width:
        picture = f"{before.picture()}\n\n{results.picture()}"
    text = Text(picture if "utf" in out.encoding else picture.translate(_ASCII))
    text.highlight_regex(f"{TOO_SURE}+", "red")
    text.highlight_regex(f"{NOT_SURE}+", "blue")
    out.print()
    out.print(text)


def _show_notes(results: Results) -> None:
    if binned := [name for name in dict.fromkeys(row.metric for row in results.rows) if "num_bins" in _unsaid(name)]:
        out.print(f"{results.about['bins']} bins: {', '.join(binned)}", markup=False)
    if without := results.about["without_background"]:
        index, names = results.about["background"], results.about["class_names"]
        named = f"class {index} ({names[index]})" if names else f"class {index}"
        out.print(f"without the background, {named}: {', '.join(without)}", markup=False)
    show_notes(results.notes())


def _unsaid(metric: str) -> set[str]:
    """The options of a metric that its name does not set, so that they have their defaults."""
    id, options = parse_metric(metric)
    return set(options_of(METRICS[id].function)) - set(options)


def diagnosis_in_words(results: Results) -> list[str]:
    """The diagnosis as sentences."""
    found = results.diagnosis
    images = ", ".join(f"{count} {word}" for word, count in found["images"].items() if count)
    overall = f"NLL - entropy = {found['set']['balance']:+.4f} nats per voxel"
    if results.channels:
        word = found["set"]["verdict"]
        which = f": {escape(channels_in_words(found))}" if word == "mixed" else " in every channel"
        return [f"[bold]{word}[/]{which} ({overall}, the mean over {len(results.channels)} channels)"]
    lines = [f"[bold]{found['set']['verdict']}[/] ({overall}); images: {images}"]
    for scope in ("classes", "bands"):
        if verdicts := {name: finding["verdict"] for name, finding in found[scope].items()}:
            lines.append(f"{scope}: {escape(verdicts_in_words(verdicts))}")
    # Calibrated scores and those of a channel have no common offset that could vary.
    if results.about["calibrator"] or results.about.get("channel"):
        return lines
    spread = found["gauge"]
    advice = {
        "none": "calibrators that see raw logits are safe",
        "some": "prefer translation-invariant calibrators",
        "high": "use translation-invariant calibrators only",
        "undefined": "no valid voxels",
    }
    lines.append(f"free-energy spread {spread['free_energy_std']:.2f} nats per image: {advice[spread['risk']]}")
    return lines


def _draw(results: Results, cases: CaseSet, calibrator: Calibrator | None, folder: Path) -> None:
    from segcal.plots import case_figures, reliability_figures, save

    with progress("drawing", len(cases) * max(1, len(results.channels))) as step:
        for name, figure in chain(
            reliability_figures(results), case_figures(results, cases, calibrator, progress=step)
        ):
            save(figure, folder / f"{name}.png")


def split_metrics(text: str) -> tuple[str, ...]:
    """Split at commas that are not inside brackets, each once; 'all' is every metric."""
    if text.strip() == "all":
        return tuple(METRICS)
    parts = re.split(r",(?![^\[]*\])", text)  # no "]" follows before the next "["
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))


def _with_interval(value: float, low: float, high: float, wide: bool) -> list[str]:
    """A value and its interval in two cells or, on a narrow terminal, in one."""
    cells = [_number(value), f"{_number(low)} - {_number(high)}" if low == low else ""]
    return cells if wide else ["\n".join(filter(None, cells))]


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"
