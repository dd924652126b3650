"""The modules are torchmetrics' own where definitions coincide, and exact sums under everything torchmetrics does."""

import inspect
import math
import pickle
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.classification import MulticlassCalibrationError as Peer

from segcal.errors import InputError
from segcal.metrics import METRICS
from segcal.metrics.modules import Calibration, MulticlassCalibrationError
from segcal.scores import KINDS
from segcal.statistics import VoxelStatistics

NORMS = ("l1", "l2", "max")
USABLE = tuple(spec.id for spec in METRICS.values() if set(spec.needs) <= {"classwise"})


def voxels(seed, classes=4, spatial=(6, 5), images=3, ignored=0.1):
    """Overconfident logits, labels that often agree with them, and some ignored voxels (255)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(images, classes, *spatial, generator=generator)
    labels = (logits / 3 + torch.randn(logits.shape, generator=generator)).argmax(1)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = 255
    return logits, labels


def near_an_edge(logits, bins):
    """Where (lo, hi] and [lo, hi) could differ in float32."""
    scaled = logits.double().softmax(1).amax(1) * bins
    return (scaled - scaled.round()).abs() < 1e-4


def assert_same(ours, theirs, tolerance=1e-12):
    ours, theirs = ([ours], [theirs]) if isinstance(ours, torch.Tensor) else (ours.values(), theirs.values())
    np.testing.assert_allclose([float(v) for v in ours], [float(v) for v in theirs], rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[*NORMS, "calibration"])
def metric(request):
    if request.param == "calibration":
        return Calibration(4, metrics=USABLE)
    return MulticlassCalibrationError(4, norm=request.param, ignore_index=255)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    norm=st.sampled_from(NORMS),
    bins=st.integers(1, 50),
    classes=st.integers(2, 7),
    spatial=st.sampled_from([(), (9,), (4, 3), (3, 2, 2)]),
    as_probabilities=st.booleans(),
)
def test_equals_torchmetrics_away_from_bin_edges(seed, norm, bins, classes, spatial, as_probabilities):
    logits, labels = voxels(seed, classes, spatial, images=20)
    labels[near_an_edge(logits, bins)] = 255
    assume(bool((labels != 255).any()))
    preds = logits.softmax(1) if as_probabilities else logits
    ours = MulticlassCalibrationError(classes, bins, norm, 255)
    theirs = Peer(classes, bins, norm, 255)
    for part in (slice(0, 7), slice(7, None)):
        ours.update(preds[part], labels[part])
        theirs.update(preds[part], labels[part])
    assert_same(ours.compute(), theirs.compute(), 1e-6)


def test_bins_are_closed_above_and_one_is_in_the_last():
    preds = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.75, 0.25]])
    metric = MulticlassCalibrationError(2, n_bins=2)
    metric.update(preds, torch.tensor([0, 0, 1]))
    assert metric.count.tolist() == [1, 2]
    # Torchmetrics has 0.5 in the upper bin and 1.0 in a third.
    assert float(Peer(2, 2)(preds, torch.tensor([0, 0, 1]))) != pytest.approx(float(metric.compute()))


def test_kind_says_what_torchmetrics_guesses():
    preds, target = torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0])
    guessed, probs, logits = (
        MulticlassCalibrationError(2, kind=kind)(preds, target) for kind in ("auto", *KINDS[::-1])
    )
    assert_same(guessed, probs)
    assert_same(logits, MulticlassCalibrationError(2)(preds.softmax(1), target), 1e-6)


def test_what_cannot_be_probabilities_is_not_taken_for_them():
    with pytest.raises(InputError, match=r"do not sum to 1.*kind='logits'"):
        MulticlassCalibrationError(2).update(torch.tensor([[0.9, 0.9]]), torch.tensor([0]))
    with pytest.raises(InputError, match="outside"):
        MulticlassCalibrationError(2, kind="probs").update(torch.tensor([[9.0, 0.9]]), torch.tensor([0]))


@pytest.mark.parametrize("far", [(0, 0), (63, 1), (31, 63)])
def test_one_score_outside_zero_and_one_anywhere_means_logits(far):
    logits = torch.full((1, 2, 64, 64), 0.5)
    logits[0, 1][far] = 3.0
    labels = torch.zeros(1, 64, 64, dtype=torch.int64)
    assert_same(MulticlassCalibrationError(2)(logits, labels), Peer(2)(logits, labels), 1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_counts_beyond_two_to_the_24(norm):
    preds, target = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.6, 0.4]]).log(), torch.tensor([0, 0, 1])
    metric = MulticlassCalibrationError(2, norm=norm)
    small = metric(preds, target)
    for _ in range(25):
        metric.merge_state(metric)
    voxels_seen = 3 * 2**25
    assert int(metric.count.sum()) == voxels_seen
    assert_same(metric.compute(), small)
    metric.update(preds, target)
    assert int(metric.count.sum()) == voxels_seen + 3


def test_many_metrics_beyond_two_to_the_24():
    metric = Calibration(4, metrics=USABLE)
    small = metric(*voxels(0))
    for _ in range(20):
        metric.merge_state(metric)
    assert int(metric.confusion.sum()) > 2**25
    assert_same(metric.compute(), small)


def test_calibration_is_the_metrics_of_the_statistics():
    logits, labels = voxels(1)
    metric = Calibration(4, metrics=(*USABLE, "flip"), num_bins=10)
    before = logits.flip(0).argmax(1)
    metric.update(logits, labels, uncalibrated=before)
    stats = VoxelStatistics(4, bins=(10,)).update(logits, labels, uncalibrated=before)
    for id, value in metric.compute().items():
        binned = "num_bins" in inspect.signature(METRICS[id].function).parameters
        expected = METRICS[id].function(stats, **({"num_bins": 10} if binned else {}))
        assert value.shape == (), id
        assert float(value) == pytest.approx(expected, rel=1e-12), id


def test_free_energies_of_batches_with_other_origins_add_up():
    logits, labels = voxels(2)
    shifted = logits + torch.tensor([1000.0, 0.0, -50.0]).view(3, 1, 1, 1)
    metric = Calibration(4, metrics=("free-energy-std",))
    for n in range(3):
        metric.update(shifted[n : n + 1], labels[n : n + 1])
    energy = shifted.double().logsumexp(1)[labels != 255]
    assert float(metric.compute()["free-energy-std"]) == pytest.approx(float(energy.std(correction=0)), rel=1e-9)


def test_whole_is_the_sum_of_parts(metric):
    whole = metric
    logits, labels = voxels(3, images=7)
    whole.update(logits, labels)
    by_update, by_forward, left, right = (whole.clone() for _ in range(4))
    for metric in (by_update, by_forward, left, right):
        metric.reset()
        assert not any(bool(state.any()) for state in metric.metric_state.values())
    for n, metric in ((slice(0, 2), left), (slice(2, 3), left), (slice(3, 7), right)):
        by_update.update(logits[n], labels[n])
        metric.update(logits[n], labels[n])
        alone = whole.clone()
        alone.reset()
        alone.update(logits[n], labels[n])
        assert_same(by_forward(logits[n], labels[n]), alone.compute())
    left.merge_state(right)
    for metric in (by_update, by_forward, left):
        assert_same(metric.compute(), whole.compute())
        assert metric.metric_state.keys() == whole.metric_state.keys()
        for name, state in metric.metric_state.items():
            torch.testing.assert_close(state, whole.metric_state[name], rtol=1e-12, atol=1e-12)


def test_the_state_does_not_grow(metric):
    shapes = {name: state.shape for name, state in metric.metric_state.items()}
    metric.update(*voxels(4, spatial=(2,)))
    metric.update(*voxels(4, spatial=(40, 30)))
    assert {name: state.shape for name, state in metric.metric_state.items()} == shapes
    assert all(isinstance(state, torch.Tensor) for state in metric.metric_state.values())


def test_the_state_of_the_calibration_error_is_its_bins():
    states = MulticlassCalibrationError(19, n_bins=15).metric_state.values()
    assert [state.shape for state in states] == [(15,)] * 3 + [()]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.half(),
        lambda m: m.float(),
        lambda m: m.to(torch.float16),
        lambda m: m.set_dtype(torch.float16),
        lambda m: torch.nn.ModuleList([m]).to(torch.bfloat16),
        lambda m: m._apply(lambda _: SimpleNamespace(device=torch.device("mps"))),  # where there is no float64
    ],
)
def test_sums_keep_their_dtype_and_digits(metric, change):
    metric.update(*voxels(5))
    expected, state = metric.compute(), {name: value.clone() for name, value in metric.metric_state.items()}
    change(metric)
    for name, value in metric.metric_state.items():
        assert value.dtype in (torch.float64, torch.int64)
        assert torch.equal(value, state[name])
    assert_same(metric.compute(), expected, 0)
    metric.reset()
    assert all(value.dtype in (torch.float64, torch.int64) for value in metric.metric_state.values())


def test_states_move_to_the_device():
    metric = Calibration(4).to("meta")
    assert metric.device.type == "meta"
    assert all(state.device.type == "meta" for state in metric.metric_state.values())


def test_state_dict_clone_and_pickle_carry_on(metric):
    logits, labels = voxels(6)
    metric.update(logits[:2], labels[:2])
    assert metric.state_dict() == {}  # as everywhere in torchmetrics, unless asked for
    metric.persistent(True)
    loaded = metric.clone()
    loaded.reset()
    loaded.load_state_dict(metric.state_dict())
    copies = [loaded, metric.clone(), pickle.loads(pickle.dumps(metric))]
    metric.update(logits[2:], labels[2:])
    for copy in copies:
        copy.update(logits[2:], labels[2:])
        assert_same(copy.compute(), metric.compute(), 0)


def test_in_a_metric_collection():
    logits, labels = voxels(7)
    alone = Calibration(4, metrics=("nll", "ece"))(logits, labels)
    collection = MetricCollection(
        {
            "calibration": Calibration(4, metrics=("nll", "ece")),
            "l1": MulticlassCalibrationError(4, ignore_index=255),
            "max": MulticlassCalibrationError(4, norm="max", ignore_index=255),
            "accuracy": MulticlassAccuracy(4, average="micro", ignore_index=255),
        },
        prefix="val/",
    )
    for n in range(3):
        collection.update(logits[n : n + 1], labels[n : n + 1])
    values = collection.compute()
    assert values.keys() == {"val/nll", "val/ece", "val/l1", "val/max", "val/accuracy"}
    assert_same(values["val/nll"], alone["nll"])
    assert_same(values["val/ece"], alone["ece"])
    assert_same(values["val/l1"], alone["ece"])
    # The two norms have the same state, so torchmetrics updates one of them for both.
    assert ["l1", "max"] in [sorted(group) for group in collection.compute_groups.values()]


def test_a_collection_keeps_those_apart_that_differ_only_in_later_batches():
    logits, labels = voxels(7)
    ignored = torch.where(labels == 255, 3, labels)
    made = {ignore: Calibration(4, metrics=("ece",), ignore_index=ignore) for ignore in (255, 3, None, -100)}
    collection = MetricCollection({str(ignore): metric.clone() for ignore, metric in made.items()}, prefix="val/")
    first = ignored.masked_fill(ignored == 3, 0)  # nothing is ignored by any of them
    for batch in ((logits, first), (logits, ignored)):
        collection.update(*batch)
        for metric in made.values():
            metric.update(*batch)
    for ignore, metric in made.items():
        torch.testing.assert_close(collection[str(ignore)].compute(), metric.compute(), rtol=0, atol=0)
    assert len(collection.compute_groups) == len(made)


@pytest.mark.parametrize(
    ("kind", "scores_are"), [("logits",) * 2, ("probs",) * 2, ("auto", "logits"), ("auto", "probs")]
)
def test_an_ignored_voxel_may_hold_anything(kind, scores_are):
    logits, labels = voxels(8)
    scores = logits.softmax(1) if scores_are == "probs" else logits
    made = [MulticlassCalibrationError(4, ignore_index=255, kind=kind)]
    made += [Calibration(4, metrics=USABLE, kind=kind)] if kind != "auto" else []
    for metric in made:
        clean = metric(scores, labels)
        for anything in (math.nan, math.inf, 0.0, -7.0):
            metric.reset()
            assert_same(metric(scores.masked_fill((labels == 255).unsqueeze(1), anything), labels), clean)


def test_nothing_to_average_is_nan(metric):
    logits, labels = voxels(9, ignored=2.0)
    values = metric(logits, labels)
    assert all(math.isnan(value) for value in (values.values() if isinstance(values, dict) else [values]))
    metric.update(logits[:0], labels[:0])
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert math.isnan(MulticlassCalibrationError(4).compute())
    kept = voxels(9)
    metric.update(*kept)
    alone = metric.clone()
    alone.reset()
    assert_same(metric.compute(), alone(*kept))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_only_a_rounding_of_the_input(metric, dtype):
    logits, labels = voxels(10)
    rounded = logits.to(dtype)
    same = metric.clone()
    assert_same(metric(rounded, labels), same(rounded.double(), labels))


def test_no_gradient_is_kept(metric):
    logits, labels = voxels(11)
    value = metric(logits.requires_grad_(), labels)
    assert not any(v.requires_grad for v in (value.values() if isinstance(value, dict) else [value]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MulticlassCalibrationError(1), "num_classes is 1"),
        (lambda: MulticlassCalibrationError(3, n_bins=0), "from 1 to 4096"),
        (lambda: MulticlassCalibrationError(3, norm="l3"), "one of l1, l2, max"),
        (lambda: MulticlassCalibrationError(3, kind="logit"), "one of auto, logits, probs"),
        (lambda: Calibration(3, kind="auto"), "one of logits, probs"),
        (lambda: Calibration(3, metrics=("ce",)), "metric 'ce'; expected some of nll"),
        (lambda: Calibration(3, metrics=("ba-ece",)), "which needs distance"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_wrong_batch_is_an_error_and_changes_nothing(metric):
    logits, labels = voxels(12)
    metric.update(logits, labels)
    state = {name: value.clone() for name, value in metric.metric_state.items()}
    bad = logits.clone()
    bad[0, 0, 0, 0], labels[0, 0, 0] = math.nan, 1
    for preds, target in (
        (bad, labels),
        (logits, labels[:, :2]),
        (logits[:, :3], labels),
        (logits, labels.masked_fill(labels == 255, 9)),
        (logits.long(), labels),
    ):
        with pytest.raises(InputError):
            metric.update(preds, target)
    assert all(torch.equal(value, state[name]) for name, value in metric.metric_state.items())


_WITHOUT = """
import sys
sys.modules["torchmetrics"] = None
import segcal.metrics
from segcal.errors import MissingExtraError
try:
    import segcal.metrics.modules
except MissingExtraError as error:
    print(error)
"""


def test_without_torchmetrics_only_the_modules_are_missing():
    answer = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=True, timeout=120)
    assert "pip install 'segcal[torchmetrics]'" in answer.stdout
