"""The calibrator as a whole: what it learns, what it keeps, what it says, and how it meets bad input."""

import numpy as np
import pytest
import torch

import segcal
from segcal.calibrators import TemperatureScaling, TrustCalibration, load
from segcal.calibrators.trust import calibrator as module
from segcal.calibrators.trust import fit as trust_fit
from segcal.calibrators.trust.tiles import Images, tiles
from segcal.errors import InputError
from segcal.synthetic import ClassConditional, SpatialTemperature, scenes

PLANT = [SpatialTemperature()]


@pytest.fixture(scope="module")
def cases():
    return scenes(16, size=(64, 72), plant=[SpatialTemperature(), ClassConditional([3.0, 1, 1, 2, 1, 1])], coherence=0)


@pytest.fixture(scope="module")
def fitted(cases):
    return TrustCalibration().fit(cases)


def notes_of(calibrator):
    return "; ".join(calibrator.fit_report.notes)


def held_out(seed=5):
    return scenes(8, size=(64, 72), plant=[SpatialTemperature(), ClassConditional([3.0, 1, 1, 2, 1, 1])], coherence=0,
                  seed=seed)  # fmt: skip


def test_it_beats_ts_on_other_images(cases, fitted):
    others = held_out()
    metrics = ("nll", "brier", "ece")
    mine, theirs = (segcal.evaluate(others, own, metrics=metrics) for own in (fitted, TemperatureScaling().fit(cases)))
    assert all(mine.value(metric) < theirs.value(metric) for metric in metrics)


def test_the_report_says_what_was_tried(fitted):
    notes = notes_of(fitted)
    assert all(f"w = {w:g} " in notes for w in trust_fit.SHARES)
    assert f"w = {float(fitted.share):g} is taken" in notes
    assert "losers: " in notes
    assert "gradient " in notes
    assert "% of the voxels are levelled" in notes
    assert fitted.fit_report.converged
    assert fitted.fit_report.certificate < 1e-6


def test_trust_is_the_winners_probability_and_is_calibrated(cases, fitted):
    for case in (cases[0], held_out()[0]):
        q = fitted.trust_map(case.logits)
        assert q.shape == (1, *case.logits.shape[2:])
        torch.testing.assert_close(q, fitted.predict_proba(case.logits).amax(1))
    right, total = 0.0, 0.0
    for case in cases:
        right += float((case.logits.argmax(1) == case.labels).double().sum())
        total += float(fitted.trust_map(case.logits).double().sum())
    assert total == pytest.approx(right, rel=0.01)
    assert fitted.trust_map(cases[0].logits.half()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_labels_stay_bit_for_bit_also_where_classes_tie(fitted, dtype):
    z = held_out()[0].logits.repeat(1, 1, 4, 4).to(dtype)
    choice = torch.rand(z.shape, generator=torch.Generator().manual_seed(0))
    z = torch.where(choice < 0.3, z.amax(1, keepdim=True), z)
    assert torch.equal(fitted(z).argmax(1), z.argmax(1))


def test_tiles_change_nothing(fitted, monkeypatch):
    z = scenes(1, size=(300, 72), plant=PLANT)[0].logits
    whole = fitted(z)
    monkeypatch.setattr("segcal.calibrators.trust.tiles._TILE_VALUES", 6 * 72 * 90)
    torch.testing.assert_close(fitted(z), whole, atol=1e-5, rtol=0)


def test_a_batch_is_its_images_each_alone(fitted, monkeypatch):
    z = torch.cat([case.logits.repeat(1, 1, 4, 4) for case in held_out()]) * torch.linspace(1, 3, 8).view(8, 1, 1, 1)
    images = Images(tuple(z.shape), z.device, lambda rows: z[:, :, rows])
    judged = fitted._known(next(tiles(images, fitted.beta)))
    assert ((judged > 0.1) & (judged < 0.9)).any(), "no image that is half known, so nothing is mixed"
    alone = torch.cat([fitted(image) for image in z.split(1)])
    torch.testing.assert_close(fitted(z), alone, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr("segcal.calibrators.trust.tiles._TILE_VALUES", 3 * z[0].numel())
    torch.testing.assert_close(fitted(z), alone, atol=1e-5, rtol=1e-5)
    assert fitted(z[:0]).shape == z[:0].shape


def test_groups_stay_together_in_folds(cases):
    groups = {case: f"patient {number // 2}" for number, case in enumerate(cases.ids)}
    grouped = segcal.cases.CaseSet(cases.refs, cases.num_classes, cases.class_names, groups=groups)
    folds = trust_fit.fold_of(grouped, seed=0)
    by_group = {}
    for case, group in groups.items():
        by_group.setdefault(group, set()).add(folds[case])
    assert all(len(own) == 1 for own in by_group.values())
    few = segcal.cases.CaseSet(cases.refs, cases.num_classes, cases.class_names, groups=dict.fromkeys(cases.ids, "one"))
    assert trust_fit.fold_of(few, seed=0) is None


def test_the_same_seed_gives_the_same_bits(cases, fitted):
    again = TrustCalibration().fit(cases)
    assert all(torch.equal(a, b) for a, b in zip(again.tensors().values(), fitted.tensors().values(), strict=True))


@pytest.mark.parametrize("count", [1, 3, 7])
def test_few_cases_have_no_network_and_say_so(count):
    calibrator = TrustCalibration().fit(scenes(count, size=(48, 64), plant=PLANT))
    assert float(calibrator.share) == 0
    assert f"{count} cases or groups are fewer than 8: w = 0" in notes_of(calibrator)
    assert calibrator.fit_report.nll_after <= calibrator.fit_report.nll_before


def test_volumes_are_judged_slice_by_slice():
    volumes = scenes(8, size=(3, 40, 48), plant=PLANT)
    calibrator = TrustCalibration().fit(volumes)
    z = volumes[0].logits
    assert calibrator(z).shape == z.shape
    assert torch.equal(calibrator(z).argmax(1), z.argmax(1))
    assert calibrator(z[:, :, :1]).shape == (1, 6, 1, 40, 48)  # a volume with one slice


def test_members_disagreement_is_a_feature_and_its_gain_is_said():
    cases = scenes(8, size=(48, 64), members=3, member_noise=3.0)
    calibrator = TrustCalibration().fit(cases)
    assert "with the members' disagreement, out-of-fold NLL of right or wrong" in notes_of(calibrator)
    members = [cases[0].member_logits(m) for m in range(3)]
    ((_, pieces),) = list(calibrator.pieces(cases[0]))
    torch.testing.assert_close(calibrator(members), pieces, atol=1e-5, rtol=0)
    assert torch.equal(calibrator(members).argmax(1), cases[0].logits.argmax(1))
    assert calibrator(cases[0].logits).shape == (1, 6, 48, 64)  # without members, their disagreement is average
    with pytest.raises(InputError, match=r"2 ensemble members; expected 3"):
        calibrator(members[:2])
    with pytest.raises(InputError, match=r"2 ensemble members; expected one tensor"):
        TrustCalibration().fit(scenes(2, size=(32, 40)))(members[:2])


# -- unusual data ------------------------------------------------------------------------------------------------------


def assert_valid_fit(z, y, **options):
    calibrator = TrustCalibration().fit(z, y, **options)
    p = calibrator.predict_proba(z)
    assert torch.isfinite(p).all()
    assert torch.allclose(p.sum(1), torch.ones(()), atol=1e-4)
    assert torch.equal(p.argmax(1), z.argmax(1))
    report = calibrator.fit_report
    assert report.nll_after <= report.nll_before
    return calibrator


def random_logits(*shape, seed=0):
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_no_wrong_voxel():
    z = random_logits(9, 4, 20, 24)
    assert "no voxel is wrong" in notes_of(assert_valid_fit(z, z.argmax(1)))


def test_all_wrong():
    z = random_logits(9, 4, 20, 24)
    q = assert_valid_fit(z, (z.argmax(1) + 1) % 4).trust_map(z)
    torch.testing.assert_close(q, torch.full_like(q, 0.25), atol=1e-4, rtol=0)  # as little as the winner can have


def test_a_fold_without_wrong_voxels():
    z = random_logits(8, 4, 20, 24)
    y = z.argmax(1)
    y[0] = (y[0] + 1) % 4  # wrong in one image only
    assert "of 480 wrong voxels" in notes_of(assert_valid_fit(z, y))


def test_one_class_is_all_there_is():
    z = random_logits(9, 4, 20, 24)
    calibrator = assert_valid_fit(z, torch.zeros(9, 20, 24, dtype=torch.int64))
    p, q, lost = calibrator.predict_proba(z), calibrator.trust_map(z), z.argmax(1) != 0
    others = p[:, 1:].movedim(1, -1)[lost].sort(1).values[:, :2]  # without the winner
    assert (p[:, 0][lost] >= others[:, 1] - 1e-5).all()  # the first of the losers, or level with them
    assert q[~lost].min() > 0.95  # this class is always right
    assert q[lost].median() < 0.26  # the others never: as little as the winner can have


def test_classes_never_predicted_and_never_true():
    z = random_logits(9, 5, 20, 24)
    z[:, 3] -= 100.0
    y = torch.randint(3, (9, 20, 24), generator=torch.Generator().manual_seed(1))
    calibrator = assert_valid_fit(z, y)
    right_at_times = z.argmax(1) != 4
    assert (calibrator.predict_proba(z)[:, 3][right_at_times] < 0.03).all()
    assert calibrator.trust_map(z)[~right_at_times].median() < 0.21  # never right: as little as the winner can have


def test_images_without_a_valid_voxel():
    z, y = random_logits(10, 4, 20, 24), torch.randint(4, (10, 20, 24), generator=torch.Generator().manual_seed(1))
    y[2:4] = 255
    assert_valid_fit(z, y)
    with pytest.raises(InputError, match="no valid voxel"):
        TrustCalibration().fit(z, torch.full_like(y, 255))


def test_all_valid_voxels_in_one_fold():
    z, y = random_logits(9, 4, 20, 24), torch.full((9, 20, 24), 255)
    y[0] = torch.randint(4, (20, 24), generator=torch.Generator().manual_seed(1))
    assert not assert_valid_fit(z, y).network.last.any()  # no network has anything to learn from


@pytest.mark.parametrize("shape", [(9, 4, 3, 3), (9, 4, 1, 1), (9, 4, 1, 5, 6), (40, 4)])
def test_images_smaller_than_the_windows(shape):
    y = torch.randint(4, (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(1))
    assert assert_valid_fit(random_logits(*shape), y).fit_report.voxels_used == y.numel()


def test_impossible_classes_stay_impossible():
    z = random_logits(9, 4, 20, 24)
    z[:, 2, :, :12] = -torch.inf
    y = torch.randint(2, (9, 20, 24), generator=torch.Generator().manual_seed(1))
    assert (assert_valid_fit(z, y).predict_proba(z)[:, 2, :, :12] == 0).all()


def test_logits_of_ten_thousand():
    y = torch.randint(4, (9, 20, 24), generator=torch.Generator().manual_seed(1))
    certain = 1e4 * (y[:, None] == torch.arange(4)[:, None, None])
    z = torch.where(torch.arange(24) < 12, certain, random_logits(9, 4, 20, 24) + 1e4)
    assert (assert_valid_fit(z, y).trust_map(z)[..., :12] == 1).all()  # nothing else is possible there


def test_two_classes():
    z = random_logits(9, 2, 20, 24)
    y = (torch.rand(9, 20, 24, generator=torch.Generator().manual_seed(1)) < z.softmax(1)[:, 1] ** 0.5).long()
    assert "two classes" in notes_of(assert_valid_fit(z, y))


def test_many_classes_have_biases_or_one_temperature(tmp_path):
    for classes, said in ((150, "biases and no matrices"), (300, "one temperature and no matrices")):
        z = random_logits(9, classes, 12, 14)
        y = torch.randint(classes, (9, 12, 14), generator=torch.Generator().manual_seed(1))
        calibrator = assert_valid_fit(z, y, ignore_index=-1)
        assert said in notes_of(calibrator)
        calibrator.save(tmp_path / "trust.safetensors")
        assert torch.equal(load(tmp_path / "trust.safetensors")(z), calibrator(z))


def test_a_map_that_is_worse_than_ts_is_not_kept(cases, monkeypatch):
    monkeypatch.setattr(module.TrustCalibration, "_measure", lambda self, cases: (np.inf, 0))
    calibrator = TrustCalibration().fit(cases[:8])
    assert "which is kept" in notes_of(calibrator)
    ts, z = TemperatureScaling().fit(cases[:8]), cases[0].logits
    torch.testing.assert_close(calibrator.predict_proba(z), ts.predict_proba(z), atol=1e-5, rtol=0)


def test_tensors_are_cases_of_several_images():
    cases = scenes(20, size=(32, 40), plant=PLANT)
    z, y = torch.cat([case.logits for case in cases]), torch.cat([case.labels for case in cases])
    y[3, 5:9] = 255
    fitted = TrustCalibration().fit(z, y)
    assert fitted.fit_report.voxels_used == int((y != 255).sum())
    expected = torch.nn.functional.nll_loss(fitted(z).double(), y, ignore_index=255)
    assert fitted.fit_report.nll_after == pytest.approx(float(expected), rel=1e-6)
