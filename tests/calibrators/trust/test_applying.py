"""A fitted trust is applied the same by every path, to images together or alone, and in one tile or two."""

import pytest
import torch

from calibrators.local_cases import Tensors, case_set
from segcal.calibrators import TemperatureScaling, TrustCalibration
from segcal.calibrators.trust import calibrator as module
from segcal.calibrators.trust import fit, losers
from segcal.calibrators.trust.features import SUMMARY
from segcal.calibrators.trust.tiles import Images, tiles
from segcal.errors import InputError
from segcal.kernels import dispatch
from segcal.synthetic import SpatialTemperature, scenes

CLASSES = 4


def example(share=0.5, seed=0):
    """Random maps, networks and losers, as if fitted."""
    calibrator, random = TrustCalibration(), torch.Generator().manual_seed(seed)
    calibrator.num_classes = CLASSES
    calibrator.allocate(CLASSES)
    calibrator.beta.fill_(0.6)
    calibrator.temperature.fill_(1.4)
    calibrator.share.fill_(share)
    calibrator.fitted.fill_(1.0)
    calibrator.slopes.copy_(0.1 * torch.randn(calibrator.slopes.shape, generator=random))
    calibrator.losers.copy_(0.3 * torch.randn(calibrator.losers.shape, generator=random))
    calibrator.network.reset(seed)
    calibrator.network.last.copy_(0.3 * torch.randn(calibrator.network.last.shape, generator=random))
    calibrator.first.copy_(0.7 * calibrator.first)
    return calibrator


def logits(*shape, seed=0):
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_compiled_path_is_the_plain_one(share, monkeypatch):
    calibrator, z = example(share), logits(2, CLASSES, 24, 30)
    plain = calibrator(z.double())
    monkeypatch.setattr(dispatch, "_LARGE", 0)
    torch.testing.assert_close(calibrator(z).double(), plain, atol=1e-4, rtol=0)


@pytest.mark.parametrize("large", [2**30, 0], ids=["torch", "compiled"])
def test_the_second_map_is_for_corrected_odds_alone(large, monkeypatch):
    monkeypatch.setattr(dispatch, "_LARGE", large)
    z = logits(2, CLASSES, 24, 30)
    for share, same in ((0.0, True), (0.5, False)):
        calibrator = example(share)
        before = calibrator(z)
        calibrator.second.mul_(1.5)
        assert torch.equal(calibrator(z), before) == same


@pytest.mark.parametrize("judged", [(1.0, 1.0), (0.3, 0.3), (1.0, 0.3), (0.0, 0.6)])
def test_scores_of_the_losers_are_between_those_of_ts_and_of_the_map(judged):
    calibrator, z = example(), logits(2, CLASSES, 5, 6).double()
    z[:, 2, :, :2] = -torch.inf
    winner, beta = z.argmax(1), float(calibrator.beta)
    found = calibrator._loser_scores(z, winner, torch.tensor(judged).double())
    assert (found[:, 2, :, :2] == -torch.inf).all()
    margins = (beta * (z.amax(1, keepdim=True) - z)).movedim(1, -1)
    for n, row, column in torch.cartesian_prod(*map(torch.arange, (2, 5, 6))).tolist():
        m, k, share = margins[n, row, column], int(winner[n, row, column]), judged[n]
        u = 1.4 * m + calibrator.losers[k, :, :-1] @ m + calibrator.losers[k, :, -1]
        expected, others = -((1 - share) * m + share * u), torch.arange(CLASSES) != k
        if column >= 2:  # all classes are possible
            scores = found[n, others, row, column]
            torch.testing.assert_close(scores.log_softmax(0), expected[others].log_softmax(0))


@pytest.mark.parametrize(("shape", "values"), [((2, CLASSES, 9, 10), 360), ((1, CLASSES, 90, 10), 1800)])
def test_two_parts_are_joined(shape, values, monkeypatch):
    calibrator, z = example(), logits(*shape)
    whole = calibrator(z)
    monkeypatch.setattr("segcal.calibrators.trust.tiles._TILE_VALUES", values)
    found = calibrator(z)
    assert found.shape == z.shape
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=0)


def cases(count=2, seed=0, right=False):
    """Cases of two images each, with ignored voxels."""
    sources = []
    for index in range(count):
        z = logits(2, CLASSES, 12, 15, seed=seed + index)
        labels = (
            z.argmax(1) if right else torch.randint(CLASSES, (2, 12, 15), generator=torch.Generator().manual_seed(9))
        )
        labels[0, :2] = 255
        sources.append(Tensors(f"{index}", z, labels, None))
    return case_set(*sources)


def test_the_nll_and_the_levelled_voxels_are_those_of_the_voxels_that_count():
    calibrator, data = example(), cases()
    nll = count = moved = 0
    for case in data:
        (tile,) = tiles(Images.of_case(case), calibrator.beta)
        log_probs, levelled = calibrator._level(tile)
        valid = case.labels != 255
        nll -= float(log_probs.double().gather(1, case.labels.where(valid, 0)[:, None])[:, 0][valid].sum())
        count, moved = count + int(valid.sum()), moved + int(levelled[valid].sum())
    found, levelled = calibrator._measure(data)
    assert found == pytest.approx(nll / count, rel=1e-6)
    assert levelled == moved > 0


def test_a_survey_counts_mistakes_and_keeps_a_sample_of_them(monkeypatch):
    monkeypatch.setattr(fit, "_WRONG_VALUES", 40 * CLASSES)
    data = cases()
    seen = fit.survey(data, torch.tensor(0.6), None, 0)
    valid = [case.labels != 255 for case in data]
    wrong = [(case.logits.argmax(1) != case.labels) & own for case, own in zip(data, valid, strict=True)]
    assert seen.voxels == sum(int(own.sum()) for own in valid)
    assert seen.mistakes == sum(int(own.sum()) for own in wrong)
    assert len(seen.wrong) == 2 * (20 + 1)  # 40 voxels, half of them from each case, and one more
    assert seen.wrong.weights.sum() == pytest.approx(seen.mistakes)
    assert bool((seen.wrong.logits.argmax(1) != seen.wrong.labels).all())


def test_a_survey_draws_about_as_many_voxels_as_are_trained_on(monkeypatch):
    monkeypatch.setattr(fit, "_TRAINED", 200)
    drawn = fit.survey(cases(), torch.tensor(0.6), None, 0).sample
    assert len(drawn.right) == pytest.approx(200, abs=60)  # four standard deviations
    assert float(drawn.weights.sum()) == pytest.approx(2 * (2 * 12 - 2) * 15, rel=0.3)


def test_images_are_remembered_once_there_are_eight():
    summaries = torch.randn(8, SUMMARY, generator=torch.Generator().manual_seed(0)).double()
    for count in (7, 8):
        calibrator = example()
        calibrator._remember_images(cases(), summaries[:count])
        assert (float(calibrator.reach) < 1e3) == (count == 8)


@pytest.mark.parametrize("label", [-1, CLASSES, 200])
def test_labels_out_of_range_are_refused(label):
    data = cases(1)
    data[0].source._all["labels"][1, 5, 5] = label
    with pytest.raises(InputError, match=r"labels are out of range; expected 0\.\.3"):
        list(fit.tiles_of(data, torch.tensor(1.0)))


def test_a_prediction_is_right_if_it_is_the_label():
    seen = fit.Valid(torch.arange(3), torch.tensor([0, 1, 2]), torch.tensor([1, 1, 1]), torch.zeros(3))
    assert seen.right.tolist() == [False, True, False]


def test_of_the_network_nothing_to_all_is_tried_in_even_steps():
    assert fit.SHARES == (0, 0.25, 0.5, 0.75, 1)


def test_notes_say_whether_anything_is_wrong_and_a_worse_map_is_not_kept(monkeypatch):
    known = "no voxel is wrong: nothing is known about the losers"
    for right in (True, False):
        report = TrustCalibration().fit(cases(right=right)).fit_report
        assert (known in report.notes) == right
    monkeypatch.setattr(module.TrustCalibration, "_measure", lambda self, cases: (100.0, 0))
    report = TrustCalibration().fit(cases()).fit_report
    assert "that of ts, which is kept" in report.notes[-1]
    assert report.nll_after == TemperatureScaling().fit(cases()).fit_report.nll_after


def test_without_wrong_voxels_there_is_nothing_to_fit():
    nothing = losers.WrongVoxels(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), *2 * [torch.zeros(0).numpy()])
    found = losers.fit_losers(nothing, 4)
    assert (found.temperature, found.strength, found.converged) == (1, float("inf"), True)
    assert found.certificate == found.nll_before == found.nll_after == 0
    assert not found.change.any()


def test_penalties_are_tried_from_strong_to_weak():
    assert list(losers.STRENGTHS) == sorted(set(losers.STRENGTHS), reverse=True)


@pytest.mark.parametrize(("classes", "size"), [(2, (400, 400)), (40, (90, 90))])
def test_layouts_do_not_matter(classes, size):
    """Losers of two classes, and of many, keep the layout of the logits; compiled loops write into them in place."""
    cases = scenes(9, size=(32, 40), num_classes=classes, plant=[SpatialTemperature()])
    fitted = TrustCalibration().fit(cases)
    z = scenes(1, size=size, num_classes=classes)[0].logits
    expected = fitted(z)
    for other in (z.contiguous(memory_format=torch.channels_last), z.mT.contiguous().mT):
        torch.testing.assert_close(fitted(other), expected, atol=1e-5, rtol=1e-5)
