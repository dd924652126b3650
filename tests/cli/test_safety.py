"""No command deletes, replaces or writes anything but its own output."""

import os
import shutil
import sys

import numpy as np
import pytest

import segcal
import segcal.cli.commands
from datasets import nnunet, plain, snapshot
from segcal.errors import OutputError, SegcalError
from segcal.evaluation.results import Results


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run the command line in a folder with the dataset ``ds``; returns exit code and standard error."""
    plain(tmp_path / "ds", count=6, shape=(20, 24))
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["segcal", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            segcal.cli.main()
        call.shown, error = capsys.readouterr()
        return stop.value.code or 0, error

    return call


@pytest.mark.parametrize("folder", ["victim", "victim/", ".", "ds/..", "ds", "ds/logits", "link"])
def test_a_folder_is_no_place_for_a_file(run, tmp_path, folder):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "work.txt").write_text("years")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    before = snapshot(tmp_path)
    for command in (("fit", "ds", "-o"), ("evaluate", "ds", "-o"), ("evaluate", "ds", "--csv")):
        code, error = run(*command, folder)
        assert code == 1
        assert "is a folder" in error
        assert snapshot(tmp_path) == before


def assert_refused(run, tmp_path, says, *arguments):
    """Run a command that must refuse, say why, and leave everything as it was."""
    before = snapshot(tmp_path)
    code, error = run(*arguments)
    assert code == 1
    assert says in error
    assert "Traceback" not in error
    assert snapshot(tmp_path) == before
    return error


@pytest.fixture
def cal(run, tmp_path):
    assert run("fit", "ds", "-o", "cal.safetensors")[0] == 0
    return tmp_path / "cal.safetensors"


def test_input_is_never_output(run, tmp_path, cal):
    (tmp_path / "link").symlink_to(tmp_path / "ds")
    (tmp_path / "linked").symlink_to(tmp_path / "ds" / "logits")
    inside = ("ds/logits", "ds/labels", "ds/probs", "ds/logits/new", "linked", "linked/new")
    for output in ("ds", "ds/", "ds/../ds", "link", ".", *inside):
        for command in (("apply", cal, "ds", "-o", output), ("pack", "ds", output), ("compare", "ds", "-o", output)):
            for resume in ((), ("--resume",)):
                assert "--resume" not in assert_refused(run, tmp_path, "expected a folder apart", *command, *resume)


def test_input_is_never_output_where_segcal_wrote_it(run, tmp_path, cal):
    assert run("apply", cal, "ds", "-o", "once")[0] == 0
    shutil.copytree("ds/labels", "twice/labels")
    (tmp_path / "twice" / "segcal.toml").write_text('kind = "probs"\nscores = "../once/probs"\n')
    assert_refused(run, tmp_path, "is read", "apply", cal, "twice", "-o", "once", "--resume")
    (tmp_path / "thrice" / "probs").mkdir(parents=True)
    for path in (tmp_path / "once" / "probs").iterdir():  # links to single files
        (tmp_path / "thrice" / "probs" / path.name).symlink_to(path)
    assert_refused(run, tmp_path, "is also an input", "apply", cal, "thrice", "-o", "once", "--resume")
    assert run("pack", "ds", "packed")[0] == 0
    assert_refused(run, tmp_path, "which is read", "pack", "packed", "packed", "--resume")


def test_an_nnunet_folder_is_not_written_into(run, tmp_path):
    predictions, truth = nnunet(tmp_path / "nn")
    layout = ("--layout", "nnunet")
    assert run("fit", predictions, *layout, "--labels", truth, "-o", "cal.safetensors", "--test", "0")[0] == 0
    for output in (predictions, predictions / "new", tmp_path / "nn", truth):
        # apply does not read labels, so their folder is only one that is not empty
        says = "is not empty" if output == truth else "a folder apart from the input"
        for resume in ((), ("--resume",)):
            command = ("apply", "cal.safetensors", predictions, *layout, "-o", output)
            assert_refused(run, tmp_path, says, *command, *resume)


def test_resume_is_for_what_segcal_began(run, tmp_path, cal):
    """A folder of the user's, with the very files that a command writes, stays as it is."""
    for folder in ("probs", "labels", "logits", "work"):
        (tmp_path / "mine" / folder).mkdir(parents=True)
    for name in (
        "probs/case0.npy",
        "labels/case0.npy",
        "logits/case0.npy",
        "segcal.toml",
        "results.json",
        "index.html",
    ):
        (tmp_path / "mine" / name).write_text("mine")
    for command in (("apply", cal, "ds", "-o", "mine"), ("pack", "ds", "mine"), ("compare", "ds", "-o", "mine")):
        assert "--resume" not in assert_refused(run, tmp_path, "is not empty", *command)
        assert_refused(run, tmp_path, "could be resumed", *command, "--resume")
    run("apply", cal, "ds", "-o", "out")
    assert_refused(run, tmp_path, "holds calibrated scores already", "pack", "ds", "out", "--resume")
    assert "--resume" in assert_refused(run, tmp_path, "is not empty", "apply", cal, "ds", "-o", "out")


def test_maps_replace_maps_and_nothing_else(run, tmp_path):
    (tmp_path / "study" / "prediction").mkdir(parents=True)
    np.save(tmp_path / "study" / "prediction" / "case0.npy", np.zeros(3))  # the user's own
    assert run("evaluate", "ds", "--metrics", "nll", "--maps", "maps")[0] == 0
    once = snapshot(tmp_path / "maps" / "band")
    assert run("evaluate", "ds", "--metrics", "nll", "--maps", "maps")[0] == 0
    assert snapshot(tmp_path / "maps" / "band") == once
    assert_refused(run, tmp_path, "segcal did not write it", "evaluate", "ds", "--metrics", "nll", "--maps", "study")


def test_maps_and_plots_go_beside_the_input_but_not_into_it(run, tmp_path):
    before = snapshot(tmp_path / "ds")
    for option in ("--maps", "--plots"):
        for folder in ("ds/logits", "ds/labels/new", "ds/masks"):
            assert_refused(
                run, tmp_path, "expected a folder apart", "evaluate", "ds", "--metrics", "nll", option, folder
            )
    assert run("evaluate", "ds", "--metrics", "nll", "--maps", "ds", "--plots", ".")[0] == 0
    assert {name: state for name, state in snapshot(tmp_path / "ds").items() if name in before} == before
    assert (tmp_path / "reliability-everything.png").is_file()
    assert len(list((tmp_path / "ds" / "confidence").iterdir())) == 6
    assert segcal.open_cases(tmp_path / "ds").ids == tuple(f"case{i}" for i in range(6))


@pytest.mark.parametrize("place", ["file/x", "/proc/x", "pipe", "victim", "x" * 300])
def test_a_place_that_cannot_be_written_is_known_before_the_work(run, tmp_path, cal, monkeypatch, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "victim").mkdir()
    os.mkfifo(tmp_path / "pipe")

    def work(*args, **kwargs):
        raise AssertionError("the work began")

    for name in ("fit.CALIBRATORS", "fit.evaluate_many", "evaluate.evaluate_many"):
        monkeypatch.setattr(f"segcal.cli.{name}", {"ts": work} if name.endswith("RS") else work)
    for option in (("fit", "ds", "-o"), ("evaluate", "ds", "-o"), ("evaluate", "ds", "--csv")):
        assert_refused(run, tmp_path, "Error in", *option, place)
    if place != "victim":
        for option in ("--plots", "--maps"):
            assert_refused(run, tmp_path, "Error in", "evaluate", "ds", option, place)
        for command in (("apply", cal, "ds", "-o", place), ("pack", "ds", place), ("scenes", place)):
            assert_refused(run, tmp_path, "Error in", *command)
        assert_refused(run, tmp_path, "Error in", "compare", "ds", "-o", place)
        assert_refused(run, tmp_path, "Error in", "demo", "-o", place)


def test_files_that_are_read_are_not_written(run, tmp_path, cal):
    (tmp_path / "ds" / "segcal.toml").write_text("ignore_index = 255")
    (tmp_path / "link.json").symlink_to(tmp_path / "ds" / "logits" / "case0.npy")
    for name in ("ds/segcal.toml", "ds/labels/case0.npy", "link.json"):
        for option in (("fit", "ds", "-o"), ("evaluate", "ds", "-o"), ("evaluate", "ds", "--csv")):
            assert_refused(run, tmp_path, "is also an input", *option, name)
    assert_refused(run, tmp_path, "is also an input", "evaluate", "ds", "--calibrator", cal, "-o", cal)
    assert_refused(run, tmp_path, "two results", "evaluate", "ds", "-o", "x", "--csv", "./x")


def test_results_are_shown_where_they_cannot_be_kept(run, capsys, tmp_path, monkeypatch):
    def full(self, path):
        raise OutputError("cannot be written (No space left on device)", where=str(path))

    monkeypatch.setattr(Results, "to_csv", full)
    code, error = run("evaluate", "ds", "--metrics", "nll", "--csv", "x.csv")
    assert code == 1
    assert "No space left" in error
    assert "nll" in run.shown


def test_a_demo_removes_only_what_a_demo_wrote(run, tmp_path, monkeypatch):
    def write(data, report, seed):  # what matters here, in no time
        segcal.cases.write_dataset(segcal.synthetic.scenes(2, size=(32, 40)), data)
        (report / "work").mkdir(parents=True)
        (report / "work" / "fit.json").write_text(str(seed))
        if seed == 3:
            raise SegcalError("stopped")

    monkeypatch.setattr(segcal.cli.demo, "_demonstrate", write)
    run("pack", "ds", "d/scenes")  # as any packed dataset
    assert_refused(run, tmp_path, "which no demo wrote", "demo", "-o", "d")
    shutil.rmtree(tmp_path / "d" / "scenes")
    (tmp_path / "d" / "report" / "work").mkdir(parents=True)
    (tmp_path / "d" / "report" / "work" / "fit-0.json").write_text("{}")  # as any study
    assert_refused(run, tmp_path, "which no demo wrote", "demo", "-o", "d")
    shutil.rmtree(tmp_path / "d" / "report")
    (tmp_path / "d" / "mine.txt").write_text("mine")
    for seed in (0, 1, 3, 0):  # again and again; one of them fails in the middle
        assert run("demo", "-o", "d", "--seed", seed)[0] == (1 if seed == 3 else 0)
        assert (tmp_path / "d" / "report" / "work" / "fit.json").read_text() == str(seed)
    (tmp_path / "d" / "report" / "notes.txt").write_text("mine")
    assert_refused(run, tmp_path, "report/notes.txt, which no demo wrote", "demo", "-o", "d")
    (tmp_path / "d" / "report" / "notes.txt").unlink()
    (tmp_path / "d" / "report" / "work" / "fit.json").write_text("changed")
    assert_refused(run, tmp_path, "report/work/fit.json, which no demo wrote", "demo", "-o", "d")
    assert (tmp_path / "d" / "mine.txt").read_text() == "mine"
