"""``segcal.calibrate``: a model and a loader become what fitting by hand and calling by hand give."""

import gc
import tempfile
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import segcal
from segcal.calibrators import LocalTemperatureScaling, TemperatureScaling, VectorScaling
from segcal.errors import DataError, InputError, SegcalError
from segcal.models import CalibratedNetwork

CLASSES = 3


def data(count=8, shape=(12, 10), seed=0):
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count, *shape), generator=random)
    images = labels[:, None] + torch.randn((count, 1, *shape), generator=random)
    labels[:, 0, :2] = 255
    return images, labels


class Model(nn.Module):
    """A network with parts that differ between training and evaluation; it counts and remembers its calls."""

    def __init__(self, channels=CLASSES, wrap=lambda logits: logits):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Dropout(0.5), nn.ReLU())
            self.head = nn.Conv2d(6, channels, 1)
        self.wrap, self.calls, self.images = wrap, [], 0

    def forward(self, x):
        logits = 3 * self.head(self.body(x))
        self.images += len(x)
        self.calls.append((self.training, torch.is_inference_mode_enabled(), logits.dtype))
        return self.wrap(logits)


def loader(images, labels, **options):
    return DataLoader(TensorDataset(images, labels), **{"batch_size": 3, **options})


def by_hand(model, images, labels, calibrator=None, **options):
    """The calibrator fitted to the same cases, one per image."""
    with torch.no_grad():
        scores = model(images)
    batches = [(scores[i : i + 3], labels[i : i + 3]) for i in range(0, len(images), 3)]
    return (calibrator or TemperatureScaling()).fit(segcal.cases_from(batches, **options))


@pytest.fixture
def model():
    return Model().eval()


def test_equals_fitting_and_calling_by_hand(model, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    images, labels = data()
    expected = by_hand(Model().eval(), images, labels)
    net = segcal.calibrate(model, loader(images, labels), "ts")
    assert (model.images, {call[:2] for call in model.calls}) == (8, {(False, True)})  # once, and as it is deployed
    assert net.calibrator.temperature == expected.temperature
    assert net.fit_report.nll_after == expected.fit_report.nll_after
    logits = model(images)
    assert torch.equal(net(images), expected(logits))
    assert torch.equal(net.predict_proba(images), expected.predict_proba(logits))
    assert torch.equal(net.predict(images), logits.argmax(1))
    assert net.model is model
    net(images).sum().backward()  # nothing of it was left in inference mode
    gc.collect()
    assert not list(tmp_path.iterdir())  # the scores were kept there during the fit


def test_trust_is_the_default_and_keeps_every_label(model):
    images, labels = data(9)
    net = segcal.calibrate(model, loader(images, labels))
    assert net.calibrator.id == "trust"
    assert torch.equal(net(images).argmax(1), model(images).argmax(1))


def test_the_model_is_left_in_the_mode_that_it_was_in():
    images, labels = data()
    model = Model().train()
    model.body[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.warns(UserWarning, match=r"call eval\(\)"):
        net = segcal.calibrate(model, loader(images, labels), "ts")
    assert [module.training for module in (net, model, model.head, model.body[1])] == [True, True, True, False]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(InputError), warnings.catch_warnings():
        segcal.calibrate(model, [(images, labels.float() + 0.5)], "ts")
    assert model.training
    assert not net.eval().model.training


def test_the_order_of_the_images_does_not_matter(model):
    images, labels = data()
    expected = segcal.calibrate(model, loader(images, labels), "ts").calibrator.temperature
    shuffled = loader(images, labels, shuffle=True, generator=torch.Generator().manual_seed(3))
    sources = (shuffled, (images, labels), iter([(images.numpy(), labels.numpy())]), [(images, labels[:, None])])
    for source in sources:
        assert segcal.calibrate(model, source, "ts").calibrator.temperature == pytest.approx(expected, rel=1e-5)
    with pytest.raises(InputError, match="a DataLoader that shuffles"):
        segcal.calibrate(model, shuffled, "ts", groups=list("aabbccdd"))


def test_dicts_with_masks_ids_and_groups(model):
    images, labels = data()
    mask = labels != 1
    batches = [
        {"image": images[own], "label": labels[own, None].float(), "mask": mask[own], "id": [f"{name}_0", f"{name}_1"]}
        for name, own in ((f"p{i}", slice(i, i + 2)) for i in range(0, 8, 2))
    ]
    net = segcal.calibrate(model, batches, "ts", groups=r"^p\d+")
    expected = by_hand(model, images, labels.where(mask, 255))
    assert net.calibrator.temperature == pytest.approx(expected.temperature, rel=1e-6)
    batches[1]["id"] = ["p0_0", "p0_1"]
    with pytest.raises(InputError, match="two images have the id 'p0_0'"):
        segcal.calibrate(model, batches, "ts")


def test_what_holds_for_the_caller_holds_for_the_model(model):
    images, labels = data()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        segcal.calibrate(model, loader(images, labels), "ts")
    assert {dtype for *_, dtype in model.calls} == {torch.bfloat16}


def test_windows_are_calibrated_after_they_are_blended(model):
    monai = pytest.importorskip("monai")
    images, labels = data(shape=(20, 18))
    blended = partial(
        monai.inferers.sliding_window_inference, roi_size=(8, 8), sw_batch_size=4, overlap=0.5, mode="gaussian"
    )
    inference = lambda images, model: blended(images, predictor=model)  # noqa: E731
    net = segcal.calibrate(model, loader(images, labels), "ts", inference=inference)
    assert torch.equal(net(images), net.calibrator(blended(images, predictor=model)))
    assert torch.equal(net.predict(images), blended(images, predictor=model).argmax(1))


def test_batches_of_monai(model):
    monai = pytest.importorskip("monai.data")
    images, labels = data()
    items = [{"image": x, "label": y} for x, y in zip(images, labels[:, None].float(), strict=True)]
    as_tensors = [{name: monai.MetaTensor(value) for name, value in item.items()} for item in items]
    net = segcal.calibrate(model, monai.DataLoader(monai.Dataset(as_tensors), batch_size=3), "ts")
    assert net.calibrator.temperature == by_hand(model, images, labels).temperature
    assert torch.equal(torch.as_tensor(net(monai.MetaTensor(images))), net(images))


def test_models_that_return_more_than_a_tensor():
    images, labels = data()
    model = Model(wrap=lambda logits: {"out": logits, "aux": logits[:, :1]}).eval()
    with pytest.raises(
        InputError, match=r"the model returns a dict with 'out', 'aux'.*logits_of=lambda output: output\['out'\]"
    ):
        segcal.calibrate(model, loader(images, labels), "ts")
    net = segcal.calibrate(model, loader(images, labels), "ts", logits_of=lambda output: output["out"])
    assert torch.equal(net(images), net.calibrator(model(images)["out"]))
    with pytest.raises(InputError, match="logits_of returns a dict"):
        segcal.calibrate(model, loader(images, labels), "ts", logits_of=lambda output: output)


def test_scores_of_another_size_are_upsampled_before_calibration():
    images, labels = data()
    model = Model(wrap=lambda logits: nn.functional.avg_pool2d(logits, 2)).eval()
    with pytest.raises(InputError, match=r"batch 0: the scores have shape \(3, 3, 6, 5\).*upsample in logits_of"):
        segcal.calibrate(model, loader(images, labels), "ts")
    upsample = partial(nn.functional.interpolate, scale_factor=2, mode="bilinear")
    net = segcal.calibrate(model, loader(images, labels), "ts", logits_of=upsample)
    assert torch.equal(net(images), net.calibrator(upsample(model(images))))


def test_probabilities():
    images, labels = data()
    model = Model(wrap=lambda logits: logits.softmax(1)).eval()
    with pytest.raises(InputError, match="batch 0: .*look like probabilities.*kind='probs'"):
        segcal.calibrate(model, loader(images, labels), "ts")
    net = segcal.calibrate(model, loader(images, labels), "ts", kind="probs")
    expected = segcal.calibrate(Model().eval(), loader(images, labels), "ts")
    assert net.calibrator.temperature == pytest.approx(expected.calibrator.temperature, rel=1e-4)
    torch.testing.assert_close(net(images), expected(images), atol=1e-4, rtol=1e-4)
    assert torch.equal(net.predict(images), model(images).argmax(1))


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("method", ["ts", "vs"])
def test_sigmoid_channels_are_calibrated_one_by_one(method, kind):
    images, labels = data()
    regions = torch.stack((labels > 0, labels > 1), 1).float()
    model = Model(2, wrap=torch.sigmoid if kind == "probs" else lambda logits: logits).eval()
    net = segcal.calibrate(model, loader(images, regions), method, kind=kind, channel_names=("whole", "core"))
    assert net.calibrator.channel_names == ("whole", "core")
    scores, found = model(images), net(images)
    assert found.shape == scores.shape
    for k, own in enumerate(net.calibrator.channels):
        x = scores[:, k].detach()
        logits = torch.stack(((1 - x).log(), x.log()) if kind == "probs" else (torch.zeros_like(x), x), 1)
        alone = segcal.CALIBRATORS[method]().fit(segcal.cases_from([(logits, regions[:, k].long())]))
        torch.testing.assert_close(found[:, k], alone(logits)[:, 1], atol=2e-4, rtol=1e-3)
        assert torch.equal(net.predict(images)[:, k], own.predict(logits))
    with pytest.raises(InputError, match=r"labels have shape \(3, 12, 10\)"):
        segcal.calibrate(model, loader(images, labels), method, kind=kind, channel_names=("whole", "core"))
    with pytest.raises(InputError, match="channel_names whole; expected 2 different names"):
        segcal.calibrate(model, loader(images, regions), method, kind=kind, channel_names=("whole",))


@pytest.mark.parametrize("names", [None, ("whole", "core")])
def test_probabilities_in_half_precision_have_the_labels(names):
    scores, labels = torch.randn(2, 2, 40, 50).mul(1e-3).half(), torch.randint(0, 2, (2, 2, 40, 50))
    cases = segcal.cases_from(scores, labels if names else labels[:, 0], channel_names=names)
    net = CalibratedNetwork(nn.Identity(), TemperatureScaling().fit(cases))
    found = net.predict_proba(scores)
    assert torch.equal((found > 0.5).long() if names else found.argmax(1), net.predict(scores))


def test_one_sigmoid_channel():
    images, labels = data()
    model, inside = Model(1).eval(), (labels == 1).long()
    with pytest.raises(InputError, match="one channel.*channel_names="):
        segcal.calibrate(model, loader(images, inside), "ts")
    net = segcal.calibrate(model, loader(images, inside), "ts", channel_names=("lesion",))
    assert torch.equal(net.predict(images), (model(images) > 0).long())
    sigmoid = Model(1, wrap=torch.sigmoid).eval()
    with pytest.raises(InputError, match=r"in \[0, 1\]: these look like probabilities.*before the sigmoid"):
        segcal.calibrate(sigmoid, loader(images, inside), "ts", channel_names=("lesion",))


def test_a_calibrator_is_fitted_or_taken_as_it_is(model):
    images, labels = data()
    own = VectorScaling(off_diagonal=0.5)
    net = segcal.calibrate(model, loader(images, labels), own)
    assert net.calibrator is own
    assert not net.calibrator.preserves
    assert torch.equal(net.predict(images), net(images).argmax(1))
    again = segcal.calibrate(model, method=own)
    assert torch.equal(again(images), net(images))
    with pytest.raises(InputError, match="no loader"):
        segcal.calibrate(model, method="ts")
    with pytest.raises(SegcalError, match="has not been fitted"):
        CalibratedNetwork(model, TemperatureScaling())


images, labels = data()
BAD = {
    "nothing": ({"loader": []}, "yields no batch"),
    "a folder": ({"loader": "study/"}, "the loader is of type str"),
    "a number": ({"loader": 5}, "the loader is of type int"),
    "three things": ({"loader": [(images, labels, labels)]}, "batch 0: the batch is of type tuple"),
    "other names": ({"loader": [{"x": images, "label": labels}]}, "batch 0: the batch holds x, label"),
    "both names": ({"loader": [{"image": images, "label": labels, "labels": labels}]}, "one of label, labels"),
    "no tensor": ({"loader": [(["a.png"], labels)]}, "batch 0: images are of type list"),
    "fewer labels": ({"loader": [(images, labels[:4])]}, r"batch 0: labels have shape \(4, 12, 10\)"),
    "halves": ({"loader": [(images, labels + 0.5)]}, "batch 0: labels have dtype torch.float32"),
    "no such class": ({"loader": [(images, labels), (images, labels + 1)]}, "batch 1: label 3"),
    "no method": ({"loader": [], "method": "trsut"}, "did you mean 'trust'"),
    "images": ({"loader": [], "method": LocalTemperatureScaling(image_channels=1)}, "image_channels = 0"),
    "no kind": ({"loader": [], "kind": "logit"}, "kind is 'logit'"),
    "no device": ({"loader": [], "device": "tpu"}, "device is 'tpu'"),
    "no seed": ({"loader": [], "seed": -1}, "seed"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_say_what_is_wrong(model, arguments, message):
    with pytest.raises((InputError, DataError), match=message):
        segcal.calibrate(model, **arguments)


def test_batches_with_other_classes_are_refused():
    counts = iter((3, 2))
    model = Model(wrap=lambda logits: logits[:, : next(counts)]).eval()
    with pytest.raises(InputError, match="batch 1: logits have 2 classes; expected 3"):
        segcal.calibrate(model, [(images, labels), (images, labels.clamp(max=1))], "ts")
    with pytest.raises(InputError, match="model is of type function"):
        segcal.calibrate(lambda x: x, [(images, labels)], "ts")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_probabilities_in_half_precision_keep_their_labels(dtype):
    """Their logarithms may be equal where they are not."""
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 1), nn.Softmax(1)).eval().requires_grad_(False)
    model[0].weight.copy_(0.05 * torch.randn(8, 1, 1, 1, generator=random))
    images, labels = torch.randn(2, 1, 64, 64, generator=random), torch.randint(8, (2, 64, 64), generator=random)
    net = segcal.calibrate(model, loader(images, labels), "ts", kind="probs").to(dtype)
    x = images.to(dtype)
    expected = net.model(x).argmax(1)
    assert torch.equal(net.predict(x), expected)
    assert torch.equal(net(x).argmax(1), expected)
    assert torch.equal(net.predict_proba(x).argmax(1), expected)
