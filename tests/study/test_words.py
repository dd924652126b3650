"""The advice in words: harm is called harm, the criterion is named, and shifted cases have a say."""

import math
from dataclasses import replace

import numpy as np
import pytest

from segcal.errors import InputError
from segcal.study import compare
from segcal.study.advice.choice import Choice, Shift, is_robust
from segcal.study.advice.words import Evidence, caveats, headline, sentences, shift_caveats, shift_sentence
from segcal.study.summary.table import Table, differences
from segcal.synthetic import Temperature, scenes

CASES = 174
COLUMNS = (("nll", "everything"), ("ece", "everything"))


def rows(values, baseline="uncalibrated", cases=CASES):
    """Tables of means and differences from ``{method: (nll, ece)}``: cases vary, each method by itself a little."""
    random = np.random.default_rng(0)
    hardness = random.normal(0, 0.003, (cases, 1, 2))
    noise = random.normal(0, 0.004, (cases, len(values), 2))
    hardness, noise = hardness - hardness.mean(0), noise - noise.mean(0)  # so that the means are those asked for
    table = Table(tuple(values), COLUMNS, np.array(list(values.values()))[None] + hardness + noise)
    means = {
        (key, metric): {"mean": float(table.values[:, m, k].mean()), "low": 0.0, "high": 1.0, "n": cases}
        for m, key in enumerate(values)
        for k, (metric, _) in enumerate(COLUMNS)
    }
    return means, {(row["method"], row["metric"]): row for row in differences(table, 0, baseline)}


def evidence_of(values, method, shift=(), cases=CASES):
    summary, changes = rows(values, cases=cases)
    names = {"name": "Some method", "translation_invariant": True, "status": "ok", "preserves": "order"}
    return Evidence(
        methods={key: {**names, "pooling": None, "parameters": 3} for key in values},
        summary=summary,
        differences=changes,
        beside=rows(values, method, cases)[1],
        flips={key: {"harmful": 0, "beneficial": 0, "neutral": 0, "compared": 9} for key in values},
        diagnosis={"set": {"verdict": "overconfident"}, "gauge": {"risk": "none", "free_energy_std": 0.0}},
        cases=20,
        voxels={"0": 10_000},
        validation={"low": 0.0, "high": 1.0},
        shift=shift,
    )


def chosen(method, values):
    nll = {"mean": 0.4, "standard_error": 0.01, "minus_best": 0.0, "minus_best_standard_error": 0.0}
    return Choice(method, method, tuple(values), dict.fromkeys(values, nll))


def test_a_recommended_calibrator_that_makes_ece_worse_is_said_to():
    values = {"uncalibrated": (0.45, 0.0116), "ts": (0.44, 0.0148), "cms-op": (0.42, 0.0149)}
    evidence, choice = evidence_of(values, "cms-op"), chosen("cms-op", values)
    told = headline(choice, evidence)
    name = "Some method, chosen by NLL on the validation cases,"
    lowered = f"{name} lowers NLL by 7% on the test cases and changes no labels."
    assert told[1] == {"text": lowered, "tone": "plain"}
    assert told[2] == {"text": told[2]["text"], "tone": "worse"}
    assert told[2]["text"] == "ECE gets worse, from 0.0116 to 0.0149."
    (said,) = [text for text in sentences(choice, evidence) if text.startswith("ECE gets worse")]
    row = evidence.differences["cms-op", "ece"]
    assert row["low"] > 0
    assert f"lower in {row['lower']} of {CASES} cases" in said
    (caveat,) = [text for text in caveats(choice, evidence) if text.startswith("By ECE")]
    assert "cms-op is 3rd of 3" in caveat
    everything = " ".join([*(one["text"] for one in told), *sentences(choice, evidence)])
    assert "certain" not in everything


def test_a_method_that_takes_away_more_ece_is_named_beside():
    values = {"uncalibrated": (0.45, 0.0500), "ts": (0.44, 0.0255), "cms-op": (0.42, 0.0310), "dc": (0.41, 0.001)}
    choice = chosen("cms-op", {key: own for key, own in values.items() if key != "dc"})  # dc is not allowed
    told = headline(choice, evidence_of(values, "cms-op"))
    assert told[2]["text"].startswith("ECE falls by 38%, from 0.0")
    assert told[2]["text"].endswith("; ts would lower it by 49%.")
    assert told[2]["tone"] == "plain"


def test_without_a_sure_change_nothing_is_claimed():
    values = {"uncalibrated": (0.45, 0.0500), "ts": (0.45, 0.0500)}
    told = headline(chosen("ts", values), evidence_of(values, "ts"))
    assert "which may be chance" in told[1]["text"]
    assert told[2]["text"].startswith("ECE shows no clear change")
    worse = headline(chosen("ts", values), evidence_of({**values, "ts": (0.46, 0.04)}, "ts"))
    assert "raises NLL on the test cases, from 0.4500 to 0.4600" in worse[1]["text"]
    assert worse[1]["tone"] == "worse"


def test_one_test_case_is_no_evidence_either_way():
    values = {"uncalibrated": (0.45, 0.0500), "ts": (0.15, 0.0100)}
    told = headline(chosen("ts", values), evidence_of(values, "ts", cases=1))
    assert told[1]["text"].endswith("takes NLL from 0.4500 to 0.1500 on the only test case and changes no labels.")
    assert told[2]["text"] == "ECE goes from 0.0500 to 0.0100."


def test_nothing_is_said_of_ba_ece_where_there_is_no_boundary():
    values = {"uncalibrated": (0.45, 0.0500), "ts": (0.15, 0.0100)}
    evidence = evidence_of(values, "ts", cases=1)
    undefined = {**evidence.differences["ts", "ece"], "mean": math.nan, "low": math.nan}
    evidence.differences["ts", "ba-ece"] = undefined
    assert not any("nan" in text for text in sentences(chosen("ts", values), evidence))


def test_leaving_the_scores_as_they_are_says_why():
    values = {"uncalibrated": (0.45, 0.05), "ts": (0.45, 0.05)}
    evidence = evidence_of(values, "uncalibrated")
    for candidates, left_out, says in (
        (("uncalibrated", "ts"), (), "one standard error and by more than 0.0001 nats"),
        (("uncalibrated",), (), "no other allowed method"),
        (("uncalibrated",), ("ts",), "fails or loses on shifted cases"),
    ):
        choice = Choice("uncalibrated", "uncalibrated", candidates, chosen("ts", values).validation_nll, left_out)
        for texts in ([one["text"] for one in headline(choice, evidence)], sentences(choice, evidence)):
            assert "Leave the scores uncalibrated" in texts[1]
            assert says in texts[1]


@pytest.mark.parametrize(("other", "told"), [(0.5, True), (0.85, True), (0.95, False), (math.nan, False)])
def test_a_reader_is_told_of_a_method_with_a_clearly_lower_ece(other, told):
    values = {"uncalibrated": (3.0, 3.0), "ts": (1.0, 1.0), "isotonic": (1.0, other), "dc": (1.0, 0.1)}
    choice = chosen("ts", ("uncalibrated", "ts", "isotonic"))
    found = [text for text in caveats(choice, evidence_of(values, "ts")) if text.startswith("By ECE")]
    assert ["isotonic may be the better choice" in text for text in found] == [True] * told


def test_a_lower_ece_that_may_be_chance_is_not_named():
    values = {"uncalibrated": (0.45, 0.0500), "ts": (0.44, 0.0005), "cms-op": (0.42, 0.0006)}
    told = headline(chosen("cms-op", values), evidence_of(values, "cms-op"))
    assert "ts" not in told[2]["text"]


def shift_of(values, name="scanner B"):
    """What a shifted set says of ``{method: (nll, ece)}``."""
    summary, changes = rows(values)
    against = rows(values, "ts")[1] if "ts" in values else {}
    return Shift(name, summary, changes, against)


SHIFTED = {"uncalibrated": (0.682, 0.071), "ts": (0.645, 0.047), "cms-op": (0.669, 0.062), "ets": (0.64505, 0.047)}


def test_who_loses_to_ts_on_shifted_cases_is_said_with_its_numbers():
    one = shift_of(SHIFTED)
    assert {key: one.loses_to(key) for key in SHIFTED} == {
        "uncalibrated": ["ts"], "ts": [], "cms-op": ["ts"], "ets": []
    }  # fmt: skip
    text = shift_sentence("cms-op", one)
    for part in ("On scanner B (174 cases)", "0.6820 uncalibrated", "0.6450 with ts", "0.6690 with cms-op", "0.0620"):
        assert part in text
    assert "cms-op loses to ts there (NLL +0.0240, 95% interval +0.02" in text
    assert "cms-op is better than no calibration there (NLL -0.0130" in text
    (caveat,) = shift_caveats("cms-op", [one], "ts")
    assert caveat.startswith("cms-op loses to ts on scanner B: NLL +0.0240")
    assert caveat.endswith("With --robust, ts would be recommended.")
    assert shift_caveats("ts", [one], "ts") == []
    assert [is_robust(key, [one]) for key in SHIFTED] == [True, True, False, True]
    assert not is_robust("dc", [one])  # It failed there.
    values = {"uncalibrated": (0.45, 0.05), "ts": (0.44, 0.03), "cms-op": (0.42, 0.03), "dc": (0.42, 0.03)}
    told = headline(chosen("cms-op", values), evidence_of(values, "cms-op", shift=[one]))
    assert told[3] == {
        "text": "On scanner B, its NLL is 0.6690, higher than 0.6450 with ts.",
        "tone": "worse",
    }
    assert len(headline(chosen("ts", values), evidence_of(values, "ts", shift=[one]))) == 3
    assert headline(chosen("dc", values), evidence_of(values, "dc", shift=[one]))[3]["text"].endswith("it failed.")
    assert "failed" in shift_sentence("dc", one)


def test_less_than_the_eye_can_see_is_no_loss():
    """A map that is ts up to rounding must not be called worse for it, however sure the sign is."""
    values = np.tile([[1, 1], [0.5, 0.5], [0.50001, 0.5]], (20, 1, 1))
    table = Table(("uncalibrated", "ts", "twin"), COLUMNS, values)
    found = {(row["method"], row["metric"]): row for row in differences(table, 0, "ts")}
    assert found["twin", "nll"]["verdict"] == "worse"
    one = Shift("x", {("twin", "nll"): {}}, {}, found)
    assert one.loses_to("twin") == []


def test_differences_count_the_cases_and_say_what_the_interval_says():
    values = np.zeros((6, 2, 2))
    values[:, 1] = np.array([[-1, -1, -1, -1, -1, 0], [1, 1, 1, 1, 1, -1]]).T
    table = Table(("uncalibrated", "m"), (("nll", "everything"), ("dsc", "everything")), values)
    nll, dsc = differences(table, 0)
    assert (nll["lower"], nll["higher"], nll["verdict"]) == (5, 0, "better")
    assert (dsc["lower"], dsc["higher"], dsc["n"]) == (1, 5, 6)
    swapped = Table(("uncalibrated", "m"), table.columns, values[:, ::-1])
    assert differences(swapped, 0)[0]["verdict"] == "worse"


def test_on_a_shift_that_undoes_calibration_robust_leaves_the_scores_alone():
    cases = scenes(9, size=(32, 40), plant=[Temperature(3.0)])
    fine = scenes(20, size=(32, 40), seed=5)[9:]  # calibrated as they are, other names: to correct it can only harm
    options = {"tune": "none", "metrics": ("nll", "ece"), "regions": ("everything",)}
    free = compare(cases, ("ts", "vs"), 1, **options, shifted={"fine": fine})
    assert free.recommendation["method"] == "ts"
    (caveat,) = [text for text in free.recommendation["caveats"] if "loses to uncalibrated on fine" in text]
    assert "With --robust, uncalibrated would be recommended" in caveat
    robust = compare(cases, ("ts", "vs"), 1, **options, shifted={"fine": fine}, robust=True)
    assert robust.recommendation["method"] == "uncalibrated"
    assert robust.recommendation["left_out"] == ["ts"]  # vs may move labels and was not allowed anyway.
    assert robust.recommendation["shown"] == "ts"
    assert robust.document["about"]["settings"]["robust"] is True
    entry = robust.document["shift"][0]
    assert {(row["method"], row["baseline"]) for row in entry["differences"]} == {
        ("ts", "uncalibrated"), ("vs", "uncalibrated"), ("vs", "ts"), ("uncalibrated", "ts")
    }  # fmt: skip
    with pytest.raises(InputError, match="robust without shifted cases"):
        compare(cases, ("ts",), 1, **options, robust=True)


def test_several_test_cases_of_one_group_are_not_called_one():
    values = {"uncalibrated": (0.45, 0.0500), "ts": (0.15, 0.0100)}
    evidence = evidence_of(values, "ts", cases=1)
    for row in (*evidence.differences.values(), *evidence.summary.values()):
        row["n"] = 3
    for row in evidence.summary.values():
        row["low"] = row["high"] = math.nan
    told = headline(chosen("ts", values), evidence)
    assert "on the 3 test cases, which are one group" in told[1]["text"]
    said = sentences(chosen("ts", values), evidence)
    assert not any("one test case" in text or "95% intervals" in text for text in said)
    assert any("test cases of one group cannot show" in text for text in said)


def test_the_best_of_the_allowed_methods_is_not_called_the_best_of_all():
    values = {"uncalibrated": (0.45, 0.05), "ts": (0.44, 0.04), "cms-op": (0.44, 0.04), "dc": (0.3, 0.03)}
    choice = chosen("ts", {key: own for key, own in values.items() if key != "dc"})
    (why,) = [text for text in sentences(replace(choice, best="cms-op"), evidence_of(values, "ts")) if "lowest" in text]
    assert why.startswith("Of the allowed methods, cms-op has the lowest NLL")
