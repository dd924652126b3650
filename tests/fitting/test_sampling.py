"""A stratified sample stands for everything, without bias, however it was drawn."""

import sys

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from segcal.errors import InputError
from segcal.fitting import sampling
from segcal.fitting.data import case_seed
from segcal.fitting.sampling import VoxelSampler, _by_key, _hash
from segcal.kernels import Voxels
from segcal.synthetic import Temperature, scenes


def scene(size=(96, 128), classes=4, seed=0):
    """Logits (1, C, *size) and labels (1, *size): mostly easy voxels, some wrong."""
    case = scenes(1, size=size, num_classes=classes, plant=[Temperature(2.0)], seed=seed, coherence=0)[0]
    return case.logits, case.labels


def draw(z, y, voxels, valid=None, seed=0):
    sampler = VoxelSampler(z.shape[1], voxels, seed)
    sampler.add(Voxels(z, y, mask=valid))
    return sampler.sample()


def everything(z, y):
    """All voxels, in the order of their keys."""
    order = _hash(np.uint64(case_seed(0, "")) + np.arange(y.numel(), dtype=np.uint64)).argsort()
    return z.movedim(1, -1).flatten(0, -2)[order], y.flatten()[order]


def assert_same(first, second):
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.labels, second.labels)
    for name in ("strata", "keys", "sizes", "weights"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name


def losses(sample):
    return cross_entropy(sample.logits.double(), sample.labels, reduction="none").numpy()


@pytest.mark.parametrize("voxels", [1, 7, 40, 300, 5000, 10**6])
def test_weights_sum_to_the_valid_voxels(voxels):
    z, y = scene()
    valid = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    sample = draw(z, y, voxels, valid)
    assert len(sample) == min(voxels, int(valid.sum()))
    assert sample.total == int(valid.sum())
    assert sample.weights.min() >= 1
    if voxels >= 40:  # as many as there can be strata
        assert sample.weights.sum() == pytest.approx(sample.total)


def test_every_stratum_is_seen_and_often_enough_for_a_standard_error():
    z, y = scene()
    for voxels in (90, 400, 3000):
        sample = draw(z, y, voxels)
        drawn = np.bincount(sample.strata, minlength=len(sample.sizes))
        assert (drawn >= np.minimum(sample.sizes, 2)).all()


def test_strata_are_those_of_winner_correctness_and_confidence():
    z, y = scene()
    sample = draw(z, y, 10**6)
    p = sample.logits.double().softmax(1)
    for voxel in range(0, len(p), 97):
        winner = int(p[voxel].argmax())
        right = winner == int(sample.labels[voxel])
        level = sum(float(p[voxel, winner]) > edge for edge in sampling.CONFIDENCES)
        assert sample.strata[voxel] == (2 * winner + right) * 5 + level


def test_classes_share_the_sample_equally_where_they_can():
    z, y = scene(classes=3)
    predicted = np.bincount(z.argmax(1).flatten())
    drawn = np.bincount(draw(z, y, 300).strata // 10)
    assert predicted.max() > 10 * predicted.min()
    assert drawn.min() > 75
    assert drawn.max() < 125


def test_the_weighted_mean_is_unbiased_and_its_standard_error_honest():
    z, y = scene()
    exact = float(cross_entropy(z.double(), y))
    samples = [draw(z, y, 300, seed=seed) for seed in range(300)]
    estimates = np.array([sample.weights @ losses(sample) / sample.total for sample in samples])
    claimed = np.sqrt(np.mean([sample.standard_error(losses(sample)) ** 2 for sample in samples]))
    spread = estimates.std(ddof=1)
    assert abs(estimates.mean() - exact) < 4 * spread / np.sqrt(300)
    assert 0.85 < claimed / spread < 1.15  # the spread of 300 itself is known to 4 %
    uniform = float(cross_entropy(z.double(), y, reduction="none").std()) / np.sqrt(300)
    assert spread < 0.5 * uniform  # what the strata are for


def test_the_standard_error_of_everything_is_zero():
    z, y = scene()
    sample = draw(z, y, 10**6)
    assert sample.standard_error(losses(sample)) == 0


def test_a_large_enough_sample_is_everything():
    z, y = scene()
    for voxels in (y.numel(), 10 * y.numel()):
        sample = draw(z, y, voxels)
        assert sample.complete
        assert (sample.weights == 1).all()
        for found, expected in zip((sample.logits, sample.labels), everything(z, y), strict=True):
            assert torch.equal(found, expected)
    assert not draw(z, y, y.numel() - 1).complete


@pytest.mark.parametrize("voxels", [400, 1500])
def test_chunks_do_not_matter(voxels):
    z, y = scene()
    valid = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    whole = draw(z, y, voxels, valid)
    for rows in (1, 7, 50):
        sampler = VoxelSampler(4, voxels)
        for first in range(0, z.shape[2], rows):
            part = slice(first, first + rows)
            sampler.add(Voxels(z[:, :, part], y[:, part], mask=valid[:, part]))
        assert_same(sampler.sample(), whole)


@pytest.mark.parametrize("voxels", [100, 400, 1500, 10**6])
@pytest.mark.parametrize("sorted_by_class", [False, True])
def test_who_reads_which_case_does_not_matter(voxels, sorted_by_class):
    """Also where each process sees other classes, and far more voxels than a sample has."""
    z, y = scene()
    flat, labels = z.movedim(1, -1).flatten(0, -2), y.flatten()
    if sorted_by_class:
        order = flat.argmax(1).argsort(stable=True)
        flat, labels = flat[order], labels[order]
    cases = {f"case {n}": slice(n, n + 700) for n in range(0, len(labels), 700)}
    names = list(cases)

    def sampler(some):
        own = VoxelSampler(4, voxels)
        for name in some:
            for part in (slice(0, 300), slice(300, None)):
                own.add(Voxels(flat[cases[name]][part], labels[cases[name]][part]), name)
        return own

    whole = sampler(names).sample()
    assert whole.complete == (voxels > len(labels))
    for shares in ((names[:2], names[2:]), (names[1::2], names[::2]), (names[5:], names[2:5], names[:2])):
        merged = sampler(shares[0])
        for share in shares[1:]:
            merged = merged.merge(sampler(share))
        assert_same(merged.sample(), whole)


def test_voxels_that_were_let_go_are_drawn_again():
    """A large easy case fills the sample; the few doubtful voxels of a small one then need only a part of it."""
    parts = {"easy": [(40_000, 0, 0, 9.0), (6_000, 1, 1, 9.0)], "doubtful": [(60, 1, 0, 2.0), (60, 1, 1, 2.0)]}
    cases = {}
    for name, blocks in parts.items():
        z = torch.cat([gap * torch.eye(2)[winner].expand(count, 2) for count, winner, _, gap in blocks])
        cases[name] = z, torch.cat([torch.full((count,), label) for count, _, label, _ in blocks])

    def sampler(names, limits=None):
        own = VoxelSampler(2, 2000, limits=limits)
        for name in names:
            for first in range(0, len(cases[name][1]), 5000):
                own.add(Voxels(*(part[first : first + 5000] for part in cases[name])), name)
        return own

    def drawn(*shares):
        limits = None
        for _ in range(2):
            merged = sampler(shares[0], limits)
            for share in shares[1:]:
                merged = merged.merge(sampler(share, limits))
            if (limits := merged.limits()) is None:
                break
        assert merged.limits() is None
        return merged.sample()

    assert sampler(["doubtful", "easy"]).limits() is None
    assert sampler(["easy", "doubtful"]).limits() is not None
    whole = drawn(["doubtful", "easy"])
    assert_same(drawn(["easy", "doubtful"]), whole)
    assert_same(drawn(["easy"], ["doubtful"]), whole)


def test_a_shift_in_the_data_leaves_the_sample_without_bias():
    """Shares change while the data go by, classes and errors arrive late: what is held then must still be a sample."""
    z, y = scene()
    flat, labels = z.movedim(1, -1).flatten(0, -2), y.flatten()
    order = (flat.argmax(1) * 2 + (flat.argmax(1) != labels)).argsort(stable=True)
    flat, labels = flat[order], labels[order]
    exact, estimates = float(cross_entropy(flat.double(), labels)), []
    for seed in range(100):
        sampler = VoxelSampler(4, 300, seed)
        for first in range(0, len(labels), 500):
            part = slice(first, first + 500)
            sampler.add(Voxels(flat[part], labels[part]))
        sample = sampler.sample()
        assert len(sample) == 300
        assert sample.weights.sum() == pytest.approx(sample.total)
        estimates.append(sample.weights @ losses(sample) / sample.total)
    assert abs(np.mean(estimates) - exact) < 4 * np.std(estimates) / 10


def test_layouts_do_not_matter():
    z, y = scene()
    expected = draw(z, y, 500)
    assert_same(draw(z.movedim(1, -1).contiguous().movedim(-1, 1), y, 500), expected)
    padded = torch.nn.functional.pad(z, (3, 3))[..., 3:-3]
    assert not padded.is_contiguous()
    assert_same(draw(padded, y, 500), expected)
    assert_same(draw(z.movedim(1, -1).flatten(0, -2), y.flatten(), 500), expected)  # (N, C)
    assert_same(draw(z[0].movedim(0, 1), y[0], 500), expected)  # rows as a batch
    assert_same(draw(z.requires_grad_(), y, 500), expected)


def test_the_batch_is_one_more_direction_of_space():
    z, y = scene()
    volume = z.view(1, 4, 4, 24, 128)
    assert_same(draw(volume, y.view(1, 4, 24, 128), 500), draw(z, y, 500))
    batch = volume[0].movedim(1, 0)
    assert_same(draw(batch, y.view(4, 24, 128), 500), draw(z, y, 500))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_of_any_integer_type(dtype):
    z, y = scene()
    assert_same(draw(z, y.to(dtype), 500), draw(z, y, 500))


def test_small_types_are_float32_and_float64_keeps_its_digits():
    z, y = scene()
    assert draw(z.half(), y, 500).logits.dtype == torch.float32
    exact = z.double() + 1e9
    sample = draw(exact, y, 10**6)
    assert torch.equal(sample.logits, everything(exact, y)[0])


@pytest.mark.parametrize("size", [(256, 192), (8, 16)])  # by compiled loops, and by numpy
def test_one_case_in_float64_makes_the_sample_float64(size):
    z, y = scene(size)
    sampler = VoxelSampler(4, 10**6)
    sampler.add(Voxels(z, y), "a")
    sampler.add(Voxels(z.double(), y), "b")
    expected = VoxelSampler(4, 10**6)
    for case in "ab":
        expected.add(Voxels(z.double(), y), case)
    found = sampler.sample()
    assert found.logits.dtype == torch.float64
    assert_same(found, expected.sample())


def test_the_seed_decides():
    z, y = scene()
    assert_same(draw(z, y, 500, seed=3), draw(z, y, 500, seed=3))
    assert not np.array_equal(draw(z, y, 500, seed=3).keys, draw(z, y, 500, seed=4).keys)


def test_invalid_voxels_are_never_drawn_whatever_they_hold():
    z, y = scene()
    valid = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    expected = draw(z, y, 500, valid)
    other, labels = z.clone(), y.clone()
    other.movedim(1, -1)[~valid] = torch.nan
    labels[~valid] = 255
    assert_same(draw(other, labels, 500, valid), expected)
    assert draw(other, labels, 10**6, valid).logits.isfinite().all()


def test_thinning_keeps_a_part_that_still_stands_for_everything():
    z, y = scene()
    whole = sample = draw(z, y, 3000)
    for voxels in (2999, 1000, 50):
        sample = sample.thin(voxels)
        assert len(sample) == voxels
        assert set(sample.keys) <= set(whole.keys)
        assert sample.total == y.numel()
        assert sample.weights.sum() == pytest.approx(sample.total)
        for stratum in np.unique(sample.strata):  # the lowest keys: thinning twice is thinning once
            kept = sample.keys[sample.strata == stratum]
            held = np.sort(whole.keys[whole.strata == stratum])
            assert np.array_equal(np.sort(kept), held[: len(kept)])
    assert_same(sample.thin(50), sample)
    assert_same(sample.thin(10**6), sample)


def test_impossible_classes_and_one_sided_data():
    z, y = scene()
    z[:, 3], y[y == 3] = -torch.inf, 0
    sample = draw(z, y, 500)
    assert torch.isneginf(sample.logits[:, 3]).all()
    assert not sample.sizes[-10:].any()
    alike = draw(torch.zeros(1000, 3), torch.zeros(1000, dtype=torch.int64), 100)
    assert len(alike) == 100
    assert np.allclose(alike.weights, 10)


def test_nothing_to_draw_from_is_an_error():
    sampler = VoxelSampler(3, 10)
    with pytest.raises(InputError, match="no valid voxel"):
        sampler.sample()
    sampler.add(Voxels(torch.zeros(5, 3), torch.zeros(5), mask=torch.zeros(5, dtype=torch.bool)))
    with pytest.raises(InputError, match="no valid voxel"):
        sampler.sample()


def test_the_compiled_choice_is_the_plain_one(monkeypatch):
    random = np.random.default_rng(0)
    valid = random.random(5000) < 0.8
    strata = np.where(valid, random.integers(0, 30, 5000), -1)
    highest = random.integers(0, 2**64, 30, np.uint64, endpoint=False)
    highest[:2] = 0, np.iinfo(np.uint64).max
    results = []
    for hidden in (False, True):
        if hidden:
            monkeypatch.setitem(sys.modules, "segcal.kernels.fitting_loops", None)
        sizes = np.arange(30)
        for first in (np.uint64(0), np.uint64(2**64 - 2500)):  # the hash wraps around
            kept, keys = sampling._choose(strata, first, highest, sizes)
            results.append((hidden, kept, keys, sizes.copy()))
    for (_, *plain), (_, *compiled) in zip(results[2:], results[:2], strict=True):
        for a, b in zip(plain, compiled, strict=True):
            assert a.dtype == b.dtype
            assert np.array_equal(a, b)
    assert 0 < len(results[0][1]) < valid.sum()


@pytest.mark.parametrize("count", [1, 2, 31, 5000, 100_003])
@pytest.mark.parametrize("scale", [1, 2**40, 2**61])  # equal keys, too
def test_keys_are_sorted_by_parts_as_they_are_as_a_whole(count, scale):
    keys = np.random.default_rng(0).integers(7, size=count).astype(np.uint64) * np.uint64(scale)
    keys += np.random.default_rng(1).integers(scale, size=count).astype(np.uint64)
    order = _by_key(keys)
    np.testing.assert_array_equal(np.sort(order), np.arange(count))
    np.testing.assert_array_equal(keys[order], np.sort(keys))


def test_a_chunk_for_which_memory_is_short_is_not_counted(monkeypatch):
    z, y = scene()
    sampler, calls, rows = VoxelSampler(4, 500), [], sampling._rows

    def short_once(*given):
        calls.append(given)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return rows(*given)

    monkeypatch.setattr(sampling, "_rows", short_once)
    with pytest.raises(torch.OutOfMemoryError):
        sampler.add(Voxels(z, y))
    for part in (slice(0, 50), slice(50, None)):
        sampler.add(Voxels(z[:, :, part], y[:, part]))
    assert_same(sampler.sample(), draw(z, y, 500))
