"""nnU-Net is not needed: the parts of its trainer that the mixin touches are written here after its source."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from segcal import losses
from segcal.errors import SegcalError
from segcal.integrations.nnunet import CRaCMixin


class DeepSupervision(nn.Module):
    def forward(self, outputs, targets):
        return sum(losses.dice(z, y.long()) for z, y in zip(outputs, targets, strict=True))


class Trainer:
    has_regions, ignore_label = False, None

    def __init__(self):
        self.was_initialized, self.device = False, torch.device("cpu")
        self.label_manager = SimpleNamespace(
            has_regions=self.has_regions, ignore_label=self.ignore_label, num_segmentation_heads=3
        )

    def initialize(self):
        assert not self.was_initialized
        self.loss, self.was_initialized = DeepSupervision(), True

    def epoch(self, outputs, targets):
        value = self.loss(outputs, targets)
        with torch.no_grad():
            self.loss(outputs, targets)
        self.on_validation_epoch_end([])
        return value

    def on_validation_epoch_end(self, outputs):
        pass

    def save_checkpoint(self, filename):
        torch.save({"epoch": 1}, filename)

    def load_checkpoint(self, filename):
        if not self.was_initialized:
            self.initialize()
        assert torch.load(filename)["epoch"] == 1


class TrainerCRaC(CRaCMixin, Trainer):
    pass


def batch():
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 12, 12), torch.randint(0, 3, (2, 1, 12, 12))
    # nnU-Net's labels may be floats.
    return [logits, logits[..., ::2, ::2]], [labels.float(), labels[..., ::2, ::2].float()]


def test_penalty_and_multipliers_are_of_the_full_resolution():
    trainer = TrainerCRaC()
    trainer.initialize()
    outputs, targets = batch()
    expected = losses.CRaC(3, base=None)
    for _ in range(2):
        own = DeepSupervision()(outputs, targets)
        labels = targets[0].long()
        torch.testing.assert_close(trainer.epoch(outputs, targets), own + expected(outputs[0], labels))
        expected.observe(outputs[0], labels)
        expected.update()
        assert trainer.crac.multipliers.trace == expected.multipliers.trace


def test_multipliers_survive_a_checkpoint_loaded_before_initialisation(tmp_path):
    trainer = TrainerCRaC()
    trainer.initialize()
    trainer.epoch(*batch())
    trainer.save_checkpoint(str(tmp_path / "checkpoint_latest.pth"))
    resumed = TrainerCRaC()
    resumed.load_checkpoint(str(tmp_path / "checkpoint_latest.pth"))
    assert resumed.crac.multipliers.trace == trainer.crac.multipliers.trace
    again = TrainerCRaC()
    again.initialize()
    again.load_checkpoint(str(tmp_path / "checkpoint_latest.pth"))
    assert again.crac.multipliers.trace == trainer.crac.multipliers.trace


def test_options_and_the_ignore_label():
    class Other(TrainerCRaC):
        crac_options = {"margin": 5.0}  # noqa: RUF012 - as a user would write it
        ignore_label = 3

    trainer = Other()
    trainer.initialize()
    assert "margin=5.0" in repr(trainer.crac)
    assert "ignore_index=3" in repr(trainer.crac)


def test_regions_are_refused():
    class Regions(TrainerCRaC):
        has_regions = True

    with pytest.raises(SegcalError, match="overlapping regions"):
        Regions().initialize()
