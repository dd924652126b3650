"""Folders that a killed run left behind."""

from __future__ import annotations

import json

import pytest

from segcal.errors import OutputError
from segcal.files.folders import JOURNAL, OwnFolder


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("left", ["", '{"hol'])
def test_a_run_killed_as_it_began_leaves_a_folder_that_counts_as_empty(tmp_path, left: str, resume: bool) -> None:
    (tmp_path / JOURNAL).write_text(left)
    with OwnFolder(tmp_path, "an example", resume=resume) as folder:
        assert not folder.begun
        folder.claim("a.txt").write_text("whole")
    lines = (tmp_path / JOURNAL).read_text().splitlines()
    assert [json.loads(line) for line in lines if line != left] == [{"holds": "an example"}, {"file": "a.txt"}]
    assert OwnFolder(tmp_path, "an example", resume=True).begun


@pytest.mark.parametrize(("journal", "other"), [("", "notes.txt"), ("not ours\n", None)])
def test_a_folder_with_anything_else_is_refused(tmp_path, journal: str, other: str | None) -> None:
    (tmp_path / JOURNAL).write_text(journal)
    if other:
        (tmp_path / other).write_text("theirs")
    with pytest.raises(OutputError, match="is not empty"):
        OwnFolder(tmp_path, "an example", resume=True)
