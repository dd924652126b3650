"""Progress where no bar can be drawn, and Ctrl-C."""

import signal
import subprocess
import sys
import threading

import pytest

import segcal.cli.commands
from datasets import plain
from segcal.cli import console
from segcal.cli.console import kept


def test_a_line_a_minute_says_where_a_long_command_is_and_a_short_one_says_nothing(capsys):
    now = 0.0
    pulse = console.Pulse("evaluating", lambda: now)
    said = []
    for second in range(0, 200, 5):
        now = float(second)
        pulse.at(f"case-{second}", second, 1234)
        pulse.beat()
        said += [(second, line) for line in capsys.readouterr().err.splitlines()]
    assert said == [
        (60, "evaluating: 60 of 1,234 done, case-60 (after 1 min 0 s)"),
        (120, "evaluating: 120 of 1,234 done, case-120 (after 2 min 0 s)"),
        (180, "evaluating: 180 of 1,234 done, case-180 (after 3 min 0 s)"),
    ]
    now = 0.0
    short = console.Pulse("fitting [red]ts[/]", lambda: now)
    now = 59.9
    short.beat()
    assert capsys.readouterr().err == ""
    now = 75.0  # one step that takes longer than a minute
    short.beat()
    assert capsys.readouterr().err == "fitting [red]ts[/] (after 1 min 15 s)\n"


@pytest.mark.parametrize("make", [lambda: console.progress("packing", 3), lambda: console.waiting("packing")])
def test_the_line_comes_by_itself_while_a_step_is_at_work(make, monkeypatch):
    monkeypatch.setattr(console, "EVERY", 0.0)
    monkeypatch.setattr(console, "_LOOK", 0.001)
    lines, printed = [], threading.Event()
    monkeypatch.setattr(console.err, "print", lambda line, **_: (lines.append(line), printed.set()))
    with make() as step:
        step("case-1")
        printed.clear()
        assert printed.wait(60)
        assert "case-1" in lines[-1]
        assert threading.active_count() > 1
    lines.clear()
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("(watch)")]


@pytest.mark.usefixtures("no_figures")
def test_every_long_command_tells_how_far_it_is(run, tmp_path, monkeypatch):
    told = {}

    class Told(console.Pulse):
        def __init__(self, title):
            super().__init__(title)
            self.places = told.setdefault(title, [])

        def at(self, name, done=None, total=None):
            self.places.append((name, done, total))

    monkeypatch.setattr(console, "Pulse", Told)
    data = plain(tmp_path / "data", count=6, shape=(12, 14))
    cal = tmp_path / "cal.safetensors"
    for arguments in (
        ("check", data),
        ("evaluate", data, "--metrics", "nll"),
        ("fit", data, "-o", cal),
        ("fit", data, "-o", cal, "--method", "vs", "--tune", "nll"),
        ("apply", cal, data, "-o", tmp_path / "applied"),
        ("pack", data, tmp_path / "packed"),
        ("compare", data, "-o", tmp_path / "r", "--methods", "ts", "--metrics", "nll", "--regions", "everything"),
    ):
        assert run(*arguments)[0] == 0
    assert {"checking", "evaluating", "fitting ts", "fitting vs", "applying", "packing", "comparing"} <= told.keys()
    for title in ("checking", "evaluating", "applying", "packing"):
        assert [done for _, done, _ in told[title][1:]] == list(range(6))
        assert {total for _, _, total in told[title]} == {6}
        assert [name for name, _, _ in told[title][1:]] == [f"case{i}" for i in range(6)]
    assert any("path" in name for name, _, _ in told["fitting vs"])
    assert told["comparing"][-1][1] == told["comparing"][-1][2]


def test_every_command_with_resume_says_so_when_it_is_stopped(tmp_path):
    for command in segcal.cli.commands.app.registered_commands:
        options = {"output": tmp_path, "resume": False} if "resume" in command.callback.__annotations__ else {}
        assert ("--resume" in kept(options)) == bool(options)
        assert command.callback.__wrapped__  # handles Ctrl-C
    assert str(tmp_path) in kept({"output": tmp_path, "resume": False})


SCRIPT = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from segcal.cli.console import stoppable

@stoppable
def command(output, resume=False):
    with ThreadPoolExecutor(1) as pool:  # Threads at work are waited for, at its end and at that of Python.
        pool.submit(time.sleep, 600)
        print("begun", flush=True)
        pool.submit(time.sleep, 600).result()

command(output=Path(sys.argv[1]))
"""


def test_ctrl_c_ends_a_command_that_would_wait_for_its_threads_and_says_how_to_go_on(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        try:
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=100)  # far less than the threads would sleep
        finally:
            process.kill()
    assert process.returncode == 130
    assert error == f"Stopped. Finished work is kept in {tmp_path}. Run the same command with --resume to continue.\n"
