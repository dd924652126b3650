"""The crops that networks of local temperatures are trained on stand for all windows of the cases."""

import pytest
import torch

from calibrators.local_cases import Tensors, case_set
from segcal.calibrators import local_crops
from segcal.calibrators.local_crops import IGNORED, CropSource, crop_sides
from segcal.calibrators.local_network import TemperatureTree
from segcal.fitting.data import FitData

SIZE, SEEDS = (192, 256), 50
DOUBTFUL = (..., slice(40, 90), slice(100, 160))


@pytest.fixture(scope="module")
def scan():
    """Logits and labels of easy background, but for one doubtful place, and some ignored voxels."""
    random = torch.Generator().manual_seed(0)
    z = torch.randn(1, 3, *SIZE, generator=random)
    z[:, 0] += 9.0
    z[DOUBTFUL] = torch.randn(1, 3, 50, 60, generator=random)
    labels = z.argmax(1)
    labels[DOUBTFUL] = torch.randint(3, (1, 50, 60), generator=random)
    labels[:, :, :20] = 255
    return z, labels


def sample(scan, seed=0):
    """The crops that are drawn from one case."""
    cases = case_set(Tensors("scan", *scan, None))
    return CropSource(
        FitData(cases, None, "auto", seed), 1.0, crop_sides(cases, 2), TemperatureTree(num_classes=3), False, share=1.0
    )


@pytest.fixture
def few(monkeypatch):
    """Five of the 12 windows are drawn."""
    monkeypatch.setattr(local_crops, "_VOXELS", 5 * 64**2)


@pytest.mark.usefixtures("few")
def test_sums_over_a_sample_are_on_average_those_over_all_windows(scan):
    z, labels = scan
    labelled, doubtful = [], []
    for source in (sample(scan, seed) for seed in range(SEEDS)):
        (part,) = source.parts()
        assert len(part.owner) == 5
        crops = part.crops
        labelled.append(source.total)
        doubtful.append(float(crops.weigh((crops.labels != IGNORED) & (crops.scores[:, 0, 4:-4, 4:-4] < 5))))
    for found, true in ((labelled, labels != 255), (doubtful, (labels != 255) & (z[:, 0] < 5))):
        values = torch.tensor(found, dtype=torch.float64)
        standard_error = float(values.std()) / SEEDS**0.5
        assert abs(float(values.mean()) - int(true.sum())) < 4 * standard_error + 1e-9


@pytest.mark.usefixtures("few")
def test_doubtful_windows_are_preferred(scan):
    shown = []
    for seed in range(20):
        (part,) = sample(scan, seed).parts()
        assert part.weight.min() >= 1
        shown.append(int((part.crops.scores[:, 0, 4:-4, 4:-4] < 4).any((1, 2)).sum()))
    # Four windows of 12 show the doubtful place: of five drawn evenly, 1.7.
    assert sum(shown) / len(shown) > 2.5


def test_all_windows_count_once(scan):
    source = sample(scan)
    assert source.total == source.voxels == int((scan[1] != 255).sum())
