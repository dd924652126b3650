"""Training and applying on a CUDA device: the CPU's results, all labels kept, and the report says where."""

from __future__ import annotations

import pytest
import torch

import segcal
from segcal.solvers import adam

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # libraries of the machine warn of what is not ours
]
# The fitted NLL may differ by this share: sums are rounded in another order and, for selective and trust, training
# amplifies it or draws its own random numbers.
TOLERANCES = {"lts": 1e-5, "lts-ti": 1e-5, "ibts": 1e-5, "selective": 5e-3, "trust": 5e-3}
OPTIONS = {"lts": {"epochs": 4}, "lts-ti": {"epochs": 4}, "ibts": {"epochs": 4}}


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Twenty images: as tensors they are cases of two."""
    plant = [segcal.synthetic.SpatialTemperature()]
    cases = segcal.synthetic.scenes(20, size=(72, 96), num_classes=5, plant=plant)
    return torch.cat([case.logits for case in cases]), torch.cat([case.labels for case in cases])


def new(method: str):
    return segcal.CALIBRATORS[method](**OPTIONS.get(method, {}))


@pytest.mark.parametrize("method", TOLERANCES)
def test_training_there_gives_what_training_here_does(method: str, data) -> None:
    z, y = data
    here, there = new(method).fit(z, y), new(method).fit(z.cuda(), y.cuda())
    gain = here.fit_report.nll_before - here.fit_report.nll_after
    assert gain > 0
    assert there.fit_report.nll_after == pytest.approx(here.fit_report.nll_after, rel=TOLERANCES[method])
    assert any("trained on cuda:0" in note for note in there.fit_report.notes)
    assert all(tensor.device.type == "cpu" for tensor in there.tensors().values())
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        own = z.to(dtype)
        own[:, 1, :20] = own[:, 0, :20]  # ties
        found = there(own.cuda())
        assert found.dtype == dtype
        assert torch.equal(found.argmax(1).cpu(), own.argmax(1))
    probabilities = there(z.cuda()).exp()
    assert (probabilities.sum(1) - 1).abs().max() < 1e-5
    assert (probabilities.cpu() - there(z).exp()).abs().max() < 5e-4


@pytest.mark.parametrize("method", TOLERANCES)
def test_the_same_seed_gives_the_same_bits(method: str, data) -> None:
    z, y = (own.cuda() for own in data)
    one, other = (new(method).fit(z, y).tensors() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_mixture_maps_there_as_here(data) -> None:
    z, y = data
    calibrator = new("ets").fit(z, y)
    calibrator.weights.copy_(torch.tensor((0.5, 0.3, 0.2)))
    z = z.clone()
    z[0, 1, :20] = -torch.inf
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        own = z.to(dtype)
        found = calibrator(own.cuda())
        assert found.dtype == dtype
        assert torch.equal(found.argmax(1).cpu(), own.argmax(1))
        assert (found.exp().cpu().float() - calibrator(own.double()).exp()).abs().max() < torch.finfo(dtype).eps * 4


def test_all_crops_give_what_they_give_here(data) -> None:
    z, y = data
    here = new("lts-ti").fit(z, y, voxels="all").fit_report
    there = new("lts-ti").fit(z.cuda(), y.cuda(), voxels="all").fit_report
    assert there.voxels_used == here.voxels_used
    assert there.nll_after == pytest.approx(here.nll_after, rel=1e-5)


def test_batches_that_are_not_finite_change_nothing_there() -> None:
    line = torch.nn.Linear(1, 1).cuda()
    x = torch.linspace(-1, 1, 64, device="cuda")[:, None]
    x[8:16] = torch.nan

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return (line(x[rows]) - 3 * x[rows]).square().mean()

    def batches(_: torch.Generator):
        return torch.arange(64, device="cuda").split(8)

    good = torch.arange(16, 64, device="cuda")
    training = adam(line, loss, batches, lambda: loss(good).item(), learning_rate=0.1, max_epochs=60)
    assert training.objective < 1e-3
    assert {epoch.skipped for epoch in training.history[1:]} == {1}
    assert training.iterations == 7 * (len(training.history) - 1)


def test_a_study_there_says_what_it_says_here(tmp_path) -> None:
    cases = segcal.synthetic.scenes(10, size=(40, 48), num_classes=3, plant=[segcal.synthetic.Temperature(2.0)])
    here, there = (
        segcal.compare(cases, methods=("ts", "cms-op"), repeats=1, device=device, output=tmp_path / device)
        for device in ("cpu", "cuda")
    )
    assert [row["key"] for row in there.document["methods"]] == [row["key"] for row in here.document["methods"]]
    assert there.recommendation["sentences"] == here.recommendation["sentences"]
