import csv
import json
import math
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch

import segcal
from datasets import snapshot
from segcal.errors import SegcalError
from segcal.training import Trainer, UNet, load_network, train
from segcal.training.data import hold
from segcal.training.late import LateNumbers
from segcal.training.prediction import predict
from training.scans import small, write_scans


@pytest.fixture
def root(tmp_path):
    write_scans(tmp_path / "d", 8, ignored=0.1)
    return tmp_path / "d"


def weights(folder):
    state = torch.load(folder / "last.pt", weights_only=True)
    return {**state["network"], **{f"loss.{k}": v for k, v in state["loss"].items() if isinstance(v, torch.Tensor)}}


def same(one, other):
    return one.keys() == other.keys() and all(
        one[name].numpy().tobytes() == other[name].numpy().tobytes() for name in one
    )


def log(folder):
    with (folder / "log.csv").open() as file:
        return list(csv.DictReader(file))


class KilledError(Exception):
    pass


def interrupted_in(epoch):
    """A progress callback that ends the run in the middle of an epoch."""
    calls = []

    def progress(text):
        calls.append(text)
        if sum(f"epoch {epoch}/" in call for call in calls) == 2:
            raise KilledError

    return progress


@pytest.mark.parametrize("loss", ["ce", "crac", "bwcr"])
def test_resumed_equals_uninterrupted_bit_for_bit(root, tmp_path, loss):
    options = {"loss": loss, "epochs": 3, "milestones": [2], "crop": [16, 16]}
    train(small(root, "whole", **options))
    with pytest.raises(KilledError):
        train(small(root, "parts", **options), progress=interrupted_in(2))
    torch.manual_seed(99)
    np.random.seed(99)  # what happens in between must not matter
    report = train(small(root, "parts", **options), resume=True)
    assert report.epochs == 3
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert same(weights(whole), weights(parts))
    assert (whole / "best.safetensors").read_bytes() == (parts / "best.safetensors").read_bytes()
    for one, other in zip(log(whole), log(parts), strict=True):
        assert {**one, "wall_time": 0} == {**other, "wall_time": 0}


def test_epochs_may_be_added_and_data_may_move(root, tmp_path):
    train(small(root, "whole", epochs=3))
    train(small(root, "parts", epochs=2))
    moved = root.rename(tmp_path / "elsewhere")
    train(small(moved, "parts", epochs=3), resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_another_seed_is_another_run(root, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        Trainer(small(root, name, seed=seed, epochs=1)).fit()
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


@pytest.mark.parametrize("loss", sorted(segcal.LOSSES))
def test_every_loss_trains(root, loss):
    trainer = Trainer(small(root, loss=loss, epochs=1, batch=4))
    before = [parameter.clone() for parameter in trainer.network.parameters()]
    trainer.fit()
    after = list(trainer.network.parameters())
    assert all(bool(parameter.isfinite().all()) for parameter in after)
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_losses_add_up(root):
    parts = [{"id": "dice", "factor": 0.5}, {"id": "nacl", "options": {"base": "none", "weight": 0.2}}]
    trainer = Trainer(small(root, loss=parts))
    logits, labels = torch.randn(1, 3, 8, 8), torch.randint(0, 3, (1, 8, 8))
    expected = 0.5 * segcal.losses.dice(logits, labels) + segcal.losses.nacl(logits, labels, base=None, weight=0.2)
    torch.testing.assert_close(trainer.loss(logits, labels), expected)


def test_it_learns(tmp_path):
    write_scans(tmp_path / "d", 10, (32, 32))
    trainer = Trainer(small(tmp_path / "d", epochs=12, width=8, learning_rate=0.01, augment=["flip"]))
    report = trainer.fit()
    assert report.dice > 0.6
    assert trainer.history[-1]["train/loss"] < 0.6 * trainer.history[0]["train/loss"]
    dice = [row["val/dice"] for row in trainer.history]
    assert report.dice == max(dice)
    assert report.best_epoch == 1 + dice.index(max(dice))


@pytest.mark.parametrize(
    ("size", "dims", "dtype"), [((24, 28), 2, "float16"), ((6, 16, 20), 2, "float32"), ((6, 16, 20), 3, "float32")]
)
def test_logits_are_a_dataset_for_check_and_evaluate(tmp_path, size, dims, dtype):
    write_scans(tmp_path / "d", 6, size, ignored=0.1)
    config = small(tmp_path / "d", dims=dims, logits=dtype)
    report = train(config)
    for folder in ("logits-val", "logits-test"):
        checked = segcal.check(report.output / folder)
        assert not checked.problems
        assert checked.cases == 2
    # The best model's validation scores are what evaluating the written logits gives.
    results = segcal.evaluate(segcal.open_cases(report.output / "logits-val"), metrics=("nll", "ece"))
    near = 1e-3 if dtype == "float16" else 1e-6
    assert results.value("nll") == pytest.approx(report.nll, rel=near)
    assert results.value("ece") == pytest.approx(report.ece, rel=near, abs=near)
    case = segcal.open_cases(report.output / "logits-test")[0]
    assert np.load(next((report.output / "logits-test" / "logits").iterdir())).dtype == dtype
    np.testing.assert_array_equal(case.labels[0], np.load(tmp_path / "d" / "labels" / f"{case.id}.npy"))
    np.testing.assert_allclose(case.image[0], np.load(tmp_path / "d" / "images" / f"{case.id}.npy"))
    assert case.logits.shape == (1, 3, *size)


def test_slices_of_a_volume_are_predicted_one_by_one(tmp_path):
    write_scans(tmp_path / "d", 6, (5, 16, 20))
    trainer = Trainer(small(tmp_path / "d"))
    network, scan = trainer.network.eval(), trainer.dataset.scans["volume-002"]
    whole = torch.cat([logits for _, logits in predict(network, scan, slice(0, 5), trainer.config)])
    alone = torch.cat([logits for _, logits in predict(network, scan, slice(3, 4), trainer.config)])
    torch.testing.assert_close(whole[3:4], alone)


def test_without_validation_the_latest_model_is_kept(root):
    report = train(small(root, split={"train": 0.5, "test": 0.5}))
    assert report.best_epoch == 2
    assert math.isnan(report.dice)
    assert not (report.output / "logits-val").exists()
    assert (report.output / "logits-test").is_dir()
    kept = load_network(report.output / "best.safetensors").state_dict()
    assert same(kept, torch.load(report.output / "last.pt", weights_only=True)["network"])


def test_mixed_precision_on_a_cpu(root):
    trainer = Trainer(small(root, amp=True, loss="nacl"))
    seen = []
    trainer.network.register_forward_hook(lambda network, *_: seen.append((network.training, _[1].dtype)))
    trainer.fit()
    assert {dtype for training, dtype in seen if training} == {torch.bfloat16}
    assert {dtype for training, dtype in seen if not training} == {torch.float32}
    assert next(trainer.network.parameters()).dtype == torch.float32


def test_workers_change_nothing(root, tmp_path):
    for name, workers in (("a", 0), ("b", 2)):
        Trainer(small(root, name, workers=workers, epochs=1)).fit()
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_the_log_has_a_line_an_epoch(root):
    described = (root / "segcal.toml").read_text()
    (root / "segcal.toml").write_text('class_names = ["a", "b", "c"]\n' + described)
    report = train(small(root, loss="crac", batch=3))
    rows = log(report.output)
    assert [(row["epoch"], row["step"]) for row in rows] == [("1", "2"), ("2", "4")]
    columns = {"wall_time", "train/loss", "val/dice", "val/dice/b", "val/nll", "val/ece", "crac/lambda/outer/c"}
    assert columns <= set(rows[0])
    assert all(math.isfinite(float(row["train/loss"])) for row in rows)


def test_crac_bears_down_on_the_harder_class_and_the_outer_region(tmp_path):
    """Class 2 is labelled in every other image only, and looks the same in all: no network can meet its constraint.

    Nor can it at a border, whose place noise hides. Once the network fits what can be fitted, those multipliers grow.
    """
    for folder in ("images", "labels"):
        (tmp_path / "d" / folder).mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:24, :24]
    names = [f"s{i:02d}" for i in range(16)]
    for number, name in enumerate(names):
        image, labels = rng.normal(0, 0.3, (24, 24)), np.zeros((24, 24), np.uint8)
        for shown, label, column in ((2.0, 1, 6), (-2.0, 2 * (number % 2), 17)):
            disc = np.hypot(rows - rng.uniform(7, 16), columns - column) < rng.uniform(4, 5)
            image[disc] += shown
            labels[disc] = label
        np.save(tmp_path / "d" / "images" / f"{name}.npy", image.astype(np.float32))
        np.save(tmp_path / "d" / "labels" / f"{name}.npy", labels)
    (tmp_path / "d" / "segcal.toml").write_text(f"classes = 3\n[splits]\nvalidation = {names[-6:]}\n")
    trainer = Trainer(small(tmp_path / "d", loss="crac", epochs=45, width=8, batch=5, learning_rate=0.01, augment=[]))
    trainer.fit()
    trace = [np.array(entry["multipliers"]) for entry in trainer.controllers[0].multipliers.trace]
    grown = trace[-1] - trace[-6]
    assert (grown[:, 2] > 1.5 * grown[:, 1]).all()
    # Every class grew 1.5 times as fast where this was written; on another processor the background grew 1.4 times.
    assert (grown[1] > grown[0]).all()
    assert grown[1].sum() > 1.5 * grown[0].sum()
    assert (trace[-1][1] > trace[-1][0]).all()


def test_crac_state_survives_a_checkpoint(root):
    trainer = Trainer(small(root, loss="crac"))
    trainer.fit()
    resumed = Trainer(small(root, loss="crac", epochs=3), resume=True)
    before, after = (one.controllers[0].multipliers for one in (trainer, resumed))
    assert torch.equal(before.values, after.values)
    assert (after.values > 1e-6).all()
    assert before.trace == after.trace
    resumed.fit()
    assert [entry["epoch"] for entry in after.trace] == [1, 2, 3]


def test_a_loss_that_is_not_finite_stops_the_run(root):
    config = small(root, epochs=4)
    trainer = Trainer(config)
    good = trainer.loss

    class Bad(torch.nn.Module):
        calls = 0

        def forward(self, logits, labels):
            self.calls += 1
            return good(logits, labels) * (math.nan if self.calls == 4 else 1)

    trainer.loss = Bad()
    with pytest.raises(SegcalError, match="epoch 2, step 2: the loss is nan; the checkpoint of epoch 1 is kept"):
        trainer.fit()
    assert torch.load(trainer.output / "last.pt", weights_only=True)["epoch"] == 1
    assert train(config, resume=True).epochs == 4


def test_a_loss_read_late_is_named_by_its_own_step(root, monkeypatch):
    monkeypatch.setattr(LateNumbers, "add", partialmethod(late_add, LateNumbers.add))
    trainer = Trainer(small(root, epochs=4, batch=1))
    good, calls = trainer.loss, []

    class Bad(torch.nn.Module):
        def forward(self, logits, labels):
            calls.append(1)
            return good(logits, labels) * (math.nan if len(calls) == 5 else 1)

    trainer.loss = Bad()
    with pytest.raises(SegcalError, match="epoch 2, step 1: the loss is nan; the checkpoint of epoch 1 is kept"):
        trainer.fit()
    assert len(calls) == 8  # three steps of four later
    assert all(torch.load(trainer.output / "last.pt", weights_only=True)["network"]["head.bias"].isfinite())


def late_add(self, add, number):
    self.steps = 3
    return add(self, number)


def test_checkpoints_every_few_epochs_and_when_stopped(root, tmp_path):
    train(small(root, "whole", epochs=5))
    options = {"epochs": 5, "save_every": 2}
    saved = []

    def progress(text):
        file = tmp_path / "parts" / "last.pt"
        saved.append(torch.load(file, weights_only=True)["epoch"] if file.exists() else 0)
        if "epoch 4/" in text:
            raise KilledError

    with pytest.raises(KilledError):
        train(small(root, "parts", **options), progress=progress)
    assert saved == [0, 0, 0, 0, 2, 2, 2]
    stopped = Trainer(small(root, "parts", **options), resume=True)
    assert stopped.fit(stop=lambda: stopped.done == 3).epochs == 3
    assert torch.load(tmp_path / "parts" / "last.pt", weights_only=True)["epoch"] == 3
    assert train(small(root, "parts", **options), resume=True).epochs == 5
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert same(weights(whole), weights(parts))
    assert (whole / "best.safetensors").read_bytes() == (parts / "best.safetensors").read_bytes()


def test_validation_every_few_epochs(root, tmp_path):
    train(small(root, "whole", epochs=5))
    options = {"epochs": 5, "validate_every": 2}
    stopped = Trainer(small(root, "parts", **options)).fit(stop=lambda: True)
    assert (stopped.epochs, stopped.best_epoch) == (1, 0)
    assert not (tmp_path / "parts" / "best.safetensors").exists()
    report = train(small(root, "parts", **options), resume=True)
    whole, parts = ([float(row["val/dice"]) for row in log(tmp_path / name)] for name in ("whole", "parts"))
    assert np.isnan([parts[0], parts[2]]).all()
    assert [parts[1], *parts[3:]] == [whole[1], *whole[3:]]
    assert report.best_epoch == [2, 4, 5][int(np.argmax([whole[1], *whole[3:]]))]
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    with pytest.raises(SegcalError, match="validate_every = 2 with CRaC"):
        Trainer(small(root, "crac", loss="crac", **options))


def test_held_scans_train_the_same_network(root, tmp_path, monkeypatch):
    Trainer(small(root, "read", loss="bwcr")).fit()
    held = Trainer(small(root, "held", loss="bwcr"))
    held.samples = replace(held.samples, scans=hold(held.samples.scans, torch.device("cpu")))
    held.validation = hold(held.validation, torch.device("cpu"))
    held.fit()
    assert same(weights(tmp_path / "read"), weights(tmp_path / "held"))


def test_a_compiled_network_is_the_same_network(root, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda network, **_: compiled.append(network) or network)
    Trainer(small(root, "plain", epochs=1)).fit()
    trainer = Trainer(small(root, "compiled", epochs=1, compile=True))
    trainer.fit()
    assert compiled == [trainer.network]
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "compiled"))


@pytest.mark.parametrize(("batch", "seen"), [(3, [3]), (8, [4])])
def test_only_the_size_of_the_first_batch_is_compiled(root, monkeypatch, batch, seen):
    sizes = []

    def compiled(network, **_):
        found = torch.nn.Sequential(network)
        found.register_forward_hook(lambda module, images, logits: sizes.append(len(logits)))
        return found

    monkeypatch.setattr(torch, "compile", compiled)
    trainer = Trainer(small(root, epochs=1, compile=True, batch=batch))
    assert len(trainer.samples) == 4
    trainer.fit()
    assert sizes == seen


def test_predictions_are_what_is_written(root):
    trainer = Trainer(small(root))
    trainer.fit()
    trainer.write_logits()
    written = segcal.open_cases(trainer.output / "logits-test")
    for case, other in zip(trainer.predictions("test"), written, strict=True):
        assert case.id == other.id
        assert torch.equal(case.logits, other.logits)
        assert torch.equal(case.labels, other.labels)


def test_weights_that_are_not_finite_stop_the_run(root):
    trainer = Trainer(small(root, epochs=1, batch=16))
    trainer.optimiser.step = lambda *_: trainer.network.head.bias.data.fill_(math.inf)
    with pytest.raises(SegcalError, match="weights are not finite; there is no checkpoint yet"):
        trainer.fit()


@pytest.mark.parametrize("name", ["last.pt", "best.safetensors", "log.csv", "logits-val/mine.txt"])
def test_a_folder_with_files_of_such_names_is_left_alone(root, name):
    config = small(root, epochs=1)
    path = Path(config.output) / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    before = snapshot(root.parent)
    for resume in (False, True):
        with pytest.raises(SegcalError, match="holds a run already|is not empty|cannot be read|no checkpoint"):
            Trainer(config, resume=resume)
    assert snapshot(root.parent) == before


def test_output_among_the_images_is_refused(root):
    with pytest.raises(SegcalError, match="which is read"):
        Trainer(replace(small(root, epochs=1), output=str(root / "images")))
    (root.parent / "file").write_text("")
    with pytest.raises(SegcalError, match="is a file"):
        Trainer(replace(small(root, epochs=1), output=str(root.parent / "file")))


def test_only_the_same_run_is_resumed(root):
    config = small(root, epochs=1)
    with pytest.raises(SegcalError, match="no checkpoint to resume from"):
        Trainer(config, resume=True)
    Trainer(config).fit()
    with pytest.raises(SegcalError, match="holds a run already.*--resume"):
        Trainer(config)
    with pytest.raises(SegcalError, match=r"differs .* in batch \(3, was 2\), width \(5, was 4\);"):
        Trainer(small(root, batch=3, width=5), resume=True)
    (root / "images" / "image-000.npy").unlink()
    (root / "labels" / "image-000.npy").unlink()
    with pytest.raises(SegcalError, match="differs .* in the scans of"):
        Trainer(config, resume=True)
    (root.parent / "run" / "last.pt").write_bytes(b"PK broken")
    with pytest.raises(SegcalError, match="last.pt: cannot be read"):
        Trainer(config, resume=True)


def test_a_checkpoint_from_before_a_key_was_added_is_resumed(root, tmp_path):
    train(small(root, epochs=1))
    file = tmp_path / "run" / "last.pt"
    state = torch.load(file, weights_only=True)
    config = json.loads(state["config"])
    state["config"] = json.dumps({name: value for name, value in config.items() if name != "validate_every"})
    torch.save(state, file)
    assert train(small(root, epochs=2), resume=True).epochs == 2


def test_what_cannot_work_is_said_before_the_first_step(root):
    with pytest.raises(SegcalError, match="CRaC needs a validation set, and it is empty"):
        Trainer(small(root, loss="crac", split={"train": 0.5, "test": 0.5}))
    with pytest.raises(SegcalError, match="device = 'tpu9'"):
        Trainer(small(root, device="tpu9"))
    if not torch.cuda.is_available():
        with pytest.raises(SegcalError, match="no CUDA device"):
            Trainer(small(root, device="cuda"))
    assert not (root.parent / "run").exists()


def test_a_checkpoint_holds_no_code(root):
    report = train(small(root))
    state = torch.load(report.output / "last.pt", weights_only=True)
    assert json.loads(state["config"])["width"] == 4
    assert isinstance(load_network(report.output / "best.safetensors"), UNet)


def test_a_run_that_was_killed_before_its_first_checkpoint_can_be_resumed(tmp_path, monkeypatch):
    """Found by killing runs at random points: best.safetensors was there, and last.pt was not."""
    write_scans(tmp_path / "d")
    whole = train(small(tmp_path / "d", "whole"))

    def stop(path, state):
        raise KeyboardInterrupt  # as good as a kill: nothing is written after it

    with monkeypatch.context() as patch:
        patch.setattr("segcal.training.loop.save_checkpoint", stop)
        with pytest.raises(KeyboardInterrupt):
            train(small(tmp_path / "d", "killed"))
    assert (tmp_path / "killed" / "best.safetensors").exists()
    with pytest.raises(SegcalError, match="holds a run already"):
        train(small(tmp_path / "d", "killed"))
    resumed = train(small(tmp_path / "d", "killed"), resume=True)
    assert (resumed.nll, resumed.epochs) == (whole.nll, whole.epochs)
    best = [(tmp_path / name / "best.safetensors").read_bytes() for name in ("whole", "killed")]
    assert best[0] == best[1]
