import pytest
import torch

import segcal
from datasets import plain
from segcal.calibrators import temperature
from segcal.cases.device import resolved, values_at_once
from segcal.errors import InputError
from segcal.fitting.data import over_chunks
from segcal.statistics import VoxelStatistics

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")


def test_auto_takes_the_cpu_where_there_is_no_gpu():
    assert resolved("auto") == torch.device("cpu")


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_missing_gpu_is_an_error(device):
    with pytest.raises(InputError, match="no CUDA device"):
        resolved(device)


@pytest.mark.parametrize("device", ["gpu", "meta", ""])
def test_unknown_devices_are_an_error(device):
    with pytest.raises(InputError, match="expected auto, cpu, cuda or cuda:N"):
        resolved(device)


def test_cases_and_what_is_made_of_them_are_on_the_device():
    cases = segcal.synthetic.scenes(2, size=(16, 20), members=2).on(torch.device("cpu"))
    for case in (cases[0], cases.pooled("probs")[0], cases[:1][0]):
        assert case.device == torch.device("cpu")


def test_the_command_refuses_a_missing_gpu(run, tmp_path):
    code, _, error = run("evaluate", plain(tmp_path), "--device", "cuda")
    assert code == 1
    assert "no CUDA device" in error


def test_fits_and_evaluations_take_a_device():
    cases = segcal.synthetic.scenes(3, size=(16, 20))
    calibrator = segcal.CALIBRATORS["ts"]().fit(cases, device="cpu")
    found = segcal.evaluate(cases, calibrator, metrics=("nll",), device="auto")
    assert found.value("nll") == segcal.evaluate(cases, calibrator, metrics=("nll",)).value("nll")
    with pytest.raises(InputError, match="no CUDA device"):
        segcal.CALIBRATORS["ts"]().fit(cases, device="cuda")


def raising_once(function, calls):
    """A function for which there is too little memory at the first call."""

    def wrapped(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return function(*arguments, **options)

    return wrapped


def test_a_fit_goes_on_with_half_the_rows_where_memory_is_short(monkeypatch):
    cases, calls = segcal.synthetic.scenes(3, size=(16, 20)), []
    expected = segcal.CALIBRATORS["ts"]().fit(cases).temperature
    monkeypatch.setattr(temperature, "begin_sums", raising_once(temperature.begin_sums, calls))
    with pytest.warns(UserWarning, match="half as many"):
        found = segcal.CALIBRATORS["ts"]().fit(cases).temperature
    assert found == pytest.approx(expected, rel=1e-6)


def test_an_evaluation_goes_on_with_half_the_rows_where_memory_is_short(monkeypatch):
    cases, calls = segcal.synthetic.scenes(2, size=(16, 20)), []
    expected = segcal.evaluate(cases, metrics=("nll", "ece"))
    monkeypatch.setattr(VoxelStatistics, "update", raising_once(VoxelStatistics.update, calls))
    with pytest.warns(UserWarning, match="half as many"):
        found = segcal.evaluate(cases, metrics=("nll", "ece"))
    for metric in ("nll", "ece"):
        assert found.value(metric) == pytest.approx(expected.value(metric), rel=1e-9)


def test_a_single_row_that_does_not_fit_is_an_error():
    def never(case, chunk):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.warns(UserWarning, match="half as many"), pytest.raises(torch.OutOfMemoryError):
        list(over_chunks(segcal.synthetic.scenes(1, size=(16, 20)), never))


@pytest.mark.parametrize(("free", "expected"), [(2**40, 2**25), (2**24, 2**18), (0, 2**10)])
def test_half_of_the_free_memory_of_a_gpu_is_enough(free, expected, monkeypatch):
    for name, bytes_ in (("memory_reserved", 2**20), ("memory_allocated", 2**20), ("mem_get_info", (free, 2**40))):
        monkeypatch.setattr(torch.cuda, name, lambda _, found=bytes_: found)
    assert values_at_once(torch.device("cuda", 0), 2**10, 2**25, 32) == expected
