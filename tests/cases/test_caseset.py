import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import segcal
from datasets import plain
from segcal.cases import CaseRef, CaseSet
from segcal.errors import ConfigError, InputError
from segcal.evaluation.check import check


def fake(count, groups=None, splits=None):
    refs = [CaseRef(f"p{i // 3:02d}_{i % 3}", lambda: None) for i in range(count)]
    return CaseSet(refs, num_classes=2, groups=groups, splits=splits or {})


@given(
    count=st.integers(3, 60),
    parts=st.tuples(st.floats(0.1, 0.5), st.floats(0.1, 0.3), st.floats(0.0, 0.2)),
    seed=st.integers(0, 9),
    grouped=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_splits_are_disjoint_keep_groups_and_repeat(count, parts, seed, grouped):
    cases = fake(count)
    groups = r"^p\d+" if grouped else None
    try:
        split = cases.split(*parts, seed=seed, groups=groups)
    except InputError:  # Few cases leave a part empty; test_impossible_splits_say_why looks at the message.
        reject()
    chosen = [set(part.ids) for part in split]
    assert sum(map(len, chosen)) == len(set().union(*chosen))
    if grouped:
        patients = [{name.split("_")[0] for name in part} for part in chosen]
        assert sum(map(len, patients)) == len(set().union(*patients))
    else:
        for part, wanted in zip(chosen, parts, strict=True):
            assert abs(len(part) - wanted * count) <= 1
    again = CaseSet(list(reversed(cases.refs)), num_classes=2).split(*parts, seed=seed, groups=groups)
    assert [set(part.ids) for part in again] == chosen


def test_split_by_counts_by_mapping_and_by_function():
    cases = fake(12)
    assert [len(part) for part in cases.split(5, 3, 2)] == [5, 3, 2]
    mapping = {name: name[:3] for name in cases.ids}
    by_mapping = cases.split(0.5, 0.25, 0.25, groups=mapping)
    by_function = cases.split(0.5, 0.25, 0.25, groups=lambda name: name[:3])
    assert [part.ids for part in by_mapping] == [part.ids for part in by_function]


def test_other_seeds_give_other_splits():
    assert fake(30).split(15, 5, 5, seed=1).test.ids != fake(30).split(15, 5, 5, seed=2).test.ids


def test_declared_splits_and_groups_are_used():
    cases = fake(6, splits={"calibration": ("p00_0", "p01_1"), "test": ("p01_2",)})
    assert [part.ids for part in cases.split()] == [("p00_0", "p01_1"), (), ("p01_2",)]
    grouped = fake(12, groups=r"^p\d+").split(0.5, 0.25, 0.25)
    assert not {n[:3] for n in grouped.calibration.ids} & {n[:3] for n in grouped.test.ids}


def in_turn(ids, sizes, seed):
    """The parts of cases without groups, as they always were: committed figures rest on them."""
    names = sorted(ids)
    np.random.default_rng(seed).shuffle(names)
    parts, missing = [set() for _ in sizes], list(sizes)
    for name in names:
        part = missing.index(max(missing))
        if missing[part] > 0:
            parts[part].add(name)
            missing[part] -= 1
    return parts


@given(sizes=st.tuples(*[st.integers(0, 12)] * 3), spare=st.integers(0, 5), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_cases_without_groups_are_split_as_they_always_were(sizes, spare, seed):
    cases = fake(sum(sizes) + spare)
    expected = in_turn(cases.ids, sizes, seed)
    assert [set(part.ids) for part in cases.split(*sizes, seed=seed)] == expected
    alone = cases.split(*sizes, seed=seed, groups=lambda name: name)
    assert [set(part.ids) for part in alone] == expected


def sized(*sizes):
    """Groups of these sizes; the name of a case begins with its group's."""
    ids = [f"g{group:02d}_{i}" for group, size in enumerate(sizes) for i in range(size)]
    return CaseSet([CaseRef(name, lambda: None) for name in ids], num_classes=2, groups=r"^g\d+")


@pytest.mark.parametrize(("sizes", "least"), [((10, 6, 7), 3), ((5, 2, 3), 3), ((10, 15, 20, 22, 25, 30, 31, 40), 25)])
def test_groups_go_to_random_parts(sizes, least):
    cases = sized(*sizes)
    splits = [cases.split(0.5, 0.2, 0.3, seed=seed) for seed in range(40)]
    assert len({tuple(part.ids for part in split) for split in splits}) >= least
    assert all(len(part) for split in splits for part in split)
    if len(sizes) > 3:
        folds = [cases.folds(3, seed=seed) for seed in range(40)]
        assert len({frozenset(fold.ids for _, fold in found) for found in folds}) >= least
        # Every group is tested in some split, not only the ones that fit best.
        assert {name[:3] for split in splits for name in split.test.ids} == {name[:3] for name in cases.ids}


@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=12), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_parts_of_groups_are_near_the_wanted_sizes_and_never_empty(sizes, seed):
    cases = sized(2, *sizes)
    split = cases.split(0.5, 0.2, 0.3, seed=seed)
    assert sum(map(len, split)) == len(cases)
    assert all(len(part) for part in split)
    for part, share in zip(split, (0.5, 0.2, 0.3), strict=True):
        # A part gets no group once it is full, so it has at most one group too many, and lacks what the others have.
        beyond = len(part) - share * len(cases)
        assert -2 * max(2, *sizes) - 1 <= beyond <= max(2, *sizes) + 1
    some = cases.split(0.3, 0.0, 0.2, seed=seed)
    assert len(some.calibration) > 0 < len(some.test)
    assert len(some.validation) == 0


PARTS = {"calibration": ("p00_0", "p00_1"), "validation": (), "test": ("p01_0",)}


@pytest.mark.parametrize(
    ("splits", "groups", "says"),
    [
        ({"test": ("zzz", "p00_0")}, None, r"splits.test names 'zzz': no such case"),
        ({"calibration": ("p00_0", "p00_1"), "test": ("p00_1",)}, None, r"'p00_1' in splits.test and in .*calibration"),
        ({"test": ("p00_1", "p00_1")}, None, r"'p00_1' in splits.test and in splits.test"),
        ({"calibration": ("p00_0",), "test": ("p00_1",)}, r"^p\d+", r"group 'p00' is divided: 'p00_0'.* 'p00_1'"),
    ],
)
def test_declared_splits_that_cannot_be_are_refused_when_the_dataset_is_opened(tmp_path, splits, groups, says):
    with pytest.raises(ConfigError, match=says):
        fake(6, groups=groups, splits=splits)
    root = plain(tmp_path, count=3)
    for folder in ("logits", "labels"):
        for i, name in enumerate(("p00_0", "p00_1", "p01_0")):
            (root / folder / f"case{i}.npy").rename(root / folder / f"{name}.npy")
    text = [f"groups = '{groups}'"] if groups else []
    text += ["[splits]", *(f"{part} = {list(names)}" for part, names in splits.items())]
    (root / "segcal.toml").write_text("\n".join(text))
    with pytest.raises(ConfigError, match=f"segcal.toml.*{says}"):
        segcal.open_cases(root)
    assert [str(problem) for problem in check(root).problems]


def test_parts_are_chosen_by_name_and_stay_with_fewer_cases():
    cases = fake(6, splits=PARTS)
    assert cases.part("calibration").ids == PARTS["calibration"]
    assert cases.undeclared == ("p00_2", "p01_1", "p01_2")
    for some in (cases[:2], cases.select(["p00_1", "p00_0"]), cases.part("calibration")):
        assert set(some.split().calibration.ids) == {"p00_0", "p00_1"}
        assert len(some.part("test")) == 0
    shards = [cases.shard(rank, 2) for rank in range(2)]
    assert {name for shard in shards for name in shard.part("calibration").ids} == {"p00_0", "p00_1"}
    assert fake(3).undeclared == ()
    with pytest.raises(InputError, match="declares no test part"):
        fake(3).part("test")
    with pytest.raises(InputError, match="part is 'train'"):
        cases.part("train")


@pytest.mark.parametrize(
    ("sizes", "options", "says"),
    [
        ((0.9, 0.9, 0.1), {}, "sum to at most 1"),
        ((9, 9, 9), {}, "at most the 12"),
        ((-1, 2, 2), {}, "negative"),
        ((0.5, 0.3, 0.2), {"groups": "^one"}, "does not match"),
        ((0.5, 0.3, 0.2), {"groups": {"p00_0": "a"}}, "has no group"),
        ((0.5, 0.3, 0.2), {"groups": "("}, "is not valid"),
        ((0.5, 0.3, 0.2), {"groups": lambda name: "all"}, "empty"),
    ],
)
def test_impossible_splits_say_why(sizes, options, says):
    with pytest.raises(InputError, match=says):
        fake(12).split(*sizes, **options)


@given(count=st.integers(0, 20), world=st.integers(1, 6))
def test_shards_partition_the_cases(count, world):
    cases = fake(count)
    shards = [cases.shard(rank, world).ids for rank in range(world)]
    assert sorted(name for shard in shards for name in shard) == sorted(cases.ids)


def test_bad_shard_and_unknown_name():
    with pytest.raises(InputError, match="rank 3 of world 3"):
        fake(4).shard(3, 3)
    with pytest.raises(InputError, match="no case named 'nope'"):
        fake(4).select(["nope"])


def test_slices_indices_and_repeated_iteration(tmp_path):
    cases = segcal.open_cases(plain(tmp_path, count=4))
    assert len(cases) == 4
    assert [case.id for case in cases[1:3]] == ["case1", "case2"]
    assert cases[-1].id == "case3"
    first, second = ([case.logits.clone() for case in cases] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_iterating_keeps_no_case_alive(tmp_path):
    cases = segcal.open_cases(plain(tmp_path, count=5))
    seen = []
    for case in cases:
        case.load()
        gc.collect()
        assert sum(ref() is not None for ref in seen) == 0
        seen.append(weakref.ref(case))
        del case


def test_leaving_an_iteration_early_is_fine(tmp_path):
    cases = segcal.open_cases(plain(tmp_path, count=5))
    assert next(iter(cases)).id == "case0"
    assert [case.id for case in cases][-1] == "case4"


def test_an_unreadable_case_stops_only_whoever_reads_it(tmp_path):
    root = plain(tmp_path, count=3)
    cases = segcal.open_cases(root)
    np.save(root / "logits" / "case1.npy", np.full((4, 9, 7), np.nan, np.float32))
    ids = []
    for case in cases:
        ids.append(case.id)
        if case.id == "case1":
            with pytest.raises(InputError, match="case 'case1'.*NaN"):
                _ = case.logits
        else:
            _ = case.logits
    assert ids == ["case0", "case1", "case2"]
