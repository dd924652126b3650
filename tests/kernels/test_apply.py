"""Temperature scaling by the fast kernel, against the definition and on awkward input."""

import numpy as np
import pytest
import torch

from segcal.errors import InputError
from segcal.kernels.apply_cpu import apply_temperature
from segcal.kernels.pieces_cpu import as_voxels, piece_size
from segcal.scores import keep_argmax

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = {
    "one voxel": (1, 3, 1, 1),
    "a block and one": (1, 3, 1025),
    "rows": (1500, 6),
    "small images": (70, 3, 31, 33),
    "volume": (1, 2, 40, 33, 29),
    "several pieces": (2, 2, 190, 180),
}


def example(shape, dtype=torch.float32, scale=3.0, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def awkward(classes, kind, dtype=torch.float32):
    """Voxels (1025, C) of one kind."""
    z = example((1025, classes), dtype)
    random = torch.Generator().manual_seed(1)
    first, second = torch.rand(z.shape, generator=random).topk(2, 1).indices.T
    rows = torch.arange(len(z))
    if kind == "tied":
        z = z.round()
        z[rows, second] = z.amax(1)
    elif kind == "one ulp":
        z[rows, first] = z.amax(1)
        z[rows, second] = next_above(z.amax(1))
    elif kind == "offset":
        z = z + torch.tensor(1e4, dtype=dtype)
    elif kind == "impossible":
        z[torch.rand(z.shape, generator=random) < 0.3] = -torch.inf
        z[rows, second] = 1.0
    elif kind == "sure":
        z[rows, second] = 60.0
    return z


def next_above(values):
    bits = values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)
    return torch.where(values > 0, bits + 1, bits - 1).view(values.dtype)


def definition(logits, beta):
    z = logits.double()
    exact = ((z - z.amax(1, keepdim=True)) * float(np.float32(beta))).log_softmax(1)
    return keep_argmax(exact.to(logits.dtype), logits.argmax(1))


def assert_close(values, expected):
    """Within 5e-7 of the voxel's largest |log-probability|, or a step of the type."""
    assert values.dtype == expected.dtype
    assert values.shape == expected.shape
    assert torch.equal(torch.isneginf(values), torch.isneginf(expected))
    assert torch.equal(values.isnan(), expected.isnan())
    finite = torch.isfinite(expected)
    exact, size = expected.double(), expected.double().abs()
    largest = size.where(finite, torch.zeros(())).amax(1, keepdim=True)
    step = size * torch.finfo(values.dtype).eps if values.dtype != torch.float32 else 0.0
    error = (values.double() - exact).abs() - step
    assert (error[finite] <= (5e-7 * (1 + largest)).expand_as(error)[finite]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [2, 3, 6, 19, 40, 150])
@pytest.mark.parametrize("kind", ["random", "tied", "one ulp", "offset", "impossible", "sure"])
def test_temperature_is_the_definition_and_keeps_the_argmax(classes, kind, dtype):
    z = awkward(classes, kind, dtype)
    for beta in (0.03, 0.7, 1.0, 2.5):
        values = apply_temperature(z, beta)
        assert_close(values, definition(z, beta))
        assert torch.equal(values.argmax(1), z.argmax(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tied_class_gets_the_next_smaller_number_of_the_type(dtype):
    gaps = torch.logspace(-9, 1.3, 3000)  # winners from log 1/2 to nearly 0, through float16's smallest numbers
    z = torch.stack((torch.zeros_like(gaps), torch.zeros_like(gaps), -gaps), 1).to(dtype)
    sure = torch.stack((20 * gaps, torch.zeros_like(gaps)), 1).to(dtype)
    for logits in (z, sure, sure.flip(1)):
        values = apply_temperature(logits, 1.0)
        assert torch.equal(values, keep_argmax(values, logits.argmax(1)))
    values = apply_temperature(z, 1.0)
    assert torch.equal(next_above(values[:, 1]), values[:, 0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_winner_is_strictly_ahead_in_every_type(dtype):
    # 1 - p from one half to 1e-8, where float16 has only a few numbers left
    gap = torch.linspace(0, 18, 40_001)
    values = apply_temperature(torch.stack((-gap, torch.zeros_like(gap)), 1).to(dtype), 1.0)
    assert (values[:, 1] > values[:, 0])[1:].all()
    assert values[0, 0] > values[0, 1]


def test_the_winner_is_relatively_precise_however_sure():
    gap = torch.linspace(1, 80, 500)
    values = apply_temperature(torch.stack((torch.zeros_like(gap), -gap), 1), 1.0)[:, 0]
    expected = -torch.log1p(torch.exp(-gap.double()))
    assert ((values.double() / expected - 1).abs() < 3e-7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape_and_layout(shape, dtype):
    z = example(shape, dtype)
    expected = apply_temperature(z, 0.7)
    assert_close(expected, definition(z, 0.7))
    backwards = z.permute(*reversed(range(z.ndim))).contiguous().permute(*reversed(range(z.ndim)))
    wider = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2].copy_(z)
    last = z.movedim(1, -1).contiguous().movedim(-1, 1)
    for other in (backwards, wider, last):
        assert torch.equal(apply_temperature(other, 0.7), expected)


def test_several_threads_give_the_same_bits():
    z = example((2, 3, 200, 190))
    expected = apply_temperature(z, 0.7, threads=1)
    assert all(torch.equal(apply_temperature(z, 0.7, threads=threads), expected) for threads in (3, 16))


def test_large_batches_take_longer_pieces_to_the_same_bits():
    z = example((6, 3, 300, 190))
    expected = torch.cat([apply_temperature(image[None], 0.7) for image in z])  # two pieces each
    assert piece_size(as_voxels(z), 2) == 300 * 190
    assert torch.equal(apply_temperature(z, 0.7, threads=2), expected)


def test_pieces_are_even_and_long_where_threads_still_have_some_each():
    z = torch.empty(30, 2, 256, 512)
    assert [piece_size(as_voxels(z), threads) for threads in (1, 16, 64)] == [2**17, 2**17, 2**15]
    assert piece_size(as_voxels(z[:4]), 4) == 2**16
    assert [piece_size(as_voxels(z[:1]), 4, least=least) for least in (2**15, 2**13)] == [2**15, 2**14]
    assert piece_size(as_voxels(z[:1]), 16, least=2**13) == 2**13
    assert piece_size(as_voxels(z.half()), 1) == 2**15  # pieces of these are copied


def test_voxels_without_softmax_are_nan_and_harm_no_other():
    z = example((1, 4, 600))
    expected = apply_temperature(z, 0.7)
    z[0, 0, 3], z[0, 2, 4], z[0, 3, 5], z[0, :, 6] = torch.nan, torch.nan, torch.inf, -torch.inf
    values = apply_temperature(z, 0.7)
    undefined = torch.zeros(600, dtype=torch.bool)
    undefined[3:7] = True
    assert torch.equal(values.isnan(), undefined.expand(1, 4, 600))
    assert torch.equal(values[..., 7:], expected[..., 7:])


def test_float64_is_refused_rather_than_rounded():
    with pytest.raises(InputError, match="logits are torch.float64 on cpu"):
        apply_temperature(torch.zeros(1, 3, dtype=torch.float64), 0.7)


def test_no_voxel_is_no_trouble():
    assert apply_temperature(torch.zeros(0, 3, 4, 5), 0.7).shape == (0, 3, 4, 5)
