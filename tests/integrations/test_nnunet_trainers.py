"""segcal's losses in the real nnU-Net's trainers."""

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import nnunet_study
from segcal import LOSSES, losses
from segcal.errors import InputError, OutputError
from segcal.integrations.nnunet import LossMixin
from segcal.integrations.nnunet_trainers import FILE, install_trainers, remove_trainers, trainer_names
from segcal.losses.callbacks import hook_nnunet

pytest.importorskip("nnunetv2", reason="nnU-Net is not installed: pip install 'segcal[nnunet]'")
from nnunetv2.training.loss.compound_losses import DC_and_CE_loss
from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.find_class_by_name import recursive_find_python_class
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

pytest_plugins = ["nnunet_fixtures"]
pytestmark = pytest.mark.filterwarnings("ignore")

# Four stages, so that two resolutions are supervised; nnU-Net leaves out the lowest.
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
                    "n_stages": 4,
                    "features_per_stage": [4, 8, 8, 8],
                    "conv_op": "torch.nn.Conv2d",
                    "kernel_sizes": [[3, 3]] * 4,
                    "strides": [[1, 1], [2, 2], [2, 2], [2, 2]],
                    "n_conv_per_stage": [1] * 4,
                    "n_conv_per_stage_decoder": [1] * 3,
                },
                "_kw_requires_import": ["conv_op"],
            },
        }
    },
}


class FromMemory(nnUNetTrainer):
    """nnU-Net's trainer, with batches from memory."""

    available = None

    def get_dataloaders(self):
        return (self.batches(seed) for seed in (1, 2))

    def batches(self, seed):
        """Two an epoch, for training as for validation, from this epoch on."""
        for step in itertools.count(2 * self.current_epoch):
            if step == self.available:
                return
            random = torch.Generator().manual_seed(1000 * seed + step)
            labels = torch.zeros(2, 1, 32, 32)  # nnU-Net's labels may be floats
            labels[0, 0, 4:14, 8:30], labels[1, 0, 10:24, 2:20] = 1, 2
            image = labels + 0.2 * torch.randn(labels.shape, generator=random)
            if self.label_manager.has_ignore_label:
                labels[..., :6] = self.label_manager.ignore_label
            yield {"data": image, "target": [labels[..., ::k, ::k].clone() for k in (1, 2, 4)]}

    def plot_network_architecture(self):  # It would look for packages that are not here.
        pass


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes trainers, in a folder of results each."""
    folder = tmp_path / "preprocessed" / PLANS["dataset_name"]
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "case.b2nd").touch()  # of which nnU-Net tells the format
    (folder / "dataset_fingerprint.json").write_text("{}")

    def one(loss=None, results="results", labels=None, **attributes):
        monkeypatch.setenv("nnUNet_preprocessed", str(tmp_path / "preprocessed"))
        monkeypatch.setenv("nnUNet_results", str(tmp_path / results))
        named = {"background": 0, "one": 1, "two": 2, **(labels or {})}
        dataset = {"channel_names": {"0": "grey"}, "labels": named, "file_ending": ".png"}
        if any(isinstance(value, list) for value in named.values()):
            dataset["regions_class_order"] = [1, 2, 3]
        bases = (LossMixin, FromMemory) if loss else (FromMemory,)
        kind = type("Trainer", bases, {"loss_id": loss, **attributes})
        torch.manual_seed(0)
        trainer = kind(json.loads(json.dumps(PLANS)), "2d", 0, dataset, device=torch.device("cpu"))
        trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = 3, 2, 2
        trainer.save_every = 1
        trainer.logger.plot_progress_png = lambda *_: None
        return trainer

    return one


def outputs_and_targets(trainer):
    torch.manual_seed(0)
    targets = next(trainer.batches(1))["target"]
    return [torch.randn(2, 3, *target.shape[2:]) for target in targets], targets


def expected_loss(trainer, outputs, targets, ignored):
    """nnU-Net's loss with segcal's in it, written from the description."""
    id, weights = trainer.loss_id, (2 / 3, 1 / 3)  # 1 and 1/2, which sum to 1
    options = {"ignore_index": 255 if ignored is None else ignored}
    dice = {"batch_dice": True, "smooth": 1e-5, "do_bg": False, "ddp": False}
    both = DC_and_CE_loss(dice, {}, ignore_label=ignored, dice_class=MemoryEfficientSoftDiceLoss)
    if id in ("dice", "ce-dice"):
        kind = LOSSES[id](**options)
        return sum(w * kind(z, y.long()) for w, z, y in zip(weights, outputs, targets, strict=False))
    if id in ("ce", "focal", "ls", "svls"):
        kind = LOSSES[id](**options)
        both.weight_ce = 0
        both_and_ours = [both(z, y) + kind(z, y.long()) for z, y in zip(outputs, targets, strict=True)]
        return sum(w * value for w, value in zip(weights, both_and_ours, strict=False))
    penalty = LOSSES[id].of_classes(3, base=None, **options)
    own = sum(w * both(z, y) for w, z, y in zip(weights, outputs, targets, strict=False))
    return own + penalty(outputs[0], targets[0].long())


@pytest.mark.parametrize("ignored", [None, 3])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_takes_its_place_under_deep_supervision(make, loss, ignored):
    trainer = make(loss, labels={} if ignored is None else {"ignore": ignored})
    trainer.initialize()
    outputs, targets = outputs_and_targets(trainer)
    if loss == "bwcr":
        outputs = [torch.cat((z, z + 0.1 * torch.randn_like(z))) for z in outputs]
        targets = [torch.cat((y, y)) for y in targets]
    torch.testing.assert_close(trainer.loss(outputs, targets), expected_loss(trainer, outputs, targets, ignored))
    # A step of training and of validation, through the network.
    batch = next(trainer.batches(1))
    before = [parameter.clone() for parameter in trainer.network.parameters()]
    assert np.isfinite(trainer.train_step(batch)["loss"])
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.network.parameters(), strict=True))
    with torch.no_grad():
        assert np.isfinite(trainer.validation_step(batch)["loss"])


def test_cross_entropy_is_nnunets_own(make):
    plain, ours = make(), make("ce")
    for trainer in (plain, ours):
        trainer.initialize()
    outputs, targets = outputs_and_targets(ours)
    torch.testing.assert_close(ours.loss(outputs, targets), plain.loss(outputs, targets))


def test_without_deep_supervision(make):
    trainer = make("focal")
    trainer.enable_deep_supervision = False
    trainer.initialize()
    (logits, *_), (labels, *_) = outputs_and_targets(trainer)
    own = make()
    own.enable_deep_supervision = False
    own.initialize()
    own.loss.weight_ce = 0
    expected = own.loss(logits, labels) + losses.focal(logits, labels.long())
    torch.testing.assert_close(trainer.loss(logits, labels), expected)


def test_options_and_refusals(make):
    trainer = make("crac", loss_options={"margin": 5.0}, labels={"ignore": 3})
    trainer.initialize()
    assert "margin=5.0" in repr(trainer.segcal_loss)
    assert "ignore_index=3" in repr(trainer.segcal_loss)
    with pytest.raises(InputError, match="overlapping regions"):
        make("nacl", labels={"both": [1, 2], "one": 1, "two": [2]}).initialize()
    with pytest.raises(InputError, match="loss_id is 'nalc'.*did you mean 'nacl'"):
        make("nalc").initialize()

    def cross_entropy(self):
        return torch.nn.CrossEntropyLoss()

    with pytest.raises(InputError, match="the trainer's loss is CrossEntropyLoss; expected nnU-Net's Dice and"):
        make("focal", _build_loss=cross_entropy).initialize()


@pytest.mark.parametrize("labels", [{}, {"ignore": 3}])
def test_crac_resumed_ends_with_the_same_bits(make, labels):
    whole = make("crac", "whole", labels)
    whole.run_training()
    interrupted = make("crac", "parts", labels)
    interrupted.available = 4
    with pytest.raises(StopIteration):
        interrupted.run_training()
    latest = f"{interrupted.output_folder}/checkpoint_latest.pth"
    resumed = make("crac", "parts", labels)
    resumed.load_checkpoint(latest)
    assert len(resumed.segcal_loss.multipliers.trace) == resumed.current_epoch == 2
    resumed.run_training()
    assert resumed.segcal_loss.multipliers.trace == whole.segcal_loss.multipliers.trace
    assert len(whole.segcal_loss.multipliers.trace) == 3
    for one, other in zip(resumed.network.parameters(), whole.network.parameters(), strict=True):
        assert torch.equal(one, other)
    written = sorted(path.name for path in Path(resumed.output_folder).glob("checkpoint_*"))
    assert written == [f"checkpoint_{kind}.pth{end}" for kind in ("best", "final") for end in ("", ".crac")]


def test_crac_learns_its_multipliers_from_validation_batches(make):
    trainer = make("crac", labels={"ignore": 3})
    trainer.initialize()
    expected = losses.CRaC(3, base=None, ignore_index=3)
    validation = list(itertools.islice(trainer.batches(2), 6))

    def see(network, _, outputs):
        if not network.training:
            expected.observe(outputs[0], validation.pop(0)["target"][0].long())
            if len(validation) % 2 == 0:
                expected.update()

    trainer.network.register_forward_hook(see)
    trainer.run_training()
    assert len(expected.multipliers.trace) == 3
    assert trainer.segcal_loss.multipliers.trace == expected.multipliers.trace


def test_the_hook_alone_and_checkpoints_without_multipliers(make, tmp_path):
    trainer, crac = make(), losses.CRaC(3, ignore_index=-1)
    trainer.initialize()
    trainer.loss.loss = losses.CombinedLoss([(1.0, losses.Dice()), (1.0, crac)])
    hook_nnunet(trainer, crac)
    outputs, targets = outputs_and_targets(trainer)
    targets = [target.long() for target in targets]
    trainer.loss(outputs, targets)  # with gradients, so it is training
    assert not crac.multipliers.voxels.any()
    with torch.no_grad():
        trainer.loss(outputs, targets)
    direct = losses.CRaC(3, ignore_index=-1)
    direct.observe(outputs[0], targets[0])
    assert torch.equal(crac.multipliers.sums, direct.multipliers.sums)

    checkpoint = str(tmp_path / "checkpoint_latest.pth")
    trainer.local_rank = 1  # Another process writes.
    trainer.save_checkpoint(checkpoint)
    trainer.local_rank, trainer.disable_checkpointing = 0, True
    trainer.save_checkpoint(checkpoint)
    assert not list(tmp_path.glob("*.crac"))
    trainer.disable_checkpointing = False
    trainer.save_checkpoint(checkpoint)
    Path(f"{checkpoint}.crac").unlink()
    said = []
    trainer.print_to_log_file = lambda text, *_, **__: said.append(text)
    trainer.load_checkpoint(checkpoint)
    assert ["checkpoint_latest.pth.crac is missing" in line for line in said] == [True]


def test_nnunet_finds_the_trainers_of_all_losses_in_a_folder(tmp_path, run):
    code, text, _ = run("nnunet", "install-trainers", tmp_path)
    assert code == 0
    assert "nnUNetTrainer_segcal_ML1ACE" in text
    assert f"nnUNet_extTrainer={tmp_path}" in text
    for loss, name in trainer_names().items():
        found = recursive_find_python_class(str(tmp_path), name, None, base_folder=str(tmp_path))
        assert issubclass(found, LossMixin)
        assert issubclass(found, nnUNetTrainer)
        assert (found.__name__, found.loss_id) == (name, loss)
    assert run("nnunet", "install-trainers", tmp_path)[0] == 0  # again
    assert "removed" in run("nnunet", "install-trainers", tmp_path, "--remove")[1]
    assert not (tmp_path / FILE).exists()
    assert "no trainers were installed" in run("nnunet", "install-trainers", tmp_path, "--remove")[1]


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / FILE).write_text("mine")
    for change in (install_trainers, remove_trainers):
        with pytest.raises(OutputError, match="segcal did not write it"):
            change(tmp_path)
    assert (tmp_path / FILE).read_text() == "mine"
    with pytest.raises(InputError, match="is not a folder"):
        install_trainers(tmp_path / "nowhere")


def test_trained_by_name_then_predicted(study, tmp_path, monkeypatch):
    """Installed into nnU-Net itself, found by name, trained on its data, and found again for prediction."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    own = Path(recursive_find_trainer_class_by_name.__code__.co_filename).parents[1] / "training" / "nnUNetTrainer"
    if not os.access(own, os.W_OK) or (own / FILE).exists():
        pytest.skip("nnU-Net's folder cannot be written to, or has trainers already")
    monkeypatch.setenv("nnUNet_results", str(tmp_path))
    assert install_trainers() == own / FILE
    try:
        for loss in ("nacl", "crac", "ml1-ace"):
            kind = recursive_find_trainer_class_by_name(trainer_names()[loss])
            trainer = nnunet_study.trainer(study, "Dataset001_Organs", "2d", 0, kind)
            trainer.num_epochs, trainer.num_iterations_per_epoch = 2, 2
            trainer.logger.plot_progress_png = lambda *_: None
            trainer.run_training()
            assert np.isfinite(trainer.logger.get_value("train_losses", step=-1))
            if loss == "crac":
                assert len(trainer.segcal_loss.multipliers.trace) == 2
        predictor = nnUNetPredictor(device=torch.device("cpu"))
        predictor.initialize_from_trained_model_folder(trainer.output_folder_base, (0,))
        assert predictor.trainer_name == "nnUNetTrainer_segcal_ML1ACE"
    finally:
        assert remove_trainers() == own / FILE
