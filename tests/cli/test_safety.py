"""No command deletes, replaces or writes anything but its own output."""

import sys

import pytest

import segcal
import segcal.cli
from datasets import plain, snapshot


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run the command line in a folder with the dataset ``ds``; returns exit code and standard error."""
    plain(tmp_path / "ds", count=6, shape=(20, 24))
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["segcal", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            segcal.cli.main()
        return stop.value.code or 0, capsys.readouterr().err

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
