import gc
import math
import sys
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.reference import inference
from tests.reference import metrics as reference

import segcal
from datasets import labels, logits, nnunet, plain
from segcal.errors import InputError
from segcal.evaluation.evaluate import evaluate, evaluate_many
from segcal.evaluation.plan import Plan
from segcal.evaluation.results import POOLED, Results
from segcal.kernels import AffineMap
from segcal.metrics import METRICS, PRESETS, Column
from segcal.regions import CaseRegions
from segcal.synthetic import GaugeOffsets, Temperature, scenes

CASES = scenes(4, size=(40, 48), plant=[Temperature(2.0)], ignored=0.05)


class Halved(torch.nn.Module):
    """Temperature 2, as a calibrator that works voxel by voxel."""

    spatial, score_map = False, None

    def forward(self, z):
        return (z / 2).log_softmax(1)

    def pieces(self, case):
        return ((rows, self(z)) for rows, z in case.logit_rows())


def pool(cases, z=lambda z: z, region=None):
    """All valid voxels of all cases (in a region) as float64 scores and labels."""
    scores, truth = [], []
    for case in cases:
        keep = case.valid
        if region:
            keep = CaseRegions(case.labels, spacing=case.spacing, mask=case.mask).mask(region)
        scores.append(z(case.logits).double().movedim(1, -1)[keep])
        truth.append(case.labels[keep])
    return torch.cat(scores), torch.cat(truth)


@pytest.mark.parametrize("region", ["everything", "foreground", "boundary", "interior", "band-3-7"])
def test_values_equal_float64_formulas_in_every_region(region):
    results = evaluate(CASES, metrics=("nll", "entropy", "accuracy", "confidence-balance"), regions=(region,))
    for name, cases in [(POOLED, CASES), *((case.id, [case]) for case in CASES)]:
        z, y = pool(cases, region=region)
        log_p = z.log_softmax(1)
        nll = float(-log_p.gather(1, y[:, None]).mean())
        entropy = float(-(log_p.exp() * log_p).sum(1).mean())
        assert results.value("nll", region, name) == pytest.approx(nll, rel=1e-5)
        assert results.value("entropy", region, name) == pytest.approx(entropy, rel=1e-5)
        assert results.value("accuracy", region, name) == pytest.approx(float((z.argmax(1) == y).double().mean()))
        assert results.value("confidence-balance", region, name) == pytest.approx(nll - entropy, abs=1e-5)


def test_summary_is_the_mean_over_images_with_an_interval_around_it():
    results = evaluate(CASES, metrics=("ece",))
    row = results.summary()[0]
    values = list(results.values("ece").values())
    assert row.mean == pytest.approx(np.mean(values))
    assert row.low <= row.mean <= row.high
    assert (row.cases, row.undefined) == (4, 0)
    assert results.summary() == results.summary()


def assert_same_values(a, b, tolerance=1e-9):
    assert [row[:3] for row in a.rows] == [row[:3] for row in b.rows]
    for left, right in zip(a.rows, b.rows, strict=True):
        assert left.count == right.count
        assert left.value == pytest.approx(right.value, rel=tolerance, abs=tolerance, nan_ok=True)


REGIONS = ("everything", "boundary", "local")


def test_workers_give_the_same_values():
    ts = segcal.calibrators.TemperatureScaling().fit(CASES)
    options = {"metrics": ("nll", "ece", "ba-ece", "hd95", "ace-adaptive"), "regions": REGIONS, "exact": True}
    told = {workers: [] for workers in (1, 2)}
    one, two = (evaluate(CASES, ts, **options, workers=n, progress=told[n].append) for n in told)
    assert_same_values(one, two)
    assert one.pooled_intervals == two.pooled_intervals
    assert one.pooled_intervals
    assert told[1] == list(CASES.ids) * 2  # once for all, and once more for the pooled edges of exact bins
    assert sorted(told[2]) == sorted(told[1])


def test_functions_that_workers_cannot_be_sent():
    with pytest.raises(InputError, match="the mask rare cannot be sent to worker processes.*workers=1"):
        evaluate(CASES, masks={"rare": lambda case: case.labels == 3}, workers=2)
    with pytest.raises(InputError, match=r"the calibrator cannot be sent to worker processes.*workers=1"):
        evaluate(CASES, lambda logits: logits.log_softmax(1), workers=2)


def test_chunks_give_the_same_values(monkeypatch):
    whole = evaluate(CASES, Halved(), metrics=("nll", "ece", "ba-ece", "hd95"), regions=REGIONS)
    module = sys.modules["segcal.evaluation.measure"]
    original = module.row_slices
    monkeypatch.setattr(module, "row_slices", lambda shape, values: original(shape, 6 * 48 * 7))
    assert_same_values(whole, evaluate(CASES, Halved(), metrics=("nll", "ece", "ba-ece", "hd95"), regions=REGIONS))


def test_every_kind_of_calibrator_gives_the_same_values():
    class Fused(Halved):
        score_map = AffineMap.temperature(2.0)

    class Spatial(Halved):
        spatial = True

    metrics = ("nll", "ece", "flip", "hd95")
    voxelwise = evaluate(CASES, Halved(), metrics=metrics, regions=REGIONS)
    for other in (Fused(), Spatial(), lambda z: (z / 2).log_softmax(1)):
        other_results = evaluate(CASES, other, metrics=metrics, regions=REGIONS)
        assert_same_values(other_results, voxelwise, tolerance=1e-5)
    assert voxelwise.value("flip") == 0


@pytest.mark.parametrize("calibrator", ["cal.safetensors", 2.0])
def test_what_is_no_calibrator_is_refused(calibrator):
    with pytest.raises(InputError, match=r"the calibrator is .* segcal\.load"):
        evaluate(CASES, calibrator)


def test_undoing_the_planted_temperature_calibrates():
    before = evaluate(CASES, metrics=("nll",))
    after = evaluate(CASES, Halved(), metrics=("nll",))
    assert after.value("nll") < before.value("nll")
    assert before.diagnosis["set"]["verdict"] == "overconfident"
    assert abs(after.diagnosis["set"]["balance"]) < 0.3 * before.diagnosis["set"]["balance"]


def test_flips_are_counted_against_the_uncalibrated_argmax():
    def swap(z):
        return z.flip(1).log_softmax(1)

    z, y = pool(CASES)
    before, after = z.argmax(1), z.flip(1).argmax(1)
    results = evaluate(CASES, swap, metrics=("flip", "flip[kind=harmful]", "flip[kind=beneficial]"))
    assert results.value("flip") == pytest.approx(float((before != after).double().mean()))
    harmful = (before != after) & (before == y)
    assert results.value("flip[kind=harmful]") == pytest.approx(float(harmful.double().mean()))
    beneficial = (before != after) & (after == y)
    assert results.value("flip[kind=beneficial]") == pytest.approx(float(beneficial.double().mean()))


def test_local_is_the_mean_and_maximum_over_patches():
    results = evaluate(scenes(2, size=(90, 100), plant=[Temperature(2.0)]), metrics=("nll",), regions=("local",))
    for case in scenes(2, size=(90, 100), plant=[Temperature(2.0)]):
        mean, largest = (results.value("nll", f"local-{how}", case.id) for how in ("mean", "max"))
        assert mean < largest
    assert not any(row.case == POOLED and row.region.startswith("local") for row in results.rows)
    small = evaluate(CASES[:1], metrics=("nll",), regions=("everything", "local"))
    for how in ("mean", "max"):
        assert small.value("nll", f"local-{how}", CASES.ids[0]) == pytest.approx(small.value("nll"))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs_in_two_and_three_dimensions(name):
    for size in ((40, 48), (6, 20, 24)):
        results = evaluate(scenes(2, size=size, plant=[Temperature(2.0)]), metrics=PRESETS[name].columns)
        assert {row.metric.split("[")[0] for row in results.rows} >= {column.metric for column in PRESETS[name].columns}


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_is_finite_on_scenes(metric):
    results = evaluate(CASES, Halved(), metrics=(metric,))
    values = [row.value for row in results.rows if row.metric == metric]
    assert values
    assert all(math.isfinite(value) for value in values)


def rare(case):
    return case.labels == 4


def test_any_mask_is_a_region():
    results = evaluate(CASES, metrics=("nll",), masks={"rare": rare})
    z, y = pool(CASES)
    assert results.value("nll", "rare") == pytest.approx(float(torch.nn.functional.cross_entropy(z[y == 4], y[y == 4])))
    with pytest.raises(InputError, match="region has shape"):
        evaluate(CASES, metrics=("nll",), masks={"wrong": lambda case: torch.ones(1, 3, 3, dtype=torch.bool)})
    with pytest.raises(InputError, match="masks are named boundary"):
        evaluate(CASES, masks={"boundary": rare})


def test_options_are_part_of_the_name():
    results = evaluate(CASES, metrics=("ece", "ece[num_bins=50]", Column("ece", "boundary", options={"num_bins": 7})))
    assert results.value("ece[num_bins=50]") >= results.value("ece") - 1e-12
    assert results.value("ece[num_bins=7]", "boundary") > 0


def test_reliability_data_adds_up():
    results = evaluate(CASES, metrics=("ece",), regions=("everything", "boundary"))
    for region in ("everything", "boundary"):
        data = results.reliability[region]
        voxels = len(pool(CASES, region=region)[1])
        assert sum(data["top"]["count"]) == voxels
        assert sum(sum(k["count"]) for k in data["classes"]) == voxels
        assert sum(sum(c["count"]) for c in data["cases"].values()) == voxels
        gaps = np.abs(np.array(data["top"]["confidence"]) - data["top"]["correct"]).sum() / voxels
        assert results.value("ece", region) == pytest.approx(gaps)


def test_json_and_csv_round_trip(tmp_path):
    results = evaluate(CASES, metrics=("ece", "hd95", "flip"))
    results.to_json(tmp_path / "r.json")
    again = Results.from_json(tmp_path / "r.json")
    assert_same_values(results, again, tolerance=0)
    assert again.to_json() == results.to_json()
    results.to_csv(tmp_path / "r.csv")
    lines = (tmp_path / "r.csv").read_text().splitlines()
    assert lines[0] == "case,region,metric,value,count,missed,channel,low,high"
    assert len(lines) == len(results.rows) + 1
    row = next(row for row in results.summary() if row.metric == "ece")
    assert [line for line in lines if line.endswith(f"{row.pooled_low},{row.pooled_high}")] == [
        line for line in lines if line.startswith(",everything,ece")
    ]
    (tmp_path / "r.json").write_text("{}")
    with pytest.raises(segcal.SegcalError, match="results.json"):
        Results.from_json(tmp_path / "r.json")


def test_gauge_diagnosis():
    safe = evaluate(scenes(2, size=(40, 48)), metrics=("nll",))
    shifted = evaluate(scenes(2, size=(40, 48), plant=[GaugeOffsets(20.0)]), metrics=("nll",))
    assert safe.diagnosis["gauge"]["risk"] == "none"
    assert shifted.diagnosis["gauge"]["risk"] == "high"
    assert shifted.value("nll") == pytest.approx(safe.value("nll"), rel=1e-4)


def test_multilabel_and_exterior(tmp_path):
    predictions, truth = nnunet(tmp_path, regions={"whole": [1, 2], "core": [2], "rim": [1]})
    cases = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))
    results = evaluate(cases, metrics=("nll", "dsc"), regions=("everything", "boundary"))
    assert next(row for row in results.rows if row.channel).count == 2 * 4 * 6
    assert math.isfinite(results.value("nll"))


# -- bad input


def test_all_ignored_is_nan_with_count_zero(tmp_path):
    root = plain(tmp_path, count=2)
    np.save(root / "labels" / "case0.npy", np.full((9, 7), 255, np.uint8))
    results = evaluate(segcal.open_cases(root), metrics=("nll", "ece", "ba-ece", "dsc", "hd95"), regions=REGIONS)
    for row in results.rows:
        if row.case == "case0":
            assert math.isnan(row.value)
            assert row.count == 0
    assert all(row.undefined == 1 for row in results.summary())
    np.save(root / "labels" / "case1.npy", np.full((9, 7), 255, np.uint8))
    nothing = evaluate(segcal.open_cases(root))
    assert math.isnan(nothing.value("nll"))
    assert nothing.diagnosis["set"]["verdict"] == "undefined"
    assert "NaN" not in nothing.to_json()


def test_one_class_image_without_boundary(tmp_path):
    root = plain(tmp_path, count=1)
    np.save(root / "labels" / "case0.npy", np.zeros((9, 7), np.uint8))
    results = evaluate(
        segcal.open_cases(root), metrics=("nll", "ba-ece"), regions=("everything", "boundary", "interior")
    )
    assert math.isnan(results.value("nll", "boundary"))
    assert results.value("nll", "interior") == pytest.approx(results.value("nll"))
    assert math.isnan(results.value("ba-ece"))


def test_errors_name_the_case(tmp_path):
    root = plain(tmp_path, count=3)
    z = logits(1)
    z[0, 2, 3] = np.nan
    np.save(root / "logits" / "case1.npy", z)
    with pytest.raises(InputError, match=r"case 'case1'.*NaN logits at voxel \(2, 3\)"):
        evaluate(segcal.open_cases(root))
    np.save(root / "logits" / "case1.npy", logits(1))
    np.save(root / "labels" / "case2.npy", labels(2) + 7)
    with pytest.raises(segcal.SegcalError, match=r"case 'case2'.*label"):
        evaluate(segcal.open_cases(root))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"metrics": ("nope",)}, "metric is 'nope'; expected one of nll"),
        ({"metrics": ("ece[num_bins",)}, "expected an id"),
        ({"metrics": ("ece[bins=3]",)}, "metric 'ece' has no option 'bins'; expected num_bins"),
        ({"regions": ("nope",)}, "region is 'nope'; expected one of everything"),
        ({"workers": 0}, "workers is 0"),
    ],
)
def test_wrong_requests_say_what_there_is(options, says):
    with pytest.raises(InputError, match=says):
        evaluate(CASES, **options)
    with pytest.raises(InputError, match="no cases"):
        evaluate(CASES[:0])
    with pytest.raises(InputError, match="no value of 'nll'"):
        evaluate(CASES[:1], metrics=("ece",)).value("nll")


@pytest.mark.parametrize("calibrated", [False, True])
def test_exact_equal_mass_bins_are_those_of_sorted_voxels(calibrated):
    """Per case, per region and pooled, against the reference that sorts all probabilities."""
    cases = scenes(2, size=(16, 18), num_classes=3, plant=[Temperature(2.0)], ignored=0.1)
    calibrator = segcal.calibrators.VectorScaling().fit(cases) if calibrated else None
    metrics = ("ace-adaptive", "ace-adaptive[num_bins=7]", "tace")
    results = evaluate(cases, calibrator, metrics=metrics, regions=("everything", "boundary"), exact=True)
    seen = {}
    for case in cases:
        log_probs = case.logits.log_softmax(1) if calibrator is None else calibrator(case.logits)
        probs = log_probs[0].flatten(1).T.double().exp()
        labels, boundary = case.labels.flatten(), CaseRegions(case.labels, ignore_index=255).mask("boundary").flatten()
        for region, inside in (("everything", labels != 255), ("boundary", boundary & (labels != 255))):
            values = (probs[inside].numpy(), labels[inside].numpy())
            seen.setdefault((POOLED, region), []).append(values)
            seen[case.id, region] = [values]
    for (case_id, region), parts in seen.items():
        probs, labels = (np.concatenate(items) for items in zip(*parts, strict=True))
        for metric, bins, threshold in zip(metrics, (15, 7, 15), (None, None, 1e-3), strict=True):
            expected = reference.ace_adaptive(probs, labels, bins, threshold)
            assert results.value(metric, region, case_id) == pytest.approx(expected, abs=1e-6)


def test_exact_local_patches_and_every_calibrator_in_one_read():
    cases = scenes(2, size=(40, 48), plant=[Temperature(2.0)])
    ts = segcal.calibrators.TemperatureScaling().fit(cases)
    options = {"metrics": ("ece", "ace-adaptive"), "regions": ("everything", "local"), "exact": True}
    reads = []
    many = evaluate_many(
        Plan.make(**options, background=cases.background), cases, {"before": None, "after": ts}, progress=reads.append
    )
    assert reads == [*cases.ids] * 2  # once for all, and once more for the pooled edges
    assert many["before"].rows == evaluate(cases, **options).rows
    assert many["after"].rows == evaluate(cases, ts, **options).rows
    once = evaluate(cases, metrics=("ace-adaptive",), regions=("local",)).values("ace-adaptive", "local-mean")
    exact = many["before"].values("ace-adaptive", "local-mean")
    assert all(exact[name] == pytest.approx(once[name], abs=0.05) for name in exact)
    assert exact != once


def test_statistics_alone_cannot_be_exact():
    stats = segcal.VoxelStatistics(2).update(torch.zeros(4, 2), torch.tensor([0, 0, 0, 1]))
    with pytest.raises(InputError, match=r"(?s)exact is True.*SecondPass"):
        segcal.metrics.ace_adaptive(stats, exact=True)


def grouped(count=12, size=3):
    cases = scenes(count, size=(32, 40), plant=[Temperature(2.0)])
    return replace(cases, groups={name: f"patient {i // size}" for i, name in enumerate(cases.ids)})


def test_intervals_are_over_groups_where_there_are_some(tmp_path):
    cases = grouped()
    results = evaluate(cases, metrics=("nll", "dsc"))
    alone = evaluate(replace(cases, groups=None), metrics=("nll", "dsc"))
    values = list(results.values("nll").values())
    means = inference.cluster_means(values, list(cases.groups.values()), 20_000, np.random.default_rng(0))
    row, other = results.summary()[0], alone.summary()[0]
    assert row.mean == other.mean
    assert (row.low, row.high) != (other.low, other.high)
    assert [row.low, row.high] == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.05 * (row.high - row.low))
    results.to_json(tmp_path / "r.json")
    again = Results.from_json(tmp_path / "r.json")
    assert again.summary() == results.summary()
    assert again.groups == cases.groups
    assert results.notes() == [
        "intervals are over 4 groups of cases, not over single cases: with fewer than 8 they are too narrow"
    ]
    assert alone.notes() == []


def test_the_pattern_of_groups_is_in_the_results_and_a_wrong_one_is_an_error_before_any_work():
    cases = replace(grouped(), groups=r"^image-(\d)")
    assert evaluate(cases, metrics=("nll",)).about["groups"]["pattern"] == r"^image-(\d)"
    assert evaluate(cases, metrics=("nll",)).groups["image-010"] == "0"
    read = []
    with pytest.raises(InputError, match="does not match case 'image-000'"):
        evaluate(replace(cases, groups="^scan"), metrics=("nll",), progress=read.append)
    assert not read


def test_the_work_after_the_pass_does_not_grow_with_classes_times_regions(monkeypatch):
    """Sums over the histograms of all classes are taken once a metric or region, not once a class."""
    calls = []
    total = segcal.VoxelStatistics.total
    monkeypatch.setattr(segcal.VoxelStatistics, "total", lambda self, *region: calls.append(1) or total(self, *region))
    counts = []
    for classes in (3, 12):
        calls.clear()
        evaluate(scenes(1, size=(16, 18), num_classes=classes), regions=("everything", "boundary"))
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_a_case_is_released_when_it_is_measured():
    """Without waiting for Python to look for circles of references."""
    cases, seen = segcal.synthetic.scenes(3, size=(16, 20)), []

    def mask(case):
        seen.append(weakref.ref(case))
        return case.labels > 0

    gc.disable()
    try:
        segcal.evaluate(cases, metrics=("nll",), regions=("own",), masks={"own": mask})
    finally:
        gc.enable()
    assert len(seen) == 3
    assert all(one() is None for one in seen)
