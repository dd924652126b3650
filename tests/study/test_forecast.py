"""What commands will cost: memory and disk beside what happens, and how the model of time grows."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import segcal
from datasets import plain
from segcal.errors import InputError
from segcal.report import write_report
from segcal.study import costs
from segcal.study.costs import DataSize
from segcal.study.forecast import _WAITED, Machine, _clock, plan
from segcal.synthetic import demo_plant, scenes

REFERENCE = Machine("cpu", 1, 8e9, 8e9, read=1e9, alone=1.0, together=1.0, passes=1.0)
_PEAK = """
import sys, pathlib, segcal
cases = segcal.open_cases(sys.argv[1])
if sys.argv[2] == "evaluate":
    segcal.evaluate(cases, regions=("everything", "boundary"))
else:
    segcal.CALIBRATORS[sys.argv[2]]().fit(cases)
status = pathlib.Path("/proc/self/status").read_text()
print(1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))))
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan") / "study"
    cases = scenes(10, size=(64, 80), num_classes=4, plant=demo_plant(4))
    segcal.write_dataset(cases, folder, dtype="float32")
    return folder


def assert_within_a_factor_of_two(forecast, found):
    assert found / 2 <= forecast <= 2 * found, f"forecast {forecast:,.0f}, found {found:,.0f}"


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_disk_is_within_a_factor_of_two_of_what_is_written(study, tmp_path):
    cases = segcal.open_cases(study)
    forecast = plan(cases, ("ts", "isotonic"), 1, machine=REFERENCE)
    segcal.evaluate(cases, regions=("everything", "boundary")).to_json(tmp_path / "results.json")
    assert_within_a_factor_of_two(forecast.row("evaluate").disk, size_of_file(tmp_path / "results.json"))
    fitted = {id: segcal.CALIBRATORS[id]().fit(cases) for id in ("ts", "isotonic")}
    fitted["isotonic"].save(tmp_path / "cal.safetensors")
    assert_within_a_factor_of_two(forecast.row("fit isotonic").disk, size_of_file(tmp_path / "cal.safetensors"))
    segcal.apply(fitted["ts"], cases, tmp_path / "applied")
    assert_within_a_factor_of_two(forecast.row("apply ts").disk, size_of(tmp_path / "applied" / "probs"))
    segcal.compare(cases, ("ts", "isotonic"), 1, output=tmp_path / "report")
    write_report(tmp_path / "report")
    assert_within_a_factor_of_two(forecast.row("compare ts,isotonic").disk, size_of(tmp_path / "report"))


def size_of_file(path):
    return path.stat().st_size


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("what", ["evaluate", "cms-op"])
def test_memory_is_within_a_factor_of_two_of_the_peak(tmp_path, what):
    # One image of 2 million voxels and 12 classes: what is held of it shows beside what is loaded.
    plain(tmp_path, count=1, classes=12, shape=(1400, 1500))
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path), what], capture_output=True, text=True, check=True, env=os.environ
    )
    size = DataSize.of(segcal.open_cases(tmp_path))
    model = segcal.study.forecast.Model(size, REFERENCE)
    forecast = model.evaluate() if what == "evaluate" else model.fit(what)
    assert_within_a_factor_of_two(forecast.memory, int(done.stdout))


def test_sizes_are_those_of_the_files(tmp_path, monkeypatch):
    for count in range(12):
        (tmp_path / "logits").mkdir(exist_ok=True), (tmp_path / "labels").mkdir(exist_ok=True)
        shape = (40 + 10 * count, 64)
        np.save(tmp_path / "logits" / f"{count}.npy", np.zeros((3, *shape), np.float16))
        np.save(tmp_path / "labels" / f"{count}.npy", np.zeros(shape, np.uint8))
    cases = segcal.open_cases(tmp_path)
    voxels = [case.labels.numel() for case in cases]
    found = DataSize.of(cases)
    assert (found.cases, found.voxels, found.largest, found.classes) == (12, sum(voxels), max(voxels), 3)
    assert (found.format, found.stored) == ("float16 npy", size_of(tmp_path / "logits"))
    assert 1 <= found.ratio < 1.1
    monkeypatch.setattr(costs, "_OPENED", 4)  # the shapes of most are taken from their files
    some = DataSize.of(cases)
    assert some.largest == max(voxels)
    assert some.voxels == pytest.approx(sum(voxels), rel=0.01)


def test_time_grows_linearly_with_voxels_and_with_methods():
    # Beyond what fits draw at most, a voxel costs as much as the one before it.
    size = DataSize(cases=100, voxels=10**8, largest=10**6, classes=5)
    rows = {}
    for factor in (1, 2, 3):
        more = replace(size, cases=factor * size.cases, voxels=factor * size.voxels)
        model = segcal.study.forecast.Model(more, REFERENCE)
        parts = [(50 * factor, 20 * factor, 30 * factor)] * 3
        for ids in (("ts",), ("cms-op",), ("ts", "cms-op")):
            rows[factor, ids] = model.compare(ids, ids, parts).seconds
        rows[factor, "evaluate"], rows[factor, "fit trust"] = model.evaluate().seconds, model.fit("trust").seconds
    for what in {what for _, what in rows}:
        first, second = rows[2, what] - rows[1, what], rows[3, what] - rows[2, what]
        assert second == pytest.approx(first, rel=1e-6)
        assert first > 0
    fits = model.fit("cms-op").seconds
    assert rows[3, ("ts", "cms-op")] - rows[3, ("ts",)] > fits  # three repeats of half the cases


def test_a_faster_machine_takes_less_time_and_the_same_memory():
    size = DataSize(cases=10, voxels=10**7, largest=10**6, classes=5)
    faster = replace(REFERENCE, alone=0.5, together=0.25, passes=0.25, read=1e10)
    slow, fast = (segcal.study.forecast.Model(size, machine).fit("dc") for machine in (REFERENCE, faster))
    assert 0.25 * slow.seconds < fast.seconds < 0.5 * slow.seconds
    assert (slow.memory, slow.disk) == (fast.memory, fast.disk)


@pytest.mark.skipif(not _WAITED.exists(), reason="the system does not tell how long threads wait")
def test_the_clock_stops_while_other_programs_have_the_core():
    cores = os.sched_getaffinity(0)
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for process in (0, rival.pid):
            os.sched_setaffinity(process, {min(cores)})
        started, used = _clock(), time.thread_time()
        while time.thread_time() - used < 0.2:
            pass
        elapsed, busy = _clock() - started, time.thread_time() - used
    finally:
        os.sched_setaffinity(0, cores)
        rival.kill()
        rival.wait()
    assert elapsed == pytest.approx(busy, rel=0.2)


def test_every_calibrator_has_costs():
    assert set(costs.FITS) == set(costs.MAPS) == set(segcal.CALIBRATORS)


def test_what_does_not_fit_is_noted():
    forecast = plan(scenes(10, size=(16, 20)), ("ts",), 1, machine=replace(REFERENCE, memory=1e6, disk=1e3))
    assert any("GB of memory are needed, and 0.0 GB are free" in note for note in forecast.notes)
    assert any("are free in this folder" in note for note in forecast.notes)
    with pytest.raises(InputError, match="no command 'fit vs'"):
        forecast.row("fit vs")


def test_fits_that_would_be_refused_say_so(monkeypatch):
    monkeypatch.setattr(segcal.fitting.cost, "available_memory", lambda: 1e9)
    size = DataSize(cases=10, voxels=10**6, largest=10**5, classes=1000)
    model = segcal.study.forecast.Model(size, REFERENCE)
    assert "'cms-op' of 1000 classes needs about" in model.fit("cms-op").refused
    assert model.apply("cms-op").refused == model.fit("cms-op").refused
    assert model.fit("ts").refused is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": ("ts", "nope")}, "nope"),
        ({"methods": ()}, "no methods"),
        ({"repeats": 0}, "repeats"),
        ({"device": "tpu"}, "device is 'tpu'"),
        *([] if torch.cuda.is_available() else [({"device": "cuda"}, "no CUDA device")]),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        plan(scenes(10, size=(16, 20)), **arguments)


def test_one_case_can_be_calibrated_and_not_compared():
    forecast = plan(scenes(1, size=(16, 20)), ("ts",))
    assert [row.command for row in forecast.rows if row.refused is None] == ["evaluate", "fit ts", "apply ts"]
    assert forecast.row("compare ts").refused == "1 case leaves the validation part empty"


def test_no_cases_are_refused():
    with pytest.raises(InputError, match="no cases"):
        DataSize.of(scenes(1, size=(16, 20))[:0])


def test_files_whose_size_is_not_known_are_taken_for_plain(tmp_path, monkeypatch):
    cases = segcal.open_cases(plain(tmp_path))
    expected = plan(cases, ("ts",), machine=REFERENCE).row("apply ts").disk
    monkeypatch.setattr("segcal.cases.caseset.file_size", lambda path: 0)  # as of all URLs
    found = plan(cases, ("ts",), machine=REFERENCE).row("apply ts").disk
    assert found == pytest.approx(expected, rel=0.5)
