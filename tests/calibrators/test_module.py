"""Every calibrator is a torch module: cast, moved, traced, and loaded from a state dict with its network."""

import copy

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from segcal.calibrators import CALIBRATORS, Ensemble, SelectiveScaling
from segcal.errors import InputError

#: Few logits take torch's operations, many the compiled loops.
SIZES = {"small": (1, 6, 12, 11), "large": (1, 6, 256, 180)}


def logits(shape):
    return 4 * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def assert_same(recorded, fitted, shapes):
    """What was recorded at one size gives what the calibrator gives, at these, and keeps the labels where it does."""
    for shape in shapes:
        z = logits(shape)
        top = z.amax(1, keepdim=True)
        z = torch.where(torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.1, top, z)  # exact ties
        found = recorded(z)
        assert torch.allclose(found.exp(), fitted(z).exp(), atol=1e-4)
        if fitted.preserves:
            assert torch.equal(found.argmax(1), z.argmax(1))


class Network(nn.Module):
    """A user's network that ends in a calibrator."""

    def __init__(self, calibrator):
        super().__init__()
        self.head = nn.Conv2d(6, 6, 1)
        self.calibrator = calibrator

    def forward(self, x):
        return self.calibrator(self.head(x))


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, nn.Module.double, lambda m: m.to(torch.float16)])
def test_a_network_that_is_cast_leaves_the_calibrator_its_digits(fitted, cast):
    network = cast(Network(copy.deepcopy(fitted)))
    assert network.head.weight.dtype != torch.float32
    for shape in SIZES.values():
        for dtype in (torch.float32, torch.float16):
            z = logits(shape).to(dtype)
            assert torch.equal(network.calibrator(z), fitted(z))


def test_the_device_follows(fitted):
    network = Network(copy.deepcopy(fitted)).half().to("meta")
    assert {tensor.device.type for tensor in network.state_dict().values() if tensor.is_floating_point()} == {"meta"}
    empty = network.to_empty(device="cpu")
    assert {name: t.dtype for name, t in empty.calibrator.tensors().items()} == {
        name: t.dtype for name, t in fitted.tensors().items()
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_for_any_size(fitted):
    traced = torch.jit.trace(fitted, (logits((2, 6, 7, 9)),), check_trace=False)
    assert_same(traced, fitted, [(3, 6, 40, 5), *SIZES.values()])


def test_a_state_dict_loads_into_a_network_with_a_fresh_calibrator(fitted):
    trained, fresh = Network(fitted), Network(type(fitted)())
    # Through a file that holds tensors alone, as some tools want them.
    fresh.load_state_dict(load(save({name: t.contiguous() for name, t in trained.state_dict().items()})))
    z = logits(SIZES["small"])
    assert torch.equal(fresh(z), trained(z))
    assert fresh.calibrator.num_classes == 6
    assert fresh.calibrator.class_names == fitted.class_names
    # What earlier versions kept, parameters alone, still loads where the classes are known.
    parameters = {name: t for name, t in trained.state_dict().items() if "_extra_state" not in name}
    fresh.load_state_dict(parameters)
    with pytest.raises(RuntimeError, match=r"calibrator\._extra_state"):
        Network(type(fitted)()).load_state_dict(parameters)


def test_a_calibrator_of_other_classes_becomes_the_loaded_one(fitted):
    other = type(fitted)().fit(logits((2, 3, 16, 16)), (torch.arange(512) % 3).view(2, 16, 16))
    other.load_state_dict(fitted.state_dict())
    z = logits(SIZES["small"])
    assert torch.equal(other(z), fitted(z))


@pytest.mark.parametrize("composed", [SelectiveScaling, Ensemble])
def test_bases_load_with_what_they_are_the_base_of(composed, cases):
    trained, fresh = composed(base="cms-op").fit(cases), composed(base="cms-op")
    fresh.load_state_dict(trained.state_dict())
    z = logits(SIZES["small"])
    assert torch.equal(fresh(z), trained(z))


def test_a_state_dict_of_something_else_is_refused(fitted):
    state = fitted.state_dict()
    state["_extra_state"] = torch.tensor(list(b'{"num_classes"'), dtype=torch.uint8)
    with pytest.raises(InputError, match="the classes of the state dict cannot be read"):
        type(fitted)().load_state_dict(state)


@pytest.mark.parametrize(("stored", "fresh"), [("ms", "dc"), ("lts", "lts-ti"), ("cms-ap", "cms-op"), ("ts", "vs")])
def test_a_state_dict_of_another_method_is_refused_even_if_its_shapes_suit(cases, stored, fresh):
    state = CALIBRATORS[stored]().fit(cases).state_dict()
    unfitted = CALIBRATORS[fresh]()
    with pytest.raises(InputError, match=f"of a calibrator '{stored}'; expected one of '{fresh}'"):
        unfitted.load_state_dict(state)
    assert unfitted.num_classes is None
