"""Methods that are the same map share everything, are not tested, and are never preferred to the simpler one."""

import math

import pytest

from segcal.calibrators import CALIBRATORS, TemperatureScaling
from segcal.study import compare
from segcal.study.advice.choice import Candidate, choose
from segcal.synthetic import Temperature, scenes

QUICK = {"tune": "none", "metrics": ("nll", "ece", "dsc", "flip"), "regions": ("everything",)}


class AsTemperature(TemperatureScaling):
    """Temperature scaling that is not fused into the passes, so that its values are rounded in another way."""

    id = "as-ts"
    spatial = False

    @property
    def score_map(self):
        return None


class AsIdentity(AsTemperature):
    id = "as-identity"

    def _fit(self, data):
        found = super()._fit(data)
        self.beta.fill_(1.0)
        return found


@pytest.fixture(scope="module")
def studies():
    cases = scenes(12, size=(32, 40), plant=[Temperature(3.0)])
    with pytest.MonkeyPatch.context() as patch:
        for cls in (AsTemperature, AsIdentity):
            patch.setitem(CALIBRATORS, cls.id, cls)
        every = compare(cases, ("as-identity", "ts", "as-ts", "vs"), 2, **QUICK, shifted={"again": cases}).document
        few = compare(cases, ("ts", "vs"), 2, **QUICK).document
    return every, few


def test_the_same_map_is_found_in_spite_of_rounding(studies):
    every, _ = studies
    same = {row["key"]: row["same_as"] for row in every["methods"]}
    assert same == {"uncalibrated": None, "as-identity": "uncalibrated", "ts": None, "as-ts": "ts", "vs": None}
    values = {row["method"]: row["values"] for row in every["cases"]
              if (row["metric"], row["region"], row["repeat"]) == ("nll", "everything", 0)}  # fmt: skip
    assert values["as-ts"] != values["ts"]  # It is rounding that is seen through here.


def test_it_is_shown_with_the_values_of_the_other_and_not_tested(studies):
    every, few = studies
    summary = {(row["method"], row["metric"], row["region"]): row for row in every["summary"]}
    for (method, metric, region), row in summary.items():
        if method == "as-ts":
            other = summary["ts", metric, region]
            assert [row[name] for name in ("mean", "low", "high")] == [other[name] for name in ("mean", "low", "high")]
    own, alone = ({(r["method"], r["metric"], r["region"]): r for r in found["differences"]} for found in (every, few))
    for (method, metric, region), row in own.items():
        if method in ("as-ts", "as-identity"):
            assert row["p"] is row["p_adjusted"] is None
        else:  # The family is that of the study without them.
            assert row["p_adjusted"] == pytest.approx(alone[method, metric, region]["p_adjusted"])
        if method == "as-identity":
            assert (row["mean"], row["low"], row["high"]) == (0, 0, 0)


def test_it_shares_the_rank(studies):
    every, _ = studies
    for row in every["ranks"]:
        assert row["mean_rank"]["as-ts"] == row["mean_rank"]["ts"]
        assert row["mean_rank"]["as-identity"] == row["mean_rank"]["uncalibrated"]
    for name in ("sum_rank", "mean_case_rank"):
        assert every[name]["as-ts"] == every[name]["ts"]


def test_it_is_not_tested_on_shifted_cases_either(studies):
    every, _ = studies
    for row in every["shift"][0]["differences"]:
        if "as-ts" in (row["method"], row["baseline"]) or row["method"] == "as-identity":
            assert row["p"] is None


def test_it_is_never_preferred(studies):
    every, _ = studies
    assert every["recommendation"]["method"] == "ts"
    assert set(every["recommendation"]["candidates"]) == {"uncalibrated", "ts"}


def test_without_the_simpler_one_among_the_allowed_it_may_be_chosen():
    nothing = Candidate("uncalibrated", "order", True, True, 0, [2.0, 2.1, 2.2])
    moving = Candidate("vs", None, True, True, 5, [1.0, 1.1, 1.2])
    same = Candidate("cms-op", "order", True, True, 50, [1.0, 1.1, 1.2], same_as="vs")
    assert choose([nothing, moving, same], "order", False).method == "cms-op"
    assert choose([nothing, moving, same], "none", False).candidates == ("uncalibrated", "vs")
    fallen = Candidate("lts", "order", True, True, 50, [2.0, 2.1, 2.2 - 1e-9], same_as="uncalibrated")
    assert choose([nothing, fallen], "order", False).best == "uncalibrated"
    assert not math.isnan(choose([nothing, fallen], "order", False).validation_nll["lts"]["mean"])
