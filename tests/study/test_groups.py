"""Cases of one group are resampled, tested and ranked together, and every test case is counted once."""

from dataclasses import replace

import numpy as np
import pytest
from tests.reference import inference as reference

from segcal.evaluation.evaluate import evaluate
from segcal.inference import compare_pairs, friedman
from segcal.metrics import Column
from segcal.study import compare
from segcal.study.splits import counted_once
from segcal.study.summary.table import Table
from segcal.study.work.tasks import Evaluation
from segcal.synthetic import Temperature, scenes

QUICK = {"tune": "none", "metrics": ("nll", "ece", "ba-ece", "flip"), "regions": ("everything",)}


@pytest.fixture(scope="module")
def cases():
    found = scenes(18, size=(32, 40), plant=[Temperature(3.0)])
    groups = {name: f"patient {i // 3}" for i, name in enumerate(found.ids)}
    splits = {"calibration": found.ids[:3], "validation": found.ids[3:6], "test": found.ids[6:]}
    return replace(found, groups=groups, splits=splits)


@pytest.fixture(scope="module")
def study(cases):
    return compare(cases, ("ts", "vs"), **QUICK).document


def values_of(study, method, metric):
    (row,) = [r for r in study["cases"] if (r["method"], r["metric"], r["region"]) == (method, metric, "everything")]
    return np.array(row["values"])


def test_intervals_differences_tests_and_ranks_are_over_groups(study, cases):
    names = study["splits"][0]["test"]
    groups = [cases.groups[name] for name in names]
    methods = ("uncalibrated", "ts", "vs")
    values = np.stack([values_of(study, key, "nll") for key in methods], axis=1)
    summary = {row["method"]: row for row in study["summary"] if row["metric"] == "nll"}
    differences = {row["method"]: row for row in study["differences"] if row["metric"] == "nll"}
    tests = compare_pairs(values, groups=groups, baseline=0)
    for m, key in enumerate(methods):
        shown = [(summary[key], values[:, m])]
        if m:
            shown.append((differences[key], values[:, m] - values[:, 0]))
            assert (differences[key]["p"], differences[key]["p_adjusted"]) == (tests[m - 1].p, tests[m - 1].adjusted)
        for row, own in shown:
            means = reference.cluster_means(own.tolist(), groups, 10_000, np.random.default_rng(0))
            ends = np.quantile(means, [0.025, 0.975])
            assert row["mean"] == pytest.approx(own.mean())
            assert [row["low"], row["high"]] == pytest.approx(ends, abs=0.06 * (ends[1] - ends[0]))
    ranks = next(row for row in study["ranks"] if row["metric"] == "nll")
    assert ranks["friedman"]["n"] == len(set(groups)) == 4
    assert list(ranks["mean_rank"].values()) == pytest.approx(friedman(values, groups=groups).mean_ranks.tolist())


def test_few_groups_are_a_caveat_and_all_groups_are_in_the_results(study, cases):
    assert any("belong to 4 groups. With fewer than 8" in text for text in study["recommendation"]["caveats"])
    assert study["about"]["data"]["groups"] == {"pattern": None, "cases": cases.groups}
    alone = compare(replace(cases, groups=None), ("ts",), **QUICK).document
    assert alone["about"]["data"]["groups"] is None
    assert not any("groups" in text for text in alone["recommendation"]["caveats"])


def test_standard_errors_of_the_choice_are_over_groups(study, cases):
    one = replace(cases, groups=dict.fromkeys(cases.ids[:3], "a") | dict.fromkeys(cases.ids[3:6], "b")
                  | dict.fromkeys(cases.ids[6:], "c"))  # fmt: skip
    found = compare(one, ("ts",), **QUICK).document["recommendation"]["validation_nll"]["ts"]
    assert found["standard_error"] is None  # One validation group says nothing of the next.


def test_voxels_of_a_case_that_several_repeats_test_are_counted_once(cases):
    cases = replace(cases, groups=None)
    document = compare(cases, ("ts",), 3, **QUICK).document
    tested = {name for split in document["splits"] for name in split["test"]}
    assert sum(len(split["test"]) for split in document["splits"]) == 3 * len(tested)
    expected = evaluate(cases.select(sorted(tested)), metrics=[Column("nll"), Column("ba-ece")])
    voxels = sum(expected.reliability["everything"]["top"]["count"])
    assert {row["compared"] for row in document["flips"]} == {0, voxels}
    for row in document["reliability"]:
        if (row["region"], row["class"]) == ("everything", None):
            assert sum(row["count"]) == voxels
    # Uncalibrated scores are the same in every repeat, so that counting once gives exactly these.
    bins = next(row for row in document["reliability"] if (row["method"], row["class"]) == ("uncalibrated", None))
    assert bins["count"] == expected.reliability["everything"]["top"]["count"]
    assert sum(row["count"] for row in document["bands"] if row["method"] == "ts") == voxels
    bands = [row for row in document["bands"] if row["method"] == "uncalibrated"]
    nll = sum(row["nll"] * row["count"] for row in bands if row["count"]) / voxels
    assert nll == pytest.approx(expected.value("nll"), rel=1e-9)


def test_cases_are_counted_in_one_part_each_and_evenly(cases):
    parts = [cases[:9], cases[3:12], cases[6:]]
    counted = counted_once(parts)
    for part, names in zip(parts, counted, strict=True):
        assert set(names) <= set(part.ids)
    assert sorted(name for names in counted for name in names) == sorted(cases.ids)
    assert [len(names) for names in counted] == [6, 6, 6]
    assert [len(names) for names in counted_once([cases] * 3)] == [6, 6, 6]


def test_the_order_of_groups_and_cases_is_that_of_the_table(cases):
    found = evaluate(cases[:6], metrics=("nll",))
    own = Evaluation(found.rows)
    table = Table.of([{"uncalibrated": own}], [("nll", "everything")], dict(cases.groups))
    assert table.groups == ("patient 0",) * 3 + ("patient 1",) * 3
