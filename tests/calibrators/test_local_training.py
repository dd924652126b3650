"""Training a network of local temperatures: what its report says, and the rate it takes."""

import pytest
import torch

from calibrators.local_cases import Tensors, case_set, nll, random_logits, untrained
from segcal.calibrators import ImageTemperatureScaling, LocalTemperatureScaling, local_training
from segcal.calibrators.local_network import TemperatureTree
from segcal.calibrators.local_training import Recipe, fit_network
from segcal.fitting.data import FitData


def cases(count=2, seed=0, classes=3):
    sources = []
    for index in range(count):
        z = random_logits(1, classes, 16, 20, seed=seed + index, scale=2.0)
        y = torch.randint(classes, (1, 16, 20), generator=torch.Generator().manual_seed(seed + index))
        sources.append(Tensors(f"{index}", z, y, None))
    return case_set(*sources)


def data(**options):
    return FitData(cases(**options), cases(seed=7, **options), "auto", 0)


@pytest.mark.parametrize("cls", [LocalTemperatureScaling, ImageTemperatureScaling])
def test_the_report_is_that_of_the_validation_cases(cls):
    calibrator = untrained(cls, 3)
    recipe = Recipe(calibrator.inputs, calibrator.per_image, 1, 0.0, 0.0)  # a rate of 0: the weights stay
    before = [own.clone() for own in calibrator.network.parameters()]
    found = fit_network(calibrator.network, 0.7, data(), recipe)
    assert all(map(torch.equal, before, calibrator.network.parameters()))
    assert not any(own.requires_grad for own in calibrator.network.parameters())
    validation = data().validation
    assert found.nll_after == pytest.approx(nll(calibrator, validation), rel=1e-5)
    calibrator.network.reset()
    assert found.nll_before == pytest.approx(nll(calibrator, validation), rel=1e-5)
    assert found.certificate > 1e-4


def test_it_is_said_whether_one_temperature_does_as_well():
    for bias, said in ((0.0, True), (3.0, False)):
        network = TemperatureTree(3)
        network.reset()
        network.bias += bias  # of the leaves: higher temperatures everywhere
        found = fit_network(network, 2.0, data(), Recipe("logits", False, 1, 0.0, 0.0))
        assert (found.nll_after >= found.nll_before) == said
        assert found.notes[-1].endswith("no better, so this is ts") == said


@pytest.mark.parametrize(("classes", "share"), [(3, 1.0), (4, 1.0), (5, 0.8), (8, 0.5)])
def test_the_rate_falls_in_proportion_to_the_inputs_beyond_a_hundred(classes, share, monkeypatch):
    rates = []
    adam = local_training.adam
    monkeypatch.setattr(
        local_training, "adam", lambda *a, **named: rates.append(named["learning_rate"]) or adam(*a, **named)
    )
    fit_network(TemperatureTree(classes), 1.0, data(classes=classes), Recipe("logits", False, 1, 1e-3, 0.0))
    assert rates == pytest.approx([1e-4 * share, 1e-3 * share])
