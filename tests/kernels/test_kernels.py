"""The fast kernel against the definition, and both against awkward input."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from segcal import kernels
from segcal.errors import InputError, SegcalError
from segcal.kernels import AffineMap, BinGrid, Tally, Voxels, reference, tally

CLASSES = BinGrid.classwise((15, 50), (1e-3,))
TOP = BinGrid.top_label((15, 50), CLASSES)
BACKENDS = ("reference", "numba")


def example(classes=5, shape=(2, 40, 33), scale=3.0, seed=0):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape[0], classes, *shape[1:], generator=random) * scale
    noise = -torch.log(-torch.log(torch.rand(logits.shape, generator=random)))
    labels = (logits / 1.5 + noise).argmax(1)
    labels[torch.rand(labels.shape, generator=random) < 0.1] = 255
    return logits, labels


def run(logits, labels, backend, **options):
    options = {"ignore_index": 255, **options}
    return tally(Voxels(logits, labels, TOP, CLASSES, **options), backend)[0]


def assert_agree(a: Tally, b: Tally, moved: int) -> None:
    """1e-6 on every sum and equal counts, but for ``moved`` probabilities so close to an edge that rounding decides."""
    for name in ("confusion", "flips"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    np.testing.assert_allclose(b.losses, a.losses, rtol=1e-6, atol=1e-20)
    np.testing.assert_allclose(b.energy, a.energy, rtol=1e-6, atol=1e-7 * a.confusion.sum())
    for kind in ("top", "predicted", "class"):
        count, other = getattr(a, f"{kind}_count"), getattr(b, f"{kind}_count")
        assert count.sum() == other.sum(), kind
        assert np.abs(count - other).sum() <= 2 * moved, kind
        sums, others = getattr(a, f"{kind}_confidence"), getattr(b, f"{kind}_confidence")
        np.testing.assert_allclose(others.sum(-1), sums.sum(-1), rtol=1e-6, err_msg=kind)
        np.testing.assert_allclose(others[count == other], sums[count == other], rtol=1e-6, err_msg=kind)
    assert np.abs(a.class_positive - b.class_positive).sum() <= 2 * moved


def near_edges(logits, score_map=None):
    z = logits.double() if score_map is None else score_map(logits.double())
    p = torch.softmax(z, 1).reshape(-1).numpy()
    i = np.minimum(np.searchsorted(TOP.upper, p), len(TOP) - 1)
    return int((np.minimum(TOP.upper[i] - p, p - TOP.lower[i]) < 1e-6 * p).sum())


MAPS = {
    "none": None,
    "temperature": AffineMap.temperature(1.7),
    "vector": AffineMap(torch.tensor([1.0, 0.8, 1.2, 0.9, 1.1]), torch.tensor([0.1, -0.2, 0.0, 0.3, 0.0])),
    "matrix": AffineMap(torch.eye(5) + 0.1 * torch.arange(25.0).view(5, 5).sin(), torch.arange(5.0) / 5),
}


@pytest.mark.parametrize("score_map", MAPS.values(), ids=MAPS)
def test_numba_agrees_with_the_reference(score_map):
    logits, labels = example()
    options = {
        "mask": torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) > 0.2,
        "slots": (torch.arange(labels.numel()) // 7 % 3).view(labels.shape).to(torch.uint8),
        "num_slots": 3,
        "score_map": score_map,
    }
    assert_agree(
        run(logits, labels, "reference", **options),
        run(logits, labels, "numba", **options),
        near_edges(logits, score_map),
    )


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("classes", [2, 33, 150])
def test_numba_agrees_for_few_and_many_classes_from_flat_to_sharp(classes, scale):
    logits, labels = example(classes, (1, 31, 37), scale)
    assert_agree(run(logits, labels, "reference"), run(logits, labels, "numba"), near_edges(logits))


def test_numba_agrees_without_classwise_histograms():
    logits, labels = example()
    results = [tally(Voxels(logits, labels, TOP, None, ignore_index=255), backend)[0] for backend in BACKENDS]
    assert results[0].class_count.size == results[1].class_count.size == 0
    assert np.array_equal(results[0].confusion, results[1].confusion)
    np.testing.assert_allclose(results[1].top_confidence.sum(-1), results[0].top_confidence.sum(-1), rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fused_map_equals_the_mapped_logits(backend):
    logits, labels = example()
    for score_map in MAPS.values():
        if score_map is not None:
            fused = run(logits, labels, backend, score_map=score_map)
            plain = run(score_map(logits.double()), labels, "reference", uncalibrated=logits.argmax(1))
            assert_agree(plain, fused, near_edges(logits, score_map))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "shape", [(1, 3000), (700,), (3, 4, 5, 6), (5, 130), (1, 8, 9000), (2, 17, 2049), (2, 3, 5, 40_000)]
)
def test_memory_layout_and_dtype_change_nothing(backend, shape):
    logits, labels = example(3, (*shape, 1)[:2] if len(shape) == 1 else shape)
    logits, labels = (logits.flatten(1)[:, :3], labels.flatten()) if len(shape) == 1 else (logits, labels)
    expected = run(logits, labels, backend)
    strided = (
        torch.stack((logits, logits), -1).flatten(-2)[..., ::2] if logits.ndim > 2 else logits.t().contiguous().t()
    )
    channels_last = logits.movedim(1, -1).contiguous().movedim(-1, 1)
    for twin in (strided, channels_last):
        for mine, theirs in zip(expected, run(twin, labels.to(torch.uint8), backend), strict=True):
            np.testing.assert_allclose(theirs, mine, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_before_anything_else(backend, dtype):
    logits, labels = example()
    half = logits.to(dtype)
    for mine, theirs in zip(run(half.float(), labels, backend), run(half, labels, backend), strict=True):
        assert np.array_equal(mine, theirs)


def test_numba_in_threads_gives_the_same_bits_every_time():
    logits, labels = example(4, (1, 300, 500))
    serial = run(logits, labels, "numba")
    voxels = Voxels(logits, labels, TOP, CLASSES, ignore_index=255)
    first, second = (tally(voxels, "numba", threads=3)[0] for _ in range(2))
    for one, two, alone in zip(first, second, serial, strict=True):
        assert np.array_equal(one, two)
        np.testing.assert_allclose(one, alone, rtol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_probabilities_of_exactly_0_and_1(backend):
    logits = torch.tensor([[0.0, -torch.inf, -200.0]])
    result = run(logits, torch.tensor([0]), backend)
    assert result.top_count[0, 1, -1] == 1
    assert result.top_confidence[0, 1, -1] == 1
    assert result.class_count[0, :, 0].tolist() == [0, 1, 1]
    assert result.class_count[0, 0, -1] == 1
    assert result.losses[0, 0].max() < 1e-30


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_impossible_label_costs_infinitely_much(backend):
    result = run(torch.tensor([[0.0, -torch.inf]]), torch.tensor([1]), backend)
    assert result.losses[0, 0].tolist() == [torch.inf, 2.0, pytest.approx(0, abs=1e-30)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_of_a_label_far_below_the_best(backend):
    for low, high, loss in ((-3e38, 3e38, 6e38), (-2000.0, 0.0, 2000.0)):
        logits, labels = torch.tensor([[high, low]]), torch.tensor([1])
        assert run(logits, labels, backend).losses[0, 0, 0] == pytest.approx(loss, rel=1e-6)
        # Maps take what is more than 1000 below the best for impossible, and so must their evaluation.
        mapped = run(logits, labels, backend, score_map=AffineMap.temperature(2.0))
        assert mapped.losses[0, 0, 0] == torch.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_first_class(backend):
    result = run(torch.tensor([[1.0, 2.0, 2.0], [3.0, 3.0, 3.0]]), torch.tensor([1, 0]), backend)
    assert result.confusion[0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert result.top_confidence.sum() == pytest.approx(1 / (2 + np.exp(-1)) + 1 / 3, rel=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("classes", [2, 3, 6, 7, 49, 150, 1000])
def test_tied_classes_are_on_the_edge_of_a_bin_and_thus_in_it(backend, classes):
    grid = BinGrid.top_label((classes,))
    voxels = Voxels(torch.full((1, classes), 3.7), torch.tensor([0]), grid, None)
    (found,) = tally(voxels, backend)[0].top_count[0, 1].nonzero()[0]
    assert grid.coarse(classes)[found] == 0  # 1 / C is in (0, 1 / C]


@pytest.mark.parametrize("backend", BACKENDS)
def test_flips_are_harmful_beneficial_or_neutral(backend):
    logits = torch.eye(4)[[0, 1, 2, 3, 0]]
    labels, before = torch.tensor([0, 0, 2, 0, 255]), torch.tensor([0, 0, 1, 1, 1])
    result = run(logits, labels, backend, uncalibrated=before)
    assert result.flips[0].tolist() == [4, 1, 1, 1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("value", "message"),
    [(torch.nan, "NaN logits"), (torch.inf, "infinite logits"), (-torch.inf, "every class is -inf")],
)
def test_scores_without_softmax_are_named(backend, value, message):
    logits, labels = example(3, (1, 20, 30))
    labels[labels == 255] = 0
    logits[0, :, 7, 11] = value if value == -torch.inf else logits[0, :, 7, 11]
    logits[0, 1, 7, 11] = value
    with pytest.raises(InputError, match=rf"{message} at voxel \(7, 11\)"):
        run(logits, labels, backend)
    labels[0, 7, 11] = 255
    assert run(logits, labels, backend).confusion.sum() == 599
    labels[0, 7, 11] = 0
    assert np.isfinite(run(logits, labels, backend, mask=torch.isfinite(logits).all(1)).losses).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("label", [-1, 3, 200])
def test_labels_without_class_are_named(backend, label):
    logits, labels = example(3, (2, 20, 30))
    labels[1, 2, 3] = label
    with pytest.raises(InputError, match=rf"label {label} at voxel \(1, 2, 3\); expected 0..2 or 255"):
        run(logits, labels, backend)


@pytest.mark.parametrize("mask", [-torch.inf, -65504.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_impossible_classes_stay_impossible_in_every_map(backend, mask):
    logits, labels = example()
    logits[:, 2][(labels != 2) & (logits[:, 0] > 0)] = mask
    for score_map in (*list(MAPS.values())[1:], AffineMap.temperature(100.0)):
        scores = score_map(logits.double())
        assert torch.equal(torch.isneginf(scores), logits == mask)
        fused = run(logits, labels, backend, score_map=score_map)
        plain = run(scores, labels, "reference", uncalibrated=logits.argmax(1))
        for name in ("confusion", "flips", "losses", "energy"):
            np.testing.assert_allclose(getattr(fused, name), getattr(plain, name), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("largest", [149, 2**16 - 1, 2**16])
def test_narrow_tables_of_bins_say_the_same(largest):
    cpu = pytest.importorskip("segcal.kernels.cpu")
    table = np.linspace(0, largest, 4096).astype(np.int64)
    assert np.array_equal(cpu._narrow(table), table)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_count(backend):
    logits, labels = example()
    result = run(logits, torch.full_like(labels, 255), backend)
    assert all(not array.any() for array in result)
    assert not tally(Voxels(logits[:0], labels[:0], TOP, CLASSES))[0].confusion.any()


def test_numba_is_chosen_by_size_and_dtype(monkeypatch):
    called = []
    kernel = SimpleNamespace(tally=lambda voxels, threads: called.append(voxels))
    monkeypatch.setattr("segcal.kernels.dispatch._compiled", {"cpu": kernel}.get)
    logits, labels = example(4, (1, 300, 300))
    tally(Voxels(logits, labels, TOP, None))
    assert len(called) == 1
    tally(Voxels(logits.double(), labels, TOP, None, ignore_index=255))
    tally(Voxels(logits[..., :9], labels[..., :9], TOP, None, ignore_index=255))
    assert len(called) == 1


def test_without_numba_the_reference_does_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "segcal.kernels.cpu", raising=False)
    monkeypatch.delattr(kernels, "cpu", raising=False)
    monkeypatch.setitem(sys.modules, "segcal.kernels.cpu_loops", None)
    logits, labels = example(4, (1, 300, 300))
    assert run(logits, labels, "auto").confusion.sum() == (labels != 255).sum()
    with pytest.raises(SegcalError, match="pip install numba"):
        run(logits, labels, "numba")


def test_unknown_backends_and_unsuitable_input_are_refused():
    logits, labels = example()
    with pytest.raises(InputError, match="one of auto, reference, numba"):
        run(logits, labels, "cuda")
    with pytest.raises(InputError, match="float32 or less on the CPU"):
        run(logits.double(), labels, "numba")


@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        (torch.ones(2, 3), None),
        (torch.ones(2, 2, 2), None),
        (torch.tensor(-1.0), None),
        (torch.tensor(torch.nan), None),
    ],
)
def test_impossible_maps_are_refused(weight, bias):
    with pytest.raises(InputError):
        AffineMap(weight, bias)


def test_a_map_for_another_number_of_classes_is_refused():
    logits, labels = example()
    with pytest.raises(InputError, match="5 classes"):
        run(logits, labels, "reference", score_map=AffineMap(torch.ones(3)))


@pytest.mark.parametrize(("values", "size"), [(0, 3), (1, 1), (5000, 7), (300, 2**23)])
def test_sums_in_parts_are_the_sums(values: int, size: int) -> None:
    random = torch.Generator().manual_seed(values)
    numbers = torch.rand(values, dtype=torch.float64, generator=random)
    index = torch.randint(size, (values,), generator=random)
    total = torch.ones(size, dtype=torch.float64)
    reference.sum_in_parts(total, numbers, index)
    torch.testing.assert_close(total, torch.ones_like(total).index_add_(0, index, numbers), rtol=1e-13, atol=0)
