"""Laws of calibrators, for any logits: each voxel on its own, offsets, order, files; and of their fits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.strategies import SEEDS, chosen, examples, image, order, voxels
from segcal.calibrators import CALIBRATORS, load
from segcal.synthetic import Temperature, scenes
from torture import inputs

CLASSES = 4
CASES = scenes(3, size=(24, 32), num_classes=CLASSES, plant=[Temperature(1.7)], ignored=0.05)
#: Fits that are the same whatever the voxels' order and the classes' names are.
EXACT = ("ts", "ets", "vs", "ms", "ms-c", "dc", "cdc", "cms-ap", "cms-op", "isotonic", "histogram")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.fixture(scope="module", params=CALIBRATORS)
def fitted(request):
    options = {"epochs": 2} if request.param in ("lts", "lts-ti", "ibts") else {}
    return CALIBRATORS[request.param](**options).fit(CASES)


@examples(2)
@given(drawn=voxels(classes=CLASSES), seed=SEEDS)
def test_a_voxel_or_an_image_is_mapped_on_its_own(fitted, drawn, seed):
    z = drawn[0]
    if not fitted.spatial:
        kept, moved = chosen(len(z), seed), order(len(z), seed)
        whole = fitted(z)
        torch.testing.assert_close(fitted(z[kept]), whole[kept], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(fitted(z[moved]), whole[moved], rtol=1e-5, atol=1e-6)
    both = torch.cat((image(z), image(z.flip(0))))
    torch.testing.assert_close(fitted(both)[:1].exp(), fitted(both[:1]).exp(), rtol=1e-4, atol=1e-5)


@examples(2)
@given(drawn=voxels(classes=CLASSES))
def test_what_comes_out_is_a_distribution_that_keeps_what_it_promises(fitted, drawn):
    z = image(drawn[0])
    log_p = fitted(z)
    assert log_p.dtype == z.dtype
    assert (log_p.double().exp().sum(1) - 1).abs().max() < TOLERANCE[z.dtype]
    assert torch.isneginf(log_p[torch.isneginf(z)]).all()
    if fitted.preserves:
        assert torch.equal(log_p.argmax(1), z.argmax(1))
    if fitted.preserves == "order":
        ranked = log_p.gather(1, z.sort(dim=1, descending=True, stable=True).indices).double()
        assert (ranked[:, 1:] <= ranked[:, :-1]).all()


@examples(2)
@given(
    drawn=voxels(classes=CLASSES, families=("ordinary", "ties", "one ulp", "sure"), dtypes=[torch.float16]), seed=SEEDS
)
def test_offsets_are_not_seen_where_that_is_declared(fitted, drawn, seed):
    z = image(drawn[0]).double()
    offset = torch.randint(-(2**20), 2**20, (1, 1, *z.shape[2:]), generator=inputs.generator(seed))
    if fitted.translation_invariant:
        torch.testing.assert_close(fitted(z + offset).exp(), fitted(z).exp(), rtol=0, atol=1e-7)


@examples(1)
@given(drawn=voxels(classes=CLASSES))
def test_saved_loaded_and_saved_again_it_is_the_same(fitted, drawn, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "c.safetensors"
    fitted.save(path)
    again = load(path)
    assert again.to_bytes() == path.read_bytes()
    z = image(drawn[0])
    assert torch.equal(again(z), fitted(z))
    assert torch.equal(again(z), again(z))


@pytest.mark.parametrize("name", EXACT)
@examples(2)
@given(
    drawn=voxels(classes=3, most=80, families=("ordinary", "one ulp", "sure", "flat"), dtypes=[torch.float32]),
    seed=SEEDS,
)
def test_a_fit_sees_neither_order_nor_names_nor_what_is_masked(name, drawn, seed):
    z, y = drawn

    def after(z, y, **more):
        report = CALIBRATORS[name]().fit(z, y, **more).fit_report
        return report.nll_after

    moved, kept, names = order(len(y), seed), chosen(len(y), seed), order(3, seed)
    near = {"rel": 2e-5, "abs": 1e-7}
    expected = after(z, y)
    assert after(z[moved], y[moved]) == pytest.approx(expected, **near)
    if len(z.unique()) == z.numel():  # of tied classes, the first wins
        assert after(z[:, names], names.argsort()[y]) == pytest.approx(expected, **near)
    hidden = z.masked_fill(~kept[:, None], torch.nan)
    assert after(hidden, y, mask=kept) == pytest.approx(after(z[kept], y[kept]), **near)


@examples(2)
@given(st.sampled_from(sorted(CALIBRATORS)), st.integers(0, 2**31))
def test_the_same_seed_gives_the_same_bits(name, seed):
    options = {"epochs": 1} if name in ("lts", "lts-ti", "ibts") else {}
    first, second = (CALIBRATORS[name](**options).fit(CASES[:2], seed=seed) for _ in range(2))
    for key, own in first.tensors().items():
        assert torch.equal(own, second.tensors()[key]), key
