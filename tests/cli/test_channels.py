"""Multi-label data through the commands: an nnU-Net model with regions, and channels that differ."""

import json

import numpy as np
import pytest
import torch

import segcal
from datasets import nnunet
from multilabel import channels, stacked
from segcal.calibrators import load
from segcal.cases import write_dataset
from segcal.evaluation.results import Results

REGIONS = {"whole": [1, 2], "core": [2]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return nnunet(tmp_path_factory.mktemp("nnunet"), count=4, classes=2, regions=REGIONS)


def test_check_looks_at_every_channel(run, tmp_path):
    parts = channels(2, {"liver": 1.0, "tumour": 4.0, "vein": 0.4}, size=(48, 64))
    write_dataset(stacked(**parts), tmp_path / "data")
    code, out, _ = run("check", tmp_path / "data")
    assert code == 0
    assert "mixed: balanced in liver, overconfident in tumour, underconfident in vein" in out
    code, out, _ = run("check", tmp_path / "data", "--json")
    found = json.loads(out)
    for row, own in zip(found["per_channel"], parts.values(), strict=True):
        inside = sum(int((case.labels == 1).sum()) for case in own)
        assert (row["labels"], row["valid"]) == (inside, 2 * 48 * 64)
        assert row["nll"] == pytest.approx(segcal.evaluate(own, metrics=("nll",)).value("nll"), rel=1e-6)
    assert found["label_counts"] == [row["labels"] for row in found["per_channel"]]
    assert found["nll"] == pytest.approx(np.mean([row["nll"] for row in found["per_channel"]]))


def test_check_names_channels_that_are_never_inside(run, tmp_path):
    own = channels(1, {"liver": 1.0}, size=(16, 20))["liver"]
    write_dataset(stacked(liver=own, empty=own), tmp_path / "data")
    for path in (tmp_path / "data" / "labels").iterdir():
        labels = np.load(path)
        labels[1] = 0
        np.save(path, labels)
    code, out, _ = run("check", tmp_path / "data")
    assert code == 0
    assert "never in the labels: empty" in out


def test_regions_of_nnunet_have_a_map_each(run, model, tmp_path):
    predictions, truth = model
    data = (predictions, "--layout", "nnunet", "--labels", truth)
    code, out, _ = run("check", *data)
    assert code == 0
    assert "whole" in out
    file = tmp_path / "ts.safetensors"
    code, out, _ = run("fit", *data, "--method", "ts", "--test", "0", "-o", file)
    assert code == 0
    assert "map: whole: T = " in out
    calibrator = load(file)
    assert calibrator.channel_names == ("whole", "core")
    cases = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))
    for k, own in enumerate(calibrator.channels):
        alone = segcal.calibrators.TemperatureScaling().fit(cases.channel(k))
        assert own.temperature == alone.temperature
    temperatures = [own.temperature for own in calibrator.channels]
    assert abs(temperatures[0] - temperatures[1]) > 0.1

    code, *_ = run("apply", file, *data[:3], "-o", tmp_path / "out")
    assert code == 0
    for case in cases:
        with np.load(predictions / f"{case.id}.npz") as old, np.load(tmp_path / "out" / f"{case.id}.npz") as new:
            before, after = old["probabilities"], new["probabilities"]
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        outside = ~case.mask[0].numpy()
        assert (after[:, outside] == 0).all()
        inside = torch.from_numpy(before[:, ~outside]).double()
        expected = torch.stack([(p.logit() / t).sigmoid() for p, t in zip(inside, temperatures, strict=True)])
        np.testing.assert_allclose(after[:, ~outside], expected.numpy(), atol=1e-5)

    there = ("--metrics", "nll,ece", "--labels", truth, "--layout", "nnunet")
    code, *_ = run("evaluate", tmp_path / "out", *there, "-o", tmp_path / "written.json")
    assert code == 0
    code, *_ = run("evaluate", predictions, *there, "--calibrator", file, "-o", tmp_path / "fused.json")
    assert code == 0
    written, fused = (Results.from_json(tmp_path / f"{name}.json") for name in ("written", "fused"))
    for name in ("whole", "core"):
        assert written.value("nll", channel=name) == pytest.approx(fused.value("nll", channel=name), rel=1e-4)


def test_a_study_of_regions(run, model, tmp_path):
    predictions, truth = model
    code, out, _ = run(
        "compare", predictions, "--layout", "nnunet", "--labels", truth, "--methods", "ts", "--repeats", "1", "--tune",
        "none", "--metrics", "nll,ece", "--regions", "everything", "-o", tmp_path / "report",
    )  # fmt: skip
    assert code == 0
    assert "whole NLL" in out
    assert "means over these 2 channels, by which methods are chosen" in out


def test_a_calibrator_of_one_map_is_refused_for_channels(run, model, tmp_path):
    predictions, truth = model
    file = tmp_path / "one.safetensors"
    cases = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))
    segcal.calibrators.TemperatureScaling().fit(cases.channel(0)).save(file)
    for command in (("apply", file, predictions), ("evaluate", predictions, "--calibrator", file, "--labels", truth)):
        code, _, err = run(*command, "--layout", "nnunet", "-o", tmp_path / "nothing")
        assert code == 1
        assert "the cases have the channels whole, core" in err
        assert "expected no channels" in err
        assert not (tmp_path / "nothing").exists()
