"""What calibrators say of themselves: guarantees, arguments, costs, counts and states, as they are documented."""

import pytest
import torch

from calibrators.local_cases import Tensors, case_set, untrained
from multilabel import channels, stacked
from segcal.calibrators import (
    CALIBRATORS,
    ClassConditionalDirichlet,
    Ensemble,
    HistogramBinning,
    IsotonicRegression,
    LocalTemperatureScaling,
    MatrixScaling,
    SelectiveScaling,
    TemperatureScaling,
    TrustCalibration,
    selective,
)
from segcal.calibrators.base import LogUniform
from segcal.calibrators.module import check_num_classes
from segcal.calibrators.per_channel import channel_pieces, split_channels
from segcal.errors import InputError
from segcal.kernels.grid import LIMIT, LOGIT_BINS
from segcal.synthetic import scenes


class Trial:
    """What a hyperparameter search asks, answered with the last choice or the upper bound."""

    def __init__(self):
        self.asked = {}

    def suggest_categorical(self, name, choices):
        self.asked[name] = choices
        return choices[-1]

    def suggest_float(self, name, low, high, *, log):
        self.asked[name] = (low, high, log)
        return high


def test_a_number_that_may_be_zero_is_so_in_one_of_two_choices():
    trial = Trial()
    assert LogUniform(1e-6, 0.1, or_zero=True).suggest(trial, "penalty") == 0.1
    assert trial.asked == {"penalty is zero": (True, False), "penalty": (1e-6, 0.1, True)}
    assert LogUniform(1e-6, 0.1).suggest(Trial(), "penalty") == 0.1


def test_only_adam_has_something_to_search():
    assert MatrixScaling().search_space == {}
    space = MatrixScaling(solver="adam").search_space
    assert set(space) == {"learning_rate", "patience", "off_diagonal", "bias_penalty"}
    assert space["learning_rate"] == (1e-4, 3e-2, False)
    assert space["patience"].values == (10, 20, 50)
    assert space["off_diagonal"] == space["bias_penalty"] == (1e-6, 1e-1, True)


def test_offsets_matter_to_the_maps_of_raw_logits_alone():
    assert {name for name, cls in CALIBRATORS.items() if not cls.translation_invariant} == {"vs", "ms", "lts"}


def test_neighbours_matter_to_networks_of_a_neighbourhood_and_members_to_ensembles():
    spatial = {name for name, cls in CALIBRATORS.items() if cls.spatial}
    assert spatial == {"lts", "lts-ti", "ibts", "trust", "ensemble"}


@pytest.mark.parametrize("wrong", [{"learning_rate": 0.0}, {"learning_rate": -1e-3}, {"patience": 0}])
def test_adam_needs_a_rate_and_patience(wrong):
    with pytest.raises(InputError, match="more than zero"):
        MatrixScaling(solver="adam", **wrong)


def test_every_predicted_class_has_a_dirichlet_map():
    assert ClassConditionalDirichlet.parameter_count(4) == (4 * 4 * 5, 4 * (4 * 5 - 5))
    assert ClassConditionalDirichlet().shapes(4) == {"weight": (4, 4, 4), "bias": (4, 4)}


def test_the_arguments_of_local_temperatures():
    assert LocalTemperatureScaling().arguments() == {
        "image_channels": 0, "neighbourhood": "plane", "epochs": 40, "learning_rate": 1e-3, "weight_decay": 0.1,
    }  # fmt: skip


def test_the_voxels_of_a_selector_are_those_documented():
    assert f"trained on {selective._VOXELS:,} voxels" in " ".join(SelectiveScaling.__doc__.split())


def test_what_needs_no_search_reports_no_steps_or_one():
    cases = scenes(2, size=(16, 20), members=2)
    assert Ensemble().fit(cases).fit_report.iterations == 0
    for cls in (IsotonicRegression, HistogramBinning, TrustCalibration):
        assert cls().fit(cases).fit_report.iterations == 1


def test_fine_histograms_are_three_tables_of_eight_bytes():
    cost, twice = HistogramBinning().cost(10), HistogramBinning().cost(20)
    assert cost.memory == 10 * 3 * 8 * LOGIT_BINS
    assert twice.seconds == 2 * cost.seconds > 0


def test_a_bin_of_one_voxel_gets_another_with_the_networks_probability():
    z = torch.tensor([[0.0, -2.0], [0.0, -0.5], [0.0, 1.0], [0.0, 3.0]])
    y = torch.tensor([0, 1, 1, 0])
    values = HistogramBinning(num_bins=4).fit(z, y).values
    p = z.softmax(1)[:, 1]
    torch.testing.assert_close(values[1], (((y == 1) + p) / 2).double(), atol=1e-3, rtol=0)


def test_all_tensors_move_those_of_networks_too():
    moved = untrained(LocalTemperatureScaling, 3).to("meta")
    assert {tensor.device.type for tensor in moved.tensors().values()} == {"meta"}


def test_before_a_fit_a_state_says_nothing_and_can_be_loaded():
    state = TemperatureScaling().state_dict()
    assert state["_extra_state"].numel() == 0
    other = TemperatureScaling()
    other.load_state_dict(state)
    assert other.num_classes is None


def test_numbers_of_classes_fit_31_bits():
    assert check_num_classes(2**31 - 1) == 2**31 - 1
    for wrong in (1, 2**31, 2**31 + 1, 3.0, True):
        with pytest.raises(ValueError, match="num_classes"):
            check_num_classes(wrong)


def test_channels_are_split_with_or_without_space():
    for shape in ((2, 2), (2, 2, 5), (2, 2, 3, 4)):
        parts = split_channels(("liver", "tumour"), torch.arange(2.0).view(2, *[1] * (len(shape) - 1)).expand(shape))
        assert [(part.shape, float(part.max())) for part in parts] == [((1, *shape[1:]), 0), ((1, *shape[1:]), 1)]
    for shape in ((2,), (3, 2), (1, 2, 4)):
        with pytest.raises(InputError, match="one for each of the channels"):
            split_channels(("liver", "tumour"), torch.zeros(shape))


def test_every_channel_sees_its_own_image_or_the_one_of_all():
    calibrator = TemperatureScaling().fit(stacked(**channels(2, {"liver": 1.0, "tumour": 2.0}, size=(8, 8))))
    logits, images = torch.zeros(2, 2, 8, 8), torch.arange(2.0).view(2, 1, 1, 1).expand(2, 3, 8, 8)
    for image, expected in ((images, (images[:1], images[1:])), (images[1:], (images[1:],) * 2)):
        found = [seen for _, _, seen in calibrator._by_channel(logits, image)]
        assert all(map(torch.equal, found, expected))


def test_a_case_that_cannot_be_sliced_is_decoded_once_for_all_channels():
    class Whole(Tensors):
        sliceable, reads = False, 0

        def logits(self, rows):
            self.reads += 1
            return super().logits(rows)

    calibrator = TemperatureScaling().fit(stacked(**channels(2, {"liver": 1.0, "tumour": 2.0}, size=(8, 8))))
    source = Whole("0", torch.zeros(2, 2, 8, 8), torch.zeros(2, 8, 8, dtype=torch.long), None)
    ((rows, found),) = channel_pieces(calibrator.per_channel, case_set(source)[0])
    assert (rows, found.shape) == (slice(0, 8), (2, 2, 8, 8))
    assert source.reads == 1


def test_pieces_of_an_ensemble_keep_no_graph():
    calibrator = Ensemble().fit(scenes(2, size=(8, 8), num_classes=3))
    z = torch.zeros(1, 3, 8, 8, requires_grad=True)
    case = case_set(Tensors("0", z, torch.zeros(1, 8, 8, dtype=torch.long), None))[0]
    assert not any(found.requires_grad for _, found in calibrator.pieces(case))


def test_trust_says_its_temperature_and_its_maps_stay_within_twice_the_limit():
    calibrator = TrustCalibration()
    calibrator.num_classes = 3
    calibrator.allocate(3)
    calibrator.beta.fill_(0.5)
    assert calibrator.summary().startswith("T = 2, w = 0, ")
    for name in ("first", "second"):
        limits = calibrator.limits()[name]
        limits.check(name, torch.tensor([-2 * LIMIT, 2 * LIMIT]))
        for wrong in ([-2.5 * LIMIT, 0.0], [0.0, 2.5 * LIMIT], [1.0, 0.0]):
            with pytest.raises(InputError):
                limits.check(name, torch.tensor(wrong))
