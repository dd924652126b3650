"""What every calibrator promises, held for each of them."""

import copy

import numpy as np
import pytest
import torch

import segcal
from segcal.calibrators import CALIBRATORS, load
from segcal.errors import DataError, InputError, SegcalError
from segcal.scores import keep_argmax
from segcal.synthetic import Temperature, scenes

CASES = scenes(3, size=(32, 40), plant=[Temperature(1.7)], ignored=0.05)


def random_logits(*shape, seed=0, scale=4.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(fitted, z, first, second):
    """To 1e-5 of the largest number of each voxel, or to what the exact map makes of float32's rounding of the scores.

    The latter is more on the steep steps of ``isotonic``, and which voxels are on one depends on the processor.
    """
    difference = (first - second).detach().abs()
    far = (difference > 1e-5 * (1 + first.detach().abs().amax(1, keepdim=True))).any(1)
    if far.any():
        assert not fitted.spatial
        points, difference = (own.detach().movedim(1, -1)[far].double() for own in (z, difference))
        rounding = 4 * torch.finfo(torch.float32).eps * points.abs().amax()
        steps = rounding * torch.eye(points.shape[1], dtype=torch.float64)
        assert (difference <= sum((fitted(points + step) - fitted(points - step)).abs() for step in steps)).all()


def test_output_is_log_probabilities_in_the_input_dtype(fitted):
    z = random_logits(2, 6, 5, 7)
    for dtype, tolerance in (
        (torch.float64, 1e-12),
        (torch.float32, 1e-5),
        (torch.float16, 5e-2),
        (torch.bfloat16, 2e-1),
    ):
        log_probs = fitted(z.to(dtype))
        assert log_probs.dtype == dtype
        assert torch.allclose(log_probs.double().exp().sum(1), torch.ones(2, 5, 7).double(), atol=tolerance)
    assert torch.allclose(fitted.predict_proba(z), fitted(z).exp())


def test_translation_invariance_where_declared(fitted):
    z = random_logits(1, 6, 20, 20).double()
    offset = 1e4 * (2 * torch.rand(1, 1, 20, 20, generator=torch.Generator().manual_seed(1)).double() - 1)
    same = torch.allclose(fitted(z), fitted(z + offset), atol=1e-8)
    assert same == fitted.translation_invariant


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_argmax_is_kept_bit_for_bit_where_declared(fitted, dtype):
    z = random_logits(1, 6, 200, 300).to(dtype)
    top = z.amax(1, keepdim=True)
    near = torch.nextafter(top, torch.full_like(top, -torch.inf)).expand_as(z)
    choice = torch.rand(z.shape, generator=torch.Generator().manual_seed(2))
    z = torch.where(choice < 0.2, top, torch.where(choice < 0.4, near, z))  # exact ties, and gaps of one ulp
    if fitted.preserves:
        assert torch.equal(fitted(z).argmax(1), z.argmax(1))
        assert torch.equal(fitted.predict(z), z.argmax(1))
        assert torch.equal(fitted.predict_proba(z).argmax(1), z.argmax(1))  # the exponential rounds, too


@pytest.mark.parametrize("size", [(30, 20), (300, 200)], ids=["torch", "numba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_order_is_kept_where_declared(fitted, dtype, size):
    z = random_logits(1, 6, *size).to(dtype)
    near = torch.nextafter(z, torch.full_like(z, -torch.inf)).roll(1, 1)  # one ulp below the class before
    choice = torch.rand(z.shape, generator=torch.Generator().manual_seed(2))
    z = torch.where(choice < 0.2, near, torch.where(choice < 0.3, z.roll(1, 1), z))
    if fitted.preserves == "order":
        ranked = fitted(z).gather(1, z.sort(dim=1, descending=True, stable=True).indices)
        assert (ranked.diff(dim=1) <= 0).all()


def test_small_and_large_inputs_are_mapped_alike(fitted):
    z = random_logits(1, 6, 300, 200)
    if not fitted.spatial:
        parts = torch.cat([fitted(z[:, :, row : row + 50]) for row in range(0, 300, 50)], 2)
        assert_close(fitted, z, fitted(z), parts)
    assert fitted(z[:0]).shape == (0, 6, 300, 200)


def test_never_worse_than_the_identity_on_the_fit_data(fitted):
    report = fitted.fit_report
    assert report.converged
    assert report.nll_after <= report.nll_before
    assert report.voxels_used == sum(int(case.valid.sum()) for case in CASES)
    measured = segcal.evaluate(CASES, fitted, metrics=("nll",)).value("nll")
    assert measured == pytest.approx(report.nll_after, rel=1e-5)


def test_tensors_and_cases_of_any_shape_fit_alike(fitted):
    if fitted.spatial or fitted.id == "selective":
        pytest.skip("neighbours matter, or whole cases are held out")
    z = torch.cat([case.logits for case in CASES])
    y = torch.cat([case.labels for case in CASES])
    flat_z, flat_y = z.movedim(1, -1).reshape(-1, 6), y.flatten()
    half = random_logits(*y.shape, seed=3) < 0
    for data in ((z, y), (flat_z, flat_y)):
        again = type(fitted)().fit(*data)
        assert again.fit_report.nll_after == pytest.approx(fitted.fit_report.nll_after, abs=1e-8)
    masked = type(fitted)().fit(z, y, mask=half)
    ignored = type(fitted)().fit(z, torch.where(half, y, 255))
    assert masked.fit_report.nll_after == pytest.approx(ignored.fit_report.nll_after, abs=1e-8)


def test_save_and_load_are_bit_identical(fitted, tmp_path):
    fitted.save(tmp_path / "c.safetensors")
    again = load(tmp_path / "c.safetensors")
    z = random_logits(1, 6, 30, 30)
    assert torch.equal(again(z), fitted(z))
    assert (again.fit_report, again.num_classes, again.class_names) == (fitted.fit_report, 6, fitted.class_names)
    assert type(again) is type(fitted)
    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]


def test_damaged_and_foreign_files_are_refused(fitted, tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "c.safetensors"
    fitted.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(DataError, match="cannot be read"):
        load(path)
    path.write_bytes(whole.replace(b'\\"version\\": 1', b'\\"version\\": 9'))
    with pytest.raises(DataError, match="version 9"):
        load(path)
    save_file({"beta": torch.ones(())}, path)
    with pytest.raises(DataError, match="cannot be read"):
        load(path)
    with pytest.raises(DataError, match="cannot be read"):
        load(tmp_path / "nowhere.safetensors")
    broken = copy.deepcopy(fitted)
    for buffer in broken.tensors().values():
        buffer.fill_(torch.nan)
    broken.save(path)
    with pytest.raises(DataError, match="is not finite"):
        load(path)


def test_a_failed_fit_changes_nothing(fitted):
    z = random_logits(1, 6, 30, 30)
    calibrator = copy.deepcopy(fitted)
    before, report = calibrator(z), calibrator.fit_report
    with pytest.raises(InputError, match="label 9"):
        calibrator.fit(z, torch.full((1, 30, 30), 9))
    with pytest.raises(InputError, match="NaN"):
        calibrator.fit(torch.full_like(z, torch.nan), torch.zeros(1, 30, 30, dtype=torch.int64))
    assert torch.equal(calibrator(z), before)
    assert calibrator.fit_report is report


def test_wrong_use_says_so(fitted, tmp_path):
    fresh = type(fitted)()
    with pytest.raises(SegcalError, match="has not been fitted"):
        fresh(torch.zeros(1, 6))
    with pytest.raises(SegcalError, match="has not been fitted"):
        fresh.save(tmp_path / "c.safetensors")
    with pytest.raises(InputError, match=r"expected \(N, 6, \*spatial\)"):
        fitted(torch.zeros(1, 5, 3))
    with pytest.raises(InputError, match="logits come without labels"):
        fresh.fit(torch.zeros(1, 6))
    with pytest.raises(InputError, match="labels come with cases"):
        fresh.fit(CASES, torch.zeros(1))
    with pytest.raises(InputError, match="labels have shape"):
        fresh.fit(torch.zeros(2, 6), torch.zeros(3, dtype=torch.int64))
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(InputError, match="labels have dtype"):
            fresh.fit(torch.zeros(2, 6), torch.zeros(2, dtype=dtype))
    with pytest.raises(InputError, match="mask has shape .* dtype torch.uint8"):
        fresh.fit(torch.zeros(2, 6), torch.zeros(2).long(), mask=torch.ones(2, dtype=torch.uint8))
    with pytest.raises(InputError, match="no valid voxel"):
        fresh.fit(torch.zeros(2, 6), torch.full((2,), 255))
    with pytest.raises(InputError, match="no cases"):
        fresh.fit(CASES[:0])


def test_impossible_classes_stay_impossible(fitted):
    z = random_logits(1, 6, 10)
    z[:, 2] = -torch.inf
    assert torch.isneginf(fitted(z)[:, 2]).all()


def test_evaluation_fuses_the_map_without_a_difference(fitted):
    plain = segcal.evaluate(CASES, lambda z: fitted(z), metrics=("nll", "ece", "flip"))
    fused = segcal.evaluate(CASES, fitted, metrics=("nll", "ece", "flip"))
    for metric in ("nll", "ece", "flip"):
        assert fused.value(metric) == pytest.approx(plain.value(metric), rel=1e-5, abs=1e-7)


def test_gradients_are_those_of_finite_differences(fitted):
    z = random_logits(2, 6, 3, 4, seed=4).double().requires_grad_()
    if fitted(z).requires_grad:
        assert torch.autograd.gradcheck(fitted, (z,), eps=1e-6, atol=1e-5)
    large = random_logits(1, 6, 300, 200).requires_grad_()
    assert_close(fitted, large, fitted(large), fitted(large.detach()))


def test_labels_of_any_integer_type(fitted):
    z, y = CASES[0].logits, CASES[0].labels
    options = {"epochs": 2} if "epochs" in fitted.arguments() else {}  # two fits alike, however good
    expected = type(fitted)(**options).fit(z, y)
    for dtype in (torch.uint8, torch.int16, torch.int32) if fitted.id == "ts" else (torch.uint8,):
        assert torch.equal(type(fitted)(**options).fit(z, y.to(dtype))(z), expected(z))


def test_the_same_seed_gives_the_same_bits(fitted):
    z = random_logits(1, 6, 30, 30)
    assert torch.equal(type(fitted)().fit(CASES)(z), fitted(z))


def test_arguments_of_fit_are_checked(fitted):
    fresh = type(fitted)()
    with pytest.raises(InputError, match="voxels is 'some'"):
        fresh.fit(CASES, voxels="some")
    with pytest.raises(InputError, match="validation has 3 classes; expected 6"):
        fresh.fit(CASES, validation=scenes(1, size=(16, 16), num_classes=3))
    with pytest.raises(InputError, match="at least two classes"):
        fresh.fit(torch.zeros(5, 1), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(InputError, match="mask has shape"):
        fresh.fit(torch.zeros(5, 6), torch.zeros(5, dtype=torch.int64), mask=torch.ones(4, dtype=torch.bool))
    assert fresh.num_classes is None


# Kirscher et al., Table 2: optimised and identifiable parameters for 2, 5 and 20 classes.
TABLE_2 = {
    "ts": ((1, 1), (1, 1), (1, 1)),
    "ets": ((4, 3), (4, 3), (4, 3)),
    "ms": ((6, 3), (30, 24), (420, 399)),
    "ms-c": ((5, 2), (26, 20), (401, 380)),
    "dc": ((6, 3), (30, 24), (420, 399)),
    "lts": ((357, 357), (882, 882), (3507, 3507)),
    "cdc": ((12, 6), (150, 120), (8400, 7980)),
    "cms-ap": ((10, 4), (130, 100), (8020, 7600)),
    "cms-op": ((10, 4), (130, 100), (8020, 7600)),
}


@pytest.mark.parametrize("name", [name for name in TABLE_2 if name in CALIBRATORS])
def test_parameters_are_those_of_table_2(name):
    counted = tuple(tuple(CALIBRATORS[name].parameter_count(classes)) for classes in (2, 5, 20))
    assert counted == TABLE_2[name]


def test_keep_argmax_changes_only_what_ties():
    scores = torch.tensor([[0.0, 1.0, 1.0, np.nan_to_num(-np.inf)]])
    kept = keep_argmax(scores, torch.tensor([2]))
    assert kept.argmax(1).item() == 2
    assert kept[0, [0, 2, 3]].equal(scores[0, [0, 2, 3]])


def test_keep_argmax_needs_no_derivative_of_nextafter(monkeypatch):
    """Torch up to 2.11 has none."""
    nextafter = torch.nextafter

    def without_derivative(*tensors):
        assert not torch.is_grad_enabled()
        return nextafter(*tensors)

    monkeypatch.setattr(torch, "nextafter", without_derivative)
    scores = torch.tensor([[0.0, 1.0, 1.0, -torch.inf], [-torch.inf] * 4]).requires_grad_()
    kept = keep_argmax(scores, torch.tensor([2, 0]))
    assert kept.argmax(1).tolist() == [2, 0]
    assert torch.isneginf(kept[1]).all()
    kept[0, :3].sum().backward()
    assert scores.grad[0].tolist() == [1.0, 0.0, 2.0, 0.0]  # what ties is the winner's value, one step lower
