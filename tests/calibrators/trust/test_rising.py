"""The streamed isotonic map of log-odds."""

import numpy as np
import pytest
import torch
from scipy.optimize import isotonic_regression

from segcal.calibrators.trust.rising import OddsHistogram, apply_rising, bin_centres, odds_bin


def draw(count=20_000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    odds = 3 * torch.randn(count, generator=generator)
    right = torch.rand(count, generator=generator) < torch.sigmoid(0.5 * odds - 0.3)
    return odds, right


def test_it_is_scipys_regression_of_the_same_voxels():
    odds, right = draw()
    histogram = OddsHistogram()
    for part in (slice(0, 7_000), slice(7_000, None)):
        histogram.add(odds[part], right[part])
    places = odds_bin(odds)
    bins, count = places.unique(return_counts=True)
    share = torch.zeros(len(bin_centres()), dtype=torch.float64).index_add_(0, places, right.double())[bins] / count
    expected = isotonic_regression(share.numpy(), weights=count.numpy().astype(float)).x
    found = torch.sigmoid(histogram.rising()[bins]).numpy()
    inside = (expected > 0) & (expected < 1)  # ends are pulled in by half a voxel
    np.testing.assert_allclose(found[inside], expected[inside], atol=1e-9)
    assert inside.mean() > 0.9


def test_the_sum_of_two_is_that_of_all_their_voxels():
    odds, right = draw(500)
    whole, *parts = (OddsHistogram() for _ in range(3))
    whole.add(odds, right)
    for part, own in zip(parts, (slice(0, 200), slice(200, None)), strict=True):
        part.add(odds[own], right[own])
    both = parts[0] + parts[1]
    assert np.array_equal(both.counts, whole.counts)
    assert np.array_equal(both.right, whole.right)
    assert (parts[0].counts.sum(), parts[1].counts.sum()) == (200, 300)  # neither has changed


def test_it_rises_and_nobody_is_certain():
    histogram = OddsHistogram()
    histogram.add(torch.tensor([-1.0, 0.0, 1.0, 2.0]), torch.tensor([False, True, False, True]))
    values = histogram.rising()
    assert bool((values.diff() >= 0).all())
    assert bool(torch.isfinite(values).all())
    everyone_right = OddsHistogram()
    everyone_right.add(torch.tensor([1.0, 2.0]), torch.tensor([True, True]))
    torch.testing.assert_close(torch.sigmoid(everyone_right.rising()[-1]), torch.tensor(2.5 / 3).double())


def test_a_block_without_a_right_voxel_is_given_half_of_one():
    histogram = OddsHistogram()
    histogram.add(torch.tensor([-3.0, -2.9, -2.8, 4.0, 4.1]), torch.tensor([False, False, False, True, True]))
    low, high = torch.sigmoid(histogram.rising()[[0, -1]]).tolist()
    assert low == pytest.approx(0.5 / (3 + 1))
    assert high == pytest.approx(1 - 0.5 / (2 + 1))


def test_odds_beyond_the_limits_are_in_the_first_and_the_last_bin():
    bins, last = odds_bin(torch.tensor([-99.0, -30.0, 30.0, 99.0, torch.inf])).tolist(), len(bin_centres()) - 1
    assert bins == [0, 0, last, last, last]
    assert odds_bin(bin_centres()).tolist() == list(range(last + 1))


def test_between_centres_it_is_linear_and_beyond_them_constant():
    values = bin_centres() ** 3
    x = torch.linspace(-40, 40, 999).double()
    expected = np.interp(x.numpy(), bin_centres().numpy(), values.numpy())
    np.testing.assert_allclose(apply_rising(values, x).numpy(), expected, rtol=1e-9, atol=1e-9)


def test_float32_loses_no_digits_where_the_map_is_steep():
    random = torch.Generator().manual_seed(0)
    values = torch.rand(len(bin_centres()), generator=random, dtype=torch.float64).cumsum(0)  # half a unit a bin
    odds = 40 * torch.rand(10_000, generator=random) - 20
    exact = apply_rising(values, odds.double())
    assert torch.equal(apply_rising(values, odds), exact.float())
