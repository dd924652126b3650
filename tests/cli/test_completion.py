"""A shell's completion, asked as shells ask: through environment variables."""

import os
import subprocess
import sys

import pytest

import segcal
from segcal.cli.commands import app
from segcal.cli.completion import completing_app, described
from segcal.metrics import PRESETS

ASK = """
import sys
sys.argv = ["segcal"]
from segcal.cli import main
try:
    main()
finally:
    heavy = {"torch", "numpy", "scipy", "numba"} & set(sys.modules)
    assert not heavy, heavy
"""


@pytest.fixture
def complete(monkeypatch, capsys):
    """What bash is told for a line; the cursor stands behind its last letter."""

    def ask(line):
        words = line.split(" ")
        monkeypatch.setenv("_SEGCAL_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        monkeypatch.setattr(sys, "argv", ["segcal"])
        with pytest.raises(SystemExit):
            segcal.cli.main()
        return capsys.readouterr().out.split()

    return ask


def test_the_file_has_the_options_of_all_commands():
    assert described(completing_app()) == described(app), "run: make completions"


def test_commands_options_and_their_values(complete):
    assert complete("segcal ev") == ["evaluate"]
    assert {"--regions", "--per-class", "--no-per-class"} <= set(complete("segcal evaluate data --"))
    assert complete("segcal fit data --method ") == list(segcal.CALIBRATORS)
    assert complete("segcal fit data --voxels a") == ["auto", "all"]
    assert complete("segcal evaluate data --preset ") == list(PRESETS)
    assert complete("segcal evaluate data --regions band-") == [name for name in segcal.REGIONS if "band" in name]
    assert complete("segcal evaluate data --output r") == []  # The shell completes file names by itself.


def test_lists_with_commas(complete):
    assert complete("segcal evaluate data --metrics nll,ec") == ["nll,ece", "nll,ece-wrong", "nll,ece-right"]
    assert complete("segcal compare data --methods ts,cms-") == ["ts,cms-ap", "ts,cms-op"]
    assert "decision-preserving" in complete("segcal compare data --methods ")
    others = complete("segcal compare data --methods ts,")
    assert others == [f"ts,{name}" for name in segcal.CALIBRATORS if name != "ts"]
    assert complete("segcal evaluate data --metrics all,") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_an_answer_without_waiting_for_torch(shell):
    line = "segcal fit data --method cms-"
    asked = {"_SEGCAL_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "COMP_CWORD": "4",
             "_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ASK], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "cms-ap" in done.stdout
    assert "cms-op" in done.stdout
    assert shell == "bash" or "CMS order preserving" in done.stdout


def test_the_script_for_the_shell_can_be_shown(run, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code, text, _ = run("--show-completion", "bash")
    assert code == 0
    assert "_SEGCAL_COMPLETE=complete_bash" in text
