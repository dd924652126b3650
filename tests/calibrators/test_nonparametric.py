import numpy as np
import pytest
import torch

from segcal.calibrators.nonparametric import (
    HistogramBinning,
    IsotonicRegression,
    histogram_over,
    pool_adjacent_violators,
)
from segcal.cases import CaseRef, CaseSet
from segcal.errors import InputError
from segcal.fitting.measured import mean_loss
from segcal.kernels.fitting_passes import logit_bin
from segcal.kernels.grid import LIMIT, LOGIT_BINS
from segcal.scores import log_probabilities, only_possible
from segcal.synthetic import Temperature, scenes

CASES = scenes(2, size=(12, 15), num_classes=3, plant=[Temperature(1.7)], ignored=0.05)


def flattened(cases=CASES):
    """``log p`` of all valid voxels and classes, flat, and whether the class is the label."""
    log_p = torch.cat([case.logits.double().log_softmax(1).movedim(1, -1)[case.valid] for case in cases])
    labels = torch.cat([case.labels[case.valid] for case in cases])
    return log_p.flatten(), torch.nn.functional.one_hot(labels, cases.num_classes).flatten().double()


def isotonic_reference(x, y):
    """The isotonic regression of y on x as ``max_{a <= i} min_{b >= i} mean(a..b)``, at the distinct values of x."""
    values, where, counts = np.unique(x, return_inverse=True, return_counts=True)
    total = np.concatenate(([0.0], np.cumsum(np.bincount(where, y))))
    size = np.concatenate(([0], np.cumsum(counts)))
    fitted = np.empty(len(values))
    for i in range(len(values)):
        a, b = np.arange(i + 1)[:, None], np.arange(i, len(values))[None]
        fitted[i] = ((total[b + 1] - total[a]) / (size[b + 1] - size[a])).min(1).max()
    return fitted[where]


def squared_error(fitted, y):
    return float(np.mean((fitted - y) ** 2))


def test_pooling_adjacent_violators_is_the_min_max_formula():
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=60), rng.integers(1, 9, 60).astype(float)
    expected = isotonic_reference(np.repeat(np.arange(60), weights.astype(int)), np.repeat(values, weights.astype(int)))
    found = np.repeat(pool_adjacent_violators(values, weights), weights.astype(int))
    assert found == pytest.approx(expected, abs=1e-12)
    rising = np.sort(values)
    assert (pool_adjacent_violators(rising, weights) == rising).all()


def test_isotonic_is_the_exact_regression_of_rounded_probabilities():
    log_p, y = flattened()
    bins = logit_bin(log_p)
    logit = log_p - torch.log(-torch.expm1(log_p))
    width = 2 * LIMIT / LOGIT_BINS
    centre = -LIMIT + width * (bins + 0.5)
    inside = logit.abs() < LIMIT
    assert (centre - logit)[inside].abs().max() <= width / 2 + 1e-9
    calibrator = IsotonicRegression().fit(CASES)
    assert calibrator.values[bins].numpy() == pytest.approx(isotonic_reference(bins.numpy(), y.numpy()), abs=1e-12)


def test_isotonic_is_within_its_bound_of_the_exact_regression():
    log_p, y = (tensor.numpy() for tensor in flattened())
    exact = isotonic_reference(log_p, y)
    bins = logit_bin(torch.from_numpy(log_p)).numpy()
    found = IsotonicRegression().fit(CASES).values[bins].numpy()
    excess = squared_error(found, y) - squared_error(exact, y)
    rise = [np.ptp(exact[bins == b]) * np.mean(bins == b) for b in np.unique(bins)]
    assert -1e-12 <= excess <= 2 * sum(rise) + 1e-12
    assert excess < 1e-3


def test_isotonic_resolves_probabilities_near_one():
    """Margins of 12 and 20: p differs by 6e-6, the shares of errors by 1 %."""
    margin = torch.tensor([12.0, 20.0]).repeat_interleave(1000)
    z = torch.stack((margin, torch.zeros(2000)), 1)
    y = torch.zeros(2000, dtype=torch.int64)
    y[:10] = 1
    unsure, sure = IsotonicRegression().fit(z, y).predict_proba(z)[[0, -1], 0].tolist()
    assert unsure == pytest.approx(0.99, abs=1e-4)
    assert sure == pytest.approx(1.0, abs=1e-6)


def test_isotonic_keeps_the_order_of_extreme_scores_exactly():
    calibrator = IsotonicRegression().fit(CASES)
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-4, 1.0, 30.0, 1e4):
        z = scale * torch.randn((1, 3, 5000), generator=generator)
        ranked = calibrator(z).gather(1, z.argsort(1, descending=True))
        assert (ranked[:, 1:] <= ranked[:, :-1]).all()
        assert torch.equal(calibrator(z).argmax(1), z.argmax(1))
        assert torch.equal(torch.isfinite(calibrator(z)), torch.isfinite(only_possible(z)))


def test_one_winner_keeps_the_last_digit_of_its_doubt():
    z = torch.tensor([[0.0, -40.0, -41.0]])
    expected = -(np.exp(-40) + np.exp(-41))
    assert float(log_probabilities(z)[0, 0]) == pytest.approx(expected, rel=1e-6)


def test_fine_histograms_are_sums_of_their_parts():
    whole = histogram_over(CASES, classwise=True)
    parts = [histogram_over(CASES[k : k + 1], classwise=True) for k in range(2)]
    together = histogram_over(CASES, classwise=False)
    assert (together.counts[0] == whole.counts.sum(0)).all()
    assert (together.positive[0] == whole.positive.sum(0)).all()
    assert (whole.counts == parts[0].counts + parts[1].counts).all()
    assert (whole.positive == parts[0].positive + parts[1].positive).all()
    valid = sum(int(case.valid.sum()) for case in CASES)
    assert whole.counts.sum(1).tolist() == [valid] * 3
    assert whole.probability.sum() == pytest.approx(valid)


@pytest.mark.parametrize("num_bins", [2, 7])
def test_histogram_is_the_share_of_the_class_in_bins_of_equal_mass(num_bins):
    calibrator = HistogramBinning(num_bins).fit(CASES)
    log_p, y = (tensor.view(-1, 3) for tensor in flattened())
    for k in range(3):
        edges = [-np.inf, *calibrator.edges[k].tolist(), 0.0]
        heaviest = int(np.bincount(logit_bin(log_p[:, k])).max())
        for b in range(num_bins):
            inside = (log_p[:, k] > edges[b]) & (log_p[:, k] <= edges[b + 1])
            count = int(inside.sum())
            assert count
            assert count == pytest.approx(len(log_p) / num_bins, abs=heaviest + 1)
            share = (float(y[inside, k].sum()) + float(log_p[inside, k].exp().mean())) / (count + 1)
            assert float(calibrator.values[k, b]) == pytest.approx(share, abs=1e-12)


def test_worse_than_the_identity_falls_back_and_says_so():
    calibrator = HistogramBinning(num_bins=1).fit(CASES)
    report = calibrator.fit_report
    assert "identity, which is kept" in report.notes[0]
    assert report.nll_after == report.nll_before == pytest.approx(mean_loss(CASES).nll, rel=1e-12)
    z = CASES[0].logits
    assert torch.allclose(calibrator(z), z.log_softmax(1), atol=1e-6)


@pytest.mark.parametrize("kind", [IsotonicRegression, HistogramBinning])
def test_unseen_scores_stay_finite(kind):
    calibrator = kind().fit(torch.tensor([[3.0, 0.0, -1.0]] * 5), torch.zeros(5, dtype=torch.int64))
    z = 50 * torch.randn((100, 3), generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(calibrator(z)).all()


def test_no_bins_are_refused():
    with pytest.raises(InputError, match="num_bins is 0"):
        HistogramBinning(0)


@pytest.mark.parametrize("kind", [IsotonicRegression, HistogramBinning])
def test_a_fit_reads_every_case_twice(kind):
    opened = []

    def counted(ref):
        return CaseRef(ref.id, lambda: opened.append(ref.id) or ref.open())

    kind().fit(CaseSet([counted(ref) for ref in CASES.refs], CASES.num_classes))
    assert sorted(opened) == sorted(2 * CASES.ids)
