import gc
import weakref

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import segcal
from datasets import plain
from segcal.cases import CaseRef, CaseSet
from segcal.errors import InputError


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


@pytest.mark.parametrize(
    ("sizes", "options", "says"),
    [
        ((0.9, 0.9, 0.1), {}, "sum to at most 1"),
        ((9, 9, 9), {}, "at most the 12"),
        ((-1, 2, 2), {}, "negative"),
        ((0.5, 0.3, 0.2), {"groups": "^one"}, "does not match"),
        ((0.5, 0.3, 0.2), {"groups": {"p00_0": "a"}}, "has no group"),
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
    scores = torch.full((4, 9, 7), torch.nan).numpy()
    __import__("numpy").save(root / "logits" / "case1.npy", scores)
    ids = []
    for case in cases:
        ids.append(case.id)
        if case.id == "case1":
            with pytest.raises(InputError, match="case 'case1'.*NaN"):
                _ = case.logits
        else:
            _ = case.logits
    assert ids == ["case0", "case1", "case2"]
