import os
import subprocess
import sys

import pytest

import segcal
from datasets import plain, snapshot
from segcal.cases import write_dataset
from segcal.cases.formats import SCORE_FORMATS
from segcal.errors import OutputError
from segcal.evaluation.apply import apply, write_maps
from segcal.files import atomic as files
from segcal.files.atomic import atomic_path, check_writable
from segcal.plots import reliability_figures, save
from segcal.training.loop import save_checkpoint
from segcal.training.networks import UNet


@pytest.fixture
def victim(tmp_path):
    """A folder with something in it, beside which nothing may change."""
    (tmp_path / "victim" / "deep").mkdir(parents=True)
    (tmp_path / "victim" / "deep" / "work.txt").write_text("years")
    return tmp_path / "victim"


@pytest.mark.parametrize("name", ["victim", "victim/", "victim/deep/..", ".", "..", "link"])
def test_a_folder_is_never_replaced_by_a_file(tmp_path, victim, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(victim)
    before = snapshot(tmp_path)
    with pytest.raises(OutputError, match="is a folder"):
        check_writable(name)
    with pytest.raises(OutputError, match="is a folder"), atomic_path(tmp_path / name) as temporary:
        temporary.write_text("new")
    assert snapshot(tmp_path) == before


def test_a_folder_replaces_nothing_or_what_it_may(tmp_path, victim):
    before = snapshot(tmp_path)
    with pytest.raises(OutputError, match="is not empty"), atomic_path(victim, folder=True) as temporary:
        temporary.mkdir()
    (link := tmp_path / "link").symlink_to(victim)
    with pytest.raises(OutputError, match="a link"), atomic_path(link, folder=True, replace=True) as temporary:
        temporary.mkdir()
    link.unlink()
    assert snapshot(tmp_path) == before
    (tmp_path / "empty").mkdir()
    for name, replace in (("empty", False), ("new/folder", False), ("victim", True)):
        with atomic_path(tmp_path / name, folder=True, replace=replace) as temporary:
            temporary.mkdir()
            (temporary / "file").write_text(name)
        assert [path.name for path in (tmp_path / name).iterdir()] == ["file"]
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "new", "victim"}


def test_a_file_is_replaced_once_the_new_one_is_complete(tmp_path):
    path = tmp_path / "cal"
    path.write_text("old")
    with pytest.raises(TypeError), atomic_path(path) as temporary:
        temporary.write_text(b"half")
    assert snapshot(tmp_path).keys() == {"cal"}
    assert path.read_text() == "old"
    with atomic_path(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert snapshot(tmp_path).keys() == {"cal"}


def test_a_link_to_a_file_is_written_through(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "cal")
    with atomic_path(tmp_path / "link") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "real" / "cal").read_text() == "new"
    assert (tmp_path / "link").is_symlink()


def test_devices_and_protected_files_stay(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    protected = tmp_path / "protected"
    protected.write_text("mine")
    protected.chmod(0o400)
    before = snapshot(tmp_path)
    names = [tmp_path / "pipe", *([] if os.access(protected, os.W_OK) else [protected])]  # root may write anything
    for path in names:
        with pytest.raises(OutputError, match="device or pipe|protected"), atomic_path(path) as temporary:
            temporary.write_text("new")
    with pytest.raises(OutputError, match="device"):
        check_writable(os.devnull)
    assert snapshot(tmp_path) == before


def test_what_cannot_be_written_is_known_beforehand_and_leaves_no_trace(tmp_path):
    (tmp_path / "file").write_text("")
    before = snapshot(tmp_path)
    for path in ("file/cal", "x" * 300):
        with pytest.raises(OutputError, match="cannot be written"):
            check_writable(tmp_path / path)
    with pytest.raises(OutputError, match="is a file"):
        check_writable(tmp_path / "file", folder=True)
    for path, folder in (("new/deep/cal", False), ("new/deep", True), (".", True), ("file", False)):
        check_writable(tmp_path / path, folder=folder)
    assert snapshot(tmp_path) == before
    with pytest.raises(KeyError), atomic_path(tmp_path / "new" / "deep" / "cal"):
        raise KeyError
    assert snapshot(tmp_path) == before


def test_long_names_are_as_good_as_short_ones(tmp_path):
    path = tmp_path / ("x" * 248 + ".nii.gz")
    with atomic_path(path) as temporary:
        assert temporary.name.endswith(".nii.gz")
        temporary.write_text("")
    assert path.is_file()


def test_leftovers_of_killed_processes_go_and_nothing_else_does(tmp_path):
    script = """
import os, pathlib, signal, sys
from segcal.files.atomic import atomic_path
with atomic_path(pathlib.Path(sys.argv[1])) as temporary, atomic_path(pathlib.Path(sys.argv[2]), folder=True) as zarr:
    temporary.write_text("half"); zarr.mkdir(); (zarr / "chunk").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", script, tmp_path / "a.npy", tmp_path / "a.zarr"])
    assert killed.returncode < 0
    left = set(snapshot(tmp_path))
    assert len(left) == 3
    (name,) = (path.name for path in tmp_path.iterdir() if path.suffix == ".npy")
    machine, process = name.split("-")[2:4]
    kept = [
        f".tmp-{process}-a.npy",
        f".segcal-tmp-{process}-a.npy",
        f".segcal-tmp-{'0' * 8}-{process}-{'0' * 8}-0.npy",  # of another machine
        f".segcal-tmp-{machine}-{os.getppid()}-{'0' * 8}-0.npy",  # of a process that lives
        f".segcal-tmp-{machine}-{os.getpid()}-{files._TOKEN}-9999.npy",  # of this one
    ]
    for name in kept:
        (tmp_path / name).write_text("")
    files.remove_leftovers.cache_clear()
    with atomic_path(tmp_path / "b.npy") as temporary:
        temporary.write_text("")
    assert {path.name for path in tmp_path.iterdir()} == {"b.npy", *kept}


def test_files_have_the_rights_that_the_umask_gives(tmp_path):
    cases = segcal.synthetic.scenes(4, size=(32, 40), num_classes=3)
    before = os.umask(0o027)
    try:
        calibrator = segcal.calibrators.TemperatureScaling().fit(cases)
        calibrator.save(tmp_path / "cal.safetensors")
        UNet(1, 2, width=4, depth=2).save(tmp_path / "best.safetensors")
        save_checkpoint(tmp_path / "last.pt", {})
        for format in SCORE_FORMATS:
            write_dataset(cases[:1], tmp_path / format, format=format)
        apply(calibrator, cases[:1], tmp_path / "applied", confidence=True)
        results = segcal.evaluate(cases, metrics=("nll",))
        results.to_json(tmp_path / "results.json")
        results.to_csv(tmp_path / "results.csv")
        write_maps(cases[:1], tmp_path / "maps")
        segcal.compare(cases, methods=("ts",), repeats=1, metrics=("nll",), output=tmp_path / "study")
        for _, figure in reliability_figures(results):
            save(figure, tmp_path / "plots" / "figure.png")
    finally:
        os.umask(before)
    rights = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert len(rights) > 50
    wrong = {path: oct(mode) for path, mode in rights.items() if mode != (0o750 if path.is_dir() else 0o640)}
    assert not wrong


def test_resuming_removes_what_a_killed_run_left_in_any_subfolder(tmp_path):
    finished = subprocess.Popen([sys.executable, "-c", ""])
    finished.wait()
    left = f".segcal-tmp-{files._machine()}-{finished.pid}-{'0' * 8}-0.npy"
    cases = segcal.open_cases(plain(tmp_path / "in"))
    write_dataset(cases, tmp_path / "out")
    whole = snapshot(tmp_path / "out")
    (tmp_path / "out" / "labels" / left).write_text("half")
    files.remove_leftovers.cache_clear()
    assert write_dataset(cases, tmp_path / "out", resume=True).skipped == 3
    assert snapshot(tmp_path / "out").keys() == whole.keys()
