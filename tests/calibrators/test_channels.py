"""Multi-label data: every channel has a map of its own, and it is the one it would have had alone."""

import copy
import json

import pytest
import torch
from safetensors import safe_open

import segcal
from multilabel import channels, stacked
from segcal.calibrators import CALIBRATORS, load, selective
from segcal.cases.calibrated import case_scores
from segcal.errors import DataError, InputError
from segcal.evaluation.apply import apply

PARTS = channels(3, {"liver": 1.0, "tumour": 4.0}, size=(20, 24), ignored=0.05)
CASES = stacked(**PARTS)
# Few epochs: what is compared is the same training, not how good it is.
QUICK = {name: {"epochs": 1} for name in ("lts", "lts-ti", "ibts")}


@pytest.fixture(scope="module", autouse=True)
def _few_epochs_of_selectors():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selective, "_EPOCHS", 2)
        yield


def fresh(name):
    return CALIBRATORS[name](**QUICK.get(name, {}))


@pytest.fixture(scope="module", params=CALIBRATORS)
def fitted(request):
    return fresh(request.param).fit(CASES)


@pytest.fixture(scope="module", params=["ts", "cms-op", "selective"])
def some(request):
    return fresh(request.param).fit(CASES)


def without_times(report):
    return [value for name, value in vars(report).items() if name not in ("seconds", "fitted")]


def test_each_channel_is_fitted_as_if_it_were_alone(fitted):
    assert (fitted.channel_names, fitted.num_classes) == (("liver", "tumour"), 2)
    logits = CASES[0].logits
    for k, (own, alone) in enumerate(zip(fitted.channels, PARTS.values(), strict=True)):
        expected = fresh(fitted.id).fit(alone)
        assert own.tensors().keys() == expected.tensors().keys()
        assert all(torch.equal(t, expected.tensors()[name]) for name, t in own.tensors().items())
        assert without_times(own.fit_report) == without_times(expected.fit_report)
        assert torch.equal(fitted(logits)[k : k + 1], expected(logits[k : k + 1]))
        for case, whole in zip(alone, CASES, strict=True):
            assert torch.equal(case_scores(whole, fitted)[k : k + 1], case_scores(case, expected))


def test_planted_temperatures_are_recovered():
    parts = channels(6, {"a": 1.0, "b": 4.0}, size=(48, 64))
    found = CALIBRATORS["ts"]().fit(stacked(**parts))
    assert [own.temperature for own in found.channels] == pytest.approx([1.0, 4.0], rel=0.05)


def test_the_whole_report_is_that_of_the_channels(fitted):
    whole, own = fitted.fit_report, [channel.fit_report for channel in fitted.channels]
    assert whole.nll_after == pytest.approx((own[0].nll_after + own[1].nll_after) / 2)
    assert whole.nll_after <= whole.nll_before
    assert whole.certificate == max(report.certificate for report in own)
    assert whole.voxels_used == sum(report.voxels_used for report in own)
    assert whole.converged == all(report.converged for report in own)
    assert whole.notes == tuple(
        f"{name}: {note}" for name, report in zip(fitted.channel_names, own, strict=True) for note in report.notes
    )


def test_channels_in_another_order_give_the_maps_in_that_order(some):
    names = tuple(reversed(PARTS))
    turned = fresh(some.id).fit(stacked(**{name: PARTS[name] for name in names}))
    assert turned.channel_names == names
    z = CASES[0].logits
    assert torch.equal(turned(z.flip(0)), some(z).flip(0))


def test_files_keep_the_bits_and_name_the_channels(fitted, tmp_path):
    path = tmp_path / "c.safetensors"
    fitted.save(path)
    again = load(path)
    z = CASES[0].logits
    assert torch.equal(again(z), fitted(z))
    assert (again.channel_names, again.num_classes) == (fitted.channel_names, 2)
    assert again.fit_report == fitted.fit_report
    assert [own.fit_report for own in again.channels] == [own.fit_report for own in fitted.channels]
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["segcal"])
    assert [channel["name"] for channel in about["channels"]] == ["liver", "tumour"]
    assert about["version"] == 2


def test_state_dicts_go_from_channels_to_one_map_and_back(fitted):
    z = CASES[0].logits
    other = fresh(fitted.id)
    other.load_state_dict(fitted.state_dict())
    assert torch.equal(other(z), fitted(z))
    assert other.channel_names == fitted.channel_names
    other.load_state_dict(fitted.channels[1].state_dict())
    assert other.channels is None
    assert torch.equal(other(z[1:]), fitted(z)[1:])


def test_refitting_takes_what_comes(some):
    calibrator, z = copy.deepcopy(some), CASES[0].logits
    calibrator.fit(PARTS["tumour"])
    assert (calibrator.channels, calibrator.channel_names) == (None, None)
    assert torch.equal(calibrator(z[1:]), some(z)[1:])
    calibrator.fit(CASES)
    assert torch.equal(calibrator(z), some(z))


def test_no_parameter_of_the_whole_is_taken_for_a_channel(fitted):
    assert all(name.startswith("channels.") for name in fitted.tensors())
    if fitted.id == "ts":
        with pytest.raises(AttributeError, match="temperature"):
            _ = fitted.temperature


def test_predictions_and_guarantees_are_those_of_the_channels(fitted):
    z = 4 * torch.randn(2, 2, 60, 50, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(fitted.predict_proba(z), fitted(z).exp())
    assert fitted.score_map is None
    assert fitted.spatial == fitted.channels[0].spatial
    assert fitted.size() == sum(own.size() for own in fitted.channels)
    assert fitted.summary() == "; ".join(
        f"{name}: {own.summary()}" for name, own in zip(PARTS, fitted.channels, strict=True)
    )
    if fitted.preserves:
        assert torch.equal(fitted(z).argmax(1), z.argmax(1))
        assert torch.equal(fitted.predict(z), z.argmax(1))


def test_images_and_members_reach_the_channels():
    parts = channels(2, {"a": 1.0, "b": 3.0}, members=3, member_noise=3.0, size=(20, 24))
    cases = stacked(**parts)
    case = cases[0]
    ensemble = CALIBRATORS["ensemble"]("probs", base="ts").fit(cases)
    members = [case.member_logits(m) for m in range(3)]
    assert torch.allclose(case_scores(case, ensemble), ensemble(members), atol=1e-6)
    local = CALIBRATORS["lts"](image_channels=case.image.shape[1], epochs=1).fit(cases)
    assert torch.allclose(case_scores(case, local), local(case.logits, case.image), atol=1e-6)
    both = torch.cat([case.image, case.image])
    assert torch.equal(local(case.logits, both), local(case.logits, case.image))
    temperatures = local.temperature_map(case.logits, case.image)
    assert temperatures.shape == (2, 1, 20, 24)
    assert torch.allclose((case.logits / temperatures).log_softmax(1), local(case.logits, case.image), atol=1e-5)


def test_a_failed_fit_changes_nothing_and_names_the_channel(some):
    calibrator, z = copy.deepcopy(some), CASES[0].logits
    nothing = stacked(liver=PARTS["liver"], tumour=channels(3, {"x": 1.0}, size=(20, 24), ignored=1.0)["x"])
    with pytest.raises(InputError, match=r"channel 'tumour'.*no valid voxel"):
        calibrator.fit(nothing)
    assert torch.equal(calibrator(z), some(z))


def test_another_number_of_channels_is_refused(fitted):
    for count in (1, 3):
        with pytest.raises(InputError, match=r"expected \(2, 2, \*spatial\), .* channels liver, tumour"):
            fitted(torch.zeros(count, 2, 5, 5))
    three = stacked(**channels(1, {"a": 1.0, "b": 1.0, "c": 1.0}, size=(20, 24)))
    with pytest.raises(InputError, match="3 channels; expected 2"):
        case_scores(three[0], fitted)


@pytest.mark.parametrize("use", [segcal.evaluate, lambda cases, calibrator: apply(calibrator, cases, "nowhere")])
def test_data_of_another_kind_are_refused(use):
    whole, one = CALIBRATORS["ts"]().fit(CASES), CALIBRATORS["ts"]().fit(PARTS["liver"])
    with pytest.raises(InputError, match=r"the cases have no channels.*expected the channels liver, tumour"):
        use(PARTS["liver"], whole)
    with pytest.raises(InputError, match=r"the cases have the channels liver, tumour; expected no channels"):
        use(CASES, one)
    turned = stacked(tumour=PARTS["tumour"], liver=PARTS["liver"])
    with pytest.raises(InputError, match="the cases have the channels tumour, liver; expected liver, tumour"):
        use(turned, whole)
    with pytest.raises(InputError, match="the cases have 1 channels; expected 2"):
        use(stacked(liver=PARTS["liver"]), whole)


def test_channels_that_are_only_numbered_match_any_name(tmp_path):
    calibrator = CALIBRATORS["ts"]().fit(CASES)
    numbered = stacked(**{"channel 0": PARTS["liver"], "channel 1": PARTS["tumour"]})
    assert apply(calibrator, numbered, tmp_path).written == 3


def test_damaged_files_of_channels_are_refused(tmp_path):
    path = tmp_path / "c.safetensors"
    CALIBRATORS["ts"]().fit(CASES).save(path)
    whole = path.read_bytes()
    for old, new in (
        (b'\\"version\\": 2', b'\\"version\\": 1'),
        (b'\\"name\\": \\"tumour\\"', b'\\"name\\": \\"liver\\" '),
        (b'\\"channels\\"', b'\\"chamnels\\"'),
    ):
        assert whole.count(old) == 1
        path.write_bytes(whole.replace(old, new))
        with pytest.raises((DataError, InputError)):
            load(path)
