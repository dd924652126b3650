"""Too many classes for a map: refused before anything is read or allocated, and what would fit is named."""

import tracemalloc

import pytest
import torch

import segcal
from reference.calibrators import drawn
from segcal.calibrators import CALIBRATORS
from segcal.cases import CaseRef, CaseSet
from segcal.cases.tensors import tensors_as_cases
from segcal.errors import InputError
from segcal.fitting import cost, first_pass

ROUTED = ("cdc", "cms-ap", "cms-op")
GIB = 2**30


def unread():
    raise AssertionError("the data were read")


def many_classes(count):
    return CaseSet([CaseRef(name, unread) for name in "abcd"], num_classes=count, ignore_index=-1)


@pytest.fixture
def memory(monkeypatch):
    """Sets how much memory is free."""
    return lambda count: monkeypatch.setattr(cost, "available_memory", lambda: count)


@pytest.mark.parametrize("name", ROUTED)
def test_a_matrix_for_each_of_a_thousand_classes_is_refused_before_anything_is_read_or_allocated(name, memory):
    memory(256 * GIB)
    for fit in (lambda cases: CALIBRATORS[name]().fit(cases), lambda cases: segcal.tune(name, cases)):
        tracemalloc.start()
        with pytest.raises(InputError, match=f"'{name}' of 1000 classes needs about .* GiB .* parameters") as refused:
            fit(many_classes(1000))
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()
    assert "at most 128.0 GiB, 50% of the memory that is free" in str(refused.value)
    assert "take one of ts, ets, vs, ms, ms-c, dc, lts, " in refused.value.fix
    assert not {*refused.value.fix.replace(",", "").split()} & {*ROUTED}


@pytest.mark.parametrize("name", CALIBRATORS)
def test_usual_numbers_of_classes_fit(name, memory):
    memory(4 * GIB)
    for classes in (2, 19, 25):
        CALIBRATORS[name]().check_size(classes)
    memory(8 * GIB)
    CALIBRATORS[name]().check_size(150)
    if name not in ROUTED:
        CALIBRATORS[name]().check_size(1000)


def test_the_memory_that_is_free_decides(memory):
    z, y = drawn(300, 4)
    memory(100_000)
    with pytest.raises(InputError, match="'cms-op' of 4 classes needs about") as refused:
        CALIBRATORS["cms-op"]().fit(z, y)
    assert refused.value.fix.startswith("take one of ts, ets, vs, ms, ms-c, dc, lts,")
    memory(GIB)
    CALIBRATORS["cms-op"]().fit(z, y)


@pytest.mark.parametrize(("name", "classes"), [("dc", 16), ("ms-c", 16), ("cms-op", 10), ("cdc", 10)])
def test_the_estimate_is_an_upper_bound_and_not_far_off(name, classes):
    z, y = drawn(1000, classes)
    CALIBRATORS[name]().fit(z, y)  # whatever is imported or compiled
    tracemalloc.start()
    CALIBRATORS[name]().fit(z, y)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    estimate = CALIBRATORS[name]().cost(classes).memory
    assert estimate / 4 < peak < estimate


def test_this_machine_has_memory():
    assert 2**20 < cost.available_memory() < 2**50


def test_a_container_leaves_what_it_does_not_use(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "_GROUP", tmp_path)
    whole = cost.available_memory()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert cost._free_in_group() is None
    (tmp_path / "memory.max").write_text("5000\n")
    assert cost.available_memory() == 4000 < whole


def test_samples_of_many_classes_have_fewer_voxels(monkeypatch):
    monkeypatch.setattr(first_pass, "_SCORES", 4000)
    z, y = drawn(3000, 4)
    report = CALIBRATORS["vs"]().fit(z, y).fit_report
    assert report.voxels_used == 1000
    assert "stratified sample of 1,000 of 3,000 voxels" in report.notes[-1]


def test_a_thousand_classes_are_scaled_by_vectors():
    random = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(100, 1000, generator=random)
    y = (z + torch.randn(z.shape, generator=random)).argmax(1)
    report = CALIBRATORS["vs"]().fit(z, y, ignore_index=-1).fit_report
    assert report.converged
    assert report.nll_after < report.nll_before
    assert len(report.notes) == 3
    assert all(len(note) < 300 for note in report.notes)


def thousand_classes():
    random = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(2, 1000, 8, 8, generator=random)
    return z, (z + torch.randn(z.shape, generator=random)).argmax(1)


@pytest.mark.parametrize("name", ["ts", "ets", "vs", "isotonic", "trust"])
def test_a_thousand_classes_are_fitted_and_labels_are_kept(name):
    z, y = thousand_classes()
    calibrator = CALIBRATORS[name]().fit(z, y, ignore_index=-1)
    assert calibrator.fit_report.nll_after <= calibrator.fit_report.nll_before
    mapped = calibrator(z)
    assert torch.allclose(mapped.exp().sum(1), torch.ones(2, 8, 8), atol=1e-4)
    if calibrator.preserves:
        assert torch.equal(mapped.argmax(1), z.argmax(1))


def test_all_metrics_of_a_thousand_classes():
    z, y = thousand_classes()
    results = segcal.evaluate(tensors_as_cases(z, y, -1, None), metrics=tuple(segcal.METRICS))
    expected = torch.nn.functional.cross_entropy(z.double(), y)
    assert results.value("nll") == pytest.approx(float(expected), rel=1e-5)
    assert 0 < results.value("ece") < 1
    assert results.value("accuracy") == pytest.approx(float((z.argmax(1) == y).double().mean()))


def test_a_class_that_would_be_ignored_by_default_is_noticed():
    z, y = thousand_classes()
    with pytest.raises(InputError, match="label 255 is ignored, and is one of the 1000 classes.*ignore_index = -1"):
        CALIBRATORS["ts"]().fit(z, y)
    tensors_as_cases(z[:, :255], y.clamp(max=254), 255, None)
    tensors_as_cases(z, y, 0, None)  # the background may be ignored
