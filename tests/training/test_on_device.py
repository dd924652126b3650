"""Training on a CUDA device: the samples of the CPU, no step that waits, runs that resume."""

from __future__ import annotations

import pytest
import torch

import segcal
from segcal.training import Trainer
from segcal.training.data import HeldScan
from segcal.training.late import LateNumbers
from training.scans import small, write_scans

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # libraries of the machine warn of what is not ours
]


@pytest.fixture
def root(tmp_path):
    write_scans(tmp_path / "d", 16, (64, 80), ignored=0.1)
    return tmp_path / "d"


def trainers(root, **options):
    return [Trainer(small(root, device, device=device, **options)) for device in ("cpu", "cuda")]


@pytest.mark.parametrize("loss", ["ce", "bwcr"])
def test_batches_are_those_of_the_cpu(root, loss):
    here, there = trainers(root, loss=loss, crop=[48, 96])
    assert all(isinstance(scan, HeldScan) for scan in (*there.samples.scans, *there.validation))
    here.samples.epoch = there.samples.epoch = 3
    steps = [chosen for chosen, _ in here.schedule.of(3)]
    pairs = zip(*(t.samples.batches(steps, pin=False) for t in (here, there)), strict=True)
    for one, other in pairs:
        assert other.images.is_cuda
        torch.testing.assert_close(other.images.cpu(), one.images, atol=1e-3, rtol=0)
        assert (other.labels.cpu() == one.labels).float().mean() > 0.999  # rotated labels may be rounded otherwise


@pytest.mark.parametrize("loss", sorted(segcal.LOSSES))
def test_no_step_waits(root, loss):
    trainer = Trainer(small(root, device="cuda", loss=loss, amp=True, batch=4))
    steps, late = [chosen for chosen, _ in trainer.schedule.of(1)], LateNumbers(100)
    trainer.network.train()
    for mode in ("default", "error"):  # The first steps choose convolutions and may wait.
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for batch in trainer.samples.batches(steps, pin=False):
                list(late.add(trainer._step(trainer.network, batch, 1.0)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(value == value for value in late.rest())


@pytest.mark.parametrize("options", [{}, {"amp": True}, {"amp": True, "compile": True}])
def test_it_learns_and_resumes(root, options):
    config = {"epochs": 12, "width": 8, "learning_rate": 0.01, "device": "cuda", "save_every": 5, **options}
    trainer = Trainer(small(root, **config))
    assert trainer.fit(stop=lambda: trainer.done == 7).epochs == 7
    resumed = Trainer(small(root, **config), resume=True)
    assert resumed.done == 7
    report = resumed.fit()
    assert report.epochs == 12
    assert resumed.history[-1]["train/loss"] < 0.7 * resumed.history[0]["train/loss"]
    results = segcal.evaluate(resumed.predictions("validation"), metrics=("nll",), device="auto")
    assert results.value("nll") == pytest.approx(report.nll, rel=1e-3)


def test_a_loss_that_is_not_finite_is_named_by_its_step(root):
    trainer = Trainer(small(root, device="cuda", batch=1, epochs=2))
    good, calls = trainer.loss, []

    class Bad(torch.nn.Module):
        def forward(self, logits, labels):
            calls.append(1)
            return good(logits, labels) * (float("nan") if len(calls) == 3 else 1)

    trainer.loss = Bad()
    with pytest.raises(segcal.errors.SegcalError, match="epoch 1, step 3: the loss is nan; there is no checkpoint yet"):
        trainer.fit()
    assert not (trainer.output / "last.pt").exists()
