"""The callbacks in runs of the real ``Trainer``."""

import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import segcal
from peers import peer
from segcal import losses
from segcal.errors import DataError, InputError, SegcalError
from segcal.integrations.lightning import calibration_callback, calibrator_of, crac_callback

L = peer("lightning.pytorch")
logging = peer("lightning.pytorch.utilities.rank_zero").logging

# Lightning's own use of torch, and its advice about workers.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
]


class Module(L.LightningModule):
    """A network that has learnt something, and is too sure."""

    def __init__(self, loss=None):
        super().__init__()
        self.network, self.loss = nn.Conv2d(1, 3, 3, padding=1), loss or losses.CrossEntropy()
        with torch.no_grad():
            self.network.weight.zero_()[1, 0, 1, 1] = 8.0
            self.network.bias.copy_(torch.tensor([2.0, 0.0, -4.0]))

    def forward(self, images):
        return self.network(images)

    def training_step(self, batch):
        images, labels = batch
        return self.loss(self(images), labels)

    def validation_step(self, batch):
        images, labels = batch
        return {"logits": self(images), "labels": labels}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def loader(images=6, seed=0, batch_size=2):
    random = torch.Generator().manual_seed(seed)
    noisy = torch.randn(images, 1, 16, 16, generator=random)
    labels = (noisy + 0.7 * torch.randn(noisy.shape, generator=random) > 0.3)[:, 0].long()
    labels[:, 0] = 255
    labels[0, 5:8, 5:8] = 2
    return DataLoader(TensorDataset(noisy, labels), batch_size=batch_size)


def trainer(tmp_path, *callbacks, **options):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    options = {"max_epochs": 2, "enable_checkpointing": False, **quiet, **options}
    return L.Trainer(default_root_dir=tmp_path, callbacks=list(callbacks), **options)


def predictions(module, data):
    with torch.no_grad():
        parts = [(module(images), labels) for images, labels in data]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def kept_folders():
    return set(Path(tempfile.gettempdir()).glob("segcal-validation-*"))


class TestCalibration:
    @pytest.mark.parametrize("held_out", [0.0, 0.5])
    def test_validate_fits_to_the_validation_images(self, tmp_path, held_out):
        module, data, before = Module(), loader(), kept_folders()
        callback = calibration_callback("vs", metrics=("nll", "ece[num_bins=10]"), held_out=held_out)
        run = trainer(tmp_path, callback)
        run.validate(module, data, verbose=False)
        cases = segcal.cases_from(predictions(module, data))
        part = cases.split(1 - held_out, 0.0, held_out, seed=0)
        own = segcal.calibrators.VectorScaling().fit(part.calibration)
        for name, tensor in callback.calibrator.tensors().items():
            torch.testing.assert_close(tensor, own.tensors()[name])
        measured = part.test if held_out else part.calibration
        for when, calibrator in (("before", None), ("after", own)):
            expected = segcal.evaluate(measured, calibrator, metrics=("nll", "ece[num_bins=10]"))
            for metric in ("nll", "ece[num_bins=10]"):
                logged = float(run.callback_metrics[f"calibration/{metric}_{when}"])
                assert logged == pytest.approx(expected.value(metric), rel=1e-5)
        assert run.callback_metrics["calibration/nll_after"] < run.callback_metrics["calibration/nll_before"]
        assert kept_folders() == before

    def test_every_epoch_of_a_fit_and_its_checkpoint(self, tmp_path):
        callback, seen = calibration_callback(held_out=0.5), []
        checkpoint = L.callbacks.ModelCheckpoint(tmp_path, monitor="calibration/nll_after", save_top_k=-1)

        class Watch(L.Callback):
            def on_validation_end(self, trainer, pl_module):
                seen.append((trainer.sanity_checking, callback.calibrator))

        run = trainer(tmp_path, callback, Watch(), checkpoint, enable_checkpointing=True)
        run.fit(Module(), loader(), loader(seed=1))
        (sanity, nothing), (_, first), (_, second) = seen
        assert sanity
        assert nothing is None
        assert first.temperature != second.temperature
        # Each checkpoint holds the calibrator that belongs to its weights.
        paths = sorted(checkpoint.best_k_models, key=lambda path: torch.load(path, weights_only=True)["epoch"])
        assert [calibrator_of(path).temperature for path in paths] == [first.temperature, second.temperature]
        assert calibrator_of(paths[0]).fit_report == first.fit_report
        fresh = calibration_callback()
        trainer(tmp_path, fresh, max_epochs=2).fit(Module(), loader(), loader(seed=1), ckpt_path=paths[1])
        assert fresh.calibrator.temperature == second.temperature

    def test_training_is_not_changed(self, tmp_path):
        weights = []
        for callbacks in ([], [calibration_callback(segcal.CALIBRATORS["lts-ti"](epochs=1))]):
            L.seed_everything(3, verbose=False)
            shuffled = DataLoader(loader().dataset, batch_size=2, shuffle=True)
            module = Module()
            trainer(tmp_path, *callbacks).fit(module, shuffled, loader(seed=1))
            weights.append(module.network.weight.detach().clone())
        assert torch.equal(*weights)

    def test_images_of_different_sizes_and_half_precision(self, tmp_path):
        class Half(Module):
            def forward(self, images):
                return super().forward(images).half()

        data = [(torch.randn(1, 1, size, 12), torch.randint(0, 3, (1, 1, size, 12))) for size in (8, 16, 24)]
        callback = calibration_callback()
        trainer(tmp_path, callback).validate(Half(), DataLoader(data, batch_size=None), verbose=False)
        assert callback.calibrator.fit_report.voxels_used > 0

    def test_several_devices_are_refused(self, tmp_path):
        run = trainer(tmp_path, calibration_callback(), devices=2, strategy="ddp")
        with pytest.raises(SegcalError, match=r"trainer has 2 processes.*one, which sees all.*devices=1"):
            run.callbacks[0].setup(run, Module(), "fit")

    def test_mistakes_are_named(self, tmp_path):
        with pytest.raises(InputError, match="method is 'tss'.*did you mean"):
            calibration_callback("tss")
        with pytest.raises(InputError, match="held_out is 1"):
            calibration_callback(held_out=1.0)
        with pytest.raises(InputError, match="metric is 'eec'"):
            calibration_callback(metrics=("eec",))
        with pytest.raises(DataError, match="holds no calibrators"):
            calibrator_of({"callbacks": {"other": {}}})

        class Loss(Module):
            def validation_step(self, batch):
                return super().validation_step(batch)["logits"].sum()

        before = kept_folders()
        with pytest.raises(SegcalError, match="validation_step returned Tensor"):
            trainer(tmp_path, calibration_callback()).validate(Loss(), loader(), verbose=False)
        assert kept_folders() == before
        one = DataLoader(TensorDataset(*loader().dataset[:1]))
        with pytest.raises(SegcalError):
            trainer(tmp_path, calibration_callback()).validate(Module(), one, verbose=False)


class TestCRaC:
    def test_it_learns_what_a_plain_loop_learns(self, tmp_path):
        crac, expected, traces = losses.CRaC(3), losses.CRaC(3), []

        class PlainLoop(L.Callback):
            def on_validation_end(self, trainer, pl_module):
                if not trainer.sanity_checking:
                    losses.callbacks.update_multipliers(expected, pl_module, loader(seed=1))
                    traces.append(expected.multipliers.trace[-1])

        module = Module(losses.CombinedLoss([(1.0, losses.Dice()), (0.5, crac)]))
        callback = crac_callback()
        trainer(tmp_path, callback, PlainLoop()).fit(module, loader(), loader(seed=1))
        assert len(traces) == 2
        assert crac.multipliers.trace == traces
        assert callback.state_dict() == {}

    def test_only_validation_of_a_fit_counts(self, tmp_path):
        crac = losses.CRaC(3)
        run = trainer(tmp_path, crac_callback())
        run.validate(Module(crac), loader(), verbose=False)
        assert not crac.multipliers.trace
        assert not crac.multipliers.voxels.any()

    def test_a_given_loss_is_saved_with_the_callback(self, tmp_path):
        crac, fresh = losses.CRaC(3), losses.CRaC(3)
        run = trainer(tmp_path, crac_callback(crac))
        run.fit(Module(), loader(), loader(seed=1))
        run.save_checkpoint(tmp_path / "last.ckpt")
        again = trainer(tmp_path, crac_callback(fresh))
        again.fit(Module(), loader(), loader(seed=1), ckpt_path=tmp_path / "last.ckpt")
        assert fresh.multipliers.trace == crac.multipliers.trace
        assert len(crac.multipliers.trace) == 2
        assert torch.equal(fresh.multipliers.values, crac.multipliers.values)

    def test_mistakes_are_named(self, tmp_path):
        with pytest.raises(SegcalError, match="Module has no CRaC loss"):
            trainer(tmp_path, crac_callback()).fit(Module(), loader(), loader())

        class Other(Module):
            returned = None

            def validation_step(self, batch):
                return self.returned

        for returned, says in ((None, "NoneType"), ({"loss": torch.zeros(())}, "a dict with loss")):
            Other.returned = returned
            with pytest.raises(SegcalError, match=f"validation_step returned {says}"):
                trainer(tmp_path, crac_callback()).fit(Other(losses.CRaC(3)), loader(), loader())


@pytest.mark.parametrize("make", [crac_callback, calibration_callback])
def test_the_extra_is_named(monkeypatch, make):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"{make.__name__} needs lightning.*segcal\[lightning\]"):
        make()
