import atexit
import copy
import functools
import gc
import math
import os
import sys

# Tests run in parallel processes: more threads each would only get in each other's way, also in what they start.
# Read when numpy and torch are first imported.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import pytest
import torch
import typer.main
from hypothesis import settings

from seeds import DEFAULT_SEED, ROUNDS, SEED

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

import segcal.cli.console
from segcal.synthetic.scene import SceneSpec

SCENES = {}


@pytest.fixture(autouse=True)
def _small_scenes_are_generated_once(monkeypatch, request):
    """For all tests of a process, each of which gets copies; not for those of the scenes themselves.

    To generate a small scene takes longer than to evaluate it, and its case is opened again in every pass.
    """
    if request.path.name == "test_synthetic.py" or request.path.match("segcal/synthetic/*"):
        return
    generate = SceneSpec.generate

    def kept(spec, index):
        if math.prod(spec.size) > 2**14:
            return generate(spec, index)
        key = repr(spec), index
        if key not in SCENES:
            if len(SCENES) == 128:
                del SCENES[next(iter(SCENES))]
            SCENES[key] = generate(spec, index)
        return copy.deepcopy(SCENES[key])

    monkeypatch.setattr(SceneSpec, "generate", kept)


@pytest.fixture(scope="session", autouse=True)
def _commands_are_built_once():
    """Typer builds all commands from their signatures at every call, which takes longer than most calls of tests."""
    typer.main.get_command = functools.cache(typer.main.get_command)


# Property tests draw the same examples in every run, or others with every seed.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("seeded", derandomize=False, database=None, deadline=None, print_blob=True)
settings.load_profile("fixed" if SEED == DEFAULT_SEED else "seeded")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Hand the seed to hypothesis, as its option would, unless that is given."""
    if SEED != DEFAULT_SEED and config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = SEED


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """What was imported stays: each search for garbage would take half a second to go through it.

    What tests import is searched less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)
    atexit.register(gc.unfreeze)  # or libraries would report what they still hold as lost


def pytest_report_header():
    return f"segcal: SEGCAL_SEED={SEED} SEGCAL_ROUNDS={ROUNDS}"


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


@pytest.fixture
def no_figures(monkeypatch):
    """Reports without figures, which take a second to draw: for tests that look at something else."""
    monkeypatch.setattr("segcal.report.figures.write_figures", lambda study, folder: [])


def pytest_sessionfinish(session):
    """Where integrations are required, a test that was skipped has failed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("SEGCAL_REQUIRE_INTEGRATIONS") and reporter is not None and reporter.stats.get("skipped"):
        reporter.write_line("integrations are required, but tests were skipped:", red=True)
        for report in reporter.stats["skipped"]:
            reporter.write_line(f"  {report.nodeid}: {report.longrepr[-1]}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
