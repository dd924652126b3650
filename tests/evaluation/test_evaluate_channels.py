"""Multi-label data are measured channel by channel; what has no channel is the mean over them, and says so."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import segcal
from datasets import nnunet
from multilabel import channels, stacked
from segcal import plots
from segcal.calibrators import CALIBRATORS
from segcal.cases import write_dataset
from segcal.errors import InputError
from segcal.evaluation.evaluate import evaluate, evaluate_many
from segcal.evaluation.plan import Plan
from segcal.evaluation.results import POOLED, Results, Row

PARTS = channels(3, {"liver": 1.0, "tumour": 4.0, "vein": 0.4}, size=(40, 48), ignored=0.05)
CASES = stacked(**PARTS)
METRICS = ("nll", "ece", "cece", "ba-ece", "dsc", "hd95", "confidence-balance")
OPTIONS = {"metrics": METRICS, "regions": ("everything", "boundary", "local")}


@pytest.fixture(scope="module")
def results():
    return evaluate(CASES, **OPTIONS)


def assert_same_rows(rows, others):
    assert [row[:3] for row in rows] == [row[:3] for row in others]
    for row, other in zip(rows, others, strict=True):
        assert row.value == pytest.approx(other.value, rel=0, abs=0, nan_ok=True)
        assert (row.count, row.missed) == (other.count, other.missed)


def test_each_channel_is_measured_as_if_it_were_alone(results):
    assert results.channels == tuple(PARTS)
    for k, (name, own) in enumerate(PARTS.items()):
        alone, channel = evaluate(own, **OPTIONS), results.channel(name)
        assert_same_rows(channel.rows, alone.rows)
        assert_same_rows([row for row in results.rows if row.channel == name], alone.rows)
        assert channel.reliability == alone.reliability
        assert channel.diagnosis == alone.diagnosis
        assert channel.summary() == alone.summary()
        assert_same_rows(evaluate(CASES.channel(k), **OPTIONS).rows, alone.rows)
        assert results.value("nll", "boundary", channel=name) == alone.value("nll", "boundary")
        assert results.values("ece", channel=name) == alone.values("ece")


def test_rows_without_a_channel_are_means_over_channels(results):
    for case in (POOLED, *CASES.ids):
        for metric in ("nll", "ece", "dsc"):
            values = [results.value(metric, case=case, channel=name) for name in PARTS]
            assert results.value(metric, case=case) == pytest.approx(np.mean(values))
    assert {row.count for row in results.rows if not row.channel} <= {0, 1, 2, 3}
    assert [row.channel for row in results.summary()][:: len(results.summary()) // 4] == ["", *PARTS]


def test_undefined_channels_are_left_out_of_the_mean_and_counted():
    nothing = channels(2, {"x": 1.0}, size=(20, 24), ignored=1.0)["x"]
    own = channels(2, {"a": 2.0}, size=(20, 24))["a"]
    results = evaluate(stacked(a=own, x=nothing), metrics=("nll",))
    assert results.value("nll") == results.value("nll", channel="a")
    assert math.isnan(results.value("nll", channel="x"))
    assert {row.count for row in results.rows if not row.channel} == {1}


def test_over_and_underconfident_channels_are_mixed_and_not_balanced(results):
    found = results.diagnosis
    assert [found["channels"][name]["set"]["verdict"] for name in PARTS] == [
        "balanced", "overconfident", "underconfident",
    ]  # fmt: skip
    assert found["set"]["verdict"] == "mixed"
    mean = np.mean([found["channels"][name]["set"]["balance"] for name in PARTS])
    assert found["set"]["balance"] == pytest.approx(mean)
    alike = stacked(a=PARTS["tumour"], b=PARTS["tumour"])
    assert evaluate(alike, metrics=("nll",)).diagnosis["set"]["verdict"] == "overconfident"


@pytest.mark.parametrize("name", ["ts", "ets", "lts", "ensemble"])
def test_calibrators_of_channels_are_seen(name):
    parts = channels(2, {"a": 1.0, "b": 4.0}, size=(20, 24), members=3, member_noise=2.0)
    cases = stacked(**parts)
    calibrator = CALIBRATORS[name](**({"epochs": 1} if name == "lts" else {})).fit(cases)
    many = evaluate_many(Plan.make(("nll", "flip")), cases, {"before": None, "after": calibrator})
    for channel, own, part in zip(parts, calibrator.channels, parts.values(), strict=True):
        assert_same_rows(many["after"].channel(channel).rows, evaluate(part, own, metrics=("nll", "flip")).rows)
        assert_same_rows(many["before"].channel(channel).rows, evaluate(part, metrics=("nll", "flip")).rows)


def test_functions_see_every_channel():
    halved = evaluate(CASES, lambda z: (z / 2).log_softmax(1), metrics=("nll",))
    for name, own in PARTS.items():
        expected = evaluate(own, lambda z: (z / 2).log_softmax(1), metrics=("nll",))
        assert_same_rows(halved.channel(name).rows, expected.rows)


def test_exact_bins_know_channels():
    options = {"metrics": ("ace-adaptive", "nll"), "exact": True}
    once = evaluate(CASES, **options)
    for name, own in PARTS.items():
        assert_same_rows(once.channel(name).rows, evaluate(own, **options).rows)


def test_masks_are_asked_for_every_channel():
    seen = []

    def inside(case):
        seen.append(case.shape)
        return case.labels == 1

    results = evaluate(CASES, metrics=("nll",), masks={"inside": inside})
    assert set(seen) == {(1, 2, 40, 48)}
    expected = evaluate(PARTS["vein"], metrics=("nll",), masks={"inside": inside})
    assert results.value("nll", "inside", channel="vein") == expected.value("nll", "inside")


def test_files_carry_the_channel(results, tmp_path):
    results.to_json(tmp_path / "r.json")
    again = Results.from_json(tmp_path / "r.json")
    assert again.to_json() == results.to_json()
    assert again.channels == results.channels
    assert_same_rows(again.channel("vein").rows, results.channel("vein").rows)
    results.to_csv(tmp_path / "r.csv")
    head, *lines = (tmp_path / "r.csv").read_text().splitlines()
    assert head.endswith(",channel,low,high")
    assert sum(",tumour," in line for line in lines) == len(results.channel("tumour").rows)


@pytest.mark.parametrize("version", [1, 2])
def test_earlier_results_are_read(version, tmp_path):
    results = evaluate(PARTS["liver"], metrics=("nll", "ece"))
    content = json.loads(results.to_json())
    content["version"] = version
    width = {1: 5, 2: 6}[version]
    content["columns"] = content["columns"][:width]
    content["rows"] = [row[:width] for row in content["rows"]]
    if version == 1:
        content["rows"] = [["(pooled)" if row[0] is None else row[0], *row[1:]] for row in content["rows"]]
    (tmp_path / "r.json").write_text(json.dumps(content))
    again = Results.from_json(tmp_path / "r.json")
    assert_same_rows(again.rows, results.rows)
    assert again.value("nll") == results.value("nll")
    assert again.channels == ()


def test_wrong_channels_are_refused(results):
    with pytest.raises(InputError, match="channel 'lung'; expected one of liver, tumour, vein"):
        results.channel("lung")
    with pytest.raises(InputError, match="in channel 'lung'"):
        results.value("nll", channel="lung")
    with pytest.raises(InputError, match="expected one of none"):
        Results((Row("a", "everything", "nll", 1.0, 1),)).channel("lung")


def test_errors_name_the_channel():
    def broken(logits):
        return (
            logits * torch.nan if float(logits[0, 1].mean()) == float(PARTS["vein"][0].logits[0, 1].mean()) else logits
        )

    with pytest.raises(InputError, match="case 'image-000', channel 'vein': NaN"):
        evaluate(CASES, broken, metrics=("nll",))


def test_diagrams_are_drawn_for_every_channel(results):
    first = {name: {"everything": own["everything"]} for name, own in results.reliability.items()}
    names = [name for name, _ in plots.reliability_figures(replace(results, reliability=first))]
    assert names[:2] == ["channel-0/reliability-everything", "channel-0/classes-everything"]
    assert len(names) == 3 * 2


def test_regions_of_nnunet(tmp_path):
    predictions, truth = nnunet(tmp_path, classes=2, regions={"whole": [1, 2], "core": [2]})
    cases = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))
    results = evaluate(cases, metrics=("nll", "dsc"))
    assert results.channels == ("whole", "core")
    for k, name in enumerate(results.channels):
        losses, count = 0.0, 0
        for case in cases:
            log_p = case.logits[k].double().log_softmax(0)
            losses -= float(log_p.gather(0, case.labels[k][None])[0][case.valid[k]].sum())
            count += int(case.valid[k].sum())
        assert results.value("nll", channel=name) == pytest.approx(losses / count, rel=1e-6)
        assert next(row for row in results.rows if row.channel == name and row.case is POOLED).count == count


def test_the_command_prints_every_channel_and_the_mean(run, tmp_path):
    write_dataset(stacked(**channels(4, {"liver": 1.0, "tumour": 4.0}, size=(32, 40))), tmp_path / "data")
    code, out, _ = run("evaluate", tmp_path / "data", "--metrics", "nll,ece", "-o", tmp_path / "r.json")
    assert code == 0
    titles = ["liver", "tumour", "mean over 2 channels"]
    assert [line for line in out.splitlines() if line in titles] == titles
    assert "mixed: balanced in liver, overconfident in tumour" in out
    assert "free-energy" not in out  # which is advice on offsets, and sigmoid scores have none
    assert Results.from_json(tmp_path / "r.json").channels == ("liver", "tumour")
    code, out, _ = run("fit", tmp_path / "data", "--test", "0.5", "-o", tmp_path / "c.safetensors")
    assert code == 0
    assert "map: liver: T = " in out
    assert "; tumour: T = " in out
    code, out, _ = run("evaluate", tmp_path / "data", "--calibrator", tmp_path / "c.safetensors", "--metrics", "nll")
    assert code == 0
    assert "balanced in every channel" in out
