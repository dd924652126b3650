"""Against other libraries, where definitions coincide. Each test runs where its peer is installed."""

import numpy as np
import pytest
import torch

from segcal import metrics
from segcal.statistics import VoxelStatistics


@pytest.fixture(scope="module")
def scores():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 40, 50, generator=random) * 2
    labels = (logits / 1.4 - torch.log(-torch.log(torch.rand(logits.shape, generator=random)))).argmax(1)
    return logits, labels, VoxelStatistics(5, (10, 15)).update(logits, labels)


def test_torchmetrics(scores):
    tm = pytest.importorskip("torchmetrics.functional.classification")
    logits, labels, stats = scores
    p = logits.softmax(1)
    for norm, metric in (("l1", metrics.ece), ("max", metrics.mce)):
        theirs = tm.multiclass_calibration_error(p, labels, num_classes=5, n_bins=15, norm=norm)
        assert metric(stats) == pytest.approx(float(theirs), abs=1e-6)
    assert metrics.accuracy(stats) == pytest.approx(
        float(tm.multiclass_accuracy(p, labels, 5, average="micro")), abs=1e-6
    )
    assert np.array_equal(stats.total().confusion, tm.multiclass_confusion_matrix(p, labels, 5).numpy())
    assert metrics.miou(stats) == pytest.approx(float(tm.multiclass_jaccard_index(p, labels, 5)), abs=1e-6)


def test_fiducio(scores):
    fiducio = pytest.importorskip("fiducio.metrics")
    logits, labels, stats = scores
    p = logits.softmax(1)
    assert metrics.nll(stats) == pytest.approx(fiducio.negative_log_likelihood(p, labels), abs=1e-6)
    assert metrics.brier(stats) == pytest.approx(fiducio.brier_score(p, labels), abs=1e-6)
    assert metrics.ece(stats) == pytest.approx(fiducio.expected_calibration_error(p, labels, n_bins=15), abs=1e-6)
    assert metrics.ace(stats) == pytest.approx(fiducio.unweighted_calibration_error(p, labels, n_bins=15), abs=1e-6)


def test_monai(scores):
    """MONAI's calibration error is per image and class, in bins [lo, hi): the same but for values on edges."""
    monai = pytest.importorskip("monai.metrics")
    if not hasattr(monai, "CalibrationErrorMetric"):
        pytest.skip("this MONAI has no calibration error")
    logits, labels, _ = scores
    one_hot = torch.nn.functional.one_hot(labels, 5).movedim(-1, 1)
    metric = monai.CalibrationErrorMetric(num_bins=15, calibration_reduction="expected")
    theirs = metric(y_pred=logits.softmax(1), y=one_hot).double().mean()
    cases = [VoxelStatistics(5).update(logits[i : i + 1], labels[i : i + 1]) for i in range(2)]
    assert metrics.Measure.mean(map(metrics.cece, cases)) == pytest.approx(float(theirs), abs=1e-6)


def test_relplot(scores):
    relplot = pytest.importorskip("relplot")
    logits, labels, stats = scores
    confidence, winner = logits.softmax(1).max(1)
    right = (winner == labels).double().flatten().numpy()
    # relplot finds the bandwidth to 1/1024 and evaluates on 200 points.
    assert metrics.smece(stats) == pytest.approx(relplot.smECE(confidence.flatten().double().numpy(), right), abs=2e-3)
