"""One run at a time writes to a folder, and a run that was killed holds nothing."""

import os
import signal
import subprocess
import sys
import time

import pytest

import segcal
from datasets import plain, snapshot
from segcal.cases import write_dataset
from segcal.errors import OutputError
from segcal.files.folders import JOURNAL, OwnFolder
from segcal.files.lock import Lock

HOLDER = """
import sys, pathlib
from segcal.files.folders import OwnFolder
own = OwnFolder(pathlib.Path(sys.argv[1]), "a dataset")
own.begin()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path):
    cases, out = segcal.open_cases(plain(tmp_path / "in")), tmp_path / "out"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        before = snapshot(tmp_path)
        for resume in (False, True):
            with pytest.raises(OutputError, match="out: another process is writing here.*To fix: wait until"):
                write_dataset(cases, out, resume=resume)
        assert snapshot(tmp_path) == before
    finally:
        holder.kill()
        holder.communicate()
    assert write_dataset(cases, out, resume=True).cases == 3


def test_a_run_that_began_after_this_one_looked_is_seen(tmp_path):
    late = OwnFolder(tmp_path / "out", "a dataset")
    with OwnFolder(tmp_path / "out", "a dataset") as early:
        early.claim("labels/a.npy")
        with pytest.raises(OutputError, match="another process is writing here"):
            late.begin()
    with pytest.raises(OutputError, match="another process has written here"):
        late.begin()
    assert (tmp_path / "out" / JOURNAL).read_text().count("holds") == 1


def test_a_forked_process_does_not_keep_the_lock(tmp_path):
    """As the workers of a DataLoader, which may outlive the run."""
    mine, later = Lock(tmp_path / "file", tmp_path), Lock(tmp_path / "file", tmp_path)
    mine.hold()
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        mine.release()
        later.hold()
        later.release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
