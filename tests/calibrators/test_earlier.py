"""Files that earlier versions wrote: they load, and ordinary logits are mapped as they were then, bit for bit."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import segcal
from segcal.calibrators import CALIBRATORS
from segcal.errors import DataError
from segcal.kernels import ExpertMap
from segcal.synthetic import scenes

CASES = scenes(2, size=(16, 20), num_classes=3)


def rewritten(path, change):
    """Save a file again after ``change(about, tensors)``."""
    with safe_open(path, framework="pt") as file:
        about, tensors = json.loads(file.metadata()["segcal"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    about.pop("digest", None)  # Earlier files have none.
    change(about, tensors)
    save_file(tensors, path, {"segcal": json.dumps(about)})


@pytest.mark.parametrize("prefix", ["", "base."])
def test_vector_scaling_stored_as_a_matrix(prefix, tmp_path):
    fitted = (CALIBRATORS["selective"](base="vs") if prefix else CALIBRATORS["vs"]()).fit(CASES)
    path, name = tmp_path / "c.safetensors", f"{prefix}weight"
    fitted.save(path)

    def as_matrix(about, tensors):
        tensors[name] = tensors[name][:, :, 0].diag_embed()

    def with_another_entry(about, tensors):
        tensors[name][0, 0, 1] = 1.0

    rewritten(path, as_matrix)
    z = CASES[0].logits
    assert torch.equal(segcal.load(path)(z), fitted(z))
    rewritten(path, with_another_entry)
    with pytest.raises(DataError, match="holds the tensors"):
        segcal.load(path)


def test_trust_without_linear_corrections(tmp_path):
    fitted, path, z = CALIBRATORS["trust"]().fit(CASES), tmp_path / "c.safetensors", CASES[0].logits
    fitted.share.fill_(0.5)
    fitted.network.last.fill_(0.1)
    fitted.network.classes.fill_(1.0)
    fitted.save(path)
    rewritten(path, lambda about, tensors: tensors.pop("slopes"))
    assert torch.equal(segcal.load(path)(z), fitted(z))
    rewritten(path, lambda about, tensors: tensors.pop("losers"))
    with pytest.raises(DataError, match="holds the tensors"):
        segcal.load(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("features", ["logits", "own-logit", "log-probs"])
def test_ordinary_logits_are_mapped_by_the_plain_formula(features, dtype):
    random = torch.Generator().manual_seed(0)
    z = 20 * torch.randn(1, 11, 40, 30, generator=random).to(dtype)
    weight, bias = torch.randn(1, 11, 11, generator=random), torch.randn(1, 11, generator=random)
    if features == "own-logit":
        weight = weight[:, :, :1]
        expected = weight[0, :, 0].to(z).view(-1, 1, 1) * z
    else:
        x = z if features == "logits" else z.log_softmax(1)
        expected = torch.einsum("kj,nj...->nk...", weight[0].to(z), x)
    found = ExpertMap(features, weight, bias)(z)
    usual = z.abs().amax(1, keepdim=True) < 60
    assert torch.equal(found[usual.expand_as(z)], (expected + bias[0].to(z).view(-1, 1, 1))[usual.expand_as(z)])
    assert usual.float().mean() > 0.9


@pytest.mark.parametrize(
    ("name", "earlier"),
    [("dc", {"bias": 0.1, "rate": 0.2}), ("lts", {"rate": 0.2}), ("ibts", {"rate": 0.2, "inputs": "logits"})],
)
def test_arguments_by_their_earlier_names(name, earlier, tmp_path):
    now = {"bias": "bias_penalty", "rate": "learning_rate"}
    expected = {now.get(argument, argument): value for argument, value in earlier.items()}
    calibrator = CALIBRATORS[name](**earlier)
    assert calibrator.arguments() == CALIBRATORS[name](**expected).arguments()
    with pytest.raises(TypeError, match="'speed'"):
        CALIBRATORS[name](speed=1)

    def as_before(about, tensors):
        about["arguments"] = earlier

    CALIBRATORS[name](**({} if name == "dc" else {"epochs": 1})).fit(CASES).save(tmp_path / "c.safetensors")
    rewritten(tmp_path / "c.safetensors", as_before)
    assert segcal.load(tmp_path / "c.safetensors").arguments() == calibrator.arguments()
