import os
import sys

# Tests run in parallel processes: more threads each would only get in each other's way, also in what they start.
# Read when numpy and torch are first imported.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

import segcal.cli.console


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line as a user would; returns exit code, standard output, standard error."""

    def call(*arguments, width=200):
        monkeypatch.setattr(sys, "argv", ["segcal", *map(str, arguments)])
        monkeypatch.setattr(segcal.cli.console.out, "_width", width)
        with pytest.raises(SystemExit) as stop:
            segcal.cli.main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


def pytest_sessionfinish(session):
    """Where integrations are required, a test that was skipped has failed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("SEGCAL_REQUIRE_INTEGRATIONS") and reporter is not None and reporter.stats.get("skipped"):
        reporter.write_line("integrations are required, but tests were skipped:", red=True)
        for report in reporter.stats["skipped"]:
            reporter.write_line(f"  {report.nodeid}: {report.longrepr[-1]}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
