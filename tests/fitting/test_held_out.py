"""What every fit rests on: voxels that count and no others, and validation data apart from what is trained on."""

import numpy as np
import pytest
import torch

from segcal.calibrators import (
    CALIBRATORS,
    CMSOrderPreserving,
    EnsembleTemperatureScaling,
    SelectiveScaling,
    selective,
)
from segcal.calibrators.base import FitData
from segcal.cases.tensors import tensors_as_cases
from segcal.errors import InputError
from segcal.fitting.first_pass import held_out_samples, hold_out
from segcal.fitting.measured import Detection, compared
from segcal.fitting.sampling import VoxelSampler
from segcal.kernels import Voxels
from segcal.synthetic import ConfidentlyWrong, Temperature, scenes

QUICK = {name: {"epochs": 1} for name in ("lts", "lts-ti", "ibts")}
VALIDATED = ["lts", "lts-ti", "ibts", "selective", "adam"]


def make(name):
    return CMSOrderPreserving(solver="adam", patience=1) if name == "adam" else CALIBRATORS[name](**QUICK.get(name, {}))


@pytest.fixture
def _few_epochs(monkeypatch):
    """Of selectors, for which there is no option."""
    monkeypatch.setattr(selective, "_EPOCHS", 2)


def tensors(count=3, size=(12, 16), dtype=torch.float32):
    """Logits, labels, and a mask of the voxels that count, some of those ignored by their label."""
    cases = scenes(count, size=size, num_classes=4, plant=[Temperature(1.7)])
    z, y = torch.cat([case.logits for case in cases]), torch.cat([case.labels for case in cases])
    away = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < 0.2
    y[away & (torch.arange(size[0])[:, None] % 2 == 0)] = 255
    return z.to(dtype), y, ~away


@pytest.mark.usefixtures("_few_epochs")
@pytest.mark.parametrize("name", [*CALIBRATORS, "adam"])
def test_voxels_that_do_not_count_do_not_matter(name):
    z, y, mask = tensors()
    away = ~mask.unsqueeze(1)
    expected = make(name).fit(z.masked_fill(away, torch.nan), y, mask=mask)
    probe = tensors(1)[0]
    # To neighbours the scores of an ignored voxel are as good as any, unless they are no numbers.
    for content in (torch.inf,) if expected.spatial and name != "ensemble" else (torch.inf, 7.0):
        other = make(name).fit(z.masked_fill(away, content), y, mask=mask)
        assert torch.equal(other(probe), expected(probe))
    report = expected.fit_report
    assert report.nll_after <= report.nll_before
    assert report.voxels_used <= int(mask.sum())


@pytest.mark.usefixtures("_few_epochs")
@pytest.mark.parametrize("name", [*CALIBRATORS, "adam"])
def test_no_more_voxels_are_used_than_there_are(name):
    for z, y, mask in (tensors(1, (8, 8)), tensors(11, (8, 10))):
        assert 0 < make(name).fit(z, y, mask=mask).fit_report.voxels_used <= int(mask.sum())
    if name not in ("lts", "lts-ti", "ibts"):
        flat, labels = z.movedim(1, -1).reshape(-1, 4), y.flatten()
        assert 0 < make(name).fit(flat, labels).fit_report.voxels_used <= int((labels != 255).sum())


@pytest.mark.usefixtures("_few_epochs")
@pytest.mark.parametrize("name", VALIDATED)
def test_one_case_says_what_it_was_validated_on(name):
    z, y, mask = tensors(1, (80, 140))
    notes = make(name).fit(z, y, mask=mask).fit_report.notes
    assert any("there is one case" in note for note in notes)
    assert not any("there is one case" in note for note in make(name).fit(*tensors(2)[:2]).fit_report.notes)
    small = make(name).fit(*tensors(1, (8, 9))[:2]).fit_report.notes
    assert any("there is one case" in note for note in small)


def test_voxels_of_one_case_are_held_out():
    z, y, mask = tensors(1)
    cases = tensors_as_cases(z, y, 255, mask)
    samples = held_out_samples(FitData(cases, None, "auto", 0), 1000)
    own, other = samples.train, samples.held_out
    assert samples.voxels == len(own) + len(other) == int(mask.sum())
    assert len(other) == round(0.2 * samples.voxels)
    assert not set(own.keys.tolist()) & set(other.keys.tolist())
    one_voxel = tensors_as_cases(z[0, :, 0, :1].T, torch.tensor([2]), 255, None)
    assert held_out_samples(FitData(one_voxel, None, "auto", 0), 9).voxels == 1


@pytest.mark.usefixtures("_few_epochs")
@pytest.mark.parametrize("name", VALIDATED)
def test_another_case_is_held_out_where_one_is_all_ignored(name):
    z, y, _ = tensors(4)
    (chosen,) = hold_out(FitData(tensors_as_cases(z, y, 255, None), None, "auto", 0))[0].validation.ids
    ignored = y.clone()
    ignored[int(chosen.removeprefix("tensors[").removesuffix("]"))] = 255
    assert make(name).fit(z, ignored).fit_report.voxels_used <= int((ignored != 255).sum())
    only = torch.full_like(y, 255)
    only[2] = y[2]
    assert any("there is one case" in note for note in make(name).fit(z, only).fit_report.notes)


def test_parts_have_voxels_and_groups_stay_together():
    z, y, _ = tensors(6)
    y[1:5] = 255
    cases = tensors_as_cases(z, y, 255, None)
    for seed in range(8):
        parts, _ = hold_out(FitData(cases, None, "auto", seed))
        for part in (parts.cases, parts.validation):
            assert any(case.valid.any() for case in part)
    grouped = type(cases)(cases.refs, cases.num_classes, groups=lambda _: "all")
    parts, notes = hold_out(FitData(grouped, None, "auto", 0))
    assert "one group" in notes[0]
    assert len(parts.validation) == 1


@pytest.mark.usefixtures("_few_epochs")
@pytest.mark.parametrize("name", [*CALIBRATORS, "adam"])
def test_logits_in_float64_are_fitted(name):
    z, y, mask = tensors(2, dtype=torch.float64)
    calibrator = make(name).fit(z, y, mask=mask)
    assert calibrator(z).dtype == torch.float64
    single = make(name).fit(z.float(), y, mask=mask)
    assert calibrator.fit_report.nll_after == pytest.approx(single.fit_report.nll_after, rel=1e-3)


# -- notes -------------------------------------------------------------------------------------------------------------


def test_numbers_are_told_apart_or_called_the_same():
    assert compared(0.4360361, 0.4360360) == "0.436036, 1.0e-07 above"
    assert compared(0.25, 0.25) == "0.25, the same as"


def test_a_fallback_says_by_how_much():
    notes = make("lts-ti").fit(*tensors(3)[:2]).fit_report.notes
    assert any("above that with one temperature" in note or "below that with one temperature" in note for note in notes)


def test_what_is_undefined_is_left_out():
    nothing_found = Detection.of(torch.tensor([[90.0, 0.0], [10.0, 0.0]]))
    assert str(nothing_found) == "mispredictions: recall 0.000, accuracy 0.900"
    assert str(Detection.of(torch.tensor([[90.0, 10.0], [0.0, 0.0]]))) == (
        "mispredictions: precision 0.000, accuracy 0.900"
    )


def test_a_standard_error_of_zero_is_not_reported():
    sampler = VoxelSampler(3, 50)
    z = torch.randn((1, 3, 400), generator=torch.Generator().manual_seed(0))
    sampler.add(Voxels(z, z.argmax(1)))
    sample = sampler.sample()
    assert sample.note(np.zeros(50)) == "a stratified sample of 50 of 400 voxels; voxels='all' is exact"
    assert "standard error of" in sample.note(np.arange(50.0))


def test_ets_that_is_ts_reports_no_standard_error(monkeypatch):
    monkeypatch.setattr("segcal.calibrators.ensemble_temperature.MIXTURE_VOXELS", 300)
    notes = EnsembleTemperatureScaling().fit(*tensors(2)[:2]).fit_report.notes
    assert not any("0.0e+00" in note for note in notes)


def test_a_selector_that_selects_everything_is_noticed():
    # All are overconfident, so that it is best to suspect nearly everything.
    calibrator = SelectiveScaling().fit(scenes(4, size=(32, 40), plant=[Temperature(8.0)]))
    assert calibrator.detection.accuracy < 0.5
    (kept, false), _ = calibrator.counts.tolist()
    share = f"{false / (kept + false):.0%} of the correct predictions for wrong"
    assert any(share in note for note in calibrator.fit_report.notes)
    sound = SelectiveScaling().fit(scenes(4, size=(32, 40), plant=[ConfidentlyWrong()]))
    assert not any("of the correct predictions for wrong" in note for note in sound.fit_report.notes)


@pytest.mark.usefixtures("_few_epochs")
@pytest.mark.parametrize("name", VALIDATED)
@pytest.mark.parametrize("wrong", [-100, 4])
def test_validation_labels_that_are_no_classes_are_refused(name, wrong):
    z, y, _ = tensors()
    bad = y.clone()
    bad[0, 3, 5] = wrong
    with pytest.raises(InputError, match=rf"case 'tensors\[0\]': label {wrong} at voxel \(3, 5\)"):
        make(name).fit(z, y, validation=(z, bad))


@pytest.mark.usefixtures("_few_epochs")
@pytest.mark.parametrize("name", VALIDATED)
def test_validation_scores_without_a_softmax_are_refused(name):
    z, y, _ = tensors()
    bad = z.clone()
    bad[0, 1, 3, 5] = torch.nan
    with pytest.raises(InputError, match="at voxel"):
        make(name).fit(z, y, validation=(bad, y))
