import sys

import pytest

import segcal.cli


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line as a user would; returns exit code, standard output, standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["segcal", *map(str, arguments)])
        monkeypatch.setattr(segcal.cli.console.out, "_width", 200)
        with pytest.raises(SystemExit) as stop:
            segcal.cli.main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call
