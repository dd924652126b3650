"""Every option given in brackets changes what is computed, or is refused by name."""

import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

import segcal
from datasets import plain
from segcal.errors import InputError
from segcal.evaluation.evaluate import evaluate
from segcal.evaluation.plan import parse_metric
from segcal.evaluation.results import plain as plain_values
from segcal.metrics import METRICS, Column, options_of

# Two values of each option that must give different numbers.
PAIRS = {
    "num_bins": (3, 40),
    "threshold": (0.02, 0.3),
    "binning": ("mass", "width"),
    "divide": (False, True),
    "reduction": ("mean", "sum"),
    "background": (True, False),
    "kind": ("harmful", "beneficial"),
    "tolerance": (0.0, 1.5),
    "predicted": (0, 2),
    "absent": ("nan", "one"),
}
OPTIONS = [(id, name) for id, spec in METRICS.items() for name in options_of(spec.function)]


def values_of(option, id):
    return ("diagonal", 3.0) if option == "absent" and id in ("hd95", "asd") else PAIRS[option]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Five classes: class 3 is never predicted, class 4 is in neither prediction nor labels."""
    root = plain(tmp_path_factory.mktemp("options"), count=2, classes=5, shape=(12, 14))
    for i in range(2):
        scores = np.load(root / "logits" / f"case{i}.npy")
        scores[3:] = -20
        np.save(root / "logits" / f"case{i}.npy", scores)
        labels = np.load(root / "labels" / f"case{i}.npy")
        np.save(root / "labels" / f"case{i}.npy", np.where(labels == 4, 0, labels))
    return segcal.open_cases(root)


class Rolled(torch.nn.Module):
    """A calibrator that changes labels."""

    spatial = False

    def forward(self, z):
        return (z + torch.tensor([0.0, 2.0, 0.0, 0.0, 0.0]).view(-1, 1, 1)).log_softmax(1)


@pytest.mark.parametrize(("id", "option"), OPTIONS, ids=[f"{id}-{option}" for id, option in OPTIONS])
def test_a_changed_option_changes_the_value(cases, id, option):
    one, other = (f"{id}[{option}={value}]" for value in values_of(option, id))
    results = evaluate(cases, Rolled(), metrics=(one, other))
    assert len({row.metric for row in results.rows}) == 2
    first, second = ([row.value for row in results.rows if row.metric.startswith(id + "[")][k::2] for k in (0, 1))
    assert first != second
    assert not any(map(math.isnan, first + second))


@pytest.mark.parametrize("id", METRICS)
def test_unknown_options_are_refused_with_those_there_are(cases, id):
    known = ", ".join(options_of(METRICS[id].function)) or "no options"
    for request in (f"{id}[nope=1]", f"{id}[region=boundary]", f"{id}[exact=true]", Column(id, options={"nope": 1})):
        with pytest.raises(InputError, match=rf"metric '{id}' has no option '\w+'; expected {known}\."):
            evaluate(cases, metrics=(request,))


@pytest.mark.parametrize("text", ["abc", "nan", "0", "-3", "1e9", "1000000000", "2.5", "inf", "true", "15.0"])
def test_numbers_of_bins_are_whole_and_within_bounds(cases, text):
    says = rf"option num_bins of metric 'ece' is '{text}'; expected a whole number from 1 to 4096"
    with pytest.raises(InputError, match=says):
        evaluate(cases, metrics=(f"ece[num_bins={text}]",))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tace[threshold=0]", "option threshold of metric 'tace' is '0'; expected a number between 0 and 1"),
        ("tace[threshold=1]", "expected a number between 0 and 1"),
        ("tace[threshold=nan]", "expected a number between 0 and 1"),
        ("tace[binning=both]", "is 'both'; expected 'mass' or 'width'"),
        ("sce[divide=yes]", "is 'yes'; expected true or false"),
        ("hd95[absent=-1]", "expected 'diagonal' or 'infinite' or 'skip' or a number of 0 or more"),
        ("hd95[absent=inf]", "expected 'diagonal' or 'infinite' or 'skip' or a number of 0 or more"),
        ("surface-dice[tolerance=nan]", "expected a number of 0 or more"),
        ("confidence-balance[predicted=5]", "predicted is 5; expected a class, 0 to 4"),
        ("confidence-balance[predicted=-1]", "expected a whole number of 0 or more"),
        (
            "ece[num_bins]",
            r"metric is 'ece\[num_bins\]'; .*ece\[option=value,...\].*of ece are num_bins",
        ),
        ("ece[num_bins=]", r"expected ece\[option=value,...\]"),
        ("ece[=5]", r"expected ece\[option=value,...\]"),
        ("ece[]", r"expected ece\[option=value,...\]"),
        ("ece[num_bins=5,]", r"expected ece\[option=value,...\]"),
        ("ece[num_bins=5,num_bins=6]", "each option once"),
        ("ece[", r"metric is 'ece\['; expected an id, or id\[option=value,...\]"),
        ("ece]", "expected an id"),
        ("", "expected an id"),
        ("ece[num_bins=5][num_bins=6]", "expected an id"),
    ],
)
def test_mistakes_are_named(cases, text, says):
    with pytest.raises(InputError, match=f"(?s){says}"):
        evaluate(cases, metrics=(text,))
    with pytest.raises(InputError):
        segcal.compare(cases, methods=("ts",), metrics=(text,))


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (Column("hd95", "boundary"), "metric 'hd95' in region 'boundary'; expected surfaces of whole cases"),
        (Column("hd95", aggregation="pooled"), "pooled; expected a value for every image"),
        (Column("ece", "local", "pooled"), "pooled; expected a value for every image"),
        (Column("ece", options={"num_bins": 2.5}), "option num_bins of metric 'ece' is 2.5"),
        (Column("ece", options={"num_bins": True}), "option num_bins of metric 'ece' is True"),
    ],
)
def test_columns_are_checked_too(cases, column, says):
    with pytest.raises(InputError, match=says):
        evaluate(cases, metrics=(column,))


def test_nothing_asked_for_is_an_error(cases, run):
    with pytest.raises(InputError, match="nothing was asked for"):
        evaluate(cases, metrics=())
    with pytest.raises(InputError, match="nothing was asked for"):
        evaluate(cases, metrics=("ece",), regions=())


@pytest.mark.parametrize("text", ["", ",", "ece[num_bins=abc]", "ece["])
def test_the_command_fails_without_a_traceback(run, tmp_path, text):
    root = plain(tmp_path / "in", count=1)
    code, shown, error = run("evaluate", root, "--metrics", text, "-o", tmp_path / "r.json")
    assert (code, shown) == (1, "")
    assert "expected" in error
    assert not (tmp_path / "r.json").exists()


def test_aggregation_decides_which_rows_there_are(cases):
    columns = (Column("ece", aggregation="pooled"), Column("nll", aggregation="per-image"), Column("brier"))
    results = evaluate(cases, metrics=columns, exact=True)
    found = {metric: [row.case for row in results.rows if row.metric == metric] for metric in ("ece", "nll", "brier")}
    assert found == {"ece": [None], "nll": [*cases.ids], "brier": [*cases.ids, None]}
    both = evaluate(cases, metrics=("ece", "nll", "brier"))
    assert set(results.rows) < set(both.rows)


def test_a_metric_asked_for_twice_is_counted_once(cases):
    once, twice = (evaluate(cases, metrics=("ece",) * k) for k in (1, 2))
    assert once.rows == twice.rows
    assert once.summary()[0].cases == len(cases)


def test_only_what_was_asked_for_has_rows(cases):
    results = evaluate(cases, metrics=("ece",))
    assert {row.metric for row in results.rows} == {"ece"}
    asked = evaluate(cases, metrics=("ece", "confidence-balance", "free-energy-std"))
    assert plain_values(results.diagnosis) == plain_values(asked.diagnosis)
    spreads = asked.values("free-energy-std")
    assert results.diagnosis["gauge"]["free_energy_std"] == pytest.approx(np.mean([*spreads.values()]))
    assert results.diagnosis["set"]["balance"] == asked.value("confidence-balance")


def test_thresholds_of_several_columns_do_not_disturb_each_other(cases):
    names = ("tace", "tace[threshold=0.0001]", "tace[threshold=0.05]", "cece", "ace-adaptive")
    together = evaluate(cases, metrics=names)
    for name in names:
        alone = evaluate(cases, metrics=(name,)).value(name)
        assert together.value(name) == pytest.approx(alone, abs=2e-3 if name == "ace-adaptive" else 1e-6)
    assert together.value("tace") == pytest.approx(together.value("tace[threshold=0.0001]"), abs=0.05)


@pytest.mark.parametrize("bins", [1, 1000, 4096])
def test_any_number_of_bins_that_is_accepted_works_for_every_metric(cases, bins):
    ids = [id for id, spec in METRICS.items() if "num_bins" in options_of(spec.function)]
    results = evaluate(cases, metrics=[f"{id}[num_bins={bins}]" for id in ids])
    assert all(math.isfinite(row.value) for row in results.rows)


def test_options_keep_their_types():
    assert parse_metric(" tace [ num_bins = 5 , binning=width,threshold=1e-2] ") == (
        "tace",
        {"num_bins": 5, "binning": "width", "threshold": 0.01},
    )
    assert parse_metric("sce[divide=True]") == ("sce", {"divide": True})
    assert parse_metric("hd95[absent=30]") == ("hd95", {"absent": 30.0})


def test_the_output_says_how_many_bins(run, tmp_path):
    root = plain(tmp_path / "in", count=2)
    text = run("evaluate", root, "--metrics", "nll,ece,cece,ece[num_bins=50]")[1]
    assert "15 bins: ece, cece\n" in text
    assert "bins:" not in run("evaluate", root, "--metrics", "nll,ece[num_bins=50]")[1]
    assert evaluate(segcal.open_cases(root)).about["bins"] == 15


def test_options_are_shared_and_cannot_be_changed():
    option = options_of(METRICS["ece"].function)["num_bins"]
    assert option is options_of(METRICS["ece"].function)["num_bins"]
    with pytest.raises(FrozenInstanceError):
        option.number = float
