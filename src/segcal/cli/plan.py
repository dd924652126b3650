"""``segcal plan``."""

from __future__ import annotations

import json

from rich.markup import escape

from segcal.cli.compare import Methods, Repeats, method_names
from segcal.cli.console import new_table, out, show_notes, show_table, waiting
from segcal.cli.data import Data, DeviceOption, Json, Labels, Layout, open_data
from segcal.fitting.cost import bytes_in_words, seconds_in_words
from segcal.study.advice.phrases import counted
from segcal.study.forecast import Forecast, plan


def plan_command(
    data: Data,
    methods: Methods = "trust,ts,lts-ti,cms-op",
    repeats: Repeats = None,
    layout: Layout = None,
    labels: Labels = None,
    device: DeviceOption = "auto",
    as_json: Json = False,
) -> None:
    """Say what a study will cost before it starts: time, memory and disk of every command.

    Looks at the sizes of the files, and measures for some seconds how fast this machine reads and computes.

    Example: segcal plan study/ --methods all
    """
    cases = open_data(data, layout, labels)
    with waiting("measuring this machine"):
        forecast = plan(cases, method_names(methods), repeats, device=device)
    if as_json:
        out.print_json(json.dumps(forecast.to_dict(), allow_nan=False))
    else:
        show_forecast(forecast)


def show_forecast(forecast: Forecast) -> None:
    """Print the data, the machine, and a line for every command."""
    data, machine = forecast.data, forecast.machine
    facts = new_table()
    facts.add_column(style="bold")
    stored = f", {bytes_in_words(data.stored)}" if data.stored else ""
    sizes = f"{counted(data.cases, 'case')}, {data.voxels:,} voxels, {data.classes} classes"
    facts.add_row("data", f"{sizes}, {data.format}{stored}")
    speed = f"reads {machine.read / 1e6:,.0f} million scores/s, passes at {1 / machine.passes:.2g} x the reference"
    facts.add_row("machine", f"{machine.device}, {counted(machine.threads, 'thread')}, {speed}")
    facts.add_row("free", f"{bytes_in_words(machine.memory)} of memory, {bytes_in_words(machine.disk)} of disk")
    show_table(facts)
    out.print()
    table = new_table("command", "time", "memory", "written", left=("command",))
    for row in forecast.rows:
        if row.refused:
            table.add_row(escape(row.command), "[red]refused[/]", "", "")
        else:
            cells = (seconds_in_words(row.seconds), *map(bytes_in_words, (row.memory, row.disk)))
            table.add_row(escape(row.command), *cells)
    show_table(table)
    refused = [f"{row.command}: {row.refused}" for row in forecast.rows if row.refused]
    show_notes((*forecast.notes, *refused))
