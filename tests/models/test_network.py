"""A calibrated network is a module like any other, and one file."""

import copy
import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import segcal
from segcal.calibrators import TemperatureScaling
from segcal.errors import DataError, InputError


def network(classes=3, width=4):
    return nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.Conv2d(width, classes, 1)).eval()


images, labels = torch.randn(6, 1, 12, 10), torch.randint(3, (6, 12, 10))


@pytest.fixture
def net():
    return segcal.calibrate(network(), [(images, labels)], "ts")


@pytest.mark.parametrize("method", ["ts", "trust", "selective"])
def test_a_file_gives_the_same_bits_whatever_the_weights_were(method, tmp_path):
    net, path = segcal.calibrate(network(), [(images, labels)], method), tmp_path / "net.safetensors"
    net.save(path)
    again = segcal.load_calibrated(path, network())
    assert torch.equal(again(images), net(images))
    assert again.fit_report == net.fit_report
    assert [file.name for file in tmp_path.iterdir()] == ["net.safetensors"]
    alone = segcal.load(path)  # the calibrator in it
    assert torch.equal(alone(net.scores(images)), net(images))
    assert (alone.id, alone.fit_report) == (method, net.fit_report)


def test_channels_kind_and_tied_weights_come_back(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(1, 1, 3, padding=1)
            self.again = nn.Conv2d(1, 2, 1)
            self.same = self.first

        def forward(self, x):
            return self.again(self.same(self.first(x))).sigmoid()

    regions = torch.stack((labels > 0, labels > 1), 1)
    net = segcal.calibrate(Tied().eval(), [(images, regions)], "ts", kind="probs", channel_names=("a", "b"))
    net.save(tmp_path / "net")
    again = segcal.load_calibrated(tmp_path / "net", Tied().eval())
    assert (again.kind, again.calibrator.channel_names) == ("probs", ("a", "b"))
    assert torch.equal(again(images), net(images))


def test_another_architecture_is_refused_and_left_as_it_was(net, tmp_path):
    path = tmp_path / "net.safetensors"
    net.save(path)
    for other, message in (
        (network(width=5), r"other shapes '0.weight \(4, 1, 3, 3\) for \(5, 1, 3, 3\)'"),
        (network()[:2], "the model lacks '2.bias', '2.weight'"),
        (nn.Sequential(*network(), nn.PReLU()), "the file lacks '3.weight'"),
    ):
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(InputError, match=message):
            segcal.load_calibrated(path, other)
        assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_functions_are_asked_for_again(tmp_path):
    net = segcal.calibrate(network(), [(images, labels)], "ts", logits_of=lambda output: 2 * output)
    net.save(tmp_path / "net")
    with pytest.raises(InputError, match="logits_of is missing"):
        segcal.load_calibrated(tmp_path / "net", network())
    with pytest.raises(InputError, match="inference is given"):
        segcal.load_calibrated(tmp_path / "net", network(), inference=lambda images, model: model(images))
    again = segcal.load_calibrated(tmp_path / "net", network(), logits_of=lambda output: 2 * output)
    assert torch.equal(again(images), net(images))


def test_other_files_are_refused(net, tmp_path):
    path = tmp_path / "net.safetensors"
    net.calibrator.save(path)
    with pytest.raises(DataError, match="holds a calibrator without a model.*segcal.calibrate"):
        segcal.load_calibrated(path, network())
    net.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(DataError, match="cannot be read"):
        segcal.load_calibrated(path, network())
    path.write_bytes(whole.replace(b'\\"version\\": 1, \\"kind', b'\\"version\\": 7, \\"kind'))
    for read in (segcal.load, lambda path: segcal.load_calibrated(path, network())):
        with pytest.raises(DataError, match="segcal.network version 7"):
            read(path)

    class Extra(nn.Conv2d):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(InputError, match="holds more than tensors: '_extra_state'"):
        segcal.CalibratedNetwork(Extra(1, 3, 1), net.calibrator).save(path)


def test_a_state_dict_goes_into_a_fresh_network(net):
    fitted = TemperatureScaling().fit(torch.randn(20, 2), torch.randint(2, (20,)))
    fresh = segcal.CalibratedNetwork(network(), fitted).eval()
    fresh.load_state_dict(net.state_dict())
    assert torch.equal(fresh(images), net(images))


def test_cast_compiled_traced_and_exported(net):
    half = copy.deepcopy(net).half()
    assert half(images.half()).dtype == torch.float16
    assert torch.equal(half(images.half()), net.calibrator(half.model(images.half())))
    torch._dynamo.reset()
    sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(net, (images,), check_trace=False)
    for recorded in (
        torch.compile(net, backend="eager", dynamic=True, fullgraph=True),
        torch.export.export(net, (images,), dynamic_shapes=(sizes,)).module(),
        traced,
    ):
        for x in (images, torch.randn(2, 1, 30, 17), torch.randn(1, 1, 300, 310)):
            with torch.no_grad():
                torch.testing.assert_close(recorded(x).exp(), net(x).exp(), atol=1e-4, rtol=0)


def test_weights_are_those_of_the_model(net, tmp_path):
    net.save(tmp_path / "net")
    stored = load_file(tmp_path / "net")
    assert {name for name in stored if name.startswith("model.")} == {
        f"model.{name}" for name in net.model.state_dict()
    }
