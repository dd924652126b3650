"""Work in several processes: told of as it goes on, and a clear error where one of them dies."""

import operator
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import segcal
from segcal.cases.caseset import CaseRef
from segcal.errors import InputError, WorkerError
from segcal.parallel.workers import in_workers
from segcal.study import compare
from segcal.study.work import run
from segcal.synthetic import Temperature, scenes
from worker_tasks import opened_only_by, scaled


def test_results_come_in_order_progress_as_it_is_made_and_errors_as_they_are():
    told = []
    assert in_workers(scaled, [(10, [1, 2]), (100, [3])], operator.add, told.append) == [10, 20, 300]
    assert sorted(told) == ["10", "20", "300"]
    with pytest.raises(InputError, match="nothing to scale"):
        in_workers(scaled, [(10, [0])], operator.add, told.append)


def deadly(cases):
    return replace(cases, refs=tuple(CaseRef(ref.id, partial(opened_only_by, os.getpid(), ref)) for ref in cases.refs))


def test_a_worker_that_dies_while_it_evaluates_is_a_clear_error_and_no_failure_of_a_method(monkeypatch, tmp_path):
    cases = deadly(scenes(8, size=(24, 32), plant=[Temperature(2.0)]))
    monkeypatch.setattr(run, "_MANY_SCORES", 0)  # otherwise one process evaluates so few
    monkeypatch.setattr(run, "run_fits", partial(_fits_here, run.run_fits))
    with pytest.raises(WorkerError, match=r"a worker process died.*fewer workers.*--resume"):
        compare(cases, ("ts",), 1, tune="none", metrics=("nll",), regions=("everything",), workers=2, output=tmp_path)


def _fits_here(run_fits, tasks, store, workers, progress):
    return run_fits(tasks, store, 1, progress)


# Without torch and the rest of segcal, which take seconds to import and have no part in this.
SCRIPT = """
import os, signal, sys, time, types
from pathlib import Path
sys.modules["torch"] = torch = types.ModuleType("torch")
torch.get_num_threads, torch.set_num_threads = (lambda: 2), (lambda count: None)
sys.modules["segcal"] = package = types.ModuleType("segcal")
package.__path__ = [SOURCE]
from segcal.parallel.workers import in_workers

def work(folder, progress):
    (folder / f"{os.getpid()}.pid").touch()
    progress("begun")
    time.sleep(600)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore Ctrl-C
    folder = Path(sys.argv[1])
    in_workers(work, [(folder,), (folder,)], max, lambda name: print(name, flush=True))
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent_though_they_would_sleep_on(tmp_path, number):
    source = str(Path(segcal.__file__).parent)
    (tmp_path / "script.py").write_text(SCRIPT.replace("SOURCE", repr(source)))
    process = subprocess.Popen(
        [sys.executable, "script.py", str(tmp_path)], cwd=tmp_path, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        try:
            assert [process.stdout.readline() for _ in range(2)] == ["begun\n", "begun\n"]
            workers = [int(path.stem) for path in tmp_path.glob("*.pid")]
            assert len(workers) == 2
            if number == signal.SIGINT:  # Ctrl-C reaches all processes of a terminal.
                os.killpg(process.pid, number)
            else:
                process.kill()
            _, error = process.communicate(timeout=100)  # far less than the workers would sleep
        finally:
            process.kill()
    assert error.count("Traceback") == (number == signal.SIGINT)  # that of the parent alone
    for _ in range(2000):
        if not any(map(alive, workers)):
            break
        time.sleep(0.05)
    assert not any(map(alive, workers))
