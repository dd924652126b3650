"""The triton kernel of ``ets`` against its definition: on a GPU if there is one, else in triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segcal.calibrators import EnsembleTemperatureScaling
from segcal.scores import keep_argmax, only_possible

triton = pytest.importorskip("triton", minversion="3.4")
cuda = pytest.importorskip("segcal.kernels.cuda")
maps = pytest.importorskip("segcal.kernels.cuda_maps")
tl = triton.language

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, where the interpreter divides by zero
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Inverse temperatures and weights: all parts, two, and one; a steep part that is nothing far below; a tiny weight.
MIXTURES = (
    (0.7, (0.6, 0.3, 0.1)), (5.0, (0.5, 0.5, 0.0)), (0.01, (0.2, 0.0, 0.8)), (1.3, (1.0, 0.0, 0.0)),
    (0.5, (0.0, 1.0, 0.0)), (0.5, (0.0, 0.0, 1.0)), (900.0, (0.98, 0.02, 0.0)), (2.0, (1e-18, 1.0, 0.0)),
)  # fmt: skip


def mixture(beta: float, weights: tuple[float, ...], classes: int) -> EnsembleTemperatureScaling:
    calibrator = EnsembleTemperatureScaling()
    calibrator.num_classes = classes
    calibrator.beta.fill_(beta)
    calibrator.weights.copy_(torch.tensor(weights, dtype=torch.float64))
    return calibrator


def mapped(z: torch.Tensor, beta: float, weights: tuple[float, ...]) -> torch.Tensor:
    return cuda.apply_mixture(z, beta, tuple(torch.tensor(weights, dtype=torch.float64).log().tolist()))


def logits(classes: int, dtype: torch.dtype = torch.float32, size: tuple[int, ...] = (1, 9, 8)) -> torch.Tensor:
    """Random, with ties, a winner far above the others, and impossible classes of both kinds."""
    random = torch.Generator().manual_seed(classes)
    z = (torch.randn(size[0], classes, *size[1:], generator=random) * 4).to(dtype)
    z[0, 1, :3] = z[0, 0, :3]
    z[0, :, 3] = z[0, :1, 3]
    z[0, 1, 4] = -torch.inf
    z[0, 0, 5], z[0, 1, 5] = 20.0, -990.0
    z[0, 1, 6] = -3000.0
    return z.to(DEVICE)


def assert_is_the_mixture(found: torch.Tensor, z: torch.Tensor, beta: float, weights: tuple[float, ...]) -> None:
    expected = mixture(beta, weights, z.shape[1])._scores(only_possible(z.double())).log_softmax(1)
    finite = torch.isfinite(expected)
    assert found.dtype == z.dtype
    assert torch.equal(torch.isfinite(found), finite)
    assert torch.equal(found.argmax(1), z.argmax(1))
    error = (found.double() - expected)[finite].abs() / (1 + expected[finite].abs())
    assert error.max() < max(5e-7, torch.finfo(z.dtype).eps)
    assert_in_order(found, z)
    if z.dtype == torch.float32:  # the probability of all but the winner keeps its digits, of which float64 has 16
        assert torch.allclose(found.double().amax(1), expected.amax(1), rtol=1e-5, atol=1e-15)


def assert_in_order(found: torch.Tensor, z: torch.Tensor) -> None:
    order = z.sort(dim=1, descending=True, stable=True).indices
    falling = found.gather(1, order).double()
    assert (falling[:, 1:] <= falling[:, :-1]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [2, 5, 26])
@pytest.mark.parametrize(("beta", "weights"), MIXTURES)
def test_mixtures(beta: float, weights: tuple[float, ...], classes: int, dtype: torch.dtype) -> None:
    z = logits(classes, dtype)
    found = mapped(z, beta, weights)
    assert_is_the_mixture(found, z, beta, weights)
    if classes == 26:
        return
    flat, last = z.movedim(1, -1).reshape(-1, classes), z.contiguous(memory_format=torch.channels_last)
    assert torch.equal(mapped(flat, beta, weights), found.movedim(1, -1).reshape(-1, classes))
    assert torch.equal(mapped(last, beta, weights), found)


def test_small_images_are_joined() -> None:
    z = logits(4, size=(3, 7, 6))[:, :, :, ::2]
    assert_is_the_mixture(mapped(z, 0.7, (0.5, 0.3, 0.2)), z, 0.7, (0.5, 0.3, 0.2))


@pytest.mark.parametrize(("beta", "weights"), MIXTURES)
@pytest.mark.parametrize("classes", [24, 26])
def test_neighbouring_numbers_keep_their_order(classes: int, beta: float, weights: tuple[float, ...]) -> None:
    """Every class is a few numbers from the next, at distances from the winner of any size."""
    random = torch.Generator().manual_seed(1)
    start = -torch.rand(64, generator=random) * 10.0 ** torch.randint(-6, 3, (64,), generator=random)
    steps = torch.randint(1, 4, (64, classes), generator=random).cumsum(1)
    near = (start[:, None].view(torch.int32) + steps.int()).view(torch.float32)
    z = near.gather(1, torch.rand(64, classes, generator=random).argsort(1))
    z[::2, 3] = 0.0
    assert_in_order(mapped(z.to(DEVICE), beta, weights), z.to(DEVICE))


@pytest.mark.parametrize("classes", [3, 25])
def test_voxels_without_softmax_become_nan(classes: int) -> None:
    z = logits(classes)
    z[0, 0, 0, 0], z[0, :, 1, 1], z[0, 1, 2, 2] = torch.nan, -torch.inf, torch.inf
    lost = torch.isnan(mapped(z, 1.3, (0.5, 0.3, 0.2))).all(1)
    assert lost.sum() == 3
    assert lost[0, 0, 0]
    assert lost[0, 1, 1]
    assert lost[0, 2, 2]


def test_the_calibrator_takes_it(monkeypatch) -> None:
    """As on a GPU; impossible classes get nothing of the uniform part, and the labels are those of the logits."""
    z, calibrator = logits(5), mixture(0.4, (0.4, 0.3, 0.3), 5)
    monkeypatch.setattr("segcal.calibrators.base.fast_maps", lambda _: None)
    plain = calibrator(z.double())
    monkeypatch.setattr("segcal.calibrators.base.cuda_kernels", lambda _: cuda)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found = calibrator(z)
    assert torch.allclose(found.double(), plain, atol=2e-6)
    assert torch.equal(found, keep_argmax(found, z.argmax(1)))


@triton.jit
def _all_mantissas(out, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    twos, less = maps._log((n + (127 << 23)).to(tl.float32, bitcast=True))
    tl.store(out + n, less - tl.where(twos == 1.0, 0.0, float("nan")))


@triton.jit
def _powers(y, whole, fraction, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p, exponent = maps._power(tl.load(y + n))
    tl.store(fraction + n, p)
    tl.store(whole + n, exponent)


def test_logarithms_of_all_fractions_rise() -> None:
    """What is subtracted from a multiple of log 2 falls from each number from 1 to 2 to the next; also precision."""
    block = 2**20 if DEVICE == "cpu" else 1024
    less = torch.empty(2**23, device=DEVICE)
    _all_mantissas[(2**23 // block,)](less, BLOCK=block)
    assert (less.diff() <= 0).all()
    fractions = torch.arange(2**23, 2**24, dtype=torch.float64, device=DEVICE) / 2**24
    assert (less.double() + fractions.log()).abs().max() < 1.5e-7
    assert less[0] == np.float32(np.log(2))
    assert less[-1] >= 0


def test_powers_rise() -> None:
    y = torch.cat([-torch.rand(2**15, generator=torch.Generator().manual_seed(k)) * 10.0**k for k in range(-6, 6)])
    y = y.sort().values.to(DEVICE)
    whole, fraction = torch.empty_like(y), torch.empty_like(y)
    block = 2**15 if DEVICE == "cpu" else 1024
    _powers[(len(y) // block,)](y, whole, fraction, BLOCK=block)
    whole, fraction = whole.double(), fraction.double()
    assert (fraction >= 1).all()
    assert (fraction <= 2).all()
    assert (fraction * 2 ** (whole - y.double()) - 1).abs().max() < 2e-7
    assert (fraction[1:] * 2 ** (whole[1:] - whole[:-1]) >= fraction[:-1]).all()
