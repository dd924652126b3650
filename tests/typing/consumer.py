"""A user's code, which ``make lint`` checks with mypy's strict settings: the public names have the types that they say.

Nothing here runs. ``assert_type`` fails where a type is lost on the way (``Any``), an unused ``type: ignore`` where a
mistake is no longer seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import assert_type

import segcal
from segcal.calibrators import Calibrator, TemperatureScaling
from segcal.evaluation.results import ClassRow, Row, SummaryRow
from segcal.losses import NACL
from segcal.metrics import Measure, MetricSpec
from segcal.report import write_report


def data(folder: Path) -> None:
    cases = segcal.open_cases(folder)
    assert_type(cases, segcal.CaseSet)
    assert_type(len(cases), int)
    for case in cases:
        assert_type(case, segcal.Case)
        assert_type(case.logits, Tensor)
        assert_type(case.spacing, tuple[float, ...] | None)
    assert_type(cases.split(0.5, 0.2, 0.3).test, segcal.CaseSet)
    assert_type(segcal.check(folder), segcal.CheckReport)
    assert_type(segcal.cases_from((torch.zeros(1, 2, 4), torch.zeros(1, 4))), segcal.CaseSet)


def calibrators(cases: segcal.CaseSet, loader: DataLoader[tuple[Tensor, Tensor]], logits: Tensor) -> None:
    assert_type(segcal.CALIBRATORS, dict[str, type[Calibrator]])
    calibrator = TemperatureScaling().fit(cases)
    assert_type(calibrator, TemperatureScaling)
    assert_type(TemperatureScaling().fit(loader), TemperatureScaling)
    assert_type(calibrator.fit_report, segcal.FitReport | None)
    assert_type(calibrator.predict_proba(logits), Tensor)
    assert_type(calibrator.predict(logits), Tensor)
    calibrator.save("cal.safetensors")
    assert_type(segcal.load("cal.safetensors"), Calibrator)
    assert_type(segcal.tune("cms-op", cases), Calibrator)
    calibrator.fit(cases, seed="one")  # type: ignore[arg-type]
    calibrator.fit(cases, voxels="some")  # type: ignore[arg-type]


def measuring(cases: segcal.CaseSet, logits: Tensor, labels: Tensor) -> None:
    results = segcal.evaluate(cases, TemperatureScaling(), metrics=("nll", "ece"), regions=("everything",))
    assert_type(results, segcal.Results)
    assert_type(results.value("ece"), float)
    assert_type(results.values("ece"), dict[str, float])
    assert_type(results.rows, tuple[Row, ...])
    assert_type(results.classes, tuple[ClassRow, ...])
    assert_type(results.summary(), list[SummaryRow])
    assert_type(results.picture(before=results), str)
    statistics = segcal.VoxelStatistics(3).update(logits, labels)
    assert_type(statistics, segcal.VoxelStatistics)
    assert_type(segcal.metrics.ece(statistics), Measure)
    assert_type(segcal.METRICS, dict[str, MetricSpec])
    segcal.evaluate(cases, workers="two")  # type: ignore[arg-type]
    segcal.evaluate(cases, metrics=3)  # type: ignore[arg-type]


def studies(cases: segcal.CaseSet, logits: Tensor, labels: Tensor) -> None:
    study = segcal.compare(cases, ("ts", "trust"), repeats=3)
    assert_type(study, segcal.Study)
    assert_type(study.summary("ece"), list[dict[str, Any]])
    assert_type(segcal.plan(cases), segcal.Forecast)
    assert_type(write_report("report"), Path)
    loss: Tensor = NACL(weight=0.1)(logits, labels)
    loss.backward()  # type: ignore[no-untyped-call]
