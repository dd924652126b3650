import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from calibrators.local_cases import LOCAL, lit_cases, nll, planted
from segcal.calibrators import TemperatureScaling
from segcal.calibrators.local import (
    ImageTemperatureScaling,
    LocalTemperatureScaling,
    TranslationInvariantLocalTemperature,
)
from segcal.synthetic import GaugeOffsets, ImageTemperature, SpatialTemperature, Temperature, scene_of

EPOCHS = 10


@pytest.fixture(scope="module")
def spatial():
    """Cases to fit and to test, with a planted field of temperatures, and calibrators fitted to them."""
    plant = [SpatialTemperature()]
    cases = planted(40, plant)
    fitted = [TemperatureScaling().fit(cases), *(cls(epochs=EPOCHS).fit(cases) for cls in LOCAL[1:])]
    return cases, planted(10, plant, seed=9), {calibrator.id: calibrator for calibrator in fitted}


def rank_correlation(calibrator, cases):
    found = [calibrator.temperature_map(case.logits).flatten() for case in cases]
    true = [scene_of(case).temperature.flatten() for case in cases]
    return spearmanr(torch.cat(found).numpy(), torch.cat(true).numpy()).statistic


def test_a_planted_field_of_temperatures_is_recovered_and_beats_ts_and_ibts(spatial):
    _, test, fitted = spatial
    assert rank_correlation(fitted["lts-ti"], test) > 0.9
    assert nll(fitted["lts-ti"], test) < nll(fitted["ts"], test) - 0.002
    assert nll(fitted["lts-ti"], test) < nll(fitted["ibts"], test) - 0.002
    report = fitted["lts-ti"].fit_report
    assert report.nll_after < fitted["ts"].fit_report.nll_after
    assert report.voxels_used == 40 * 48 * 64


@pytest.mark.parametrize("neighbourhood", ["plane", "volume"])
def test_a_planted_field_in_volumes_beats_ts(neighbourhood):
    plant = [SpatialTemperature()]
    cases, test = planted(8, plant, size=(6, 32, 40)), planted(4, plant, seed=9, size=(6, 32, 40))
    found = TranslationInvariantLocalTemperature(neighbourhood=neighbourhood, epochs=6).fit(cases)
    assert found.temperature_map(test[0].logits).shape == (1, 1, 6, 32, 40)
    assert rank_correlation(found, test) > 0.5
    assert nll(found, test) < nll(TemperatureScaling().fit(cases), test)


def test_gauge_offsets_hurt_lts_and_leave_lts_ti_as_it_is(spatial):
    cases, test, fitted = spatial
    shifted_cases, shifted_test = (
        planted(len(part), [SpatialTemperature(), GaugeOffsets(5.0)], seed) for part, seed in ((cases, 0), (test, 9))
    )
    again = TranslationInvariantLocalTemperature(epochs=EPOCHS).fit(shifted_cases)
    for plain, shifted in zip(test, shifted_test, strict=True):
        difference = fitted["lts-ti"].predict_proba(plain.logits) - again.predict_proba(shifted.logits)
        assert difference.abs().max() < 1e-4
    seeing = LocalTemperatureScaling(epochs=EPOCHS).fit(cases)
    assert nll(seeing, shifted_test) > nll(seeing, test) + 0.001
    assert nll(LocalTemperatureScaling(epochs=EPOCHS).fit(shifted_cases), shifted_test) > nll(again, shifted_test)


def test_planted_temperatures_of_images_are_recovered_and_beat_ts():
    plant = [ImageTemperature()]
    cases, test = planted(40, plant), planted(15, plant, seed=9)
    calibrator = ImageTemperatureScaling(epochs=EPOCHS).fit(cases)
    maps = [calibrator.temperature_map(case.logits) for case in test]
    assert all(len(found.unique()) == 1 for found in maps)
    true = [float(scene_of(case).temperature.mean()) for case in test]
    assert np.corrcoef([float(found.mean()) for found in maps], true)[0, 1] > 0.95
    hot = planted(1, [Temperature(4.0)], seed=9)[0]  # deep logits tell it, so no floor may hide them
    assert float(calibrator.temperature_map(hot.logits).mean()) == pytest.approx(4.0, rel=0.25)
    assert nll(calibrator, test) < nll(TemperatureScaling().fit(cases), test) - 0.005


def test_the_image_branch_learns_what_only_the_image_shows():
    cases, test = lit_cases(24, 0), lit_cases(8, 1)
    seeing = TranslationInvariantLocalTemperature(image_channels=2).fit(cases)
    blind = TranslationInvariantLocalTemperature().fit(cases)
    found = torch.cat([seeing.temperature_map(case.logits, case.image) for case in test])
    bright = torch.cat([case.image[:, :1] > 50 for case in test])
    assert found[bright].median() / found[~bright].median() > 1.7
    with torch.no_grad():
        loss = {
            name: sum(float(-calibrated(case).gather(1, case.labels[:, None]).mean()) for case in test) / len(test)
            for name, calibrated in (
                ("seeing", lambda case: seeing(case.logits, case.image)),
                ("blind", lambda case: blind(case.logits)),
            )
        }
    assert loss["seeing"] < loss["blind"] - 0.003


def test_falls_back_to_ts_where_validation_is_not_beaten():
    cases = planted(6, [SpatialTemperature(near=3.0, far=1.0)])
    single = TemperatureScaling().fit(cases)
    against = planted(6, [Temperature(single.temperature)], seed=5)
    for cls in LOCAL[:2]:
        calibrator = cls(epochs=3).fit(cases, validation=against)
        assert "so this is ts" in calibrator.fit_report.notes[-1]
        assert calibrator.fit_report.nll_after == single.fit_report.nll_after
        z = cases[0].logits
        assert torch.allclose(calibrator(z), single(z), atol=1e-5)


def test_everything_is_streamed_and_fits_as_well(spatial):
    cases = spatial[0]
    calibrator = TranslationInvariantLocalTemperature(epochs=3).fit(cases[:10], voxels="all")
    assert calibrator.fit_report.voxels_used == 10 * 48 * 64
    assert calibrator.fit_report.nll_after < TemperatureScaling().fit(cases[:10]).fit_report.nll_after


def test_a_batch_of_tensors_holds_out_images_and_the_same_seed_gives_the_same_bits():
    cases = planted(10, [SpatialTemperature()])
    z, y = torch.cat([case.logits for case in cases]), torch.cat([case.labels for case in cases])
    one, two, other = (TranslationInvariantLocalTemperature(epochs=3).fit(z, y, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one(z[:1]), two(z[:1]))
    assert not torch.equal(one(z[:1]), other(z[:1]))
    assert one.fit_report.voxels_used == y.numel()


# -- theory ------------------------------------------------------------------------------------------------------------


def test_theorem_1_the_best_temperature_of_one_voxel():
    """Ding et al. 2021: 1/T is 0 where z_y is at most the mean, unbounded where it is largest, else E[z] = z_y."""
    z = torch.tensor([[3.0, 1.0, -2.0, 0.5]])
    for label in range(4):
        found = TemperatureScaling().fit(z, torch.tensor([label]))
        if z[0, label] <= z.mean():
            assert float(found.beta) == pytest.approx(1e-3)
            assert found.predict_proba(z).max() < 0.251
        elif label == z.argmax():
            assert float(found.beta) == pytest.approx(1e3)
            assert found.predict_proba(z)[0, label] == 1
        else:
            own, beta = z[0].double(), float(found.beta)
            assert 1e-3 < beta < 1e3
            assert float((own * (beta * own).softmax(0)).sum()) == pytest.approx(float(own[label]), abs=1e-5)


def test_theorem_4_of_every_image_nll_and_entropy_meet():
    """Ding et al. 2021: with an interior optimum for each image, NLL falls and entropy rises until they are equal."""
    for case in planted(3, [ImageTemperature(median=2.0, spread=0.2)]):
        calibrator = TemperatureScaling().fit(case.logits, case.labels)
        gap = {}
        for name, log_p in (("before", case.logits.log_softmax(1)), ("after", calibrator(case.logits))):
            log_p = log_p.double()
            entropy = float(-(log_p.exp() * log_p).sum(1).mean())
            gap[name] = float(-log_p.gather(1, case.labels[:, None]).mean()) - entropy
        assert gap["before"] > 0.01
        assert gap["after"] == pytest.approx(0, abs=1e-6)


def test_one_planted_temperature_needs_no_network():
    cases = planted(10, [Temperature(2.0)])
    calibrator = TranslationInvariantLocalTemperature(epochs=5).fit(cases)
    temperatures = torch.cat([calibrator.temperature_map(case.logits) for case in cases])
    assert float(temperatures.std() / temperatures.mean()) < 0.15
    assert float(temperatures.mean()) == pytest.approx(2.0, rel=0.1)


def test_the_certificate_is_the_gradient_of_the_mean_nll():
    (case,) = planted(1, [SpatialTemperature()])
    z, y = case.logits[:, :, :60, :60].contiguous(), case.labels[:, :60, :60]  # one crop, trained and validated on
    fitted = TranslationInvariantLocalTemperature(epochs=EPOCHS).fit(z, y)
    assert float(fitted.network.weight.abs().sum()) > 0
    fitted.network.requires_grad_(True)
    torch.nn.functional.nll_loss(fitted(z), y, ignore_index=case.ignore_index).backward()
    gradient = torch.cat([own.grad.flatten() for own in fitted.network.parameters()])
    assert fitted.fit_report.certificate == pytest.approx(float(gradient.norm()), rel=1e-3)
