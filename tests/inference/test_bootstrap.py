import subprocess
import sys
import tracemalloc
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from tests.reference import inference as reference

import segcal
from segcal.errors import InputError
from segcal.inference import bootstrap_interval, hierarchical_bootstrap, mean_over_repeats, paired_difference


def study(seed, repeats=3, cases=12, *trailing):
    """Values with repeats and cases of their own level, a tenth of them missing."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(repeats, cases, *trailing))
    values += random.normal(size=(repeats, cases, *(1 for _ in trailing)))
    values[random.random(values.shape) < 0.1] = np.nan
    return values


def same(result, other):
    return all(
        np.array_equal(getattr(result, f), getattr(other, f), equal_nan=True) for f in ("estimate", "low", "high")
    )


def test_the_replicates_have_the_distribution_of_drawing_repeats_then_cases():
    values = study(0)
    values[1, :8] = np.nan  # repeats of different size
    means = hierarchical_bootstrap(values, replicates=4000, keep_means=True).means
    loops = reference.hierarchical_means(values.tolist(), 4000, np.random.default_rng(1))
    assert stats.ks_2samp(means, loops).pvalue > 0.01
    # A bootstrap of the pooled cases would have another spread: the test above can tell.
    pooled = hierarchical_bootstrap(values.reshape(1, -1), replicates=4000, keep_means=True).means
    assert stats.ks_2samp(means, pooled).pvalue < 1e-6


def test_estimate_and_count_are_those_of_the_values_that_exist():
    values = study(1, 3, 12, 4, 2)
    result = hierarchical_bootstrap(values)
    assert np.allclose(result.estimate, np.nanmean(values, axis=(0, 1)))
    assert np.array_equal(result.count, np.sum(~np.isnan(values), axis=(0, 1)))
    assert result.count.dtype == np.int64
    assert result.means is None
    assert np.all((result.low < result.estimate) & (result.estimate < result.high))


def test_one_repeat_is_the_percentile_bootstrap_of_scipy():
    values = np.random.default_rng(2).normal(size=80)
    result = hierarchical_bootstrap(values[np.newaxis], replicates=20_000)
    seed = "rng" if "rng" in signature(stats.bootstrap).parameters else "random_state"  # before scipy 1.15
    draws = {"n_resamples": 20_000, "method": "percentile", seed: np.random.default_rng(0)}
    peer = stats.bootstrap((values,), np.mean, **draws)
    width = result.high - result.low
    assert abs(result.low - peer.confidence_interval.low) < 0.02 * width
    assert abs(result.high - peer.confidence_interval.high) < 0.02 * width
    assert bootstrap_interval(values, replicates=20_000) == (result.low, result.high)


def test_the_quantiles_are_those_of_numpy():
    result = hierarchical_bootstrap(study(3, 2, 9, 5), level=0.8, replicates=501, keep_means=True)
    assert np.allclose([result.low, result.high], np.quantile(result.means, [0.1, 0.9], axis=0), rtol=1e-14)


def test_a_constant_shift_moves_the_interval_and_a_factor_scales_it():
    values = study(4, 3, 12, 2)
    before, after = hierarchical_bootstrap(values), hierarchical_bootstrap(3 * values + 7)
    for name in ("estimate", "low", "high"):
        assert np.allclose(getattr(after, name), 3 * getattr(before, name) + 7)


def test_the_draws_are_the_same_for_all_methods_and_for_any_number_of_them():
    values = study(5, 3, 12, 4)
    values[:, :, 0] = np.nan_to_num(values[:, :, 0])  # so that every case is tested in every selection
    whole, part = (hierarchical_bootstrap(v, keep_means=True).means for v in (values, values[:, :, :2]))
    assert np.allclose(whole[:, :2], part, rtol=1e-12)
    twins = hierarchical_bootstrap(np.stack([values[:, :, 0]] * 2, axis=2), keep_means=True).means
    assert np.array_equal(twins[:, 0], twins[:, 1])


def test_the_seed_decides_and_chunks_follow_one_another(monkeypatch):
    values = study(6, 3, 20, 2)
    whole = hierarchical_bootstrap(values, seed=1)
    assert same(whole, hierarchical_bootstrap(values, seed=1))
    assert not same(whole, hierarchical_bootstrap(values, seed=2))
    monkeypatch.setattr("segcal.inference.bootstrap._CHUNK", 60 * 7)
    chunked = hierarchical_bootstrap(values, seed=1)
    width = whole.high - whole.low
    assert np.all(np.abs(chunked.low - whole.low) < 0.15 * width)
    assert np.all(np.abs(chunked.high - whole.high) < 0.15 * width)


def test_permuting_cases_changes_nothing_but_the_draws():
    values = study(7, 2, 60)
    order = np.random.default_rng(0).permutation(60)
    one, other = (hierarchical_bootstrap(v, replicates=20_000) for v in (values, values[:, order]))
    assert one.estimate == pytest.approx(float(other.estimate), rel=1e-12)
    assert abs(one.low - other.low) < 0.03 * (one.high - one.low)
    assert abs(one.high - other.high) < 0.03 * (one.high - one.low)


def test_untested_cases_and_repeats_are_as_if_they_were_not_there():
    values = study(8, 3, 12, 2)
    tested = ~np.isnan(values).all(axis=2)
    padded = np.full((5, 20, 2), np.nan)
    for source, target in enumerate((0, 2, 4)):
        padded[target, : tested[source].sum()] = values[source][tested[source]]
    assert same(hierarchical_bootstrap(values), hierarchical_bootstrap(padded))


@pytest.mark.parametrize(("repeats", "cases", "spread"), [(1, 60, 0.0), (20, 15, 1.0)])
def test_intervals_cover_the_truth(repeats, cases, spread):
    random = np.random.default_rng(9)
    values = random.normal(size=(repeats, cases, 1000)) + spread * random.normal(size=(repeats, 1, 1000))
    result = hierarchical_bootstrap(values, replicates=1000)
    assert 0.92 < np.mean((result.low <= 0) & (result.high >= 0)) < 0.98


def test_cases_shared_by_the_repeats_need_averaging_first():
    random = np.random.default_rng(10)
    values = random.normal(size=(1, 60, 1000)) + 0.1 * random.normal(size=(3, 60, 1000))
    naive, right = (hierarchical_bootstrap(v, replicates=1000) for v in (values, mean_over_repeats(values)[np.newaxis]))
    assert np.mean((naive.low <= 0) & (naive.high >= 0)) < 0.85
    assert 0.92 < np.mean((right.low <= 0) & (right.high >= 0)) < 0.98


def test_the_degenerate_is_nan_with_a_count_and_no_warning():
    values = np.full((2, 5, 4), np.nan)
    values[0, 0, 1] = 3.0  # one value
    values[:, :, 2] = 2.0  # all the same
    values[:, 1:3, 3] = [[1, 2], [3, 4]]  # rare: some replicates have none
    result = hierarchical_bootstrap(values)
    assert result.count.tolist() == [0, 1, 10, 4]
    assert np.array_equal(result.estimate, [np.nan, 3, 2, 2.5], equal_nan=True)
    assert np.array_equal(result.low[:3], [np.nan, np.nan, 2], equal_nan=True)
    assert np.array_equal(result.high[:3], [np.nan, np.nan, 2], equal_nan=True)
    assert 1 <= result.low[3] < 2.5 < result.high[3] <= 4
    assert np.isnan(hierarchical_bootstrap([[np.nan, np.nan]]).estimate)
    assert hierarchical_bootstrap([[1.0], [2.0]]).count == 2


def test_infinite_values_make_infinite_means_only_where_they_are_drawn():
    values = np.random.default_rng(11).random((1, 40, 3))
    values[0, 0, 0] = np.inf
    values[0, :2, 1] = [np.inf, -np.inf]
    result = hierarchical_bootstrap(values, keep_means=True)
    assert result.estimate[0] == np.inf
    assert np.isnan(result.estimate[1])
    assert np.isfinite(result.low[0])  # a third of the replicates miss the case
    assert result.high[0] == np.inf
    assert np.mean(np.isfinite(result.means[:, 0])) == pytest.approx((1 - 1 / 40) ** 40, abs=0.05)
    assert same(
        hierarchical_bootstrap(values[:, :, 2:]),
        hierarchical_bootstrap(np.where(np.isinf(values), 0, values)[:, :, 2:]),
    )
    assert bootstrap_interval([1.0, np.inf, np.inf])[1] == np.inf


def test_memory_stays_small():
    values = np.random.default_rng(12).random((3, 4000, 5))  # all weights at once would take 192 MB
    tracemalloc.start()
    hierarchical_bootstrap(values)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6


@pytest.mark.parametrize(
    ("values", "options", "says"),
    [
        ([1.0, 2.0], {}, r"values has shape \(2,\); expected numbers of shape \(repeats, cases, ...\)"),
        (np.zeros((0, 3)), {}, r"values has shape \(0, 3\)"),
        ([["a", "b"]], {}, "values has dtype"),
        ([[1.0], [1.0, 2.0]], {}, "values is a ragged list"),
        ([[1.0, 2.0]], {"replicates": 0}, "replicates is 0"),
        ([[1.0, 2.0]], {"level": 95}, "level is 95"),
    ],
)
def test_bad_input_is_refused(values, options, says):
    with pytest.raises(InputError, match=says):
        hierarchical_bootstrap(values, **options)


def test_a_paired_difference_is_the_difference_of_the_replicates():
    values = np.random.default_rng(13).normal(size=(3, 12, 4, 2))
    result = paired_difference(values, baseline=1)
    means = hierarchical_bootstrap(values, keep_means=True).means
    shifted = means - means[:, 1:2]
    assert np.allclose(result.estimate, np.mean(values - values[:, :, 1:2], axis=(0, 1)))
    assert np.allclose([result.low, result.high], np.quantile(shifted, [0.025, 0.975], axis=0))
    others = [0, 2, 3]
    assert np.allclose(result.above[others], np.mean(shifted > 0, axis=0)[others])


def test_what_the_cases_have_in_common_cancels():
    random = np.random.default_rng(14)
    values = 100 * random.normal(size=(2, 30, 1)) + random.normal(size=(2, 30, 2)) + [0, 1]
    result = paired_difference(values, baseline=0)
    assert 0 < result.low[1] < result.high[1] < 2
    own = hierarchical_bootstrap(values)
    assert np.all(own.high - own.low > 20)


def test_a_difference_needs_both_values_and_counts_the_pairs():
    values = study(15, 2, 30, 3)
    values[:, :, 2] = np.nan
    result = paired_difference(values, baseline=0)
    assert result.count.tolist() == [*np.sum(~np.isnan(values[:, :, :2] - values[:, :, :1]), axis=(0, 1)), 0]
    assert result.estimate[1] == pytest.approx(np.nanmean(values[:, :, 1] - values[:, :, 0]))
    assert np.isnan([result.estimate[2], result.low[2], result.high[2], result.above[2], result.p[2]]).all()
    assert np.isnan(paired_difference(values, baseline=2).p).all()


def test_the_p_value_is_small_exactly_where_the_interval_excludes_zero():
    random = np.random.default_rng(16)
    values = random.normal(size=(2, 20, 200))
    values[:, :, 1:] += np.linspace(-1.5, 1.5, 199)
    result = paired_difference(values, baseline=0)
    excluded = (result.low > 0) | (result.high < 0)
    assert 20 < excluded.sum() < 180
    assert np.all(result.p[excluded] < 0.055)
    assert np.all(result.p[~excluded] > 0.045)
    assert np.all(result.p >= 2 / 2001)
    assert (result.estimate[0], result.low[0], result.high[0], result.above[0], result.p[0]) == (0, 0, 0, 0, 1)


def test_the_p_value_is_uniform_where_nothing_differs():
    values = np.random.default_rng(17).normal(size=(1, 60, 1000))
    values[:, :, 0] = 0  # so that the differences are independent
    p = paired_difference(values, baseline=0).p[1:]
    assert 0.03 < np.mean(p < 0.05) < 0.08


def test_equal_infinities_do_not_differ():
    values = np.array([[[np.inf, np.inf], [1.0, 2.0], [2.0, 3.0]]])
    result = paired_difference(values, baseline=0)
    assert result.estimate[1] == pytest.approx(2 / 3)


@pytest.mark.parametrize("baseline", [-1, 3])
def test_the_baseline_is_one_of_the_methods(baseline):
    with pytest.raises(InputError, match=f"baseline is {baseline}; expected a whole number from 0 to 2"):
        paired_difference(np.zeros((1, 4, 3)), baseline)


def test_the_mean_over_repeats_leaves_out_what_is_not_there():
    values = study(18, 3, 12, 2)
    values[:, 0] = np.nan
    means = mean_over_repeats(values)
    assert np.isnan(means[0]).all()
    assert np.allclose(means[1:], np.nanmean(values[:, 1:], axis=0))


def test_inference_needs_no_torch():
    code = f"""
import sys, types
sys.modules["segcal"] = package = types.ModuleType("segcal")  # without __init__.py, which imports everything
package.__path__ = [{str(Path(segcal.__file__).parent)!r}]
import segcal.inference
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
