import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch.nn.functional import nll_loss

from segcal.errors import InputError
from segcal.scores import free_energy, pool
from segcal.synthetic import (
    ClassAffine,
    ClassConditional,
    ConfidentlyWrong,
    GaugeOffsets,
    ImageTemperature,
    SceneSpec,
    SpatialTemperature,
    Temperature,
    TrueCalibrationError,
    demo_scenes,
    draw_labels,
    scene_of,
    scenes,
    true_calibration_error,
)
from segcal.synthetic.shapes import Grid
from segcal.types import Case

SMALL = (40, 48)
VOLUME = (6, 24, 32)
TENSORS = ("posterior", "labels", "image", "logits")


def same(one, other, tensors=TENSORS):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in tensors)


def winner_parameters(logits, per_winner):
    return torch.tensor(per_winner)[logits.argmax(1)][:, None]


# --- what a scene is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_classes", [2, 3, 4, 6, 19])
@pytest.mark.parametrize("size", [(32, 40), (8, 8), VOLUME, (1, 16, 16)])
def test_shapes_dtypes_and_ranges(size, num_classes):
    case = scenes(1, size=size, num_classes=num_classes, seed=1)[0]
    assert case.shape == (1, num_classes, *size)
    assert case.logits.shape == case.posterior.shape == case.shape
    assert case.labels.shape == (1, *size)
    assert case.image.shape == (1, 3 if len(size) == 2 else 1, *size)
    assert case.mask is None
    assert case.spacing == (None if len(size) == 2 else (2.0, 1.0, 1.0))
    assert [getattr(case, name).dtype for name in TENSORS] == [torch.float32, torch.int64, torch.float32, torch.float32]
    torch.testing.assert_close(case.posterior.double().sum(1), torch.ones(1, *size, dtype=torch.float64))
    assert 0 <= float(case.image.min()) < float(case.image.max()) <= 1
    assert 0 <= int(case.labels.min()) <= int(case.labels.max()) < num_classes
    assert bool(torch.isfinite(case.logits).all())


def test_rows_of_a_case_are_rows_of_the_whole():
    case = scenes(1, size=VOLUME)[0]
    chunks = list(case.chunks(6 * 2 * 24 * 32))
    assert len(chunks) == 3
    whole = scenes(1, size=VOLUME)[0]
    assert torch.equal(torch.cat([chunk.logits for chunk in chunks], 2), whole.logits)
    assert torch.equal(torch.cat([chunk.labels for chunk in chunks], 1), whole.labels)


def test_a_case_depends_on_seed_and_index_alone():
    few, many = scenes(4, size=SMALL, seed=5), scenes(30, size=SMALL, seed=5)
    backwards = [many[i] for i in (3, 2, 1, 0)][::-1]
    for index, (ahead, sliced) in enumerate(zip(few, many[0:4], strict=True)):
        assert same(ahead, sliced)
        assert same(ahead, backwards[index])
        assert ahead.id == sliced.id == many.ids[index]
    assert not torch.equal(few[0].labels, few[1].labels)
    assert not torch.equal(few[0].labels, scenes(1, size=SMALL, seed=6)[0].labels)


def test_cases_survive_pickling_for_worker_processes():
    cases = scenes(2, size=SMALL, plant=[Temperature(2.0)])
    assert same(pickle.loads(pickle.dumps(cases))[1], cases[1])


def test_ingredients_have_their_own_randomness():
    plain = scenes(1, size=SMALL)[0]
    faulty = scenes(1, size=SMALL, plant=[GaugeOffsets(), ImageTemperature()], members=2)[0]
    assert same(plain, faulty, ("posterior", "labels", "image"))
    assert same(plain, scenes(1, size=SMALL, coherence=0.0)[0], ("posterior", "image", "logits"))


def test_scenes_look_like_segmentation():
    images = [SceneSpec().generate(index) for index in range(48)]
    confidence = torch.stack([scene.posterior.amax(0) for scene in images])
    assert 0.85 <= float((confidence > 0.9).float().mean()) <= 0.95
    assert float(confidence.min()) < 0.4  # Some places are truly ambiguous.
    right = torch.stack([scene.posterior.argmax(0) == scene.labels for scene in images]).double().mean()
    assert 0.9 <= float(right) <= 0.97
    # Accuracy of the argmax is its expected confidence, up to label noise.
    assert float(right) == pytest.approx(float(confidence.double().mean()), abs=0.005)
    rare = torch.stack([scene.labels == 5 for scene in images]).double().flatten(1).mean(1)
    assert 0.0002 < float(rare.mean()) < 0.005
    present = torch.tensor([float(scene.posterior[5].max()) > 0.5 for scene in images])
    assert 0.2 < float(present.double().mean()) < 0.47
    thin = torch.stack([scene.posterior.argmax(0) == 4 for scene in images])
    assert 0.01 < float(thin.double().mean()) < 0.1
    # Thin: hardly a pixel of it is surrounded by its own class two pixels away on all sides.
    core = thin[:, 2:-2, 2:-2] & thin[:, 4:, 2:-2] & thin[:, :-4, 2:-2] & thin[:, 2:-2, 4:] & thin[:, 2:-2, :-4]
    assert float(core.double().sum() / thin.double().sum()) < 0.1


def test_an_exactly_calibrated_network_has_logits_equal_to_the_log_posterior():
    case = scenes(1, size=SMALL)[0]
    torch.testing.assert_close(case.logits.exp(), case.posterior)
    assert scene_of(case).temperature is None
    assert scene_of(case).members == ()


def test_ignored_share_is_exact_and_touches_nothing_else():
    plain, holes = scenes(1, size=SMALL)[0], scenes(1, size=SMALL, ignored=0.13)[0]
    ignored = holes.labels == 255
    assert int(ignored.sum()) == round(0.13 * 40 * 48)
    assert torch.equal(holes.labels[~ignored], plain.labels[~ignored])
    assert same(plain, holes, ("posterior", "image", "logits"))
    assert torch.equal(holes.valid, ~ignored)


# --- labels are drawn from the posterior -----------------------------------------------------------------------------


@pytest.mark.parametrize("coherence", [0.0, 2.0])
def test_label_frequencies_are_the_posterior(coherence):
    rng = np.random.default_rng(0)
    posterior = rng.dirichlet([0.4, 0.4, 0.4, 0.02], (6, 7)).transpose(2, 0, 1)
    draws = 6000
    counts = np.zeros_like(posterior)
    for _ in range(draws):
        counts += draw_labels(posterior, coherence, rng) == np.arange(4)[:, None, None]
    tested = draws * posterior * (1 - posterior) > 5
    z = (counts - draws * posterior)[tested] / np.sqrt(draws * posterior * (1 - posterior))[tested]
    assert len(z) > 60
    assert np.abs(z).max() < 4.5
    assert 0.6 < np.mean(z**2) < 1.5


def test_an_impossible_class_is_never_drawn():
    posterior = np.zeros((3, 30, 30))
    posterior[1:] = 0.5
    assert set(np.unique(draw_labels(posterior, 1.0, np.random.default_rng(0)))) == {1, 2}


def test_coherent_labels_change_along_lines():
    posterior = np.full((2, 64, 64), 0.5)
    changes = {
        length: np.mean(np.diff(draw_labels(posterior, length, np.random.default_rng(0)), axis=1) != 0)
        for length in (0.0, 1.0, 4.0)
    }
    assert changes[0.0] == pytest.approx(0.5, abs=0.03)
    assert changes[4.0] < 0.12 < changes[1.0] < 0.35


@pytest.mark.parametrize("grid", [Grid((8, 9), (1.0, 1.0)), Grid((4, 5, 6), (2.0, 1.0, 1.0))])
def test_noise_is_standard_normal_at_every_voxel_and_correlated_as_stated(grid):
    fields = grid.noise(np.random.default_rng(0), 0.7, 20_000)
    np.testing.assert_allclose((fields**2).mean(0), 1, atol=0.06)
    np.testing.assert_allclose(fields.mean(0), 0, atol=0.04)
    # Smoothing with a Gaussian of width s leaves the correlation exp(-d^2 / (4 s^2)), here also across the wrap.
    np.testing.assert_allclose((fields * np.roll(fields, 1, -1)).mean(0), math.exp(-1 / (4 * 0.7**2)), atol=0.06)


# --- every plant has an exact inverse --------------------------------------------------------------------------------

SCALES, BIASES = (1.0, 0.8, 1.3, 0.6, 1.1, 0.9), (0.0, 1.0, -0.5, 0.3, -1.0, 2.0)
BY_WINNER, OFFSETS = (1.0, 2.0, 0.5, 1.5, 3.0, 1.2), (0.5, 0.0, 1.0, 0.2, 0.0, 2.0)


def undo_class_conditional(z, _):
    margins = z.amax(1, keepdim=True) - z
    honest = (margins - winner_parameters(z, OFFSETS)) / winner_parameters(z, BY_WINNER)
    return -honest.scatter(1, z.argmax(1, keepdim=True), 0.0)


INVERSES = [
    ([Temperature(2.5)], lambda z, _: z / 2.5),
    ([ImageTemperature()], lambda z, t: z / t),
    ([SpatialTemperature()], lambda z, t: z / t),
    (
        [ClassAffine(SCALES, BIASES)],
        lambda z, _: (z.movedim(1, -1) * torch.tensor(SCALES) + torch.tensor(BIASES)).movedim(-1, 1),
    ),
    ([ClassConditional(BY_WINNER)], lambda z, _: z / winner_parameters(z, BY_WINNER)),
    ([ClassConditional(BY_WINNER, OFFSETS)], undo_class_conditional),
    ([GaugeOffsets(5.0)], lambda z, _: z),
    ([Temperature(2.0), GaugeOffsets(3.0), SpatialTemperature(), GaugeOffsets(1.0)], lambda z, t: z / t),
]


@pytest.mark.parametrize(("plant", "undo"), INVERSES, ids=lambda value: str(value) if isinstance(value, list) else "")
@pytest.mark.parametrize("size", [SMALL, VOLUME])
def test_the_exact_inverse_of_a_plant_gives_the_posterior(plant, undo, size):
    case = scenes(3, size=size, plant=plant)[2]
    log_probs = torch.log_softmax(undo(case.logits, scene_of(case).temperature), 1)
    torch.testing.assert_close(log_probs.exp(), case.posterior, atol=3e-6, rtol=1e-4)
    assert true_calibration_error(log_probs, case.posterior).kl < 1e-8
    if not isinstance(plant[0], GaugeOffsets):
        assert true_calibration_error(torch.log_softmax(case.logits, 1), case.posterior).kl > 1e-3


def test_gauge_offsets_leave_the_softmax_and_move_the_free_energy():
    plain = scenes(1, size=SMALL, plant=[Temperature(2.0)])[0]
    offset = scenes(1, size=SMALL, plant=[Temperature(2.0), GaugeOffsets(5.0, smoothness=3.0)])[0]
    torch.testing.assert_close(offset.logits.softmax(1), plain.logits.softmax(1), atol=3e-6, rtol=1e-4)
    moved = free_energy(offset.logits) - free_energy(plain.logits)
    assert 3 < float(moved.std()) < 7
    assert float(moved.diff(dim=-1).std()) < 0.5 * float(moved.std())


@pytest.mark.parametrize("offsets", [None, OFFSETS])
def test_class_conditional_keeps_the_argmax(offsets):
    for case in scenes(4, plant=[ClassConditional(BY_WINNER, offsets)]):
        assert torch.equal(case.logits.argmax(1), case.posterior.argmax(1))


def test_the_temperature_field_falls_with_the_distance_to_the_boundaries():
    scene = SceneSpec(plant=(SpatialTemperature(near=3.0, far=1.2, reach=4.0),)).generate(0)
    winner = scene.posterior.argmax(0)
    right_differs = winner[:, 1:] != winner[:, :-1]
    assert torch.equal(scene.temperature[:, 1:][right_differs], torch.full((int(right_differs.sum()),), 3.0))
    assert 1.2 <= float(scene.temperature.min()) < 1.3
    # The distance is 1-Lipschitz, so the logarithm of what the boundary adds is 1/4-Lipschitz (where float32 shows it).
    added = scene.temperature - 1.2
    resolved = (added[:, 1:] > 1e-3) & (added[:, :-1] > 1e-3)
    assert float(added.log().diff(dim=1).abs()[resolved].max()) < 0.25 + 1e-3


def test_without_a_boundary_the_temperature_is_that_of_the_far():
    logits = np.stack([np.ones((9, 9)), np.zeros((9, 9))])
    grid = Grid((9, 9), (1.0, 1.0))
    _, temperature = SpatialTemperature(3.0, 1.5).apply(logits, grid, np.random.default_rng(0))
    assert np.all(temperature == 1.5)


def test_boundary_distance_equals_a_search_over_all_voxels():
    grid = Grid((3, 6, 7), (2.0, 1.0, 1.0))
    regions = np.zeros(grid.size, np.int64)
    regions[1:, 2:4, 3:] = 1
    touching = [
        index
        for index in np.ndindex(grid.size)
        for axis in range(3)
        for step in (-1, 1)
        if 0 <= index[axis] + step < grid.size[axis]
        and regions[index] != regions[tuple(i + step * (a == axis) for a, i in enumerate(index))]
    ]
    positions = np.array(touching) * grid.spacing
    for index in np.ndindex(grid.size):
        nearest = np.linalg.norm(positions - np.array(index) * grid.spacing, axis=1).min()
        assert grid.boundary_distance(regions)[index] == pytest.approx(nearest)


def test_image_temperatures_are_log_normal_and_readable_from_the_logits():
    cases = [scenes(40, size=(64, 80), plant=[ImageTemperature(1.5, 0.4)])[i] for i in range(40)]
    temperatures = torch.stack([scene_of(case).temperature for case in cases])
    assert bool((temperatures.flatten(1).std(1) == 0).all())
    logs = temperatures[:, 0, 0].log()
    assert float(logs.mean()) == pytest.approx(math.log(1.5), abs=0.2)
    assert float(logs.std()) == pytest.approx(0.4, abs=0.15)
    depth = torch.stack([-torch.log_softmax(case.logits, 1).mean() for case in cases]).log()
    assert float(torch.corrcoef(torch.stack([depth, logs]))[0, 1]) > 0.97


def test_confidently_wrong_patches():
    sure, likely = [], []
    for plain, faulty in zip(scenes(8), scenes(8, plant=[ConfidentlyWrong(share=0.1)]), strict=True):
        assert same(plain, faulty, ("posterior", "labels", "image"))
        truth, prediction = faulty.posterior.argmax(1), faulty.logits.argmax(1)
        wrong = truth != prediction
        assert int(wrong.sum()) == round(0.1 * 128 * 160)
        assert torch.equal(prediction[wrong], (truth[wrong] + 1) % 6)
        right = (~wrong)[:, None].expand_as(plain.logits)
        assert torch.equal(plain.logits[right], faulty.logits[right])
        sure.append(faulty.logits.softmax(1).amax(1)[wrong])
        likely.append(faulty.posterior.gather(1, prediction[:, None])[:, 0][wrong])
    # The network is sure of what is nearly impossible.
    assert float(torch.cat(sure).mean()) > 0.85
    assert float(torch.cat(likely).mean()) < 0.03


def test_members_are_noisy_copies_and_the_case_holds_their_mean():
    single = scenes(1, size=SMALL, plant=[Temperature(2.0)])[0]
    case = scenes(1, size=SMALL, plant=[Temperature(2.0)], members=8, member_noise=0.5)[0]
    members = scene_of(case).members
    assert len(members) == 8
    assert torch.equal(case.logits, pool([member[None] for member in members], "logits"))
    noise = torch.stack(members) - single.logits
    assert float(noise.std()) == pytest.approx(0.5, abs=0.05)
    assert float((case.logits - single.logits).std()) == pytest.approx(0.5 / math.sqrt(8), abs=0.05)


def test_shift_moves_the_truth_and_not_the_belief():
    plain, shifted = scenes(1, size=SMALL)[0], scenes(1, size=SMALL, shift=0.5)[0]
    assert torch.equal(plain.logits, shifted.logits)
    # Vector scaling undoes it: the log posterior is that of the belief / 1.5, plus one number per class.
    residual = shifted.posterior.log() - plain.posterior.log() / 1.5
    prior = (residual - residual[:, :1])[0].flatten(1)
    assert float(prior.std(1).max()) < 1e-5
    assert float(prior[:, 0].abs().max()) > 0.1
    entropy = [-(case.posterior * case.posterior.log()).sum(1).mean() for case in (plain, shifted)]
    assert entropy[1] > 1.2 * entropy[0]
    assert not torch.equal(plain.image, shifted.image)


@pytest.mark.parametrize("size", [(128, 160), (12, 48, 48)])
def test_the_temperature_of_least_nll_is_the_planted_one(size):
    cases = list(scenes(16, size=size, plant=[Temperature(2.0), GaugeOffsets()], coherence=0.0))
    logits, labels = (torch.cat([getattr(case, name) for case in cases]) for name in ("logits", "labels"))
    nll = lambda beta: float(nll_loss(torch.log_softmax(beta * logits, 1), labels))  # noqa: E731
    assert 1 / minimize_scalar(nll, bounds=(0.1, 2.0), method="bounded").x == pytest.approx(2.0, rel=0.03)


# --- true calibration error ------------------------------------------------------------------------------------------


def loops(log_q, p, mask):
    """The definition, one number at a time."""
    kl, l1, voxels = 0.0, 0.0, 0
    for n, *place in np.ndindex(mask.shape):
        if mask[(n, *place)]:
            voxels += 1
            for k in range(p.shape[1]):
                truth, log_guess = float(p[(n, k, *place)]), float(log_q[(n, k, *place)])
                kl += truth * (math.log(truth) - log_guess) if truth > 0 else 0.0
                l1 += abs(truth - math.exp(log_guess))
    return kl / voxels, l1 / voxels


@pytest.mark.parametrize("spatial", [(), (5,), (4, 3), (3, 2, 4)])
def test_true_calibration_error_equals_its_definition(spatial):
    generator = torch.Generator().manual_seed(0)
    log_q = torch.randn(3, 4, *spatial, generator=generator, dtype=torch.float64).log_softmax(1)
    p = torch.randn(3, 4, *spatial, generator=generator, dtype=torch.float64).mul(3).softmax(1)
    p[:, 1] = 0
    p /= p.sum(1, keepdim=True)
    mask = torch.rand(3, *spatial, generator=generator) < 0.7
    everything = torch.ones_like(mask)
    for chosen, argument in ((mask, mask), (everything, None)):
        error = true_calibration_error(log_q, p, argument)
        assert (error.kl, error.l1) == pytest.approx(loops(log_q, p, chosen), rel=1e-12)
        assert error.voxels == int(chosen.sum())


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 8), st.floats(0, 20), st.integers(0, 2**31))
def test_kl_bounds_l1_and_both_vanish_only_at_the_truth(num_classes, distance, seed):
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(1, num_classes, 5, generator=generator, dtype=torch.float64).log_softmax(1)
    guess = truth + distance * torch.randn(1, num_classes, 5, generator=generator, dtype=torch.float64)
    error = true_calibration_error(guess.log_softmax(1), truth.exp())
    assert error.kl >= -1e-15
    assert error.l1 <= math.sqrt(2 * max(error.kl, 0)) + 1e-7  # Pinsker's inequality
    if distance > 1e-3:
        assert error.kl > 0
    itself = true_calibration_error(truth, truth.exp())
    assert itself.kl == pytest.approx(0, abs=1e-14)
    assert itself.l1 == 0


def test_impossible_classes_cost_infinity_only_where_they_happen():
    p = torch.tensor([[0.5, 0.5, 0.0]])
    assert true_calibration_error(p.log(), p).kl == pytest.approx(0, abs=1e-7)
    assert true_calibration_error(torch.tensor([[1.0, 0.0, 0.0]]).log(), p).kl == math.inf
    assert true_calibration_error(torch.tensor([[1.0, 0.0, 0.0]]).log(), p).l1 == 1.0


def test_errors_of_parts_add_up_and_masked_voxels_do_not_matter():
    case = scenes(1, size=SMALL, plant=[Temperature(3.0)])[0]
    log_q, p = case.logits.log_softmax(1), case.posterior
    whole = true_calibration_error(log_q, p)
    parts = true_calibration_error(log_q[:, :, :7], p[:, :, :7]) + true_calibration_error(log_q[:, :, 7:], p[:, :, 7:])
    assert parts.voxels == whole.voxels
    assert (parts.kl, parts.l1) == pytest.approx((whole.kl, whole.l1), rel=1e-12)
    mask = torch.zeros(1, *SMALL, dtype=torch.bool)
    mask[:, :7] = True
    broken = log_q.clone()
    broken[:, :, 7:] = math.nan
    masked, rows = true_calibration_error(broken, p, mask), true_calibration_error(log_q[:, :, :7], p[:, :, :7])
    assert (masked.kl, masked.l1, masked.voxels) == pytest.approx((rows.kl, rows.l1, rows.voxels), rel=1e-12)
    nothing = true_calibration_error(log_q, p, torch.zeros_like(mask))
    assert math.isnan(nothing.kl)
    assert math.isnan(nothing.l1)
    assert nothing == TrueCalibrationError(0.0, 0.0, 0)


# --- the demo and bad input ------------------------------------------------------------------------------------------


def test_demo_scenes_are_those_of_an_overconfident_network():
    for cases, count, size in zip(demo_scenes(), (64, 12), ((128, 160), (24, 64, 64)), strict=True):
        assert len(cases) == count
        assert len(cases.class_names) == cases.num_classes
        some = list(cases[:6])
        assert {case.shape[2:] for case in some} == {size}
        valid = torch.cat([case.valid for case in some])
        confidence, prediction = torch.cat([case.logits for case in some]).softmax(1).max(1)
        right = prediction == torch.cat([case.labels for case in some])
        assert float(confidence[valid].mean()) > float(right[valid].double().mean()) + 0.005
        assert float(free_energy(some[0].logits).std()) > 0.5
        assert scene_of(some[0]).temperature is not None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"count": 0}, "count is 0; expected a whole number of at least 1"),
        ({"size": (64,)}, r"size is \(64,\); expected \(height, width\) or"),
        ({"size": (4, 64)}, "the height in size is 4; expected a whole number of at least 8"),
        ({"size": (64.0, 64)}, "the height in size is 64.0"),
        ({"size": (0, 64, 64)}, "the depth in size is 0"),
        ({"num_classes": 1}, "num_classes is 1; expected a whole number from 2 to 255"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"coherence": -1.0}, "coherence is -1.0"),
        ({"coherence": math.nan}, "coherence is nan"),
        ({"members": 0}, "members is 0"),
        ({"member_noise": -1.0}, "member_noise is -1.0"),
        ({"shift": 1.5}, "shift is 1.5; expected a strength, from 0 to 1"),
        ({"ignored": 1.2}, "ignored is 1.2; expected a share of the voxels, from 0 to 1"),
        ({"class_names": ("one", "two")}, "class_names has 2 names; expected 6"),
        ({"plant": Temperature(2.0)}, "plant is Temperature.*expected a list"),
        ({"plant": [2.0]}, "plant holds 2.0; expected plants such as"),
        ({"plant": [Temperature(0.0)]}, "Temperature.value is 0.0; expected a positive number"),
        ({"plant": [ImageTemperature(spread=-1)]}, "ImageTemperature.spread is -1"),
        ({"plant": [SpatialTemperature(reach=0)]}, "SpatialTemperature.reach is 0"),
        ({"plant": [ClassAffine((1.0,), (0.0,))]}, "ClassAffine.scales has 1 values; expected 6"),
        ({"plant": [ClassAffine((0.0,) * 6, (0.0,) * 6)]}, "ClassAffine.scales are .* at least 0.001"),
        ({"plant": [ClassAffine((1.0,) * 6, (math.inf,) * 6)]}, "ClassAffine.biases are .* finite"),
        ({"plant": [ClassConditional((1.0,) * 6, (-1.0,) * 6)]}, "ClassConditional.offsets are .* at least 0"),
        ({"plant": [ConfidentlyWrong(share=2)]}, "ConfidentlyWrong.share is 2"),
        ({"plant": [GaugeOffsets(amplitude=math.inf)]}, "GaugeOffsets.amplitude is inf"),
    ],
)
def test_bad_arguments_are_named(arguments, says):
    with pytest.raises(InputError, match=says):
        scenes(**{"count": 1, **arguments})


@pytest.mark.parametrize(
    ("log_probs", "posterior", "mask", "says"),
    [
        (torch.zeros(2), torch.zeros(2), None, r"log_probs have shape \(2,\)"),
        (torch.zeros(1, 2, 3), torch.zeros(1, 3, 2), None, r"posterior \(1, 3, 2\); expected"),
        (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.ones(1, 2, dtype=torch.bool), r"bool of shape \(1, 3\)"),
        (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.ones(1, 3), "mask is torch.float32"),
        (torch.zeros(1, 2, 3), torch.full((1, 2, 3), 0.5), None, "sums to 2 at 3 of 3 .*log_softmax"),
        (torch.full((1, 2, 3), math.nan), torch.full((1, 2, 3), 0.5), None, "sums to nan"),
        (torch.full((1, 2, 3), 0.5).log(), torch.full((1, 2, 3), 0.7), None, "posterior sums to 1.4"),
    ],
)
def test_bad_tensors_are_named(log_probs, posterior, mask, says):
    with pytest.raises(InputError, match=says):
        true_calibration_error(log_probs, posterior, mask)


def test_only_scenes_have_a_scene():
    class Elsewhere:
        id = "elsewhere"

    with pytest.raises(InputError, match="case 'elsewhere': not a synthetic scene"):
        scene_of(Case(Elsewhere()))
