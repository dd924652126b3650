"""Laws of statistics and metrics, for any logits: what is masked, moved, merged, renamed or shifted changes nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.strategies import SEEDS, chosen, examples, order, voxels
from segcal import metrics
from segcal.kernels import AffineMap
from segcal.metrics import METRICS
from segcal.statistics import VoxelStatistics
from torture import inputs

BACKENDS = ("reference", "numba")
NAMES = [name for name, spec in METRICS.items() if not set(spec.needs) & {"distance", "surfaces", "uncalibrated"}]
NARROW = inputs.TYPES[1:]  # what the compiled loops take
#: Families without ties, in which the first of equals would win, whatever it is called.
DISTINCT = ("ordinary", "sure", "offset")


def collect(z, y, backend="reference", **more):
    return VoxelStatistics(z.shape[1], background=None, backend=backend).update(z, y, **more)


def assert_same(one, other, rel=1e-12):
    """Counts are equal and metrics agree."""
    for name, own in one.tensors().items():
        if own.dtype == torch.int64:
            assert torch.equal(own, other.tensors()[name]), name
    for name in NAMES:
        expected = METRICS[name].function(one)
        assert METRICS[name].function(other) == pytest.approx(expected, rel=rel, abs=1e-12, nan_ok=True), name


@pytest.mark.parametrize("backend", BACKENDS)
@examples(6)
@given(voxels(dtypes=NARROW), SEEDS, st.sampled_from([torch.nan, torch.inf, -torch.inf, 6e4, -6e4]))
def test_a_mask_is_deletion_whatever_it_hides(backend, drawn, seed, content):
    z, y = drawn
    kept = chosen(len(y), seed)
    alone = collect(z[kept], y[kept], backend)
    hidden = z.masked_fill(~kept[:, None], content)
    assert_same(alone, collect(hidden, y, backend, mask=kept))
    assert_same(alone, collect(hidden, torch.where(kept, y, 255), backend))


@pytest.mark.parametrize("backend", BACKENDS)
@examples(6)
@given(voxels(dtypes=NARROW), SEEDS)
def test_the_order_of_voxels_does_not_matter(backend, drawn, seed):
    z, y = drawn
    moved = order(len(y), seed)
    assert_same(collect(z, y, backend), collect(z[moved], y[moved], backend), rel=1e-11)


@examples(8)
@given(st.lists(voxels(classes=4, most=12), min_size=3, max_size=3))
def test_merging_is_associative_and_commutative_and_nothing_is_its_identity(drawn):
    a, b, c = (collect(*own) for own in drawn)
    assert_same((a + b) + c, a + (b + c))
    assert_same(a + b, b + a)
    assert (a + a.empty_like()).to_dict() == a.to_dict() == (a.empty_like() + a).to_dict()


@examples(8)
@given(voxels(families=DISTINCT, dtypes=[torch.float64]), SEEDS)
def test_the_names_of_classes_do_not_matter(drawn, seed):
    z, y = drawn
    names = order(z.shape[1], seed)
    one, other = collect(z, y), collect(z[:, names], names.argsort()[y])
    for name in NAMES:
        expected = METRICS[name].function(one)
        assert METRICS[name].function(other) == pytest.approx(expected, rel=1e-11, abs=1e-12, nan_ok=True), name


@examples(8)
@given(voxels(families=("ordinary", "ties", "-inf", "one ulp"), dtypes=[torch.float16]), SEEDS)
def test_offsets_are_seen_by_the_free_energy_alone(drawn, seed):
    z, y = drawn[0].double(), drawn[1]
    offset = torch.randint(-(2**20), 2**20, (len(y), 1), generator=inputs.generator(seed))  # exact in float64
    one, other = collect(z, y), collect(z + offset, y)
    for name in NAMES:
        if name != "free-energy-std":
            expected = METRICS[name].function(one)
            assert METRICS[name].function(other) == pytest.approx(expected, rel=1e-12, abs=1e-13, nan_ok=True), name


@pytest.mark.parametrize("backend", BACKENDS)
@examples(5)
@given(voxels(dtypes=NARROW), st.floats(0.1, 10), st.floats(1.01, 5))
def test_a_higher_temperature_lowers_confidence_and_moves_no_label(backend, drawn, temperature, factor):
    z, y = drawn
    cold, warm = (
        collect(z, y, backend, score_map=AffineMap.temperature(t)) for t in (temperature, factor * temperature)
    )
    assert (cold.total().confusion == warm.total().confusion).all()
    assert metrics.flip(cold) == metrics.flip(warm) == 0
    confidence = [float(own.total().top_confidence.sum()) for own in (cold, warm)]
    assert confidence[1] <= confidence[0] * (1 + 1e-7)
    assert metrics.entropy(warm) >= metrics.entropy(cold) * (1 - 1e-6) - 1e-30


@examples(5)
@given(voxels())
def test_a_dictionary_of_a_dictionary_is_the_dictionary(drawn):
    state = collect(*drawn).to_dict()
    assert VoxelStatistics.from_dict(state).to_dict() == state
