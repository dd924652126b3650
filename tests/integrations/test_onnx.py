"""Exported graphs, run by onnxruntime, against PyTorch."""

import json
import sys

import pytest
import torch
from torch import nn

import segcal
from calibrators.local_cases import untrained
from multilabel import channels, stacked
from segcal.calibrators import CALIBRATORS, Ensemble, LocalTemperatureScaling, TemperatureScaling
from segcal.errors import DataError, InputError, OutputError, SegcalError
from segcal.integrations.onnx import export
from segcal.scores import pool

onnx = pytest.importorskip("onnx", reason="needs the extra test-integrations")
pytest.importorskip("onnxscript", reason="needs the extra test-integrations")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra test-integrations")

CLASSES = 4
#: Maps with steps: a voxel within rounding of a step may land on either side.
STEPS = {"selective", "meta-cal", "histogram", "isotonic", "trust"}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unusual(*shape, seed=0):
    """Logits as they are not in the data: ties, impossible classes, huge values and offsets, one after another."""
    z = 4 * random(*shape, seed=seed)
    impossible = z.clone()
    impossible[:, 0] = -torch.inf
    return {
        "random": z,
        "ties": (z / 4).round(),
        "impossible": impossible,
        "huge": 2500 * z,
        "offset": z + 1e4,
        "mask": torch.where(random(*shape, seed=seed + 1) > 1, -1e9, z),
    }


@pytest.fixture(scope="module")
def cases():
    return segcal.synthetic.scenes(
        3, size=(24, 28), num_classes=CLASSES, plant=[segcal.synthetic.Temperature(1.7)], seed=1
    )


def calibrator(name, cases):
    """A calibrator of which no part is idle, as it may be after a fit to little data."""
    if name in ("lts", "lts-ti", "ibts"):
        return untrained(CALIBRATORS[name], CLASSES)
    fitted = CALIBRATORS[name]().fit(cases)
    if name == "ets":
        fitted.weights.copy_(torch.tensor([0.6, 0.3, 0.1]))
    if name == "trust":
        fitted.network.reset(0)
        fitted.network.last.copy_(0.3 * random(*fitted.network.last.shape))
        fitted.slopes.copy_(0.1 * random(*fitted.slopes.shape))
        fitted.losers.copy_(0.1 * random(*fitted.losers.shape))
        fitted.second.copy_(0.9 * fitted.second)
        fitted.share.fill_(0.5)
        fitted.fitted.fill_(1.0)
        fitted.reach.fill_(3.0)  # so that some images are strange
    return fitted


def session(path):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def run_graph(graph, *inputs):
    named = {own.name: tensor.numpy() for own, tensor in zip(graph.get_inputs(), inputs, strict=True)}
    return torch.from_numpy(graph.run(None, named)[0])


def assert_same(fitted, graph, z, *image):
    found, expected = run_graph(graph, z, *image), fitted(z, *image)
    assert found.shape == expected.shape
    assert torch.equal(found.isneginf(), expected.isneginf())
    exact = fitted(z.double(), *image).exp()
    rounding = (expected.exp() - exact).abs().max()  # some maps are steep: it is what float32 loses in PyTorch, too
    far = (found.exp() - exact).abs() > 1e-5 + 4 * rounding
    assert far.float().mean() <= (0.01 if fitted.id in STEPS else 0)
    assert torch.allclose(found.exp().sum(1), torch.ones(()), atol=1e-5)
    if fitted.preserves:
        assert torch.equal(found.argmax(1), z.argmax(1))


@pytest.mark.parametrize("name", CALIBRATORS)
def test_every_calibrator_as_a_graph(name, cases, tmp_path):
    fitted = calibrator(name, cases)
    written = export(fitted, tmp_path / "cal.onnx")
    assert written[:3] == (("logits",), ("log_probs",), 18)
    assert written.difference <= 1e-5
    graph = session(tmp_path / "cal.onnx")
    for shape in ((1, CLASSES, 1, 1), (2, CLASSES, 2, 3), (3, CLASSES, 47, 33)):
        for z in unusual(*shape).values():
            assert_same(fitted, graph, z)


def test_labels_survive_near_ties(cases, tmp_path):
    """Gaps of one rounding step, which a map may round away."""
    fitted = calibrator("cms-op", cases)
    export(fitted, tmp_path / "cal.onnx", dims=0, returns="probs")
    graph = session(tmp_path / "cal.onnx")
    z = random(20_000, CLASSES)
    best = z.amax(1, keepdim=True)
    near = torch.nextafter(best, best - 1).expand_as(z)
    z = torch.where(z == best, z, torch.where(random(*z.shape, seed=1) > 0, near, best))
    assert torch.equal(run_graph(graph, z).argmax(1), z.argmax(1))


def test_volumes_with_images(tmp_path):
    fitted = untrained(LocalTemperatureScaling, CLASSES, neighbourhood="volume", image_channels=2)
    assert export(fitted, tmp_path / "cal.onnx", dims=3).inputs == ("logits", "image")
    graph = session(tmp_path / "cal.onnx")
    for shape in ((1, 1, 2, 3), (2, 6, 9, 7)):
        batch, *spatial = shape
        image = random(batch, 2, *spatial, seed=5)
        for z in unusual(batch, CLASSES, *spatial).values():
            assert_same(fitted, graph, z, image)
    with pytest.raises(InputError, match=r"space of the logits is \(12, 11\); expected volumes"):
        export(fitted, tmp_path / "plane.onnx")
    assert not (tmp_path / "plane.onnx").exists()


@pytest.fixture(scope="module")
def of_channels():
    own = channels(2, {"liver": 1.0, "tumour": 4.0})
    return TemperatureScaling().fit(stacked(**own))


@pytest.mark.parametrize("returns", ["probs", "log-probs"])
def test_channels_take_sigmoid_logits(of_channels, returns, tmp_path):
    export(of_channels, tmp_path / "cal.onnx", returns=returns)
    graph = session(tmp_path / "cal.onnx")
    for z in unusual(3, 2, 9, 8).values():
        found = run_graph(graph, z)
        for index, own in enumerate(of_channels.per_channel):
            sides = torch.stack((torch.zeros_like(z[:, index]), z[:, index]), 1)
            expected = own(sides).exp()
            p = found[:, index] if returns == "probs" else found[:, index, 1].exp()
            assert torch.allclose(p, expected[:, 1], atol=1e-5)
        assert torch.equal(found > 0.5 if returns == "probs" else found.argmax(2) == 1, z > 0)


@pytest.mark.parametrize("space", ["logits", "probs"])
def test_members_are_pooled_in_the_graph(space, tmp_path):
    members = segcal.synthetic.scenes(2, size=(16, 20), num_classes=CLASSES, members=3, member_noise=2.0)
    fitted = Ensemble(space, base="ts").fit(members)
    assert export(fitted, tmp_path / "cal.onnx").inputs == ("logits_0", "logits_1", "logits_2")
    graph = session(tmp_path / "cal.onnx")
    z = [4 * random(2, CLASSES, 9, 7, seed=seed) for seed in range(3)]
    expected = fitted.base(pool(z, space)).exp()
    assert torch.allclose(run_graph(graph, *z).exp(), expected, atol=1e-5)


def write_network(path, outputs=("scores", "features"), opset=18, classes=CLASSES, last="Identity"):
    """A user's network, with an auxiliary output; returns it in PyTorch."""
    body, head = random(8, 1, 3, 3), random(classes, 8, 1, 1, seed=1)
    scores, features = outputs
    node, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [
            node("Conv", ["x", "body"], ["hidden"], pads=[1, 1, 1, 1]),
            node("Relu", ["hidden"], [features]),
            node("Conv", [features, "head"], ["plain"]),
            node(last, ["plain"], [scores], **({"axis": 1} if last == "Softmax" else {})),
        ],
        "net",
        [value("x", onnx.TensorProto.FLOAT, ["batch", 1, "height", "width"])],
        [
            value(name, onnx.TensorProto.FLOAT, ["batch", size, "height", "width"])
            for name, size in ((scores, classes), (features, 8))
        ],
        [onnx.numpy_helper.from_array(own.numpy(), name) for own, name in ((body, "body"), (head, "head"))],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10), path)

    def network(x):
        hidden = nn.functional.conv2d(x, body, padding=1).relu()
        return nn.functional.conv2d(hidden, head), hidden

    return network


@pytest.fixture(scope="module")
def ts(cases):
    return TemperatureScaling().fit(cases)


def test_behind_a_model(ts, tmp_path, run):
    network = write_network(tmp_path / "net.onnx")
    ts.save(tmp_path / "cal.safetensors")
    command = ("export", tmp_path / "cal.safetensors", "-o", tmp_path / "both.onnx", "--model", tmp_path / "net.onnx")
    code, _, error = run(*command)
    assert code == 1
    assert "scores, features" in error
    assert "--logits" in error
    code, text, _ = run(*command, "--logits", "scores", "--returns", "probs")
    assert code == 0
    assert "from x to features, probs" in text
    assert "checked with onnxruntime" in text
    assert "not run" not in text
    graph = session(tmp_path / "both.onnx")
    x = random(3, 1, 17, 13)
    features, probs = (torch.from_numpy(own) for own in graph.run(["features", "probs"], {"x": x.numpy()}))
    scores, expected = network(x)
    assert torch.allclose(features, expected, atol=1e-4)
    assert torch.allclose(probs, ts(scores).exp(), atol=1e-5)


def test_the_file_says_what_it_is(ts, tmp_path):
    ts.class_names = ("sky", "road", "car", "tree")
    export(ts, tmp_path / "cal.onnx")
    about = session(tmp_path / "cal.onnx").get_modelmeta()
    told = about.custom_metadata_map
    assert about.producer_name == "segcal"
    assert (told["segcal.version"], told["segcal.calibrator"]) == (segcal.__version__, "ts")
    assert json.loads(told["segcal.class_names"]) == list(ts.class_names)
    assert json.loads(told["segcal.fit"])["nll_after"] == ts.fit_report.nll_after
    assert b"/src/" not in (tmp_path / "cal.onnx").read_bytes()


def test_models_that_do_not_suit(ts, tmp_path):
    target, net = tmp_path / "both.onnx", tmp_path / "net.onnx"

    def refused(match, **options):
        with pytest.raises(DataError, match=match):
            export(ts, target, model=net, **{"logits": "scores", **options})
        assert not target.exists()

    write_network(net, opset=17)
    refused("has opset 17; expected 18 or newer. To fix: export the model with opset_version=18")
    write_network(net, classes=5)
    refused(r"'scores' has shape \(\?, 5, \?, \?\); expected \(N, 4, \*spatial\).*fitted to 4 classes")
    write_network(net, last="Softmax")
    refused("'scores' holds probabilities: it comes from Softmax; expected logits. To fix: export the model without")
    write_network(net)
    refused("logits is 'score'; expected one of scores, features. To fix: did you mean 'scores'?", logits="score")
    with pytest.raises(InputError, match="dims is 3; expected 2"):
        export(ts, target, model=net, logits="scores", dims=3)
    write_network(net, outputs=("scores", "log_probs"))
    refused("already has a value named 'log_probs'")
    net.write_bytes(b"nothing")
    refused("cannot be read .* expected an ONNX file")


def test_arguments_are_checked(ts, tmp_path):
    for options, match in (
        ({"dims": 1}, "dims is 1; expected 2 or 3 spatial axes"),
        ({"returns": "logits"}, "returns is 'logits'; expected one of log-probs, probs"),
        ({"logits": "x"}, "logits is 'x'; expected nothing, as no model came"),
    ):
        with pytest.raises(InputError, match=match):
            export(ts, tmp_path / "cal.onnx", **options)
    with pytest.raises(SegcalError, match="has not been fitted"):
        export(TemperatureScaling(), tmp_path / "cal.onnx")
    assert not list(tmp_path.iterdir())


def test_what_fails_the_check_is_not_left(ts, tmp_path, monkeypatch):
    from segcal.integrations.onnx import graph, operators

    wrong = {**operators.TRANSLATIONS, torch.ops.aten.nextafter.default: lambda x, _: operators.op.Mul(x, 2.0)}
    monkeypatch.setattr(graph, "TRANSLATIONS", wrong)
    with pytest.raises(OutputError, match="onnxruntime and PyTorch disagree: a probability differs by"):
        export(ts, tmp_path / "cal.onnx")
    assert not list(tmp_path.iterdir())


def test_the_extra_is_named(ts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"exporting to ONNX needs onnxscript.*segcal\[onnx\]"):
        export(ts, tmp_path / "cal.onnx")


class Operations(nn.Module):
    """Each operation that segcal translates itself."""

    def forward(self, x, edges):
        return (
            torch.log1p(x.clamp(max=80).exp()),  # finite
            nn.functional.logsigmoid(x),
            nn.functional.softplus(x),
            torch.logaddexp(x[:, :4], x[:, 4:]),
            x.logcumsumexp(1),
            x.cummax(1).values,
            x.cummin(1).values,
            *x.sort(dim=1, descending=True, stable=True),
            torch.searchsorted(edges, x),
            torch.searchsorted(edges[0], x),
            torch.nextafter(x, torch.full_like(x, -torch.inf)),
        )


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own
def test_operations_to_the_last_digits(tmp_path):
    from segcal.integrations.onnx.operators import TRANSLATIONS

    x = 60 * random(500, 8)
    x[:100] = x[:100].round() + 0.5  # ties, but no zero, whose neighbour is no concern
    x[-1] = -torch.inf
    edges = random(500, 5).sort(1).values * 60
    program = torch.onnx.export(
        Operations().eval(),
        (x, edges),
        dynamo=True,
        verbose=False,
        custom_translation_table=TRANSLATIONS,
        opset_version=18,
    )
    program.save(tmp_path / "operations.onnx")
    found = session(tmp_path / "operations.onnx").run(None, {"x": x.numpy(), "edges": edges.numpy()})
    exact = Operations()(x.double(), edges.double())
    expected = Operations()(x, edges)
    for index, (own, value, double) in enumerate(zip(found, expected, exact, strict=True)):
        if index < 5:
            torch.testing.assert_close(torch.from_numpy(own).double(), double, rtol=1e-6, atol=1e-37)
        else:
            finite = ~torch.isneginf(value) if value.is_floating_point() else torch.ones_like(value, dtype=torch.bool)
            assert torch.equal(torch.from_numpy(own)[finite], value[finite])
