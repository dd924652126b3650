import pytest
import torch

import segcal
from segcal.calibrators import DirichletCalibration, TemperatureScaling, load, selective
from segcal.calibrators.base import Calibrator, Fitted
from segcal.calibrators.selective import SelectiveScaling, paper_temperature
from segcal.errors import InputError
from segcal.fitting.data import over_chunks
from segcal.fitting.measured import mean_loss
from segcal.synthetic import ConfidentlyWrong, Temperature, scenes

FIT = scenes(4, size=(32, 40), plant=[ConfidentlyWrong()])
TEST = scenes(5, size=(48, 64), plant=[ConfidentlyWrong()], seed=100)
FEW = scenes(3, size=(16, 20), plant=[ConfidentlyWrong()])
DIRICHLET = DirichletCalibration(off_diagonal=0.1)


@pytest.fixture(scope="module")
def fitted():
    return SelectiveScaling().fit(FIT)


@pytest.fixture(scope="module", params=["ts", "dc"])
def on_base(request):
    return SelectiveScaling(base="ts" if request.param == "ts" else DIRICHLET).fit(FIT)


def on_test(calibrator, *metrics):
    results = segcal.evaluate(TEST, calibrator, metrics=metrics)
    return [results.value(metric) for metric in metrics]


def test_confidently_wrong_regions_are_found_without_moving_a_label(fitted):
    nll, wrong, flips = on_test(fitted, "nll", "ece-wrong", "flip")
    ts_nll, ts_wrong = on_test(TemperatureScaling().fit(FIT), "nll", "ece-wrong")
    assert wrong < 0.7 * ts_wrong
    assert nll < ts_nll
    assert flips == 0
    assert fitted.temperature > 2
    assert fitted.detection.recall > 0.4
    assert fitted.detection.precision > 0.8
    assert f"recall {fitted.detection.recall:.3f}" in fitted.fit_report.notes[-1]


def test_the_rule_of_the_paper_finds_more_and_flattens_all_of_it(fitted):
    paper = SelectiveScaling(rule="paper").fit(FIT)
    assert paper.detection.recall > max(0.5, fitted.detection.recall)
    assert paper.temperature == 1e10
    assert on_test(paper, "ece-wrong") < on_test(fitted, "ece-wrong")
    assert paper.fit_report.nll_after < paper.fit_report.nll_before


def test_the_temperature_of_the_paper():
    assert [paper_temperature(recall) for recall in (0, 0.35, 0.5, 1)] == pytest.approx([2, 2, 1e10, 1e10])
    assert paper_temperature(0.425) == pytest.approx((2 * 1e10) ** 0.5)


def test_it_builds_on_a_base_and_keeps_what_that_keeps(on_base):
    alone = type(on_base.base)(**on_base.base.arguments()).fit(FIT)
    assert on_base.preserves == alone.preserves
    assert torch.equal(on_base.base(TEST[0].logits), alone(TEST[0].logits))
    assert on_test(on_base, "ece-wrong") < on_test(alone, "ece-wrong")
    assert on_test(on_base, "flip") == on_test(alone, "flip")
    assert on_base.fit_report.nll_after <= alone.fit_report.nll_after + 1e-6


def test_no_confidence_is_raised(fitted, on_base):
    z = 5 * torch.randn((1, 6, 50, 60), generator=torch.Generator().manual_seed(0)).double()
    for calibrator, below in ((fitted, z.log_softmax(1)), (on_base, on_base.base(z))):
        assert (calibrator(z).amax(1) <= below.amax(1) + 1e-12).all()


def test_base_and_all_survive_the_file(on_base, tmp_path):
    on_base.save(tmp_path / "c.safetensors")
    again = load(tmp_path / "c.safetensors")
    z = TEST[0].logits
    assert torch.equal(again(z), on_base(z))
    assert again.arguments() == on_base.arguments()
    assert again.base.arguments() == on_base.base.arguments()
    assert again.preserves == on_base.preserves
    assert again.detection == on_base.detection


def test_fitting_leaves_the_users_base_alone():
    own = TemperatureScaling()
    SelectiveScaling(base=own).fit(FEW)
    assert own.fit_report is None
    assert own.temperature == 1


@pytest.mark.parametrize("right", [True, False])
def test_nothing_to_tell_apart_is_said_and_changes_nothing(right):
    z = torch.randn((2, 4, 20, 20), generator=torch.Generator().manual_seed(0))
    labels = z.argmax(1) if right else z.argmin(1)
    calibrator = SelectiveScaling().fit(z, labels, voxels="all")
    missing = "misprediction" if right else "correct prediction"
    assert not any("voxels = 'all'" in note for note in calibrator.fit_report.notes)  # all of them were seen
    report = calibrator.fit_report
    assert (report.converged, report.certificate, report.iterations) == (True, 0, 0)
    assert any(f"no {missing} among the calibration voxels" in note for note in calibrator.fit_report.notes)
    assert calibrator.temperature == 1
    assert calibrator.fit_report.nll_after == calibrator.fit_report.nll_before
    assert torch.allclose(calibrator(z), z.log_softmax(1), atol=1e-6)


def test_rounding_does_not_decide_who_is_suspected():
    random = torch.Generator().manual_seed(6)
    z, labels = 3 * torch.randn(480, 2, generator=random), torch.randint(2, (480,), generator=random)
    calibrator = SelectiveScaling().fit(z, labels)  # a selector that cannot tell many of the voxels apart
    single, double = (calibrator.suspicion(z.to(dtype).log_softmax(1)) > 0 for dtype in (torch.float32, torch.float64))
    assert torch.equal(single, double)


def test_the_selector_sees_a_sample_only(monkeypatch):
    monkeypatch.setattr(selective, "_VOXELS", 1000)
    calibrator = SelectiveScaling().fit(FIT)
    assert calibrator.fit_report.voxels_used == 2000
    measured = segcal.evaluate(FIT, calibrator, metrics=("nll",)).value("nll")
    assert measured == pytest.approx(calibrator.fit_report.nll_after, rel=1e-5)


def test_all_voxels_are_for_the_base_and_the_report_says_so(monkeypatch):
    monkeypatch.setattr(selective, "_VOXELS", 500)
    notes = SelectiveScaling(base="ts").fit(FIT, voxels="all").fit_report.notes
    assert "voxels = 'all' is for the base: the selector is trained on 500 voxels" in notes
    assert not any("voxels = " in note for note in SelectiveScaling().fit(FIT).fit_report.notes)


def test_the_same_seed_gives_the_same_bits():
    once, again, other = (SelectiveScaling().fit(FEW, seed=seed) for seed in (0, 0, 1))
    for name, tensor in once.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert not torch.equal(other.weight0, once.weight0)


def test_the_gauge_does_not_matter_to_the_fit():
    z = torch.cat([case.logits for case in FEW])
    labels = torch.cat([case.labels for case in FEW])
    offset = torch.linspace(-50, 50, z[:, :1].numel()).view_as(z[:, :1])
    plain, shifted = (SelectiveScaling().fit(scores, labels, validation=(scores, labels)) for scores in (z, z + offset))
    assert plain.temperature > 1.5
    assert shifted.detection.recall == pytest.approx(plain.detection.recall, abs=0.02)
    assert shifted.fit_report.nll_after == pytest.approx(plain.fit_report.nll_after, rel=1e-2)


def test_folding_batch_norm_changes_nothing():
    network = selective._network(5)
    x = torch.randn((200, 5), generator=torch.Generator().manual_seed(0)) - 3
    network.train()
    network(x)  # moves the running statistics
    network.eval()
    calibrator = SelectiveScaling()
    calibrator.allocate(5)
    for layer, trained in zip(calibrator._layers(), selective._folded(network), strict=True):
        for kept, new in zip(layer, trained, strict=True):
            kept.copy_(new.detach())
    out = network(x).detach()
    assert torch.allclose(calibrator.suspicion(x), out[:, 1] - out[:, 0], atol=1e-5)


class ImageTemperature(Calibrator):
    """A spatial base: every case is flattened by how sure it is as a whole."""

    id, translation_invariant, preserves, spatial = "image", True, "order", True

    def _scores(self, logits):
        sure = logits.softmax(1).amax(1).flatten(1).mean(1).view(-1, *[1] * (logits.ndim - 1))
        return logits * (1.5 - sure)

    def _fit(self, data):
        loss = mean_loss(data.cases)
        return Fitted(loss.nll, loss.nll, True, 0.0, 1, loss.voxels)


def test_a_spatial_base_sees_whole_cases():
    cases = scenes(4, size=(32, 40), plant=[Temperature(2.0), ConfidentlyWrong()])
    calibrator = SelectiveScaling(base=ImageTemperature()).fit(cases)
    assert calibrator.spatial
    wholes = [calibrator.base(case.logits) for case in cases]
    seen = list(over_chunks(cases, lambda _, chunk: chunk, calibrator.base))
    for chunk, whole in zip(seen, wholes, strict=True):
        assert torch.equal(chunk.logits, whole[:, :, chunk.rows])
    measured = segcal.evaluate(cases, calibrator, metrics=("nll",)).value("nll")
    assert measured == pytest.approx(calibrator.fit_report.nll_after, rel=1e-5)


def test_wrong_arguments_are_named():
    with pytest.raises(InputError, match="base is 'tz'"):
        SelectiveScaling(base="tz")
    with pytest.raises(InputError, match="rule is 'best'"):
        SelectiveScaling(rule="best")
