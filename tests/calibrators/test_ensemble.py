"""Ensembles as a calibrator: members pooled in either space, alone, before a base, and from the command line."""

import json
import sys

import numpy as np
import pytest
import torch

import segcal
import segcal.cli
from segcal.calibrators import Ensemble, LocalTemperatureScaling, SelectiveScaling, TemperatureScaling
from segcal.errors import InputError
from segcal.synthetic import Temperature, scene_of, scenes

CASES = scenes(4, size=(32, 40), plant=[Temperature(2.0)], members=3, member_noise=2.0, ignored=0.05)


def members(case):
    return [member[None] for member in scene_of(case).members]


def pieces(calibrator, case):
    return torch.cat([log_probs for _, log_probs in calibrator.pieces(case)], 2)


@pytest.mark.parametrize("space", ["logits", "probs"])
def test_a_case_and_its_members_are_mapped_to_the_pool(space):
    calibrator = Ensemble(space).fit(CASES)
    case = CASES[2]
    z = torch.stack(members(case)).double()
    wanted = z.mean(0).softmax(1) if space == "logits" else z.softmax(2).mean(0)
    torch.testing.assert_close(pieces(calibrator, case).double().exp(), wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(calibrator(members(case)).double().exp(), wanted, atol=1e-6, rtol=0)
    pooled = CASES.pooled(space)[2]
    assert torch.equal(calibrator(pooled.logits), pieces(calibrator, case))  # pooled already, and left alone
    assert calibrator.predict(members(case)).equal(wanted.argmax(1))
    measured = segcal.evaluate(CASES, calibrator, metrics=("nll",)).value("nll")
    assert measured == pytest.approx(segcal.evaluate(CASES.pooled(space), metrics=("nll",)).value("nll"), rel=1e-6)
    assert measured == pytest.approx(calibrator.fit_report.nll_after, rel=1e-6)


@pytest.mark.parametrize("space", ["logits", "probs"])
def test_no_members_gauge_matters(space):
    calibrator = Ensemble(space, base="ts").fit(CASES)
    z = members(CASES[0])
    generator = torch.Generator().manual_seed(1)
    offsets = [50 * torch.randn(1, 1, 32, 40, generator=generator) for _ in z]
    shifted = [member + offset for member, offset in zip(z, offsets, strict=True)]
    torch.testing.assert_close(calibrator(shifted).exp(), calibrator(z).exp(), atol=2e-5, rtol=0)
    assert calibrator.translation_invariant
    assert not Ensemble(space, base="vs").translation_invariant


def test_the_mean_of_probabilities_is_never_surer_than_the_surest_member_and_labels_may_move():
    calibrator = Ensemble("probs").fit(CASES)
    for case in CASES:
        sure = torch.stack(members(case)).softmax(2).amax((0, 2))
        assert (pieces(calibrator, case).exp().amax(1) <= sure + 1e-6).all()
    assert calibrator.preserves is None
    assert segcal.evaluate(CASES, calibrator, metrics=("flip",)).value("flip") > 0
    assert segcal.evaluate(CASES, Ensemble("logits").fit(CASES), metrics=("flip",)).value("flip") == 0


@pytest.mark.parametrize("space", ["logits", "probs"])
def test_pooling_is_never_worse_than_the_mean_of_the_members(space):
    """By Jensen's inequality, for every voxel: -log is convex, and so is log-sum-exp."""
    calibrator = Ensemble(space).fit(CASES)
    for case in CASES:
        labels = torch.where(case.valid, case.labels, 0)[:, None]
        own = torch.stack([-z.double().log_softmax(1).gather(1, labels) for z in members(case)])
        assert (-pieces(calibrator, case).gather(1, labels) <= own.mean(0) + 1e-5).all()


def test_a_base_is_fitted_to_the_pool_and_follows_it():
    calibrator = Ensemble("probs", base="ts").fit(CASES)
    alone = TemperatureScaling().fit(CASES.pooled("probs"))
    assert calibrator.base.temperature == alone.temperature
    assert calibrator.fit_report.nll_after == alone.fit_report.nll_after
    torch.testing.assert_close(pieces(calibrator, CASES[1]), alone(CASES.pooled("probs")[1].logits))
    z = members(CASES[1])
    torch.testing.assert_close(calibrator(z), pieces(calibrator, CASES[1]))
    assert calibrator([member.half() for member in z]).dtype == torch.float16


def test_a_spatial_base_sees_images_of_the_pooled_case():
    calibrator = Ensemble("probs", base=LocalTemperatureScaling(image_channels=3, epochs=1)).fit(CASES)
    case = CASES.pooled("probs")[0]
    assert torch.equal(pieces(calibrator, CASES[0]), calibrator.base(case.logits, case.image))


def test_selective_scaling_of_an_ensemble_sees_its_members():
    calibrator = SelectiveScaling(base=Ensemble("probs")).fit(CASES)
    measured = segcal.evaluate(CASES, calibrator, metrics=("nll",)).value("nll")
    assert measured == pytest.approx(calibrator.fit_report.nll_after, rel=1e-5)
    pooled = SelectiveScaling().fit(CASES.pooled("probs"))
    assert pooled.fit_report.nll_after == pytest.approx(calibrator.fit_report.nll_after, rel=1e-3)


@pytest.mark.parametrize("base", [None, "ts", {"id": "selective", "arguments": {"base": "ts"}}])
def test_space_base_and_members_survive_the_file(base, tmp_path):
    calibrator = Ensemble("logits", base=base).fit(CASES)
    calibrator.save(tmp_path / "c.safetensors")
    again = segcal.load(tmp_path / "c.safetensors")
    assert again.arguments() == calibrator.arguments()
    assert torch.equal(pieces(again, CASES[0]), pieces(calibrator, CASES[0]))
    with pytest.raises(InputError, match="2 ensemble members; expected 3"):
        next(again.pieces(CASES.members([0, 1])[0]))
    with pytest.raises(InputError, match="1 ensemble members; expected 3"):
        again(members(CASES[0])[:1])


def test_cases_without_members_are_taken_as_pooled():
    single = scenes(2, size=(16, 20))
    calibrator = Ensemble().fit(single)
    assert "no ensemble members" in calibrator.fit_report.notes[0]
    assert torch.equal(pieces(calibrator, single[0]), single[0].logits.log_softmax(1))


def test_fitted_to_cases_without_members_it_pools_any_number_of_them():
    calibrator = Ensemble().fit(scenes(2, size=(16, 20)))
    for count in (1, 2, 3):
        z = members(CASES[0])[:count]
        torch.testing.assert_close(calibrator(z).exp(), torch.stack(z).softmax(2).mean(0))


def test_members_in_float64_keep_their_digits_and_those_of_half_precision_are_pooled_in_float32():
    calibrator, z = Ensemble().fit(CASES), [member.double() / 3 for member in members(CASES[0])]
    torch.testing.assert_close(calibrator(z), torch.stack(z).softmax(2).mean(0).log(), atol=1e-12, rtol=0)
    half = [member.half() for member in z]
    assert torch.equal(calibrator(half), calibrator([member.float() for member in half]).half())


def test_a_space_that_is_worse_than_that_of_the_cases_is_named():
    # Members that are not sure enough: the mean of their probabilities is still less sure.
    cases = scenes(3, size=(32, 40), plant=[Temperature(0.5)], members=3)
    report = Ensemble("probs").fit(cases).fit_report
    assert report.nll_after > report.nll_before
    assert "of the cases as they are pooled" in report.notes[-1]
    assert Ensemble("logits").fit(cases).fit_report.notes == ()


def test_wrong_use_says_so():
    with pytest.raises(InputError, match="space is 'odds'"):
        Ensemble("odds")
    with pytest.raises(InputError, match="base is 'tz'"):
        Ensemble(base="tz")
    calibrator = Ensemble().fit(CASES)
    first, second, third = members(CASES[0])
    with pytest.raises(InputError, match="ensemble member 3 has shape"):
        calibrator([first, second, third[:, :, :5]])
    with pytest.raises(InputError, match=r"expected \(N, 6, \*spatial\)"):
        calibrator(torch.stack([first, second, third]))


def test_the_command_line_fits_evaluates_and_applies_it(tmp_path, monkeypatch, capsys):
    data = tmp_path / "data"
    for case in CASES:
        (data / "labels").mkdir(parents=True, exist_ok=True)
        np.save(data / "labels" / f"{case.id}.npy", case.labels[0].numpy())
        for index, member in enumerate(members(case)):
            (data / "logits" / f"m{index}").mkdir(parents=True, exist_ok=True)
            np.save(data / "logits" / f"m{index}" / f"{case.id}.npy", member[0].numpy())

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["segcal", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            segcal.cli.main()
        assert not stop.value.code
        return capsys.readouterr().out

    file = tmp_path / "c.safetensors"
    fitted = json.loads(run("fit", data, "--method", "ensemble", "--test", "0.5", "-o", file, "--json"))
    cases = segcal.open_cases(data)
    held_out = cases.split(0.5, 0.0, 0.5, seed=0).test.pooled("probs")
    assert fitted["held_out"]["after"]["nll"] == pytest.approx(
        segcal.evaluate(held_out, metrics=("nll",)).value("nll"), rel=1e-6
    )
    run("evaluate", data, "--calibrator", file, "-o", tmp_path / "results.json")
    run("apply", file, data, "-o", tmp_path / "out")
    written = np.load(tmp_path / "out" / "probs" / "image-001.npy")
    np.testing.assert_allclose(written, cases.pooled("probs")[1].logits[0].exp(), atol=1e-6)
