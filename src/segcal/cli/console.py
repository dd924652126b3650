"""The command line and the terminal: tables on standard output, progress and errors on standard error, Ctrl-C."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from segcal.errors import SegcalError
from segcal.study import Step

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False)

#: The exit code of a program that was stopped by Ctrl-C.
STOPPED = 130
# Seconds a command has to remove its temporary files. Running threads are not waited for.
_PATIENCE = 1.0
#: Seconds between two lines of progress if no bar can be drawn.
EVERY = 60.0
#: From this width of the terminal on, a value and its interval fit on one line.
WIDE = 110
# Wider than any table.
_WIDEST = 100_000
# Seconds between two checks of the time.
_LOOK = 1.0


def show_error(error: SegcalError) -> None:
    """Print an error: where, what, what was expected, and what to do."""
    lines = [f"[bold red]Error[/] in {escape(error.place)}" if error.place else "[bold red]Error[/]"]
    lines += [f"  {escape(error.problem)}"]
    lines += [f"  [dim]expected[/] {escape(error.expected)}"] if error.expected else []
    lines += [f"  [green]to fix[/]   {escape(error.fix)}"] if error.fix else []
    err.print("\n".join(lines), soft_wrap=True)


def show_notes(notes: Iterable[str], console: Console | None = None) -> None:
    """Print what the user should know."""
    for note in notes:
        (console or out).print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)


def new_table(*columns: str, left: Collection[str] = (), title: str | None = None) -> Table:
    """A table without lines. Columns are right-aligned unless named in ``left``; without columns it has no header."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=bool(columns))
    table.title, table.title_justify = title, "left"
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def show_table(table: Table) -> None:
    """Print a table without truncating any cell.

    In a pipe or a file it is as wide as it needs to be. On a terminal too narrow for it, every cell has its own line.
    """
    if table.title:
        out.print(table.title, style="table.title")
        table.title = None
    if not out.is_terminal:
        width = Measurement.get(out, out.options.update(max_width=_WIDEST), table).maximum
        Console(file=out.file, width=width, highlight=False).print(table)
        return
    with out.capture() as attempt:
        out.print(table, soft_wrap=False)
    if "…" not in attempt.get():  # rich marks truncated text with it
        out.print(table, soft_wrap=False)
        return
    headers = [column.header for column in table.columns] if table.show_header else [""] * len(table.columns)
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        for header, cell in zip(headers, cells, strict=True):
            if cell:
                out.print(f"[dim]{header}[/] {cell}" if header else cell)
        out.print()


class Pulse:
    """Progress without a terminal: one line a minute that says how far a command has got."""

    def __init__(self, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._title, self._place, self._clock = title, "", clock
        self._started = self._said = clock()

    def at(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Record where the command is."""
        counted = "" if total is None else f"{done:,} of {total:,} done, "
        self._place = f": {counted}{name}"

    def beat(self) -> None:
        """Print the line if a minute has passed."""
        now = self._clock()
        if now - self._said >= EVERY:
            self._said = now
            minutes, seconds = divmod(int(now - self._started), 60)
            line = f"{self._title}{self._place} (after {minutes} min {seconds} s)"
            err.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Check the time in a thread: a single step may take many minutes."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_LOOK):
                self.beat()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar, or one line a minute. Call it with the name of each item before its work begins."""
    done = count()  # Nothing is done when the first item begins.
    with waiting(title, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as show:
        show("", 0, total)
        yield lambda name: show(name, next(done), total)


@contextmanager
def study_progress() -> Iterator[Callable[[Step], None]]:
    """A progress bar for a study, or one line a minute."""
    with waiting("comparing", BarColumn(), TaskProgressColumn(), TimeRemainingColumn()) as show:
        yield lambda step: show(*step)


@contextmanager
def waiting(title: str, *columns: ProgressColumn) -> Iterator[Callable[..., None]]:
    """A spinner for work of unknown length, or one line a minute. Call it with the name of each step.

    With columns, such as a bar, call it also with the work that is done and the total.
    """
    if not err.is_terminal:
        pulse = Pulse(title)
        with pulse.beating():
            yield pulse.at
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), *columns, console=err, transient=True) as bar:
        task = bar.add_task(title, total=None)

        def show(name: str, done: int | None = None, total: int | None = None) -> None:
            description = f"{title}: {escape(name)}" if name else title
            bar.update(task, description=description, completed=done, total=total)

        yield show


def stoppable(command: Callable[..., None]) -> Callable[..., None]:
    """A command that answers Ctrl-C with one line and exit code 130."""
    signature = inspect.signature(command)

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        words = kept(bound.arguments)
        stopped = False
        with _ending_soon(words):
            try:
                command(*args, **kwargs)
            except KeyboardInterrupt:
                stopped = True
        if stopped:
            gc.collect()  # Release the semaphores of worker processes, or Python would warn about them.
            leave(words)

    return run


def kept(arguments: Mapping[str, Any]) -> str:
    """What a stopped command leaves behind.

    Examples:
        >>> kept({"output": "report", "resume": False})
        'Stopped. Finished work is kept in report. Run the same command with --resume to continue.'
        >>> kept({"output": Path("results.json"), "resume": False})
        'Stopped. Finished work is kept beside results.json. Run the same command with --resume to continue.'
        >>> kept({"data": "study"})
        'Stopped. Nothing is left half-written.'
    """
    output = arguments.get("output", "")
    if "resume" not in arguments or output is None:
        return "Stopped. Nothing is left half-written."
    where = f" {'beside' if Path(output).suffix else 'in'} {output}" if output else ""
    return f"Stopped. Finished work is kept{where}. Run the same command with --resume to continue."


@contextmanager
def _ending_soon(words: str) -> Iterator[None]:
    """Ctrl-C stops the work, and ends the process if that takes too long."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, lambda number, frame: leave(words))  # A second Ctrl-C ends it at once.
        patience = threading.Timer(_PATIENCE, leave, (words,))
        patience.daemon = True
        patience.start()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # Only the main thread may handle signals.
        yield
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def leave(words: str, code: int = STOPPED) -> NoReturn:
    """End this process at once and say why: a normal exit would wait for running threads."""
    err.print(words, markup=False, soft_wrap=True)
    end(code)


def end(code: int) -> NoReturn:
    """End this process at once, with all that it has printed."""
    for console in (out, err):
        console.file.flush()
    sys.stdout.flush()
    os._exit(code)
