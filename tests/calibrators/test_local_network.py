"""What the network of local temperature scaling computes, in tiles and at the edges of what it can be given."""

import math

import numpy as np
import pytest
import torch

from calibrators.local_cases import LOCAL, Tensors, case_set, lit_cases, planted, random_logits, untrained
from segcal.calibrators import TemperatureScaling, load, local
from segcal.calibrators.local import (
    ImageTemperatureScaling,
    LocalTemperatureScaling,
    TranslationInvariantLocalTemperature,
)
from segcal.calibrators.local_network import (
    TemperatureTree,
    Window,
    _recorded_mirror,
    exact_convolutions,
    mirrored,
    network_inputs,
)
from segcal.errors import InputError
from segcal.synthetic import SpatialTemperature
from segcal.types import Case

# -- what it computes --------------------------------------------------------------------------------------------------


def tree_at(calibrator, inputs, place):
    """The temperature at a voxel of inputs ``(C, *spatial)``, by loops, in float64."""
    network = calibrator.network
    x = (inputs - network.mean.double().view(-1, *[1] * len(place))) / network.scale.double().view(
        -1, *[1] * len(place)
    )
    x, weight, bias = x.numpy(), network.weight.double().numpy(), network.bias.double().numpy()
    flat = len(place) - (weight.ndim - 2)
    branch = bias.copy()
    for tap in np.ndindex(*weight.shape[2:]):
        at = list(place)
        for axis, step in enumerate(tap, start=flat):
            at[axis] += 2 * (step - 2)
            size = inputs.shape[1 + axis]
            while not 0 <= at[axis] < size:
                at[axis] = (-at[axis] if at[axis] < 0 else 2 * (size - 1) - at[axis]) if size > 1 else 0
        for k in range(len(branch)):
            branch[k] += weight[(k, slice(None), *tap)] @ x[(slice(None), *at)]
    t, s = branch[:4], 1 / (1 + np.exp(-branch[4:]))
    root = s[2] * (s[0] * t[0] + (1 - s[0]) * t[1]) + (1 - s[2]) * (s[1] * t[2] + (1 - s[1]) * t[3])
    return math.log1p(math.exp(root + math.log(math.e - 1))) / float(calibrator.beta)


@pytest.mark.parametrize(
    ("neighbourhood", "size"),
    [
        ("plane", (11, 12)),
        ("plane", (3, 2)),
        ("plane", (1, 9)),
        ("plane", (3, 6, 7)),
        ("volume", (6, 7, 9)),
        ("volume", (1, 5, 8)),
    ],
)
def test_temperatures_equal_loops_over_the_formula(neighbourhood, size):
    for cls in LOCAL[:2]:
        calibrator = untrained(cls, 3, neighbourhood=neighbourhood)
        z = random_logits(1, 3, *size).double()
        found = calibrator.temperature_map(z)[0, 0]
        inputs = z[0] if cls is LocalTemperatureScaling else z.log_softmax(1)[0]
        for place in ((0,) * len(size), tuple(n - 1 for n in size), tuple(n // 2 for n in size)):
            assert float(found[place]) == pytest.approx(tree_at(calibrator, inputs, place), rel=1e-9)


def test_points_are_constant_images():
    for cls in LOCAL:
        calibrator = untrained(cls, 3)
        z = random_logits(5, 3).double()
        assert torch.allclose(calibrator(z), calibrator(z[:, :, None, None].expand(-1, -1, 6, 7))[:, :, 2, 3])
    row = random_logits(1, 3, 40)
    assert torch.allclose(untrained(LOCAL[1], 3)(row)[0].T, untrained(LOCAL[1], 3)(row[0].T), atol=1e-6)


def test_at_the_start_the_factor_is_one_and_the_leaves_differ():
    tree = TemperatureTree(4, image_channels=1).requires_grad_(True)
    z, image = random_logits(2, 4, 20, 20), random_logits(2, 1, 20, 20)
    factor = tree(z, image)
    assert torch.allclose(factor, torch.ones_like(factor), atol=1e-6)
    factor.sum().backward()
    leaves = tree.weight.grad[:4].flatten(1)
    assert torch.pdist(leaves).min() > 0.01 * leaves.norm(dim=1).max()


def test_impossible_classes_neither_break_inputs_nor_fit():
    z = torch.tensor([[[[-torch.inf]], [[0.0]], [[-100.0]]]])
    assert network_inputs(z, "logits").flatten().tolist() == [-60, 0, -60]
    assert network_inputs(z, "log-probs").flatten().tolist() == [-60, 0, -60]
    cases = planted(4, [SpatialTemperature()])
    logits, labels = torch.cat([case.logits for case in cases]), torch.cat([case.labels for case in cases])
    logits = torch.cat([logits, torch.full_like(logits[:, :1], -torch.inf)], 1)
    for cls in LOCAL:
        calibrator = cls(epochs=2).fit(logits, labels)
        assert "skipped" not in calibrator.fit_report.notes[-1]
        assert torch.isneginf(calibrator(logits)[:, 4]).all()
        assert torch.isfinite(calibrator(logits)[:, :4]).all()
    with pytest.raises(InputError, match="labelled with a class whose logit is -inf"):
        LocalTemperatureScaling().fit(logits, torch.full_like(labels, 4))


# -- tiles -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", LOCAL)
@pytest.mark.parametrize(
    ("neighbourhood", "size"), [("plane", (37, 20)), ("plane", (7, 12, 9)), ("volume", (13, 9, 10))]
)
@pytest.mark.parametrize("channels", [0, 2])
def test_tiles_give_what_the_whole_gives(cls, neighbourhood, size, channels, monkeypatch):
    calibrator = untrained(cls, 5, neighbourhood=neighbourhood, image_channels=channels)
    z, image = random_logits(2, 5, *size), random_logits(1, channels, *size) if channels else None
    whole, temperatures = calibrator(z.double(), image), calibrator.temperature_map(z.double(), image)
    case = Case(Tensors("one", z, z.argmax(1), image))
    for values in (1, 5 * z[0, 0, 0].numel() * 2 * 6, 10**9):  # a row at a time, six rows, all
        monkeypatch.setattr(local, "TILE_VALUES", values)
        # Torch rounds the end of a row in another way than its middle: the last bit may differ.
        assert torch.allclose(calibrator(z.double(), image), whole, rtol=1e-13, atol=1e-13)
        assert torch.allclose(calibrator.temperature_map(z.double(), image), temperatures, rtol=1e-13)
        pieces = list(calibrator.pieces(case))
        assert torch.equal(torch.cat([log_probs for _, log_probs in pieces], 2), calibrator(z, image))
        assert [rows.stop for rows, _ in pieces][-1] == size[0]


@pytest.mark.parametrize("cls", LOCAL)
@pytest.mark.parametrize("size", [(37, 20), (300, 200)], ids=["torch", "numba"])
def test_tiles_of_float32_differ_in_the_last_bits_only(cls, size, monkeypatch):
    # oneDNN adds up the taps in an order that depends on the shape: bits are not promised, 1e-6 is.
    calibrator, z = untrained(cls, 5), random_logits(1, 5, *size)
    whole = calibrator.predict_proba(z)
    for rows in (1, 7, 100):
        monkeypatch.setattr(local, "TILE_VALUES", 5 * size[1] * rows)
        assert (calibrator.predict_proba(z) - whole).abs().max() < 1e-6


def test_a_window_reads_no_more_rows_than_its_halo():
    image, volume = (100, 30), (9, 30, 30)
    assert Window(((20, 25), (0, 30)), image, 2).source == slice(16, 29)
    assert Window(((0, 2), (0, 30)), image, 2).source == slice(0, 6)
    assert Window(((3, 5), (0, 30), (0, 30)), volume, 2).source == slice(3, 5)
    assert Window(((3, 5), (0, 30), (0, 30)), volume, 3).source == slice(0, 9)


# -- files and errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "calibrator",
    [
        untrained(LocalTemperatureScaling, 3, image_channels=2),
        untrained(TranslationInvariantLocalTemperature, 3, neighbourhood="volume", rate=0.01),
        untrained(ImageTemperatureScaling, 3, inputs="logits", epochs=7),
    ],
    ids=lambda calibrator: calibrator.id,
)
def test_save_and_load_are_bit_identical(calibrator, tmp_path):
    calibrator.save(tmp_path / "c.safetensors")
    again = load(tmp_path / "c.safetensors")
    z = random_logits(1, 3, 6, 12, 11)
    image = random_logits(1, 2, 6, 12, 11) if calibrator.image_channels else None
    assert torch.equal(again(z, image), calibrator(z, image))
    assert again.arguments() == calibrator.arguments()
    assert again.translation_invariant == calibrator.translation_invariant


def test_images_that_are_missing_or_unfit_say_so():
    cases = lit_cases(4, 0)
    z, image = cases[0].logits, cases[0].image
    y = cases[0].labels
    spoiled = image.clone()
    spoiled[0, 1, 3, 3] = torch.nan
    for bad, message in (
        (None, "case 'bad': no image"),
        (image[:, :1], "1 channels; expected image_channels = 2"),
        (image[..., 1:], r"expected \(1, 2, 24, 28\)"),
        (spoiled, "NaN or infinite"),
    ):
        mixed = case_set(*(case.source for case in cases), Tensors("bad", z, y, bad))
        with pytest.raises(InputError, match=message):
            LocalTemperatureScaling(image_channels=2, epochs=1).fit(mixed)
    seeing = untrained(LocalTemperatureScaling, 3, image_channels=2)
    for bad, message in ((None, "no image"), (image[..., 1:], "shape"), (image[:, :1], "1 channels"), (spoiled, "NaN")):
        with pytest.raises(InputError, match=message):
            seeing(z, bad)
    for bad, message in ((None, "case 'bad': no image"), (image[..., 1:], "case 'bad': the image has shape")):
        with pytest.raises(InputError, match=message):
            list(seeing.pieces(Case(Tensors("bad", z, y, bad))))
    with pytest.raises(InputError, match="fitted without images"):
        untrained(LocalTemperatureScaling, 3)(z, image)
    with pytest.raises(InputError, match="a plane or a volume"):
        seeing(z[:, :, 0, 0], image[:, :, 0, 0])


def test_every_item_of_a_batch_sees_its_own_image_or_the_one_of_all():
    seeing = untrained(LocalTemperatureScaling, 3, image_channels=2)
    z, images = random_logits(2, 3, 11, 13).double(), random_logits(4, 2, 11, 13, seed=1).double()
    alone = torch.cat([seeing(own, image) for own, image in zip(z.split(1), images[:2].split(1), strict=True)])
    torch.testing.assert_close(seeing(z, images[:2]), alone)
    torch.testing.assert_close(seeing(z, images[:1]), seeing(z, images[[0, 0]]))
    assert not torch.allclose(seeing(z, images[:1]), alone)
    for count in (3, 4):  # neither one nor as many as items; three is the number of classes
        with pytest.raises(InputError, match="the image has shape"):
            seeing(z, images[:count])


@pytest.mark.parametrize("size", range(1, 8))
def test_a_recorded_graph_mirrors_at_the_same_voxels(size):
    found = _recorded_mirror(-4, size + 4, size, torch.device("cpu"))
    assert found.tolist() == mirrored(-4, size + 4, size)


def test_wrong_options_and_spaces_say_so():
    with pytest.raises(InputError, match="image_channels is -1"):
        LocalTemperatureScaling(image_channels=-1)
    with pytest.raises(InputError, match="neighbourhood is 'line'; expected one of plane, volume"):
        LocalTemperatureScaling(neighbourhood="line")
    with pytest.raises(InputError, match="inputs is 'probs'; expected one of logits, log-probs"):
        ImageTemperatureScaling(inputs="probs")
    with pytest.raises(InputError, match="expected volumes"):
        untrained(LocalTemperatureScaling, 3, neighbourhood="volume")(torch.zeros(1, 3, 8, 8))
    with pytest.raises(InputError, match="the space of the logits"):
        LocalTemperatureScaling().fit(random_logits(60, 3), torch.arange(60) % 3)


def test_windows_without_a_label_that_counts_are_not_drawn():
    z = random_logits(1, 3, 130, 130)
    y = torch.full((1, 130, 130), 255)
    y[:, :20, :90] = z[:, :, :20, :90].argmax(1)
    calibrator = LocalTemperatureScaling(epochs=1).fit(z, y)
    assert calibrator.fit_report.voxels_used == 20 * 90
    ignored = Tensors("ignored", z, torch.full((1, 130, 130), 255), None)
    both = case_set(ignored, Tensors("labelled", z, y, None))
    assert LocalTemperatureScaling(epochs=1).fit(both, validation=(z, y)).fit_report.voxels_used == 2 * 20 * 90


@pytest.mark.parametrize("truth", ["argmax", "argmin"])
@pytest.mark.parametrize("cls", LOCAL)
def test_nothing_right_or_nothing_wrong_is_left_to_ts(cls, truth):
    z = torch.cat([case.logits for case in planted(4, [SpatialTemperature()])])
    labels = getattr(z, truth)(1)
    calibrator, single = cls(epochs=1).fit(z, labels), TemperatureScaling().fit(z, labels)
    assert "at its bound" in calibrator.fit_report.notes[0]
    assert calibrator.fit_report.nll_after == single.fit_report.nll_after
    assert torch.allclose(calibrator.predict_proba(z), single.predict_proba(z), atol=1e-5)


@pytest.mark.parametrize(
    ("neighbourhood", "size"),
    [("plane", (2, 3)), ("plane", (1, 40)), ("plane", (1, 24, 24)), ("volume", (1, 24, 24)), ("volume", (2, 3, 3))],
)
def test_small_thin_and_constant_images_fit(neighbourhood, size):
    sources = [
        Tensors(
            f"{i}",
            random_logits(1, 3, *size, seed=i),
            random_logits(1, 3, *size, seed=i + 9).argmax(1),
            torch.full((1, 1, *size), 5.0),
        )
        for i in range(4)
    ]
    calibrator = LocalTemperatureScaling(image_channels=1, neighbourhood=neighbourhood, epochs=2).fit(
        case_set(*sources)
    )
    first = sources[0].logits(slice(None))
    assert torch.isfinite(calibrator(first, torch.full((1, 1, *size), 5.0))).all()
    assert calibrator.fit_report.nll_after <= calibrator.fit_report.nll_before


@pytest.mark.parametrize("chosen", ["legacy", "new"])
def test_flags_of_convolutions_are_put_back(chosen):
    """Also where the user has chosen the precision by the newer of PyTorch's two ways, which may not be mixed."""
    cudnn = torch.backends.cudnn
    if not hasattr(cudnn, "conv"):
        pytest.skip("this PyTorch has one way only")
    before = cudnn.conv.fp32_precision
    try:
        if chosen == "new":
            cudnn.conv.fp32_precision = "ieee"
        during = cudnn.conv.fp32_precision, cudnn.deterministic
        with exact_convolutions(torch.device("cuda")):
            assert (cudnn.conv.fp32_precision, cudnn.deterministic) == ("ieee", True)
        assert (cudnn.conv.fp32_precision, cudnn.deterministic) == during
    finally:
        cudnn.conv.fp32_precision = before
