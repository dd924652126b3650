"""Lightning is not needed: its trainer's side of the callback is played here, as its documentation describes it."""

import sys
import types

import pytest
import torch
from torch import nn

from segcal import losses
from segcal.errors import SegcalError
from segcal.integrations.lightning import crac_callback


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def package(request, monkeypatch):
    """A package that has a ``Callback`` and nothing else; the other one is not installed."""
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    if request.param == "lightning.pytorch":
        monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    module = types.ModuleType(request.param)
    module.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


class Module(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.network, self.loss = nn.Conv2d(1, 3, 1), loss

    def validation_step(self, batch):
        images, labels = batch
        return {"logits": self.network(images), "labels": labels}


def epoch(callback, module, batches, fn="fit", sanity=False):
    """What a trainer does in a validation epoch."""
    trainer = types.SimpleNamespace(state=types.SimpleNamespace(fn=fn), sanity_checking=sanity)
    for number, batch in enumerate(batches):
        callback.on_validation_batch_end(trainer, module, module.validation_step(batch), batch, number)
    callback.on_validation_epoch_end(trainer, module)


def batches():
    torch.manual_seed(0)
    return [(torch.randn(2, 1, 6, 6), torch.randint(0, 3, (2, 6, 6))) for _ in range(2)]


def test_it_learns_what_a_plain_loop_learns(package):
    crac = losses.CRaC(3)
    module = Module(losses.CombinedLoss([(1.0, losses.Dice()), (0.5, crac)]))
    callback = crac_callback()
    assert isinstance(callback, package.Callback)
    expected = losses.CRaC(3)
    for _ in range(2):
        losses.callbacks.update_multipliers(expected, module.network, batches())
        epoch(callback, module, batches())
    assert crac.multipliers.trace == expected.multipliers.trace
    assert callback.state_dict() == {}


def test_only_validation_of_a_fit_counts(package):
    crac = losses.CRaC(3)
    for options in ({"sanity": True}, {"fn": "validate"}):
        epoch(crac_callback(), Module(crac), batches(), **options)
    assert not crac.multipliers.trace
    assert not crac.multipliers.voxels.any()


def test_a_given_loss_is_saved_with_the_callback(package):
    crac, fresh = losses.CRaC(3), losses.CRaC(3)
    callback = crac_callback(crac)
    epoch(callback, Module(None), batches())
    crac_callback(fresh).load_state_dict(callback.state_dict())
    assert fresh.multipliers.trace == crac.multipliers.trace
    assert torch.equal(fresh.multipliers.values, crac.multipliers.values)


def test_mistakes_are_named(package):
    with pytest.raises(SegcalError, match="Module has no CRaC loss"):
        epoch(crac_callback(), Module(losses.Dice()), batches())
    module = Module(losses.CRaC(3))
    for returned, says in ((None, "NoneType"), ({"loss": 1}, "a dict with loss")):
        module.validation_step = lambda batch, returned=returned: returned
        with pytest.raises(SegcalError, match=f"validation_step returned {says}"):
            epoch(crac_callback(), module, batches())


def test_the_extra_is_named(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"crac_callback needs lightning.*segcal\[lightning\]"):
        crac_callback()
