"""The study of ``nnunet_study`` as a fixture. It is built once, whichever process comes first."""

import os
import subprocess
import sys

import pytest
from filelock import FileLock

import nnunet_study


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / "nnunet-study"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = shared / "nnunet-study-unfinished"
            unfinished.mkdir()
            command = [sys.executable, nnunet_study.__file__, str(unfinished)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
            unfinished.rename(folder)
    return folder


@pytest.fixture
def study(built, monkeypatch):
    """The folder of the study, which nnU-Net's variables name."""
    for name, value in nnunet_study.environment(built).items():
        monkeypatch.setenv(name, value)
    return built
