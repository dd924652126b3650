"""How the command line speaks: tables on standard output, progress and errors on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from segcal.errors import SegcalError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def show_error(error: SegcalError) -> None:
    """Print an error so that what, where and what to do stand apart."""
    place = ", ".join(part for part in (f"case '{error.case}'" if error.case else "", error.where or "") if part)
    err.print("[bold red]Error[/]" + (f" in {escape(place)}" if place else ""), soft_wrap=True)
    err.print(f"  {escape(error.problem)}", soft_wrap=True)
    if error.expected:
        err.print(f"  [dim]expected[/] {escape(error.expected)}", soft_wrap=True)
    if error.fix:
        err.print(f"  [green]to fix[/]   {escape(error.fix)}", soft_wrap=True)


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar that is moved on by calling it with the name of the next item; silent when not a terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        started = False

        def step(name: str) -> None:
            nonlocal started
            bar.update(task, advance=int(started), description=f"{title} {escape(name)}")
            started = True

        yield step


@contextmanager
def waiting(title: str) -> Iterator[Callable[[str], None]]:
    """A spinner for work of unknown length, silent when not a terminal; called with the name of a step, it shows it."""
    if not err.is_terminal:
        yield lambda step: None
        return
    with err.status(title) as status:
        yield lambda step: status.update(f"{title}: {escape(step)}")
