import pytest
import torch

import segcal
from segcal.cases.device import resolved
from segcal.errors import InputError

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
    run("scenes", tmp_path / "scenes", "--volumes")
    code, _, error = run("evaluate", tmp_path / "scenes", "--device", "cuda")
    assert code == 1
    assert "no CUDA device" in error


def test_fits_and_evaluations_take_a_device():
    cases = segcal.synthetic.scenes(3, size=(16, 20))
    calibrator = segcal.CALIBRATORS["ts"]().fit(cases, device="cpu")
    found = segcal.evaluate(cases, calibrator, metrics=("nll",), device="auto")
    assert found.value("nll") == segcal.evaluate(cases, calibrator, metrics=("nll",)).value("nll")
    with pytest.raises(InputError, match="no CUDA device"):
        segcal.CALIBRATORS["ts"]().fit(cases, device="cuda")
