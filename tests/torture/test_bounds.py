"""Every function on hard inputs, within the error that the documentation promises."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from seeds import ROUNDS, SEED
from torture.bounds import BOUNDS
from torture.errors import Found, loss_errors, metric_errors
from torture.maps import fit_errors, map_errors, optimum_errors
from torture.table import PARTS, promised, table

ROUND_SEEDS = range(SEED * ROUNDS, (SEED + 1) * ROUNDS)
#: Of the combinations of calibrators and inputs, one in so many is tried in a round.
SHARE = 8 if ROUNDS == 1 else 4
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def hold(part: str, found: Iterator[Found]) -> None:
    """Every error is within its bound, and every function with a bound was tried or is another round's turn."""
    tried = 0
    for own in found:
        bound = BOUNDS[part][own.function][own.path].bound
        assert own.error <= bound, f"{own.function} ({own.path}) is off by {own.error:.2g} > {bound:.0e}: {own.given}"
        tried += 1
    assert tried


@pytest.mark.parametrize("seed", ROUND_SEEDS)
def test_metrics(seed):
    hold("metrics", metric_errors(seed))


@pytest.mark.parametrize("seed", ROUND_SEEDS)
def test_losses(seed):
    hold("losses", loss_errors(seed))


@pytest.mark.parametrize("seed", ROUND_SEEDS)
def test_maps(seed):
    hold("maps", map_errors(seed, SHARE))


@pytest.mark.parametrize("seed", ROUND_SEEDS)
def test_fits(seed):
    hold("fits", fit_errors(seed, SHARE))
    hold("fits", optimum_errors(seed))


def test_bounds_are_within_ten_times_of_what_was_seen():
    for functions in BOUNDS.values():
        for paths in functions.values():
            for seen, bound in paths.values():
                assert seen <= bound <= 10 * seen
                assert bound == promised(seen)


@pytest.mark.parametrize("part", PARTS)
def test_the_page_has_the_table(part):
    assert table(part) in PAGE.read_text(), "print it with: python tests/torture/table.py"
