"""Calibrators and losses through torch's compilers: exported, and compiled to one graph for any size."""

import shutil

import pytest
import torch

from calibrators.test_module import SIZES, assert_same, logits
from losses.test_properties import IDS, batch, gradient, make
from segcal.calibrators import CALIBRATORS
from segcal.synthetic import Temperature, scenes

#: One of each family is compiled down to torch's core operators, which takes seconds; the others are traced alone.
LOWERED = ("ts", "ets", "dc", "cms-op", "lts-ti", "selective", "isotonic", "histogram")
#: With the default backend, which takes longest: one map without neighbours, and the one that has all parts.
GENERATED = ("cms-op", "trust")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


@pytest.fixture(scope="module")
def cases():
    return scenes(3, size=(32, 40), plant=[Temperature(1.7)], ignored=0.05)


@pytest.fixture(scope="module", params=CALIBRATORS)
def fitted(request, cases):
    return CALIBRATORS[request.param]().fit(cases)


def compiled_once(fitted, backend):
    """Compiled for one size, and applied to others; a second compilation is an error."""
    torch._dynamo.reset()
    compiled = torch.compile(fitted, backend=backend, fullgraph=True)
    z = logits((2, 6, 7, 9))
    for axis in (0, 2, 3):
        torch._dynamo.mark_dynamic(z, axis)  # a size that becomes a constant is an error
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(z)
        assert_same(compiled, fitted, [(2, 6, 7, 9), (3, 6, 150, 100)])


def test_exported_for_any_size(fitted):
    sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    program = torch.export.export(fitted, (logits((2, 6, 7, 9)),), dynamic_shapes=(sizes,))
    assert_same(program.module(), fitted, [(3, 6, 40, 5), *SIZES.values()])


@pytest.mark.parametrize("name", ["lts-ti", "trust"])
def test_volumes_of_any_size_are_exported(name, cases):
    fitted = CALIBRATORS[name]().fit(cases)
    sizes = dict.fromkeys((0, 2, 3, 4), torch.export.Dim.DYNAMIC)
    program = torch.export.export(fitted, (logits((2, 6, 3, 7, 9)),), dynamic_shapes=(sizes,))
    assert_same(program.module(), fitted, [(1, 6, 5, 12, 11), (2, 6, 9, 60, 50)])


def test_compiled_once_for_any_size(fitted):
    compiled_once(fitted, "aot_eager" if fitted.id in LOWERED else "eager")


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", GENERATED)
def test_compiled_by_the_default_backend(name, cases):
    compiled_once(CALIBRATORS[name]().fit(cases), "inductor")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
@pytest.mark.parametrize("name", IDS)
def test_losses_compile_to_one_graph(name):
    z, labels = batch()
    loss = make(name)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(gradient(compiled, z, labels), gradient(loss, z, labels), strict=True):
        torch.testing.assert_close(ours, theirs)
