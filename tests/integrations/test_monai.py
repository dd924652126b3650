"""segcal inside the real MONAI: pipelines, inferers, engines."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import segcal
from peers import peer
from segcal import losses
from segcal.errors import InputError, SegcalError

monai = peer("monai")
for name in ("engines", "handlers", "inferers", "transforms", "data", "losses"):
    peer(f"monai.{name}")
adapters = peer("segcal.integrations.monai")
Calibrated, Calibratedd = adapters.Calibrated, adapters.Calibratedd

# MONAI's own use of torch and numpy.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:monai"),
]

MetaTensor = monai.data.MetaTensor


@pytest.fixture(scope="module")
def scenes():
    return segcal.synthetic.scenes(6, size=(24, 32), num_classes=3, plant=[segcal.synthetic.Temperature(3.0)])


@pytest.fixture(scope="module")
def vector(scenes):
    return segcal.calibrators.VectorScaling().fit(scenes)


def with_metadata(tensor, affine=None):
    applied = [{"class": "Flip", "id": 1}]
    return MetaTensor(tensor, affine=torch.diag(torch.tensor([2.0, 3, 1, 1])) if affine is None else affine,
                      meta={"filename_or_obj": "a.nii"}, applied_operations=applied)  # fmt: skip


class TestTransforms:
    @pytest.mark.parametrize("shape", [(3, 7, 5), (3, 4, 5, 6), (3, 200, 300)])  # the last by compiled loops
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
    def test_one_item_is_a_batch_of_one_and_keeps_its_metadata(self, vector, shape, dtype):
        logits = torch.randn(shape).to(dtype)
        given = with_metadata(logits)
        found = Calibrated(vector)(given)
        assert isinstance(found, MetaTensor)
        assert found.dtype == dtype
        assert torch.equal(found.as_tensor(), vector.predict_proba(logits[None])[0])
        assert torch.equal(found.affine, given.affine)
        assert found.applied_operations == given.applied_operations
        assert found.meta["filename_or_obj"] == "a.nii"
        assert torch.equal(Calibrated(vector, output="logits")(logits), vector(logits[None])[0])
        assert type(Calibrated(vector)(logits)) is torch.Tensor
        assert isinstance(Calibrated(vector)(logits.numpy()), np.ndarray)

    def test_dictionaries_and_monais_names(self, vector, tmp_path):
        assert adapters.CalibratedD is adapters.CalibratedDict is Calibratedd
        vector.save(tmp_path / "cal.safetensors")
        item = {"pred": torch.randn(3, 4, 5), "other": torch.randn(3, 4, 5), "name": "a"}
        found = Calibratedd(("pred", "missing"), tmp_path / "cal.safetensors", allow_missing_keys=True)(item)
        assert torch.equal(found["pred"], Calibrated(vector)(item["pred"]))
        assert found["other"] is item["other"]
        assert found["name"] == "a"
        with pytest.raises(KeyError):
            Calibratedd("missing", vector)(item)

    def test_a_calibrator_that_sees_the_image(self, scenes):
        seeing = segcal.CALIBRATORS["lts-ti"](image_channels=3, epochs=1).fit(scenes)
        case = scenes[0]
        expected = seeing(case.logits, case.image)
        item = {"pred": case.logits[0], "image": MetaTensor(case.image[0])}
        found = Calibratedd("pred", seeing, output="logits", image_key="image")(item)
        torch.testing.assert_close(found["pred"], expected[0])
        inferer = adapters.CalibratedInferer(monai.inferers.SimpleInferer(), seeing)
        torch.testing.assert_close(inferer(case.image, lambda image: case.logits), expected)

    def test_spatial_transforms_before_it_are_inverted_after_it(self, vector):
        """The usual pipeline: resampled and turned, predicted, calibrated, back to the original grid."""
        from monai.transforms import Compose, EnsureChannelFirstd, Invertd, Orientationd, Rotate90d, Spacingd

        affine = torch.tensor([[-2.0, 0, 0, 10], [0, 1.5, 0, -4], [0, 0, 3, 2], [0, 0, 0, 1]])
        image = MetaTensor(torch.rand(12, 14, 6), affine=affine, meta={"original_channel_dim": "no_channel"})
        before = Compose([
            EnsureChannelFirstd("image"), Orientationd("image", "RAS", labels=None),
            Spacingd("image", (1.5, 1.5, 3.0)), Rotate90d("image"),
        ])  # fmt: skip
        item = before({"image": image})
        item["pred"] = nn.Conv3d(1, 3, 1).requires_grad_(False)(item["image"][None])[0]
        assert isinstance(item["pred"], MetaTensor)
        back = Invertd("pred", before, orig_keys="image", nearest_interp=False)
        found = Compose([Calibratedd("pred", vector), back])(copy.deepcopy(item))["pred"]
        assert found.shape == (3, 12, 14, 6)
        torch.testing.assert_close(found.affine, affine.double(), check_dtype=False)
        # The same as inverting probabilities that were computed by hand.
        item["pred"] = MetaTensor(vector(item["pred"].as_tensor()[None])[0].exp()).copy_meta_from(item["pred"])
        expected = back(item)["pred"]
        torch.testing.assert_close(found.as_tensor(), expected.as_tensor())
        torch.testing.assert_close(found.as_tensor().sum(0), torch.ones(12, 14, 6))

    def test_sigmoid_channels(self):
        torch.manual_seed(0)
        channels = [
            segcal.calibrators.VectorScaling().fit(3 * z, (torch.rand(500) < z.softmax(1)[:, 1]).long())
            for z in torch.randn(2, 500, 2)
        ]
        both = segcal.calibrators.VectorScaling().take_channels(("core", "whole"), channels)
        x = torch.randn(2, 4, 5, 6)
        expected = torch.stack([
            own(torch.stack((torch.zeros_like(z), z))[None])[0, 1].exp() for own, z in zip(channels, x, strict=True)
        ])  # fmt: skip
        torch.testing.assert_close(Calibrated(both)(x), expected)
        torch.testing.assert_close(Calibrated(both, output="logits")(x).sigmoid(), expected)
        inferer = adapters.CalibratedInferer(monai.inferers.SimpleInferer(), both)
        torch.testing.assert_close(inferer(torch.stack((x, -x)), nn.Identity())[0].sigmoid(), expected)

    def test_probabilities_in_half_precision_keep_the_labels(self):
        ts = segcal.calibrators.TemperatureScaling().fit(torch.randn(500, 2), torch.randint(0, 2, (500,)))
        x = torch.randn(2, 40, 50).mul(1e-3).half()
        assert torch.equal(Calibrated(ts)(x).argmax(0), x.argmax(0))
        both = segcal.calibrators.TemperatureScaling().take_channels(("core", "whole"), [ts, ts])
        assert torch.equal(Calibrated(both)(x) > 0.5, x > 0)

    def test_mistakes_are_named(self, vector):
        with pytest.raises(InputError, match="output is 'prob'"):
            Calibrated(vector, output="prob")
        with pytest.raises(InputError, match=r"expected \(N, 3, \*spatial\)"):
            Calibrated(vector)(torch.randn(4, 5, 6))


class TestInferer:
    def test_calibration_comes_after_blending(self, vector):
        network = nn.Conv2d(1, 3, 3, padding=1).requires_grad_(False)
        image = with_metadata(torch.randn(2, 1, 20, 24))
        window = monai.inferers.SlidingWindowInferer((8, 8), sw_batch_size=4, overlap=0.5, mode="gaussian")
        blended = window(image, network)
        found = adapters.CalibratedInferer(window, vector)(image, network)
        assert isinstance(found, MetaTensor)
        assert torch.equal(found.affine, image.affine)
        torch.testing.assert_close(found.as_tensor(), vector(blended.as_tensor()))
        # A pipeline that goes on with a softmax or an argmax is right as it is.
        torch.testing.assert_close(found.as_tensor().softmax(1), found.as_tensor().exp())
        probs = adapters.CalibratedInferer(window, vector, output="probs")(image, network)
        torch.testing.assert_close(probs.as_tensor(), found.as_tensor().exp())
        of_windows = window(image, lambda x: vector(network(x)))
        assert (of_windows.as_tensor().exp().sum(1) - 1).abs().max() > 1e-4  # the other order gives no probabilities

    def test_a_network_with_several_outputs(self, vector):
        inferer = adapters.CalibratedInferer(monai.inferers.SimpleInferer(), vector)
        with pytest.raises(InputError, match="the network returns dict"):
            inferer(torch.randn(1, 3, 4, 4), lambda x: {"out": x})


class TestMetric:
    METRICS, REGIONS = ("nll", "ece[num_bins=10]", "cece", "ba-ece", "dsc"), ("everything", "boundary")

    def batches(self, scenes):
        """Logits and labels as MONAI has them: floats with a channel, and metadata."""
        cases = list(scenes)
        for part in (cases[:2], cases[2:3], cases[3:]):
            labels = torch.cat([case.labels for case in part])[:, None].float()
            yield with_metadata(torch.cat([case.logits for case in part])), with_metadata(labels)

    def test_it_is_evaluate(self, scenes):
        metric = adapters.CalibrationMetric(self.METRICS, self.REGIONS)
        expected = segcal.evaluate(scenes, metrics=self.METRICS, regions=self.REGIONS)
        for _ in range(2):
            for logits, labels in self.batches(scenes):
                metric(logits, labels)
            found = metric.aggregate()
            columns = [(m, r) for r in self.REGIONS for m in self.METRICS]
            assert list(found) == [m if r == "everything" else f"{m} in {r}" for m, r in columns]
            for value, (name, region) in zip(found.values(), columns, strict=True):
                assert value == pytest.approx(expected.value(name, region), rel=1e-9)
            details = metric.get_buffer()
            for index, (name, region) in enumerate(columns):
                own = torch.tensor(list(expected.values(name, region).values()), dtype=torch.float64)
                torch.testing.assert_close(details[:, index], own, equal_nan=True)
            metric.reset()

    def test_lists_of_items_and_probabilities(self, scenes):
        metric = adapters.CalibrationMetric(kind="probs")
        for logits, labels in self.batches(scenes):
            metric(list(logits.softmax(1)), list(labels))
        assert metric.aggregate()["nll"] == pytest.approx(segcal.evaluate(scenes).value("nll"), rel=1e-5)

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"metrics": ("hd95",)}, "metric 'hd95' in region 'everything'"),
            ({"metrics": ("flip",)}, "metric 'flip'"),
            ({"regions": ("local",)}, "metric 'nll' in region 'local'"),
            ({"metrics": ("eec",)}, "did you mean 'ece'"),
            ({"kind": "scores"}, "kind is 'scores'"),
        ],
    )
    def test_wrong_arguments_are_named(self, options, says):
        with pytest.raises(InputError, match=says):
            adapters.CalibrationMetric(**options)

    def test_wrong_batches_are_named(self):
        metric, logits = adapters.CalibrationMetric(), torch.randn(1, 3, 4, 4)
        for labels, says in (
            (torch.full((1, 1, 4, 4), 0.5), r'labels contain 0.5; expected class indices.*mode="nearest"'),
            (torch.full((1, 1, 4, 4), 9.0), "label 9 at 16 voxels"),
            (torch.zeros(1, 3, 4, 4), "one-hot"),
            (None, "y is None"),
        ):
            with pytest.raises(SegcalError, match=says):
                metric(logits, labels)
        with pytest.raises(InputError, match="no images came"):
            metric.aggregate()


def dataset(images=6):
    """Items as MONAI's loaders give them: everything is a float MetaTensor with a channel."""
    torch.manual_seed(0)
    for _ in range(images):
        labels = torch.zeros(1, 24, 24)
        low, left = torch.randint(2, 12, (2,)).tolist()
        labels[:, low : low + 9, left : left + 9] = 1
        yield {"image": MetaTensor(labels + 0.6 * torch.randn(1, 24, 24)), "label": MetaTensor(labels)}


class TestEngines:
    def test_a_training_run(self, tmp_path):
        """A supervised trainer with a loss of segcal, validated through the calibrated inferer and the handler."""
        from monai.data import DataLoader, Dataset
        from monai.engines import SupervisedEvaluator, SupervisedTrainer
        from monai.handlers import StatsHandler, ValidationHandler, from_engine

        loader = DataLoader(Dataset(list(dataset())), batch_size=3)
        network = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))
        base = monai.losses.DiceCELoss(to_onehot_y=True, softmax=True)
        loss = adapters.MonaiLoss(losses.NACL(base=base))
        evaluator = SupervisedEvaluator(
            "cpu", loader, network,
            key_val_metric={"nll": adapters.CalibrationHandler(("nll",))},
            additional_metrics={"calibration": adapters.CalibrationHandler(("ece", "dsc"))},
            metric_cmp_fn=lambda new, best: new < best,
            val_handlers=[StatsHandler(iteration_log=False)],
        )  # fmt: skip
        seen = []
        trainer = SupervisedTrainer(
            "cpu", 12, loader, network, torch.optim.Adam(network.parameters(), 0.02), loss,
            train_handlers=[ValidationHandler(4, evaluator), StatsHandler(output_transform=from_engine("loss", True))],
        )  # fmt: skip
        completed = peer("ignite.engine").Events.ITERATION_COMPLETED
        trainer.add_event_handler(completed, lambda engine: seen.append(engine.state.output[0]["loss"]))
        trainer.run()
        assert seen[-1] < 0.7 * seen[0]
        metrics = dict(evaluator.state.metrics)
        assert metrics.keys() == {"nll", "calibration/ece", "calibration/dsc"}
        assert evaluator.state.metric_details["calibration"].shape == (6, 2)
        assert 0 < evaluator.state.best_metric <= metrics["nll"]

        def predictions():
            with torch.no_grad():
                for batch in loader:
                    yield network(batch["image"]), batch["label"].long()

        expected = segcal.evaluate(list(predictions()), metrics=("nll", "ece", "dsc"))
        for name, key in (("nll", "nll"), ("ece", "calibration/ece"), ("dsc", "calibration/dsc")):
            assert metrics[key] == pytest.approx(expected.value(name), rel=1e-5)
        with pytest.warns(UserWarning, match="can be read only once"):
            calibrator = segcal.calibrators.TemperatureScaling().fit(predictions())
        evaluator.inferer = adapters.CalibratedInferer(monai.inferers.SimpleInferer(), calibrator)
        evaluator.run()
        assert evaluator.state.metrics["nll"] <= metrics["nll"] + 1e-6
        assert evaluator.state.metrics["calibration/dsc"] == metrics["calibration/dsc"]

    @pytest.mark.parametrize("id", [id for id in segcal.LOSSES if id != "bwcr"])
    def test_a_loss_is_itself_on_monais_labels(self, id):
        loss = segcal.LOSSES[id](2) if id == "crac" else segcal.LOSSES[id]()
        batch = monai.data.list_data_collate(list(dataset(2)))
        logits = torch.randn(2, 2, 24, 24)
        ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
        expected = loss(ours, batch["label"].as_tensor()[:, 0].long())
        found = adapters.MonaiLoss(loss)(MetaTensor(theirs), batch["label"])
        assert type(found) is torch.Tensor
        expected.backward()
        found.backward()
        assert torch.equal(found, expected)
        assert torch.equal(theirs.grad, ours.grad)

    def test_deep_supervision(self):
        """MONAI resizes labels for each scale, which only floats allow."""
        labels = next(iter(dataset(1)))["label"][None]
        outputs = [torch.randn(1, 2, size, size) for size in (24, 12)]
        loss = monai.losses.DeepSupervisionLoss(adapters.MonaiLoss(losses.CrossEntropy()), weights=[1.0, 0.5])
        small = labels.as_tensor()[:, 0, 1::2, 1::2]
        expected = nn.functional.cross_entropy(outputs[0], labels.as_tensor()[:, 0].long())
        expected += 0.5 * nn.functional.cross_entropy(outputs[1], small.long())
        torch.testing.assert_close(loss(outputs, labels), expected)


def test_batches_with_metadata_are_stored_as_plain_tensors(tmp_path):
    """A generator's batches are written to files: what MONAI keeps with a tensor need not be."""
    logits = MetaTensor(torch.randn(2, 3, 6, 6), meta={"reader": object(), "where": np.eye(3)})
    labels = torch.randint(0, 3, (2, 6, 6))
    with pytest.warns(UserWarning, match="can be read only once"):
        cases = segcal.cases_from(iter([(logits, MetaTensor(labels))]))
    assert type(cases[1].logits) is torch.Tensor
    assert torch.equal(cases[1].logits[0], logits[1].as_tensor())


_WITHOUT = """
import sys
sys.modules["monai"] = None
try:
    import segcal.integrations.monai
except ImportError as error:
    print(error)
"""


def test_the_extra_is_named():
    answer = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=True, timeout=120)
    assert "pip install 'segcal[monai]'" in answer.stdout
