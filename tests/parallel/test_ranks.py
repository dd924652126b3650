"""Ranks of a torchrun job: rank 0 gets the answers of all, errors are clear, and results are those of one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import segcal
from pretended_ranks import pretended_ranks
from segcal.cases import write_dataset
from segcal.errors import InputError
from segcal.evaluation import evaluate as evaluation
from segcal.parallel import ranks
from segcal.synthetic import Temperature, scenes

TESTS = Path(__file__).parent.parent


def torchrun(count, *words, **options):
    """Start a job of so many processes on this machine, each with one thread."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), *words]
    paths = [str(Path(segcal.__file__).parent.parent), str(TESTS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "scenes"
    write_dataset(scenes(4, size=(32, 40), plant=[Temperature(2.0)]), path, dtype="float32")
    return path


def test_three_ranks_work_for_the_first(folder):
    with torchrun(3, str(TESTS / "rank_script.py"), str(folder)) as job:
        said, errors = job.communicate(timeout=100)
    assert said == "all is well\n", errors
    assert job.returncode == 0


def test_a_rank_that_is_killed_fails_the_job_and_resume_goes_on(folder, tmp_path, monkeypatch, run):
    output = tmp_path / "results.json"
    command = [str(TESTS / "rank_command.py"), "evaluate", str(folder), "--metrics", "nll,ece", "-o", str(output)]
    monkeypatch.setenv("KILLED", "1")
    monkeypatch.setenv("AFTER", "1")
    with torchrun(2, *command) as job:
        _, errors = job.communicate(timeout=100)
    assert job.returncode == 1
    assert re.search(r"Another rank ended|lost another rank", errors), errors
    assert "--resume" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["results.json.unfinished"]
    measured, measure = [], evaluation.measure_case
    monkeypatch.setattr(evaluation, "measure_case", lambda *some: measured.append(some[1].id) or measure(*some))
    with pretended_ranks(monkeypatch, 2):
        code, _, errors = run("evaluate", folder, "--metrics", "nll,ece", "-o", output, "--resume")
    assert code == 0, errors
    assert "image-003" in measured
    assert "image-001" not in measured  # which the killed rank had measured
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    with pretended_ranks(monkeypatch, 2):
        run("evaluate", folder, "--metrics", "nll,ece", "-o", tmp_path / "whole.json")
    assert output.read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_ranks_of_different_versions_are_refused():
    same = {"segcal": "1.0", "torch": "2.0"}
    ranks._check_versions({0: ("a", same), 1: ("b", same)})
    with pytest.raises(InputError, match=r"rank 1 on b has segcal 0.9 instead of 1.0; expected the same versions"):
        ranks._check_versions({0: ("a", same), 1: ("b", {**same, "segcal": "0.9"})})


def test_one_process_of_torchrun_is_no_job(monkeypatch):
    for world, expected in (("1", False), ("2", True)):
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("RANK", "0")
        assert ranks.under_torchrun() == expected
