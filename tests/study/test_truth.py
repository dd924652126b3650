"""On scenes the truth is known, and so is the order of the methods."""

import numpy as np
import torch
from scipy.stats import spearmanr

from segcal.calibrators import load
from segcal.study import compare
from segcal.synthetic import GaugeOffsets, Temperature, TrueCalibrationError, scenes, true_calibration_error

METHODS = ("ts", "vs", "dc", "cms-op", "histogram", "isotonic", "meta-cal")


def test_ranking_by_measured_nll_agrees_with_ranking_by_true_calibration_error(tmp_path):
    cases = scenes(16, size=(48, 64), num_classes=4, plant=[Temperature(2.5), GaugeOffsets(2.0)], seed=3, coherence=0)
    study = compare(
        cases,
        METHODS,
        1,
        output=tmp_path,
        tune="none",
        metrics=("nll",),
        regions=("everything",),
        fractions=(0.4, 0.1, 0.5),
    )
    fitted = {load(path).id: load(path) for path in (tmp_path / "work").glob("fit-*.safetensors")}
    test = cases.select(study.document["splits"][0]["test"])
    true = {}
    for row in study.summary("nll"):
        calibrator = fitted.get(row["method"], lambda z: z.log_softmax(1))
        error = TrueCalibrationError(0.0, 0.0, 0)
        with torch.no_grad():
            for case in test:
                error += true_calibration_error(calibrator(case.logits), case.posterior)
        true[row["method"]] = error.kl
    measured = {row["method"]: row["pooled"] for row in study.summary("nll")}
    assert set(measured) == {"uncalibrated", *METHODS}
    keys = list(measured)
    assert spearmanr([measured[k] for k in keys], [true[k] for k in keys]).statistic >= 0.9
    assert np.ptp(list(true.values())) > 0.05
