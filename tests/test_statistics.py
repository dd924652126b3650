import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.errors import InputError
from segcal.kernels import AffineMap
from segcal.metrics import METRICS, ba_ece, ece, free_energy_std, nll
from segcal.statistics import VoxelStatistics

REGIONS = ("left", "top", "band-0-3")
BACKENDS = ("reference", "numba")


def example(classes=4, shape=(3, 21, 40), seed=0):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape[0], classes, *shape[1:], generator=random) * 3
    labels = torch.randint(0, classes, shape, generator=random)
    labels = torch.where(torch.rand(shape, generator=random) < 0.7, logits.argmax(1), labels)
    labels[torch.rand(shape, generator=random) < 0.05] = 255
    return logits, labels


def regions_of(labels):
    left, top = torch.zeros_like(labels, dtype=torch.bool), torch.zeros_like(labels, dtype=torch.bool)
    left[..., : labels.shape[-1] // 2] = True
    top[..., : labels.shape[-2] // 3, :] = True
    return {"left": left, "top": top, "band-0-3": labels % 2 == 0}


def assert_merged(whole: VoxelStatistics, parts: VoxelStatistics) -> None:
    """Counts to the bit, sums to 1e-12, whatever the order of atoms."""
    parts.align(whole.layout)
    for (name, a), b in zip(whole.tensors().items(), parts.tensors().values(), strict=True):
        if a.dtype == torch.int64:
            assert torch.equal(a, b), name
        else:
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12 * max(1.0, float(a.abs().max())), msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_whole_is_the_sum_of_its_parts_in_any_order(backend, data):
    logits, labels = example()
    regions, distance = regions_of(labels), torch.arange(labels.numel()).view(labels.shape) % 17.0
    rows = labels.shape[1]
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), min_size=6, max_size=6)))
    slices = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
    order = data.draw(st.permutations(range(7)))

    def collect(rows):
        return VoxelStatistics(4, regions=REGIONS, backend=backend).update(
            logits[:, :, rows],
            labels[:, rows],
            regions={name: mask[:, rows] for name, mask in regions.items()},
            distance=distance[:, rows],
            uncalibrated=logits[:, :, rows].roll(1, 0).argmax(1),
        )

    # The flips of a part compare with what its own images roll to, so whole and parts see the same.
    merged = VoxelStatistics(4, regions=REGIONS)
    for index in order:
        merged.merge(collect(slices[index]))
    assert_merged(collect(slice(0, rows)), merged)


def test_plus_leaves_both_sides_alone():
    a, b = (VoxelStatistics(4).update(*example(seed=seed)) for seed in (0, 1))
    before = a.to_dict(), b.to_dict()
    assert (a + b).count() == a.count() + b.count()
    assert (a.to_dict(), b.to_dict()) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_region_is_what_its_voxels_alone_would_give(backend):
    logits, labels = example()
    regions = regions_of(labels)
    stats = VoxelStatistics(4, regions=REGIONS, backend=backend).update(logits, labels, regions=regions)
    for chosen in ("everything", "left", "top", ("left", "top"), REGIONS):
        mask = torch.ones_like(labels, dtype=torch.bool)
        for name in (chosen,) if isinstance(chosen, str) else chosen:
            mask &= regions.get(name, mask)
        alone = VoxelStatistics(4, backend=backend).update(logits, labels, mask=mask)
        assert stats.count(chosen) == alone.count() == int((mask & (labels != 255)).sum())
        for name, spec in METRICS.items():
            if not set(spec.needs) & {"distance", "uncalibrated", "surfaces"}:
                mine, theirs = spec.function(stats, region=chosen), spec.function(alone)
                assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12), (name, chosen)
                assert mine.count == theirs.count


def test_regions_by_index_equal_regions_by_mask():
    logits, labels = example()
    index = torch.randint(-1, 3, labels.shape, generator=torch.Generator().manual_seed(0))
    masks = {name: index == i for i, name in enumerate(REGIONS)}
    by_mask = VoxelStatistics(4, regions=REGIONS).update(logits, labels, regions=masks)
    by_index = VoxelStatistics(4, regions=REGIONS).update(logits, labels, regions=index)
    assert by_mask.to_dict() == by_index.to_dict()


def test_a_dictionary_survives_json_to_the_bit():
    logits, labels = example()
    logits[0, 1, 2, 3] = -torch.inf
    labels[0, 2, 3] = 1  # an impossible label: the NLL is infinite
    stats = VoxelStatistics(4, (15, 7), regions=REGIONS, threshold=0.01)
    stats.update(logits, labels, regions=regions_of(labels))
    back = VoxelStatistics.from_dict(json.loads(json.dumps(stats.to_dict())))
    assert back.to_dict() == stats.to_dict()
    assert nll(back) == torch.inf
    assert back.merge(stats).count() == 2 * stats.count()
    with pytest.raises(InputError, match="version 9"):
        VoxelStatistics.from_dict({**stats.to_dict(), "version": 9})
    with pytest.raises(InputError, match="shapes"):
        VoxelStatistics.from_dict({**stats.to_dict(), "atoms": [0]})


def test_an_all_reduce_merges_aligned_statistics():
    ranks = [VoxelStatistics(4, regions=REGIONS) for _ in range(3)]
    whole = VoxelStatistics(4, regions=REGIONS)
    for rank, stats in enumerate(ranks[:2]):  # the last process saw nothing
        logits, labels = example(seed=rank)
        regions = regions_of(labels) if rank else {name: torch.zeros_like(labels).bool() for name in REGIONS}
        for target in (stats, whole):
            target.update(logits + 100 * rank, labels, regions=regions)
    layouts = [stats.layout for stats in ranks]
    tensors = [stats.align(*layouts).tensors() for stats in ranks]
    for name, mine in tensors[0].items():
        mine.copy_(sum(other[name] for other in tensors))
    assert_merged(whole, ranks[0])
    assert {stats.energy_shift for stats in ranks} == {layouts[0].energy_shift}
    assert layouts[0].energy_shift != layouts[1].energy_shift


def test_free_energy_keeps_its_spread_far_from_zero():
    logits, labels = example()
    spread = float(torch.logsumexp(logits.double(), 1)[labels != 255].std(correction=0))
    for gauge in (0.0, -1e4, 1e6):
        stats = VoxelStatistics(4).update(logits.double() + gauge, labels)
        assert free_energy_std(stats) == pytest.approx(spread, rel=1e-9)
    halves = VoxelStatistics(4).update(logits[:1].double() - 1e4, labels[:1])
    halves.merge(VoxelStatistics(4).update(logits[1:].double() + 1e4, labels[1:]))
    both = torch.cat((logits[:1].double() - 1e4, logits[1:].double() + 1e4))
    expected = float(torch.logsumexp(both, 1)[labels != 255].std(correction=0))
    assert free_energy_std(halves) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("content", [1e4, 1e9, -3e38, torch.nan])
def test_what_ignored_voxels_hold_is_not_seen_by_the_free_energy(backend, content):
    logits, labels = example()
    labels[0, 0] = 255
    expected = free_energy_std(VoxelStatistics(4, backend=backend).update(logits, labels))
    logits[0, :, 0] = content
    nothing = torch.full_like(labels, 255)
    stats = VoxelStatistics(4, backend=backend).update(logits, nothing).update(logits, labels)
    assert free_energy_std(stats) == expected


def test_calibrated_log_probabilities_with_the_old_argmax_equal_the_fused_map():
    logits, labels = example()
    score_map = AffineMap(torch.tensor([1.0, 0.5, 1.5, 1.0]), torch.tensor([0.0, 1.0, -1.0, 0.5]))
    fused = VoxelStatistics(4, backend="reference").update(logits.double(), labels, score_map=score_map)
    given = VoxelStatistics(4, backend="reference").update(
        torch.log_softmax(score_map(logits.double()), 1), labels, uncalibrated=logits.argmax(1)
    )
    assert torch.equal(fused.tensors()["flips"], given.tensors()["flips"])
    for name, spec in METRICS.items():
        if not set(spec.needs) & {"distance", "surfaces"}:
            assert spec.function(given) == pytest.approx(spec.function(fused), rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_ece_of_many_voxels_is_exact(backend):
    """Beyond 2^24 float32 sums are wrong; benchmarks/metrics.py does this with 40 million."""
    stats, gaps, voxels = VoxelStatistics(2, (15,), backend=backend), np.zeros(15), 0
    for seed in range(4):
        random = torch.Generator().manual_seed(seed)
        logits = torch.randn(1, 2, 250_000, generator=random) * 2
        confidence, winner = torch.softmax(logits[0].double(), 0).max(0)
        right = torch.rand(confidence.shape, generator=random, dtype=torch.float64) < confidence - 0.05
        stats.update(logits, torch.where(right, winner, 1 - winner)[None])
        bins = (confidence * 15).ceil().long() - 1
        gaps += torch.bincount(bins, weights=confidence - right.double(), minlength=15).numpy()
        voxels += right.numel()
    assert ece(stats) == pytest.approx(np.abs(gaps).sum() / voxels, abs=1e-9)
    assert ece(stats).count == voxels


def test_nothing_valid_is_nan_with_count_0():
    logits, labels = example()
    nothing = [
        VoxelStatistics(4, regions=("band-0-3", "band-3-7", "band-7-15", "band-15-inf")),
        VoxelStatistics(4).update(logits, torch.full_like(labels, 255)),
        VoxelStatistics(4).update(logits, labels, mask=torch.zeros_like(labels, dtype=torch.bool)),
        VoxelStatistics(4).update(logits[:0], labels[:0]),
        VoxelStatistics(4, regions=("left",)).update(logits[:0], labels[:0], regions={"left": labels[:0] == 0}),
    ]
    for stats in nothing:
        assert stats.count() == 0
        for name, spec in METRICS.items():
            if not set(spec.needs) & {"distance", "surfaces"}:
                value = spec.function(stats)
                assert np.isnan(value), name
                assert value.count == 0, name
    assert np.isnan(ba_ece(nothing[0]))


@pytest.mark.parametrize("classes", [2, 150])
def test_few_and_many_classes(classes):
    logits, labels = example(classes, (1, 40, 50))
    stats = VoxelStatistics(classes).update(logits, labels)
    assert stats.total().confusion.shape == (classes, classes)
    assert stats.count() == int((labels != 255).sum())


def test_one_class_is_refused():
    with pytest.raises(InputError, match="num_classes is 1; expected at least 2"):
        VoxelStatistics(1)


@pytest.mark.parametrize("threshold", [0.0, 1.0, 1.5])
def test_thresholds_are_probabilities_between_zero_and_one(threshold):
    for arguments in ({"threshold": threshold}, {"thresholds": (0.5, threshold)}):
        with pytest.raises(InputError, match="threshold is"):
            VoxelStatistics(2, **arguments)


@pytest.mark.parametrize("background", [-1, 2])
def test_the_background_is_a_class(background):
    with pytest.raises(InputError, match=f"background is {background}"):
        VoxelStatistics(2, background=background)


def test_a_dictionary_of_more_atoms_than_arrays_is_refused():
    stats = VoxelStatistics(2).update(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    assert stats.to_dict()["version"] == 1
    with pytest.raises(InputError, match="shapes"):
        VoxelStatistics.from_dict({**stats.to_dict(), "atoms": [0, 1]})


def test_nothing_has_its_energies_relative_to_zero():
    assert VoxelStatistics(2).energy_shift == 0
    mapped = VoxelStatistics(2).update(
        torch.full((3, 2), 50.0), torch.tensor([0, 1, 1]), score_map=AffineMap.temperature(2.0)
    )
    assert mapped.energy_shift == 0


def test_many_overlapping_regions():
    names = tuple(f"r{i}" for i in range(16))
    logits, labels = example()
    number = torch.arange(labels.numel()).view(labels.shape) % 200
    masks = {name: (number >> i) % 2 == 1 for i, name in enumerate(names)}
    stats = VoxelStatistics(4, regions=names).update(logits, labels, regions=masks)
    for name in names:
        assert stats.count(name) == int((masks[name] & (labels != 255)).sum())
    masks = {name: (torch.arange(labels.numel()).view(labels.shape) >> i) % 2 == 1 for i, name in enumerate(names)}
    with pytest.raises(InputError, match="more than 256 different ways"):
        stats.update(logits, labels, regions=masks)
    with pytest.raises(InputError, match="at most 16 different names"):
        VoxelStatistics(4, regions=(*names, "more"))


BAD = {
    "labels of another shape": ({"labels": torch.zeros(3, 21, 39).long()}, r"labels have shape \(3, 21, 39\)"),
    "labels that are no integers": (
        {"labels": torch.zeros(3, 21, 40)},
        "dtype torch.float32; expected .* integer type",
    ),
    "mask of another shape": ({"mask": torch.ones(3, 40, 21).bool()}, r"mask has shape \(3, 40, 21\)"),
    "mask that is no bool": ({"mask": torch.ones(3, 21, 40)}, "mask has .* torch.float32"),
    "logits of other classes": ({"logits": torch.zeros(3, 5, 21, 40)}, "5 classes; expected 4"),
    "logits that are integers": ({"logits": torch.zeros(3, 4, 21, 40).long()}, "floating point"),
    "regions nobody named": ({"regions": {"right": torch.ones(3, 21, 40).bool()}}, r"\['right'\]; expected \['left'\]"),
    "regions that are missing": ({"regions": None}, r"\[\]; expected \['left'\]"),
    "a region of another shape": ({"regions": {"left": torch.ones(21, 40).bool()}}, "region 'left' has shape"),
    "region indices without name": ({"regions": torch.ones(3, 21, 40).long()}, "region index 1; expected less than 1"),
    "NaN": ({"logits": torch.full((3, 4, 21, 40), torch.nan)}, "NaN logits at voxel"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_named_and_changes_nothing(change, message):
    logits, labels = example()
    stats = VoxelStatistics(4, regions=("left",))
    good = {"logits": logits, "labels": labels, "regions": {"left": labels == 0}}
    stats.update(**good)
    before = stats.to_dict()
    with pytest.raises(InputError, match=message):
        stats.update(**{**good, **change})
    assert stats.to_dict() == before


def test_statistics_of_different_kinds_do_not_merge():
    with pytest.raises(InputError, match=r"differ in bins \(\(15, 50\) and \(10,\)\)"):
        VoxelStatistics(4).merge(VoxelStatistics(4, (10,)))


def test_an_unknown_region_is_named():
    with pytest.raises(InputError, match="region is 'rim'; expected one of everything, left"):
        VoxelStatistics(4, regions=("left",)).total("rim")


def test_totals_are_sums_over_the_atoms_of_a_region():
    logits, labels = example()
    inside = torch.zeros_like(labels, dtype=torch.bool)
    inside[:, ::2] = True
    stats = VoxelStatistics(4, regions=("a", "b")).update(logits, labels, regions={"a": inside, "b": labels == 1})
    for region, bits in (("everything", 0), ("a", 1), ("b", 2), (("a", "b"), 3)):
        chosen = [atom & bits == bits for atom in stats.layout.atoms]
        for name, array in stats.tensors().items():
            assert np.array_equal(getattr(stats.total(region), name), array.numpy()[chosen].sum(0)), name
    with pytest.raises(AttributeError):
        stats.total().nothing  # noqa: B018


def test_memory_of_many_classes_is_what_is_documented():
    classes = 200
    stats = VoxelStatistics(classes, (15,)).update(torch.zeros(1, classes), torch.tensor([0]))
    used = sum(tensor.numel() * 8 for tensor in stats.tensors().values())
    bins, fine = len(stats.class_grid), len(stats.top_grid)
    assert bins < 400
    assert fine < 5000
    assert used <= 8 * (classes**2 + 7 * classes * bins + 4 * fine) * 1.02
