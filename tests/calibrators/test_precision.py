"""Calibrators compute and are fitted in full precision, and with gradients, whatever their caller has switched."""

import pytest
import torch

import segcal
from segcal.calibrators import CALIBRATORS
from segcal.synthetic import SpatialTemperature, scenes

OPTIONS = {"lts": {"epochs": 2}, "lts-ti": {"epochs": 2}, "ibts": {"epochs": 2}}
# These are trained, the others solved.
TRAINED = ("lts-ti", "selective", "trust")


def new(method):
    return CALIBRATORS[method](**OPTIONS.get(method, {}))


@pytest.fixture(scope="module")
def cases():
    return scenes(4, size=(32, 40), plant=[SpatialTemperature()])


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("method", CALIBRATORS)
def test_autocast_changes_no_bit(method, cases):
    fitted, z = new(method).fit(cases), cases[0].logits
    expected = fitted(z)
    with autocast():
        assert torch.equal(fitted(z), expected)
        for _, piece in fitted.pieces(cases[0]):
            assert torch.is_autocast_enabled("cpu")  # the caller's
            assert piece.dtype == torch.float32
        found = segcal.evaluate(cases, fitted, metrics=("nll",)).value("nll")
    assert found == segcal.evaluate(cases, fitted, metrics=("nll",)).value("nll")


def test_temperature_maps_are_those_without_autocast(cases):
    fitted, z = new("lts").fit(cases), cases[0].logits
    with autocast():
        found = fitted.temperature_map(z)
    assert torch.equal(found, fitted.temperature_map(z))


@pytest.mark.parametrize("around", [autocast, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", TRAINED)
def test_fits_do_not_see_what_surrounds_them(method, around, cases):
    with around():
        inside = new(method).fit(cases)
    outside = new(method).fit(cases)
    found, expected = inside.tensors(), outside.tensors()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not any(tensor.is_inference() for tensor in found.values())


def test_tensors_made_in_inference_mode_are_fitted_to(cases):
    with torch.inference_mode():
        z, y = torch.cat([case.logits for case in cases]) + 0, torch.cat([case.labels for case in cases]) + 0
        assert new("lts-ti").fit(z, y).fit_report.iterations > 0


@pytest.mark.parametrize("method", CALIBRATORS)
def test_whole_numbers_are_no_logits(method, cases):
    fitted = new(method).fit(cases)
    with pytest.raises(segcal.errors.InputError, match="logits are torch.int64"):
        fitted(cases[0].logits.long())


@pytest.mark.parametrize("kind", ["selective", "ensemble"])
def test_a_base_that_sees_images_gets_them(kind):
    cases = scenes(4, size=(32, 40), plant=[SpatialTemperature()])
    channels = cases[0].image.shape[1]
    base = CALIBRATORS["lts"](image_channels=channels, epochs=1)
    fitted = CALIBRATORS[kind](base=base).fit(cases)
    case = cases[0]
    whole = torch.cat([piece for _, piece in fitted.pieces(case)], 2)
    torch.testing.assert_close(fitted(case.logits, case.image), whole)
    assert fitted.image_channels == channels
    with pytest.raises(segcal.errors.InputError, match="no image"):
        fitted(case.logits)
