"""Fine histograms, and maps of single probabilities, by compiled loops: against the definitions in torch."""

import numpy as np
import pytest
import torch

from segcal.calibrators.nonparametric import HistogramBinning, IsotonicRegression
from segcal.errors import InputError
from segcal.kernels import fitting_passes
from segcal.kernels.fitting_passes import FineHistogram, logit_bin, logit_edges
from segcal.kernels.grid import LIMIT, LOGIT_BINS
from segcal.kernels.voxels import Voxels
from segcal.scores import log_probabilities

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = {"rows": (20_000, 3), "images": (3, 4, 50, 61), "volume": (1, 2, 30, 41, 33), "many classes": (1, 150, 9, 40)}


def example(shape, dtype=torch.float32, scale=6.0, seed=0):
    """Logits with sure voxels, ties, impossible classes and a gauge; labels with ignored ones; a mask."""
    random = torch.Generator().manual_seed(seed)
    like = (shape[0], *shape[2:])
    z = scale * torch.randn(shape, generator=random) + 100 * torch.randn(like, generator=random).unsqueeze(1)
    kind = torch.randint(0, 5, like, generator=random).unsqueeze(1)
    z = torch.where(kind == 1, z.round(), torch.where(kind == 2, 10 * z, z)).to(dtype)
    z[:, 1:] = torch.where(kind == 3, -torch.inf, z[:, 1:])
    y = torch.where(kind[:, 0] == 3, 0, torch.randint(0, shape[1], like, generator=random))
    y[torch.rand(like, generator=random) < 0.1] = 255
    return z, y, torch.rand(like, generator=random) < 0.9


def both(z, y, mask=None, *, classwise=True):
    """By the definition, and by the loops."""
    voxels = Voxels(z, y, ignore_index=255, mask=mask)
    definition, fast = (FineHistogram(z.shape[1], classwise=classwise) for _ in range(2))
    definition._add(voxels)
    fast._add_fast(voxels)
    return definition, fast


def assert_equal(first, second):
    assert (first.counts == second.counts).all()
    assert (first.positive == second.positive).all()
    assert first.voxels == second.voxels
    assert second.nll == pytest.approx(first.nll, rel=1e-12)
    assert np.allclose(first.probability, second.probability, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("classwise", [True, False])
def test_loops_fill_the_bins_of_the_definition(shape, dtype, classwise):
    z, y, mask = example(shape, dtype)
    definition, fast = both(z, y, mask, classwise=classwise)
    assert_equal(definition, fast)
    assert fast.voxels == int((mask & (y != 255)).sum()) == fast.positive.sum()
    assert fast.counts.sum() == shape[1] * fast.voxels


def test_threads_that_divide_the_classes_fill_the_same_bins(monkeypatch):
    z, y, mask = example((1, 5, 300, 400))
    definition, _ = both(z, y, mask)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for numbers in (0, 2 * 3 * 5 * LOGIT_BINS, 2**40):
        monkeypatch.setattr(fitting_passes, "_NUMBERS", numbers)
        assert_equal(definition, both(z, y, mask)[1])


def test_large_inputs_take_the_loops_and_strides_do_not_matter():
    z, y, mask = example((2, 4, 200, 300))
    whole, turned = FineHistogram(4), FineHistogram(4)
    whole.add(Voxels(z, y, ignore_index=255, mask=mask))
    turned.add(Voxels(z.transpose(2, 3), y.transpose(1, 2), ignore_index=255, mask=mask.transpose(1, 2)))
    assert_equal(both(z, y, mask)[0], whole)
    assert_equal(whole, turned)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("score", "label", "problem"),
    [(np.nan, 0, "NaN logits"), (np.inf, 0, "infinite logits"), (0.0, 9, "label 9"), (0.0, -1, "label -1")],
)
def test_voxels_that_are_unfit_are_named_unless_they_do_not_count(fast, score, label, problem):
    z, y = torch.zeros(1, 3, 50, 70), torch.zeros(1, 50, 70, dtype=torch.int64)
    z[0, 1, 30, 40], y[0, 30, 40] = score, label
    voxels = Voxels(z, y)
    histogram = FineHistogram(3)
    with pytest.raises(InputError, match=rf"{problem} at voxel \(30, 40\)"):
        (histogram._add_fast if fast else histogram._add)(voxels)
    masked = Voxels(z, y, mask=(z.sum(1) == 0) & (y == 0))
    (histogram._add_fast if fast else histogram._add)(masked)
    assert histogram.voxels == 50 * 70 - 1


def test_bins_are_equally_wide_in_logits():
    log_p = torch.from_numpy(-np.logaddexp(0, -np.linspace(-40, 40, 100_001)))
    logit = log_p - torch.log(-torch.expm1(log_p))
    expected = ((logit + LIMIT) / (2 * LIMIT) * LOGIT_BINS).ceil() - 1
    off = logit_bin(log_p) - expected.clamp(0, LOGIT_BINS - 1)
    assert off.abs().max() <= 1  # at an edge rounding decides
    assert (off != 0).double().mean() < 1e-3


def isotonic(classes, lowest):
    """A map with level stretches, and steps up to a factor of two (infinity, if it begins at 0)."""
    calibrator = IsotonicRegression()
    rising = torch.linspace(lowest, 0.98, LOGIT_BINS, dtype=torch.float64)
    calibrator.values.copy_(rising.round(decimals=2))
    calibrator.fitted.fill_(1.0)
    calibrator.num_classes = classes
    return calibrator


def definition(calibrator, z):
    return calibrator._scores(z.double()).log_softmax(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_isotonic_loop_is_the_definition_and_keeps_the_order(shape, dtype):
    from segcal.kernels import apply_cpu

    z, _, _ = example(shape, dtype)
    possible = ~torch.isneginf(z)
    for lowest in (0.0, 0.01):
        calibrator = isotonic(shape[1], lowest)
        found, exact = calibrator._fast(apply_cpu, z), definition(calibrator, z)
        assert torch.equal(found.argmax(1), z.argmax(1))
        ranked = found.gather(1, z.sort(dim=1, descending=True, stable=True).indices)
        assert (ranked[:, 1:] <= ranked[:, :-1]).all()
        assert torch.equal(torch.isneginf(found), ~possible)
    # Within a bin log g rises by up to 200 times as much as log p, and so do the errors of that in float32.
    assert (found.double() - exact).abs()[possible].max() <= 1e-3 + 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("num_bins", [1, 2, 15, 40])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_histogram_loop_is_the_definition(shape, num_bins):
    from segcal.kernels import apply_cpu

    z, _, _ = example(shape)
    calibrator = HistogramBinning(num_bins)
    calibrator.allocate(shape[1])
    random = np.random.default_rng(0)
    edges = np.sort(random.choice(logit_edges(), (shape[1], num_bins - 1)), 1) * (1 - 1e-6)
    calibrator.edges.copy_(torch.from_numpy(edges))
    calibrator.values.copy_(torch.from_numpy(random.uniform(1e-6, 1, (shape[1], num_bins))))
    calibrator.fitted.fill_(1.0)
    found, exact = calibrator._fast(apply_cpu, z), definition(calibrator, z)
    log_p = log_probabilities(z.double()).movedim(1, 0).flatten(1)
    edge = calibrator.edges[:, None]
    near = ((log_p[:, :, None] - edge).abs() < 5e-7 * edge.abs()).any(2)  # there float32 may take the next bin
    clear = ~near.any(0).view(z.shape[0], *z.shape[2:])
    assert clear.double().mean() > 0.99
    chosen = clear.unsqueeze(1) & ~torch.isneginf(z)
    assert (found.double() - exact).abs()[chosen].max() < 1e-5
    assert torch.equal(torch.isneginf(found), torch.isneginf(z))


@pytest.mark.parametrize("kind", [IsotonicRegression, HistogramBinning])
def test_voxels_without_a_softmax_become_nan_and_no_others(kind):
    from segcal.kernels import apply_cpu

    z = torch.zeros(1, 3, 5, 7)
    z[0, 1, 1, 1], z[0, 2, 2, 2], z[0, :, 3, 3] = torch.nan, torch.inf, -torch.inf
    calibrator = kind()
    calibrator.allocate(3)
    calibrator.fitted.fill_(1.0)
    found = calibrator._fast(apply_cpu, z)
    bad = ~torch.isfinite(z.amax(1, keepdim=True)).expand_as(z)
    assert torch.equal(found.isnan(), bad)


def test_a_chunk_for_which_memory_is_short_is_not_counted(monkeypatch):
    z, y = torch.randn(1, 3, 200, 150), torch.randint(3, (1, 200, 150))
    monkeypatch.setattr(fitting_passes, "_DEVICE_VOXELS", 20_000)
    once, twice, checked = FineHistogram(3), FineHistogram(3), Voxels.checked
    once._add_on_device(Voxels(z, y))
    calls = []

    def short_once(self, piece):
        calls.append(piece)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return checked(self, piece)

    monkeypatch.setattr(Voxels, "checked", short_once)
    with pytest.raises(torch.OutOfMemoryError):
        twice._add_on_device(Voxels(z, y))
    twice._add_on_device(Voxels(z, y))
    assert (twice.voxels, twice.nll) == (once.voxels, once.nll)
    assert np.array_equal(twice.counts, once.counts)
