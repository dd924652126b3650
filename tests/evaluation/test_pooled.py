"""Pooled values have intervals by a bootstrap over cases, or groups, of what each case adds."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from tests.reference import inference as reference

from multilabel import channels, stacked
from segcal.evaluation.evaluate import evaluate
from segcal.evaluation.results import Results
from segcal.metrics import METRICS
from segcal.metrics.additive import ADDITIVE
from segcal.synthetic import Temperature, scenes

CASES = scenes(12, size=(32, 40), plant=[Temperature(2.0)], ignored=0.05)
EVERYTHING = "everything"


def ends(results, metric="ece", region=EVERYTHING, channel=""):
    (row,) = (row for row in results.summary() if (row.metric, row.region, row.channel) == (metric, region, channel))
    return row.pooled_low, row.pooled_high


def ece_of_bins(total):
    """ECE of the sums of 15 bins: confidence, then correct, then count."""
    confidence, correct, count = np.reshape(total, (3, 15))
    return np.abs(confidence - correct).sum() / count.sum()


def kept_bins(results):
    """The sums of every case, as the reliability data have them."""
    kept = results.reliability[EVERYTHING]["cases"]
    return [[*own["confidence"], *own["correct"], *own["count"]] for own in kept.values()], list(kept)


@pytest.mark.parametrize("size", [1, 3])
def test_the_interval_of_pooled_ece_is_that_of_a_plain_bootstrap_of_the_bins(size):
    groups = {name: f"patient {i // size}" for i, name in enumerate(CASES.ids)}
    results = evaluate(replace(CASES, groups=groups if size > 1 else None), metrics=("ece",))
    sums, names = kept_bins(results)
    drawn = reference.pooled_values(sums, [groups[name] for name in names], ece_of_bins, 8000, np.random.default_rng(1))
    low, high = ends(results)
    bias = max(0.0, np.mean(drawn) - results.value("ece"))
    expected = np.quantile(drawn, [0.025, 0.975]) - [2 * bias, bias]
    assert [low, high] == pytest.approx(expected, abs=0.06 * (high - low))
    assert low < results.value("ece") < high


def test_the_metrics_that_promise_one_have_an_interval_and_the_others_none():
    results = evaluate(CASES, metrics=list(METRICS), regions=(EVERYTHING, "boundary", "local"))
    for row in results.summary():
        # Without a calibrator, no label is compared with one before.
        promised = row.metric in ADDITIVE and row.metric != "flip" and not row.region.startswith("local")
        assert math.isnan(row.pooled_low) == math.isnan(row.pooled_high) == (not promised), row
        if promised:
            assert row.pooled_low <= row.pooled <= row.pooled_high


def test_files_change_nothing(tmp_path):
    one = evaluate(CASES, regions=(EVERYTHING, "boundary"))
    assert len(one.pooled_intervals) == 16
    one.to_json(tmp_path / "results.json")
    again = Results.from_json(tmp_path / "results.json")
    assert again.pooled_intervals == one.pooled_intervals
    assert again.summary() == one.summary()


def test_results_of_earlier_versions_have_no_intervals(tmp_path):
    content = json.loads(evaluate(CASES, metrics=("nll",)).to_json())
    del content["pooled_intervals"]
    (tmp_path / "old.json").write_text(json.dumps({**content, "version": 3}))
    row = Results.from_json(tmp_path / "old.json").summary()[0]
    assert math.isnan(row.pooled_low)
    assert row.low < row.mean < row.high


def test_one_case_or_one_group_has_no_interval():
    alone = evaluate(CASES.select(CASES.ids[:1]), metrics=("nll", "ece"))
    together = evaluate(replace(CASES, groups=dict.fromkeys(CASES.ids, "a")), metrics=("nll", "ece"))
    for results in (alone, together):
        assert not results.pooled_intervals
        assert all(math.isnan(end) for end in ends(results))


def test_a_region_that_one_case_alone_has_gets_no_interval():
    first = CASES.ids[0]
    results = evaluate(CASES, metrics=("nll",), masks={"marked": lambda case: case.valid & (case.id == first)})
    assert results.value("nll", "marked") == results.value("nll", case=first)
    assert math.isnan(ends(results, "nll", "marked")[0])
    assert not math.isnan(ends(results, "nll")[0])


def test_channels_have_their_own_intervals_and_their_mean_has_one():
    parts = channels(6, {"liver": 1.0, "tumour": 4.0}, size=(32, 40))
    results = evaluate(stacked(**parts), metrics=("nll", "ece"))
    for name, own in parts.items():
        assert ends(results, channel=name) == ends(results.channel(name)) == ends(evaluate(own, metrics=("ece",)))
    (low, high), spans = ends(results, "nll"), [ends(results, "nll", channel=name) for name in parts]
    assert low < results.value("nll") < high
    # The mean of intervals from the same draws holds the interval of the mean.
    assert np.mean(spans, axis=0)[0] <= low
    assert high <= np.mean(spans, axis=0)[1]


def test_a_case_keeps_little_however_many_voxels_it_has():
    small, large = (evaluate(scenes(2, size=size), regions=(EVERYTHING, "boundary")) for size in ((32, 40), (128, 160)))
    sizes = [{key: own.shape for key, own in results.sums.items()} for results in (small, large)]
    assert sizes[0] == sizes[1]
    assert sum(own.nbytes for own in large.sums.values()) < 2 * 10_000


def test_too_many_numbers_a_case_give_no_interval():
    results = evaluate(CASES, metrics=("cece[num_bins=1000]", "cece"))
    assert math.isnan(ends(results, "cece[num_bins=1000]")[0])
    assert not math.isnan(ends(results, "cece")[0])
