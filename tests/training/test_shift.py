import numpy as np
import pytest
import torch
from scipy.ndimage import convolve1d

from segcal.errors import InputError, SegcalError
from segcal.synthetic import scenes
from segcal.training.shift import CORRUPTIONS, SEVERITIES, CorruptedCase, corrupt, corruption_of, value_range
from segcal.types import Case


def image(*shape, seed=0):
    """Smooth, for nothing is left of noise that is blurred, and off the ends, where clipping hides what is done."""
    rough = torch.rand(shape, generator=torch.manual_seed(seed))
    return 0.1 + 0.5 * torch.nn.functional.avg_pool2d(rough, 3, 1, 1, count_include_pad=False)


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("shape", [(3, 24, 32), (1, 24, 32), (2, 5, 24, 32), (3, 4, 24, 32), (3, 3, 3)])
def test_images_stay_images_and_the_strong_are_further_off_than_the_mild(kind, shape):
    clean = image(*shape)
    moved = {severity: corrupt(clean, "a", kind, severity) for severity in SEVERITIES}
    for result in moved.values():
        assert result.shape == clean.shape
        assert result.dtype == clean.dtype
        assert 0 <= result.min() <= result.max() <= 1
    distance = {severity: float((result - clean).square().mean()) for severity, result in moved.items()}
    assert 0 < distance["mild"] < distance["strong"]


def test_noise_has_the_published_spread_and_depends_on_name_and_seed():
    grey = torch.full((3, 200, 200), 0.5)
    for severity, sigma in (("mild", 0.03), ("strong", 0.10)):
        assert float(corrupt(grey, "a", "noise", severity).std()) == pytest.approx(sigma, rel=0.02)
    one = corrupt(grey, "a", "noise", "mild")
    assert torch.equal(one, corrupt(grey, "a", "noise", "mild"))
    assert not torch.equal(one, corrupt(grey, "b", "noise", "mild"))
    assert not torch.equal(one, corrupt(grey, "a", "noise", "mild", seed=1))


@pytest.mark.parametrize(("severity", "size", "sigma"), [("mild", 5, 1.0), ("strong", 13, 3.0)])
def test_blur_is_a_truncated_gaussian_mirrored_at_the_border(severity, size, sigma):
    clean = image(2, 20, 17).double()
    offsets = np.arange(size) - size // 2
    kernel = np.exp(-(offsets**2) / (2 * sigma**2))
    expected = clean.numpy()
    for axis in (1, 2):
        expected = convolve1d(expected, kernel / kernel.sum(), axis, mode="mirror")
    np.testing.assert_allclose(corrupt(clean, "a", "blur", severity).numpy(), expected, atol=1e-12)


def test_volumes_are_corrupted_slice_by_slice():
    volume = image(1, 4, 16, 16)
    for kind in ("blur", "jpeg", "fog", "brightness"):
        whole = corrupt(volume, "a", kind, "strong")
        for depth in range(4):
            torch.testing.assert_close(whole[:, depth], corrupt(volume[:, depth], "a", kind, "strong"))


def test_names_choose_among_all_corruptions_evenly():
    names = [f"frankfurt_{number:06d}" for number in range(2000)]
    counts = [sum(corruption_of(name) == kind for name in names) for kind in CORRUPTIONS]
    assert min(counts) > 330
    moved = sum(corruption_of(name) != corruption_of(name, seed=1) for name in names)
    assert moved > 1000
    clean = image(3, 16, 16)
    assert torch.equal(corrupt(clean, "a", None, "mild"), corrupt(clean, "a", corruption_of("a"), "mild"))


def test_a_corrupted_case_is_the_same_case_but_for_image_and_logits():
    clean = scenes(1, size=(32, 40))[0]
    seen = []

    def model(picture):
        seen.append(picture)
        return picture.mean(1, keepdim=True) * torch.arange(6.0).view(1, 6, 1, 1)

    case = Case(CorruptedCase(clean, model, "strong", 0))
    assert torch.equal(case.labels, clean.labels)
    logits = [case.logits, *(chunk.logits for chunk in case.chunks(1000))]
    assert len(seen) == 1
    assert torch.equal(logits[0], model(case.image))
    assert torch.equal(logits[0], torch.cat(logits[1:], 2))
    assert not torch.equal(case.image, clean.image)
    assert case.image.shape == clean.image.shape


def test_a_model_of_the_wrong_shape_is_told_so():
    clean = scenes(1, size=(32, 40))[0]
    with pytest.raises(SegcalError, match=r"the model gave \(1, 3, 32, 40\)"):
        _ = Case(CorruptedCase(clean, lambda picture: picture, "mild", 0)).logits


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"image": torch.rand(8, 8)}, "shape"),
        ({"image": torch.zeros(3, 8, 8, dtype=torch.uint8)}, "uint8"),
        ({"image": torch.full((3, 8, 8), 1.5)}, "1.5"),
        ({"image": torch.full((3, 8, 8), float("nan"))}, "nan"),
        ({"kind": "rain"}, "rain"),
        ({"severity": "extreme"}, "extreme"),
    ],
)
def test_what_cannot_be_corrupted_is_named(wrong, says):
    with pytest.raises(InputError, match=says):
        corrupt(**{"image": torch.rand(3, 8, 8), "name": "a", "kind": "fog", "severity": "mild", **wrong})


def test_value_ranges():
    assert value_range(torch.tensor([0.0, 1.0])) == (0, 1)
    assert value_range(torch.tensor([0.0, 200.0])) == (0, 255)
    assert value_range(torch.tensor([-1000.0, 3000.0])) == (-1000, 3000)
    assert value_range(torch.tensor([0.0, 4000.0])) == (0, 4000)
