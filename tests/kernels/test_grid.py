import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.errors import InputError
from segcal.kernels import FINE_BINS, BinGrid

probabilities = st.floats(0, 1)


def lookup(grid, p):
    """What the kernels do with the table, in Python."""
    cell = max(0, int(np.ceil(p * FINE_BINS)) - 1)
    i = grid.first[cell]
    while p > grid.upper[i]:
        i += 1
    return i


@pytest.mark.parametrize("grid", [BinGrid.top_label((15, 50, 7)), BinGrid.classwise((15, 50, 7), (1e-3,))])
@settings(deadline=None)
@given(p=probabilities)
def test_bins_are_open_below_and_closed_above(grid, p):
    i = lookup(grid, p)
    assert grid.lower[i] < p or (p == 0 and i == 0)
    assert p <= grid.upper[i]
    assert i == np.searchsorted(grid.upper, p)


@settings(deadline=None)
@given(p=probabilities, count=st.integers(1, 60))
def test_coarse_bins_are_equally_wide(p, count):
    coarse = BinGrid.top_label((count,)).coarse(count)
    expected = next(k for k in range(count) if p <= (k + 1) / count)
    assert coarse[lookup(BinGrid.top_label((count,)), p)] == expected


@pytest.mark.parametrize("count", [1, 2, 64, 4096, 15, 5, 3, 50, 25, 10])
def test_divisors_come_for_free(count):
    coarse = BinGrid.top_label((15, 50)).coarse(count)
    assert np.array_equal(np.unique(coarse), np.arange(count))


def test_other_bin_counts_must_be_asked_for():
    with pytest.raises(InputError, match=r"num_bins = 7 .* bins=\(..., 7\)"):
        BinGrid.top_label((15,)).coarse(7)


def test_the_top_label_grid_refines_the_classwise_grid():
    classwise = BinGrid.classwise((15, 50), (1e-3,))
    top = BinGrid.top_label((15, 50), classwise)
    nested = top.within(classwise)
    assert np.all(classwise.lower[nested] <= top.lower)
    assert np.all(top.upper <= classwise.upper[nested])


def test_the_lowest_class_bin_ends_at_the_threshold_and_bins_are_narrow_at_the_ends():
    grid = BinGrid.classwise((15,), (1e-3,))
    assert grid.upper[0] == 1e-3
    width, end = (grid.upper - grid.lower)[1:], np.minimum(grid.lower, 1 - grid.upper)[1:]
    assert np.all(width <= np.maximum(1 / FINE_BINS, end / 15))


def test_no_bins_are_refused():
    with pytest.raises(InputError, match="num_bins = 0"):
        BinGrid.top_label((0,))
