"""nnU-Net is not needed: the parts of its trainer that the mixin touches are written here after its source.

Where it is installed, its own trainer is run, too.
"""

import itertools
import json
from pathlib import Path
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
        self.was_initialized, self.device, self.log = False, torch.device("cpu"), []
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

    def print_to_log_file(self, text):
        self.log.append(text)


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
    assert not again.log


def test_multipliers_that_are_missing_are_reported(tmp_path):
    trainer = TrainerCRaC()
    Trainer.save_checkpoint(trainer, str(tmp_path / "checkpoint_best.pth"))
    trainer.load_checkpoint(str(tmp_path / "checkpoint_best.pth"))
    assert ["checkpoint_best.pth.crac is missing" in line for line in trainer.log] == [True]


def test_without_checkpoints_nothing_is_written(tmp_path):
    trainer = TrainerCRaC()
    trainer.disable_checkpointing = True
    trainer.initialize()
    trainer.save_checkpoint(str(tmp_path / "checkpoint_latest.pth"))
    assert not list(tmp_path.glob("*.crac"))


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


PLANS = {
    "continue_training": False,
    "dataset_name": "Dataset001_Squares",
    "plans_name": "plans",
    "label_manager": "LabelManager",
    "configurations": {
        "2d": {
            "data_identifier": "data",
            "batch_size": 2,
            "patch_size": [32, 32],
            "batch_dice": True,
            "architecture": {
                "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
                "arch_kwargs": {
                    "n_stages": 3,
                    "features_per_stage": [4, 8, 8],
                    "conv_op": "torch.nn.Conv2d",
                    "kernel_sizes": [[3, 3]] * 3,
                    "strides": [[1, 1], [2, 2], [2, 2]],
                    "n_conv_per_stage": [1, 1, 1],
                    "n_conv_per_stage_decoder": [1, 1],
                },
                "_kw_requires_import": ["conv_op"],
            },
        }
    },
}


@pytest.fixture
def real(tmp_path, monkeypatch):
    """Makes nnU-Net's own trainers, in a folder of results each; their data come from memory."""
    pytest.importorskip("nnunetv2")
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    folder = tmp_path / "preprocessed" / PLANS["dataset_name"]
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "case.b2nd").touch()  # of which nnU-Net tells the format
    (folder / "dataset_fingerprint.json").write_text("{}")

    class RealCRaC(CRaCMixin, nnUNetTrainer):
        available = None

        def get_dataloaders(self):
            return (self.batches(seed) for seed in (1, 2))

        def batches(self, seed):
            """Two an epoch, for training as for validation, from this epoch on."""
            for step in itertools.count(2 * self.current_epoch):
                if step == self.available:
                    return
                random = torch.Generator().manual_seed(1000 * seed + step)
                labels = torch.zeros(2, 1, 32, 32, dtype=torch.int16)
                labels[0, 0, 4:14, 8:30], labels[1, 0, 10:24, 2:20] = 1, 2
                image = labels + 0.2 * torch.randn(labels.shape, generator=random)
                if self.label_manager.has_ignore_label:
                    labels[..., :6] = self.label_manager.ignore_label
                yield {"data": image, "target": [labels, labels[..., ::2, ::2].clone()]}

    def make(results, **labels):
        monkeypatch.setenv("nnUNet_preprocessed", str(tmp_path / "preprocessed"))
        monkeypatch.setenv("nnUNet_results", str(tmp_path / results))
        labels = {"background": 0, "one": 1, "two": 2, **labels}
        dataset = {"channel_names": {"0": "grey"}, "labels": labels, "file_ending": ".png"}
        torch.manual_seed(0)
        trainer = RealCRaC(json.loads(json.dumps(PLANS)), "2d", 0, dataset, device=torch.device("cpu"))
        trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = 3, 2, 2
        trainer.save_every = 1
        return trainer

    return make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("labels", [{}, {"ignore": 3}])
def test_the_real_trainer_resumed_ends_with_the_same_bits(real, labels):
    whole = real("whole", **labels)
    whole.run_training()
    interrupted = real("parts", **labels)
    interrupted.available = 4
    with pytest.raises(StopIteration):
        interrupted.run_training()
    latest = f"{interrupted.output_folder}/checkpoint_latest.pth"
    resumed = real("parts", **labels)
    resumed.load_checkpoint(latest)
    assert len(resumed.crac.multipliers.trace) == resumed.current_epoch == 2
    resumed.run_training()
    assert resumed.crac.multipliers.trace == whole.crac.multipliers.trace
    assert len(whole.crac.multipliers.trace) == 3
    for one, other in zip(resumed.network.parameters(), whole.network.parameters(), strict=True):
        assert torch.equal(one, other)
    written = sorted(path.name for path in Path(resumed.output_folder).glob("checkpoint_*"))
    assert written == [f"checkpoint_{kind}.pth{end}" for kind in ("best", "final") for end in ("", ".crac")]


@pytest.mark.filterwarnings("ignore")
def test_the_real_trainer_learns_the_multipliers_from_validation_batches(real):
    trainer = real("results", ignore=3)
    trainer.initialize()
    expected = losses.CRaC(3, base=None, ignore_index=3)

    validation = list(itertools.islice(trainer.batches(2), 6))

    def see(network, _, outputs):
        if not network.training:
            expected.observe(outputs[0], validation.pop(0)["target"][0])
            if len(validation) % 2 == 0:
                expected.update()

    trainer.network.register_forward_hook(see)
    trainer.run_training()
    assert len(expected.multipliers.trace) == 3
    assert trainer.crac.multipliers.trace == expected.multipliers.trace
