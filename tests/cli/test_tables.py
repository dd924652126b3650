"""Tables are whole at any width: no number and no name is cut, on terminals and in pipes."""

import re

import pytest
from rich.table import Table

import segcal.cli.console as console
from datasets import plain

NUMBERS = re.compile(r"\d+\.\d{4}")


@pytest.fixture
def terminal(monkeypatch):
    def narrow(width):
        monkeypatch.setattr(console.out, "_force_terminal", True)
        monkeypatch.setattr(console.out, "_width", width)

    return narrow


def example():
    table = Table(title="the title", box=None, header_style="dim")
    for header in ("region", "metric", "per image", "95% interval"):
        table.add_column(header, justify="right")
    table.add_row("everything", "ece[num_bins=50]".replace("[", r"\["), "0.123456", "0.100001 - 0.200002")
    table.add_row("", "nll", "12.345678", "-")
    return table


WORDS = ("the title", "everything", "ece[num_bins=50]", "nll", "0.123456", "0.100001", "0.200002", "12.345678")


@pytest.mark.parametrize("width", [10, 25, 40, 60, 200])
def test_nothing_is_cut_on_a_terminal(terminal, capsys, width):
    terminal(width)
    console.show_table(example())
    shown = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    for word in WORDS:
        assert word in shown
    assert "…" not in shown
    if width >= 60:
        assert all(len(line) <= width for line in shown.splitlines())


@pytest.mark.parametrize("width", [10, 40, 200])
def test_a_pipe_gets_every_row_on_one_line(monkeypatch, capsys, width):
    monkeypatch.setattr(console.out, "_width", width)
    console.show_table(example())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert [word in lines[2] for word in WORDS] == [False, True, True, False, True, True, True, False]


def test_commands_print_the_same_numbers_at_any_width(run, monkeypatch, tmp_path):
    root = plain(tmp_path / ("a-long-name-" * 8), count=3, shape=(20, 24))
    commands = (("evaluate", root, "--metrics", "nll,ece[num_bins=50],hd95"), ("check", root))
    for command in commands:
        wide = run(*command)[1]
        for forced in (False, True):
            monkeypatch.setattr(console.out, "_force_terminal", forced)
            monkeypatch.setenv("NO_COLOR", "1")
            narrow = run(*command, width=40)[1]
            assert NUMBERS.findall(narrow) == NUMBERS.findall(wide)
            assert "…" not in narrow
            assert str(root) in narrow or command[0] == "evaluate"
