import json
import math

import numpy as np
import pytest

from segcal.evaluation.results import POOLED, Row
from segcal.study.results.study import csv_text, latex_text
from segcal.study.summary import table as summarise
from segcal.study.summary import voxels
from segcal.study.work.tasks import Evaluation

COLUMNS = [("nll", "everything"), ("dsc", "everything"), ("confidence-balance", "everything")]


def evaluation(values, flips=(0, 0, 0), compared=0):
    """An evaluation with these values ``{case: (nll, dsc, balance)}``."""
    rows = [
        Row(case, region, metric, value, 100)
        for case, own in values.items()
        for (metric, region), value in zip(COLUMNS, own, strict=True)
    ]
    rows += [Row(POOLED, region, metric, 0.5, 300) for metric, region in COLUMNS]
    first, *others = values
    for kind, count in zip(("harmful", "beneficial", "neutral"), flips, strict=True):
        share = count / compared if compared else math.nan
        rows += [Row(first, "everything", f"flip[kind={kind}]", share, compared)]
        rows += [Row(case, "everything", f"flip[kind={kind}]", math.nan, 0) for case in others]
    bins = {"top": {"count": [1, 3], "confidence": [0.4, 2.7], "correct": [0, 3]}, "classes": []}
    bands = dict.fromkeys(("band-0-3", "band-3-7", "band-7-15", "band-15-inf"), bins)
    rows += [Row(case, band, "nll", 2.0, 4 * (case == first)) for band in bands for case in values]
    # Every case has 100 voxels; Dice is that of one class.
    sums = np.array([[[100 * own[k], 100.0] for own in values.values()] for k in range(3)])
    overlap = (sums[1] / [2, 1])[:, None]
    kept = dict(zip((("", region, metric) for metric, region in COLUMNS), (sums[0], overlap, sums[2]), strict=True))
    return Evaluation(tuple(rows), {"counted": list(values)}, {"everything": bins, **bands}, sums=kept)


def study(repeats=2, cases=8, seed=0):
    """Two methods on random halves of the cases; method b is better in every metric and case."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(repeats):
        tested = random.choice(cases, cases // 2, replace=False)
        base = {f"c{i}": random.uniform(1, 2, 3) * (1, 0.3, 1) for i in tested}
        better = {case: own + np.array([-0.5, 0.2, -0.9]) for case, own in base.items()}
        found.append({"uncalibrated": evaluation(base), "b": evaluation(better, (1, 2, 3), 300)})
    return found


def test_means_are_over_cases_of_means_over_repeats():
    repeats = study()
    table = summarise.Table.of(repeats, COLUMNS)
    rows = {(row["method"], row["metric"]): row for row in summarise.summary(table, repeats, 0)}
    by_case = {}
    for found in repeats:
        for case, value in found["b"].values("nll").items():
            by_case.setdefault(case, []).append(value)
    row = rows["b", "nll"]
    assert row["mean"] == pytest.approx(np.mean([np.mean(own) for own in by_case.values()]))
    assert row["n"] == len(by_case)
    assert row["low"] < row["mean"] < row["high"]
    assert row["pooled"] == 0.5


def test_pooled_intervals_draw_cases_and_average_repeats():
    repeats = study(repeats=3, cases=12)
    table = summarise.Table.of(repeats, COLUMNS)
    rows = {(row["method"], row["metric"]): row for row in summarise.summary(table, repeats, 0)}
    tested = sorted({case for found in repeats for case in found["b"].values("nll")})
    random, means = np.random.default_rng(5), []
    for _ in range(10_000):
        drawn = [tested[index] for index in random.integers(0, len(tested), len(tested))]
        # Cases are equally large: the pooled value of a repeat is the mean over those of its cases that were drawn.
        own = [
            [found["b"].values("nll")[case] for case in drawn if case in found["b"].values("nll")] for found in repeats
        ]
        means.append(np.mean([np.mean(values) for values in own if values]))
    row = rows["b", "nll"]
    span = row["pooled_high"] - row["pooled_low"]
    expected = np.quantile(means, [0.025, 0.975])
    assert [row["pooled_low"], row["pooled_high"]] == pytest.approx(expected, abs=0.06 * span)
    assert rows["uncalibrated", "dsc"]["pooled_low"] < rows["uncalibrated", "dsc"]["pooled_high"]


def test_the_same_repeat_twice_is_no_more_evidence_than_once():
    once = study(repeats=1)
    for function in (
        lambda r: summarise.summary(summarise.Table.of(r, COLUMNS), r, 0),
        lambda r: summarise.differences(summarise.Table.of(r, COLUMNS), 0),
    ):
        for one, three in zip(function(once), function(once * 3), strict=True):
            for name, value in one.items():
                assert three[name] == (pytest.approx(value) if isinstance(value, float) else value)


def test_differences_are_paired_and_ranks_know_which_way_is_better():
    table = summarise.Table.of(study(), COLUMNS)
    rows = {row["metric"]: row for row in summarise.differences(table, 0)}
    assert rows["nll"]["mean"] == pytest.approx(-0.5)
    assert rows["nll"]["low"] == pytest.approx(-0.5)
    assert rows["nll"]["high"] == pytest.approx(-0.5)
    assert 0 < rows["nll"]["p"] < 0.1
    found = summarise.rankings(table)
    for row in found["ranks"]:
        assert row["mean_rank"] == {"uncalibrated": 2.0, "b": 1.0}
    assert found["sum_rank"] == {"uncalibrated": 6.0, "b": 3.0}
    assert found["mean_case_rank"] == {"uncalibrated": 2.0, "b": 1.0}


def test_counts_of_all_repeats_add_up():
    repeats = study()
    flips = {row["method"]: row for row in voxels.flips(repeats)}
    assert flips["b"] == {"method": "b", "compared": 600, "harmful": 2, "beneficial": 4, "neutral": 6}
    assert flips["uncalibrated"]["compared"] == 0
    bins = voxels.reliability(repeats, ("everything",), bands=False)
    assert [row["count"] for row in bins] == [[2, 6], [2, 6]]
    band = voxels.bands(repeats, "mm")[0]
    assert (band["count"], band["unit"], band["low"], band["high"]) == (8, "mm", 0.0, 3.0)
    assert band["ece"] == pytest.approx((2 * 0.4 + 2 * 0.3) / 8)
    assert band["nll"] == 2.0
    assert band["accuracy"] == 6 / 8


def test_tables_hold_the_numbers_and_what_latex_would_take_for_commands():
    repeats = study()
    rows = summarise.summary(summarise.Table.of(repeats, COLUMNS), repeats, 0)
    rows = [{**row, "method": {"b": r"50%_{a}\&"}.get(row["method"], row["method"])} for row in rows]
    metrics = [
        {"id": "nll", "name": "NLL", "better": "lower"},
        {"id": "dsc", "name": "Dice", "better": "higher"},
        {"id": "confidence-balance", "name": "NLL - entropy", "better": "zero"},
    ]
    document = json.loads(json.dumps({"summary": rows, "metrics": metrics}))
    lines = csv_text(document).splitlines()
    assert len(lines) == 1 + len(rows)
    assert lines[1].startswith("uncalibrated,everything,nll,")
    text = latex_text(document)
    assert r"50\%\_\{a\}\textbackslash{}\&" in text
    bold = [line for line in text.splitlines() if r"\textbf" in line]
    assert len(bold) == 1
    assert bold[0].count(r"\textbf") == 3
    assert text.count("{") - text.count("}") == text.count(r"\{") - text.count(r"\}")
