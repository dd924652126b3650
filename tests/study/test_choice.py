import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segcal.study.advice.choice import Candidate, choose

PRESERVES = {"order": {"order"}, "argmax": {"order", "argmax"}, "none": {"order", "argmax", None}}


@st.composite
def tables(draw):
    """Candidates with random validation NLL, guarantees and sizes; uncalibrated is always there."""
    cases = draw(st.integers(1, 6))
    values = st.lists(st.floats(0, 5) | st.just(math.inf), min_size=cases, max_size=cases)
    found = [Candidate("uncalibrated", "order", True, True, 0, draw(values))]
    for number in range(draw(st.integers(0, 6))):
        found.append(
            Candidate(
                f"m{number}",
                draw(st.sampled_from(["order", "argmax", None])),
                draw(st.booleans()),
                draw(st.booleans()),
                draw(st.integers(1, 1000)),
                draw(values),
            )
        )
    return found


@given(tables(), st.sampled_from(["order", "argmax", "none"]), st.booleans())
def test_the_recommendation_keeps_the_constraints(candidates, preserve, invariant):
    choice = choose(candidates, preserve, invariant)
    by_key = {one.key: one for one in candidates}
    for key in (choice.method, choice.best, *choice.candidates):
        assert by_key[key].preserves in PRESERVES[preserve]
        assert by_key[key].translation_invariant or not invariant
        assert by_key[key].deployed or preserve == "none"
    assert "uncalibrated" in choice.candidates
    best = min(np.mean(by_key[key].nll) for key in choice.candidates)
    assert np.mean(by_key[choice.best].nll) == best
    assert by_key[choice.method].parameters <= by_key[choice.best].parameters


def test_a_simpler_method_is_taken_within_one_standard_error_of_the_paired_difference_and_not_beyond():
    hard = np.array([0.1, 1.0, 5.0, 10.0])  # Images differ far more than methods do.
    rich = Candidate("rich", "order", True, True, 500, hard)
    noise = np.array([0.02, -0.02, 0.02, -0.01])
    for gain, expected in ((0.003, "simple"), (0.03, "rich")):
        simple = Candidate("simple", "order", True, True, 1, hard + gain + noise)
        nothing = Candidate("uncalibrated", "order", True, True, 0, hard + 0.5)
        assert choose([nothing, simple, rich], "order", False).method == expected


def test_with_one_validation_case_the_best_is_taken():
    rich = Candidate("rich", "order", True, True, 500, [1.0])
    nothing = Candidate("uncalibrated", "order", True, True, 0, [2.0])
    for nll, expected in ((1.01, "rich"), (1.00001, "simple")):
        simple = Candidate("simple", "order", True, True, 1, [nll])
        choice = choose([nothing, simple, rich], "order", False)
        assert choice.method == expected
    assert math.isnan(choice.validation_nll["rich"]["standard_error"])


@pytest.mark.parametrize("values", [[math.nan, math.nan], [math.inf, 1.0]])
def test_undefined_and_infinite_losses_choose_nothing(values):
    nothing = Candidate("uncalibrated", "order", True, True, 0, [2.0, 2.0])
    assert choose([nothing, Candidate("m", "order", True, True, 1, values)], "order", False).method == "uncalibrated"


def test_a_method_that_loses_on_shifted_cases_is_left_out_only_where_it_must_be_robust():
    nothing = Candidate("uncalibrated", "order", True, True, 0, [2.0, 2.1, 2.2])
    ts = Candidate("ts", "order", True, True, 1, [1.1, 1.2, 1.3])
    rich = Candidate("rich", "order", True, True, 9, [1.0, 1.1, 1.2], robust=False)
    moving = Candidate("moving", None, True, True, 9, [0.1, 0.1, 0.1], robust=False)
    free, robust = (choose([nothing, ts, rich, moving], "order", False, wanted) for wanted in (False, True))
    assert (free.method, free.left_out) == ("rich", ())
    assert (robust.method, robust.best, robust.left_out) == ("ts", "ts", ("rich",))
    assert robust.candidates == ("uncalibrated", "ts")
