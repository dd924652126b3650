"""What all maps by experts share: sums with derivatives, an optimum that is one, and what they do with little data."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from reference.calibrators import MAPS, best_nll, drawn, least, nll, start
from segcal.calibrators import CALIBRATORS, load
from segcal.errors import InputError
from segcal.fitting import expert_adam, expert_exact
from segcal.fitting import expert_sums as expert_sums_module
from segcal.fitting.expert_form import FLOOR
from segcal.fitting.expert_sums import Rows, expert_sums
from segcal.kernels import curvature_loops
from segcal.kernels.experts import ExpertMap
from segcal.scores import canonical_logits
from segcal.synthetic import Temperature, scenes

FEATURES = ("logits", "log-probs", "margins", "gaps")
IDS = tuple(MAPS)


# -- sums and their derivatives ----------------------------------------------------------------------------------------


def awkward(n=300, classes=4, seed=0):
    """Voxels with ties, impossible classes and sure winners among them, and labels that are possible."""
    random = torch.Generator().manual_seed(seed)
    z = (3 * torch.randn(n, classes, generator=random)).double()
    z[::5, 1] = z[::5].amax(1)
    z[1::5] = z[1::5].round()
    z[2::5, 2] += 50
    z[3::5, 3] = -torch.inf
    z[4::25] = 0.0
    y = torch.randint(0, 3, (n,), generator=random)
    return z, y, 0.5 + torch.rand(n, generator=random).double()


def example_theta(features, classes, count, seed=1):
    random = np.random.default_rng(seed)
    size = classes - (features == "gaps")
    theta = 0.3 * random.random((count, size, size + 1))
    theta[:, :, :-1] += 0.3 * np.eye(size)
    return theta


@pytest.fixture(params=["numpy", "compiled"])
def loops(request, monkeypatch):
    """Sums by numpy and by compiled loops, whatever the number of voxels."""
    module = curvature_loops if request.param == "compiled" else None
    monkeypatch.setattr(expert_sums_module, "fast_sums", lambda size: module)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("features", FEATURES)
def test_sums_are_what_autograd_finds(features, classes, loops):
    z, y, weights = awkward(classes=max(classes, 4))
    if classes == 2:
        z, y = z[:, 1:3], y % 2
    for count in (1, classes):
        theta = example_theta(features, classes, count)
        rows = Rows.of(z, y, weights.numpy(), features, count)
        sums = expert_sums(rows, theta, features, curvature=True)
        expert = z.argmax(1) if count > 1 else torch.zeros(len(z), dtype=torch.int64)
        for e in range(count):
            own = expert == e

            def objective(part, e=e, own=own, theta=theta):
                whole = torch.from_numpy(theta).clone()
                whole[e] = part.view(whole.shape[1:])
                scores = ExpertMap(features, whole[:, :, :-1], whole[:, :, -1])(z[own])
                return weights[own] @ cross_entropy(scores, y[own], reduction="none")

            at = torch.from_numpy(theta[e].ravel())
            slope = torch.autograd.functional.jacobian(objective, at)
            second = torch.autograd.functional.hessian(objective, at)
            assert sums.nll[e] == pytest.approx(float(objective(at)), rel=1e-12)
            assert np.allclose(sums.gradient[e].ravel(), slope, rtol=1e-10, atol=1e-9)
            assert np.allclose(sums.curvature[e], second, rtol=1e-9, atol=1e-8)


def test_sums_of_vector_scaling_are_those_of_its_matrix():
    z, y, weights = awkward(n=3000)
    scale, bias = np.random.default_rng(0).normal(1, 0.3, (2, 4))
    vector = expert_sums(
        Rows.of(z, y, weights.numpy(), "own-logit", 1),
        np.stack((scale, bias), 1)[None],
        "own-logit",
        curvature=True,
        threads=2,
    )
    matrix = expert_sums(
        Rows.of(z, y, weights.numpy(), "logits", 1), np.c_[np.diag(scale), bias][None], "logits", curvature=True
    )
    own = np.arange(4)
    places = np.stack((own * 5 + own, own * 5 + 4), 1)  # of the diagonal and the biases in the matrix (4, 5), flat
    assert vector.nll == pytest.approx(matrix.nll, rel=1e-13)
    assert np.allclose(vector.gradient[0], matrix.gradient[0].ravel()[places], rtol=1e-12, atol=1e-10)
    expected = matrix.curvature[0][np.ix_(places.ravel(), places.ravel())]
    assert np.allclose(vector.curvature[0], expected, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("features", FEATURES)
def test_threads_and_the_order_of_voxels_do_not_matter(features, loops, monkeypatch):
    monkeypatch.setattr(expert_sums_module, "_PART_ROWS", 300)
    z, y, weights = awkward(n=5000)
    theta = example_theta(features, 4, 4)
    rows = Rows.of(z, y, weights.numpy(), features, 4)
    alone = expert_sums(rows, theta, features, curvature=True)
    shuffled = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    other = Rows.of(z[shuffled], y[shuffled], weights[shuffled].numpy(), features, 4)
    for found, expected in zip(expert_sums(other, theta, features, curvature=True), alone, strict=True):
        assert np.allclose(found, expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())
    for threads in (2, 5):
        shared = expert_sums(rows, theta, features, curvature=True, threads=threads)
        assert all(np.array_equal(found, expected) for found, expected in zip(shared, alone, strict=True))


@pytest.mark.parametrize("features", FEATURES)
def test_an_expert_without_voxels_has_zero_sums(features):
    z = torch.tensor([[3.0, 0.0, 0.0], [2.0, 1.0, 0.0]])
    rows = Rows.of(z, torch.tensor([0, 1]), np.ones(2), features, 3)
    sums = expert_sums(rows, example_theta(features, 3, 3), features, curvature=True)
    for values in sums:
        assert values[0].any()
        assert not values[1:].any()


@pytest.mark.parametrize("name", IDS)
def test_the_map_is_that_of_the_formula(name):
    """The published parameters, through the naive map, and the same in the calibrator's own."""
    z, _ = drawn(400, 4)
    x, bounds = start(name, 4)
    x = x + 0.2 * np.random.default_rng(0).random(len(x))
    expected = MAPS[name](torch.from_numpy(x), z.double()).log_softmax(1)
    calibrator = CALIBRATORS[name]()
    calibrator.num_classes = 4
    calibrator.set_parameters(as_theta(calibrator, x, 4))
    assert torch.allclose(calibrator(z.double()), expected, atol=1e-12)
    assert len(x) == len(bounds)


def as_theta(calibrator, x, classes):
    """The reference's flat parameters in the calibrator's form ``(E, K, J + 1)``."""
    if calibrator.id == "vs":
        return np.stack((x[:classes], x[classes:]), 1)[None]
    theta = calibrator.form(classes).identity
    if calibrator.id == "ms-c":
        weight = x[: classes**2].reshape(classes, classes).copy()
        np.fill_diagonal(weight, 0)
        np.fill_diagonal(weight, x[-1] - weight.sum(1))
        return np.c_[weight, x[classes**2 : -1]][None]
    size = classes - 1 if calibrator.preserves else classes
    for e, own in enumerate(x.reshape(len(theta), -1)):
        expert = np.c_[own[: size**2].reshape(size, size), own[size**2 :]]
        if calibrator.features == "margins":
            others = [k for k in range(classes) if k != e]
            theta[e] = 0
            theta[e][np.ix_(others, [*others, classes])] = expert
        else:
            theta[e] = expert
    return theta


# -- the optimum -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=IDS)
def solved(request):
    z, y = drawn(4000, 4)
    return request.param, z, y, best_nll(request.param, z, y)


def applied_nll(calibrator, z, y):
    return float(nll(calibrator(z.double()), y))


def test_the_optimum_is_scipys(solved):
    name, z, y, best = solved
    calibrator = CALIBRATORS[name]().fit(z, y, voxels="all")
    report = calibrator.fit_report
    assert report.converged
    assert report.certificate < 1e-7
    assert report.nll_after == pytest.approx(best, abs=1e-6)
    assert applied_nll(calibrator, z, y) == pytest.approx(best, abs=1e-6)
    assert report.nll_before == pytest.approx(float(cross_entropy(z.double(), y)), rel=1e-6)
    assert not report.notes


@pytest.mark.parametrize("large", [2**30, 1])
def test_a_sample_and_passes_over_everything_find_the_same(solved, large, monkeypatch):
    name, z, y, best = solved
    monkeypatch.setattr("segcal.kernels.dispatch._LARGE", large)  # passes by torch, or by numba
    monkeypatch.setattr(expert_exact, "SAMPLE_VOXELS", 2000)
    monkeypatch.setattr(expert_exact, "_CURVATURE_VOXELS", 900)
    monkeypatch.setattr(expert_exact, "_VOXELS_PER_PARAMETER", 1)
    report = (calibrator := CALIBRATORS[name]().fit(z, y, voxels="all")).fit_report
    assert report.converged
    assert report.voxels_used == 4000
    assert report.certificate < 1e-3
    assert report.nll_after == pytest.approx(best, abs=1e-6)
    assert applied_nll(calibrator, z, y) < best + 1e-6
    assert applied_nll(calibrator, z, y) == pytest.approx(report.nll_after, abs=1e-6)
    # fitted to the sample alone it is near, and says what it used
    sampled = CALIBRATORS[name]().fit(z, y)
    assert sampled.fit_report.voxels_used == 2000
    assert "stratified sample of 2,000 of 4,000 voxels" in sampled.fit_report.notes[-1]
    assert best + 1e-6 < applied_nll(sampled, z, y) < best + 0.02


@pytest.mark.parametrize("name", ["vs", "ms", "dc", "cdc"])
def test_penalised_optimum_is_scipys(name):
    """ODIR by its formula, on the parameters of the affine maps."""
    z, y = drawn(2000, 3)
    x, bounds = start(name, 3)
    lam, mu = 0.05, 0.2
    off = ~torch.eye(3, dtype=torch.bool)

    def objective(at):
        value, experts_ = nll(MAPS[name](at, z.double()), y), 3 if name == "cdc" else 1
        for own in at.chunk(experts_):
            weight = torch.diag(own[:3]) if name == "vs" else own[:9].view(3, 3)
            value = value + (lam * weight[off].square().mean() + mu * own[-3:].square().mean()) / experts_
        return value

    best, at = least(objective, x, bounds)
    calibrator = CALIBRATORS[name](off_diagonal=lam, bias=mu).fit(z, y)
    assert calibrator.fit_report.converged
    found = []
    for weight, bias in zip(calibrator.weight, calibrator.bias, strict=True):
        found += [weight.flatten(), bias]
    assert float(objective(torch.cat(found))) == pytest.approx(best, abs=1e-8)
    expected = float(nll(MAPS[name](torch.from_numpy(at), z.double()), y))
    assert calibrator.fit_report.nll_after == pytest.approx(expected, abs=1e-5)
    assert expected > best_nll(name, z, y) + 1e-5


@pytest.mark.parametrize("name", IDS)
def test_shrinkage_leads_to_temperature_scaling_and_penalties_away_from_the_optimum(name):
    z, y = drawn(2000, 3)
    scaled = CALIBRATORS["ts"]().fit(z, y)
    free = CALIBRATORS[name]().fit(z, y)
    weak, strong = (CALIBRATORS[name](shrinkage=own).fit(z, y) for own in (1e-2, 1e7))
    reported = [own.fit_report.nll_after for own in (free, weak, strong)]
    assert reported == sorted(reported)
    # FLOOR keeps cms from being a temperature exactly
    assert torch.allclose(strong(z), scaled(z), atol=1e-2 if strong.preserves else 1e-4)
    if name != "vs":
        far = CALIBRATORS[name](off_diagonal=10.0, bias=10.0).fit(z, y)
        assert reported[0] < far.fit_report.nll_after <= far.fit_report.nll_before


# -- guarantees --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IDS)
def test_before_a_fit_it_is_the_identity(name):
    calibrator = CALIBRATORS[name]()
    calibrator.allocate(5)
    calibrator.num_classes = 5
    for shape in ((1, 5, 40, 30), (1, 5, 240, 230)):  # torch and numba
        z = 5 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(calibrator(z), z.log_softmax(1), rtol=1e-6, atol=1e-6)
    assert torch.allclose(calibrator(z.double()), z.double().log_softmax(1), atol=1e-12)


@pytest.mark.parametrize("name", IDS)
def test_the_bounds_hold_and_the_floor_is_kept(name):
    z, y = drawn(2000, 4)
    calibrator = CALIBRATORS[name]().fit(z, y)
    lower, upper = calibrator.form(4).bounds
    theta = torch.cat((calibrator.weight, calibrator.bias[:, :, None]), 2).numpy()
    if calibrator.form(4).basis is None:
        assert (theta >= lower).all()
        assert (theta <= upper).all()
    if calibrator.preserves:
        assert (calibrator.weight >= 0).all()
        assert (theta[:, :, -1][lower[:, :, -1] < upper[:, :, -1]] >= FLOOR).all()
        assert (calibrator.weight == 0).any()  # active constraints are typical


@pytest.mark.parametrize("name", IDS)
def test_a_fit_does_not_see_the_gauge_where_declared(name):
    z, y = drawn(2000, 3)
    offset = 1e4 * (2 * torch.rand(2000, 1, generator=torch.Generator().manual_seed(0)).double() - 1)
    plain = CALIBRATORS[name]().fit(z.double(), y)
    shifted = CALIBRATORS[name]().fit(z.double() + offset, y)
    same = abs(plain.fit_report.nll_after - shifted.fit_report.nll_after) < 1e-8
    assert same == plain.translation_invariant


# -- Adam --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IDS)
def test_adam_falls_from_the_identity_and_stays_above_the_optimum(name, monkeypatch):
    monkeypatch.setattr(expert_adam, "_BATCH", 500)
    z, y = drawn(1500, 3)
    exact = CALIBRATORS[name]().fit(z, y)
    trained, again, other = (
        CALIBRATORS[name](solver="adam", rate=0.03, patience=2).fit(z, y, seed=seed) for seed in (0, 0, 1)
    )
    report = trained.fit_report
    assert report.nll_before == pytest.approx(exact.fit_report.nll_before, abs=1e-6)
    assert exact.fit_report.nll_after - 1e-6 < report.nll_after < report.nll_before - 0.01
    assert math.isnan(report.certificate)
    assert applied_nll(trained, z, y) == pytest.approx(report.nll_after, abs=1e-5)
    assert torch.equal(again.weight, trained.weight)
    assert not torch.equal(other.weight, trained.weight)


@pytest.mark.parametrize("name", IDS)
def test_adam_without_steps_is_the_identity(name):
    z, y = drawn(500, 3)
    idle = CALIBRATORS[name](solver="adam", rate=1e-12, patience=1).fit(z, y)
    assert torch.allclose(idle(z), z.log_softmax(1), atol=5e-3 if idle.preserves else 1e-5)


@pytest.mark.parametrize("cases", [1, 2, 3, 5])
def test_adam_holds_out_cases(cases):
    data = scenes(cases, size=(32, 40), num_classes=3, plant=[Temperature(2.0)])
    assert CALIBRATORS["dc"](solver="adam", patience=1).fit(data).fit_report.nll_after < math.inf


# -- little and degenerate data ----------------------------------------------------------------------------------------


def notes(calibrator):
    return " / ".join(calibrator.fit_report.notes)


def assert_sane(calibrator, z, y):
    report = calibrator.fit_report
    assert all(torch.isfinite(tensor).all() for tensor in calibrator.state_dict().values())
    assert report.nll_after <= report.nll_before + 1e-9
    assert applied_nll(calibrator, z, y) == pytest.approx(report.nll_after, abs=1e-6)
    assert torch.isfinite(calibrator(z).exp()).all()


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("n", [1, 3, 15])
def test_fewer_voxels_than_parameters(name, n):
    z, y = drawn(n, 4)
    calibrator = CALIBRATORS[name]().fit(z, y)
    assert_sane(calibrator, z, y)
    assert "few" in notes(calibrator) or "rarely" in notes(calibrator)


@pytest.mark.parametrize("name", IDS)
def test_a_class_never_predicted(name):
    z, y = drawn(3000, 4)
    z[:, 3] = z.amin(1) - 1
    calibrator = CALIBRATORS[name]().fit(z, y)
    assert calibrator.fit_report.converged
    assert_sane(calibrator, z, y)
    if calibrator.routed:
        assert "predicted too rarely" in notes(calibrator)
        assert "3 (0)" in notes(calibrator)
    # what it does to a class it never saw is a map, not garbage
    unseen = calibrator(torch.eye(4) * 3)[3:]
    assert torch.isfinite(unseen).all()
    assert unseen.exp().sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", IDS)
def test_a_class_never_true(name):
    z, y = drawn(3000, 4)
    y[y == 3] = 0
    calibrator = CALIBRATORS[name]().fit(z, y)
    assert calibrator.fit_report.converged
    assert_sane(calibrator, z, y)
    assert ("never true" in notes(calibrator)) == (name != "cms-op")


@pytest.mark.parametrize("name", IDS)
def test_all_labels_equal(name):
    z, _ = drawn(3000, 3)
    y = torch.ones(3000, dtype=torch.int64)
    assert_sane(CALIBRATORS[name]().fit(z, y), z, y)


@pytest.mark.parametrize("name", IDS)
def test_separable_data_stay_finite(name):
    z, _ = drawn(3000, 3)
    y = z.argmax(1)
    calibrator = CALIBRATORS[name]().fit(z, y)
    assert_sane(calibrator, z, y)
    assert calibrator.fit_report.nll_after < 0.01
    assert any("likelihood" in note for note in calibrator.fit_report.notes)  # that it is level, or rises beyond
    assert max(float(tensor.abs().max()) for tensor in (calibrator.weight, calibrator.bias)) <= 1000


@pytest.mark.parametrize("name", IDS)
def test_all_logits_equal(name):
    y = drawn(3000, 3)[1]
    z = torch.zeros(3000, 3)
    calibrator = CALIBRATORS[name]().fit(z, y)
    assert_sane(calibrator, z, y)
    shares = torch.bincount(y).double() / len(y)
    if calibrator.preserves is None:  # a bias can say how often each class is true
        assert calibrator.fit_report.nll_after == pytest.approx(float(-(shares * shares.log()).sum()), abs=1e-3)


@pytest.mark.parametrize("name", IDS)
def test_impossible_classes_are_fitted_as_they_are_applied(name):
    z, y = drawn(4000, 4, scale=6.0)
    never = torch.rand(z.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    never[torch.arange(len(y)), y] = False
    z[never] = -torch.inf
    calibrator = CALIBRATORS[name]().fit(z, y)
    assert calibrator.fit_report.converged
    assert applied_nll(calibrator, z, y) == pytest.approx(calibrator.fit_report.nll_after, abs=1e-8)
    assert calibrator.fit_report.nll_after < calibrator.fit_report.nll_before
    y[0] = int(never[0].nonzero()[0]) if never[0].any() else y[0]
    z[0, y[0]] = -torch.inf
    with pytest.raises(InputError, match="labelled with a class whose logit is -inf"):
        CALIBRATORS[name]().fit(z, y)


@pytest.mark.parametrize("name", IDS)
def test_two_classes_and_multi_label_channels(name):
    z, _ = drawn(900, 3)
    y = (z / 2 + torch.randn(z.shape, generator=torch.Generator().manual_seed(0)) > 0).long()
    channels = canonical_logits(z.T.reshape(1, 3, 30, 30), "logits", multilabel=True)
    labels = y.T.reshape(3, 30, 30)
    assert channels.shape == (3, 2, 30, 30)
    calibrator = CALIBRATORS[name]().fit(channels, labels)
    assert calibrator.fit_report.converged
    flat = channels.movedim(1, -1).reshape(-1, 2)
    assert_sane(calibrator, flat, labels.flatten())
    assert calibrator(channels).shape == channels.shape
    if name in ("vs", "ms", "ms-c"):  # of two classes and a first logit of 0, all are S(a m + b)
        best = best_nll("vs", flat, labels.flatten())
        assert calibrator.fit_report.nll_after == pytest.approx(best, abs=1e-6)


# -- wrong use ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("argument", ["off_diagonal", "bias_penalty"])
def test_penalties_are_numbers_from_zero(argument, value):
    with pytest.raises(InputError, match=f"{argument} is {value}"):
        CALIBRATORS["dc"](**{argument: value})


def test_unknown_solvers_are_refused():
    with pytest.raises(InputError, match="solver is 'sgd'"):
        CALIBRATORS["dc"](solver="sgd")


@pytest.mark.parametrize("name", IDS)
def test_arguments_are_saved(name, tmp_path):
    z, y = drawn(500, 3)
    calibrator = CALIBRATORS[name](0.1, 0.2, 0.3, rate=0.05, patience=7).fit(z, y)
    calibrator.save(tmp_path / "c.safetensors")
    again = load(tmp_path / "c.safetensors")
    assert again.arguments() == calibrator.arguments()
    assert torch.equal(again(z), calibrator(z))


def test_parameters_at_their_bounds_are_reported():
    """Class 1 is where the second logit is the lower, without exception: the optimum is at infinity."""
    second = torch.linspace(0.1, 3, 4000)
    logits = torch.stack((torch.full_like(second, 4.0), second, torch.zeros_like(second)), 1)
    calibrator = CALIBRATORS["ms"]().fit(logits, (second < 1.5).long(), voxels="all")
    assert any("at their bound of 100" in note for note in calibrator.fit_report.notes)
    assert calibrator(logits).isfinite().all()
