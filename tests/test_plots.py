from __future__ import annotations

import importlib
import io
import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure, SubFigure

import segcal
from multilabel import channels, stacked
from segcal import plots
from segcal.errors import InputError, MissingExtraError, OutputError
from segcal.evaluation import maps
from segcal.metrics.reliability import Reliability, reliability
from segcal.plots import figures, style
from segcal.plots.reliability import ece, pool
from segcal.plots.style import _views
from segcal.regions import BAND_EDGES, CaseRegions, local_patches
from segcal.statistics import VoxelStatistics
from segcal.synthetic import scenes
from segcal.types import Case


def render(figure: Figure) -> bytes:
    """Draw for good, which is when layouts fail; warnings are errors."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=40)
    return buffer.getvalue()


def artists(figure: Figure, label: str) -> list:
    """Whatever was drawn under a label that begins so; those of bars belong to all bars together."""
    found = figure.findobj(lambda artist: str(artist.get_label()).startswith(label))
    containers = [part for ax in figure.axes for part in ax.containers if part.get_label() == label]
    return [*found, *(bar for part in containers for bar in part)]


def points(figure: Figure, label: str) -> np.ndarray:
    """All points of the lines of this name, by their x."""
    xy = np.concatenate([line.get_xydata() for line in artists(figure, label)])
    return xy[np.argsort(xy[:, 0], kind="stable")]


def bars(figure: Figure, label: str) -> list[tuple[float, float, float]]:
    """Centre, bottom and top of all bars of this name, by their x."""
    boxes = [bar.get_bbox() for bar in artists(figure, label)]
    return sorted(((box.x0 + box.x1) / 2, *sorted((box.y0, box.y1))) for box in boxes)


@dataclass
class Memory:
    """Tensors as the source of a case."""

    tensors: dict[str, torch.Tensor | None]
    spacing: tuple[float, ...] | None = None
    id: str = "memory"
    ignore_index: int = 255
    sliceable: bool = False

    def __post_init__(self) -> None:
        self.batch, self.num_classes, *spatial = self.tensors["logits"].shape
        self.spatial = tuple(spatial)

    def __getattr__(self, name: str):
        axis = {"logits": 2, "image": 2, "labels": 1, "mask": 1}[name]

        def read(rows: slice):
            tensor = self.tensors.get(name)
            return None if tensor is None else tensor.narrow(axis, rows.start, rows.stop - rows.start)

        return read


def case_of(logits, labels, *, image=None, mask=None, spacing=None) -> Case:
    return Case(Memory({"logits": logits, "labels": labels, "image": image, "mask": mask}, spacing))


def statistics_of(cases, classes: int) -> list[VoxelStatistics]:
    return [VoxelStatistics(classes).update(case.logits, case.labels) for case in cases]


@pytest.fixture(scope="module")
def demo() -> list[VoxelStatistics]:
    return statistics_of(segcal.synthetic.demo_scenes()[0][:5], 6)


@st.composite
def reliabilities(draw: st.DrawFn, bins: int) -> Reliability:
    count = draw(hnp.arrays(np.int64, bins, elements=st.sampled_from([0, 1, 7, 99, 100, 5000])))
    inside = draw(hnp.arrays(np.float64, bins, elements=st.floats(0.01, 1)))
    right = draw(hnp.arrays(np.float64, bins, elements=st.floats(0, 1)))
    confidence = count * (np.arange(bins) + inside) / bins
    return Reliability(count, confidence, np.round(right * count).astype(np.int64))


# -- reliability ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(st.lists(reliabilities(6), min_size=1, max_size=3))
def test_the_diagram_shows_the_numbers(cases: list[Reliability]) -> None:
    figure = plots.reliability_diagram(cases, replicates=20)
    pooled = pool(cases)
    filled = pooled.count > 0
    if not filled.any():
        assert "no valid voxels" in {text.get_text() for text in figure.axes[0].texts}
        assert artists(figure, "_gap") == []
        return
    confidence, accuracy = pooled.mean_confidence[filled], pooled.accuracy[filled]
    np.testing.assert_array_equal(points(figure, "_accuracy"), np.stack((confidence, accuracy), 1))
    middles = (np.arange(6) + 0.5)[filled] / 6
    expected = np.stack((middles, np.minimum(confidence, accuracy), np.maximum(confidence, accuracy)), 1)
    np.testing.assert_allclose(bars(figure, "_gap"), expected, atol=1e-12)
    shares = [top for _, _, top in bars(figure, "_share")]
    np.testing.assert_allclose(shares, pooled.count[filled] / pooled.count.sum())
    assert f"ECE {ece(pooled):.4f}" in figure.axes[0].get_title(loc="left")


def test_gap_bars_tell_over_from_under() -> None:
    part = Reliability(np.array([500, 500]), np.array([200.0, 400.0]), np.array([250, 350]))
    under, over = sorted(artists(plots.reliability_diagram(part), "_gap"), key=lambda bar: bar.get_x())
    assert to_rgb(under.get_facecolor()) == to_rgb(style.UNDER)
    assert to_rgb(over.get_facecolor()) == to_rgb(style.OVER)


def test_sparse_bins_are_pale_and_off_the_line() -> None:
    part = Reliability(np.array([99, 100, 0, 100]), np.array([20.0, 40.0, 0.0, 90.0]), np.array([50, 40, 0, 90]))
    figure = plots.reliability_diagram(part)
    pale, full, _ = sorted(artists(figure, "_gap"), key=lambda bar: bar.get_x())
    assert pale.get_alpha() < full.get_alpha()
    line = next(line for line in figure.axes[0].lines if line.get_label() == "accuracy")
    assert np.isnan(line.get_ydata()).tolist() == [True, False, True, False]


def test_ece_is_that_of_the_metrics(demo) -> None:
    for statistics in demo:
        assert ece(reliability(statistics)) == pytest.approx(segcal.metrics.ece(statistics), abs=1e-12)


def test_before_is_drawn_beside_it(demo) -> None:
    before = [reliability(statistics) for statistics in demo]
    after = [Reliability(part.count, part.confidence, part.correct) for part in before]
    figure = plots.reliability_diagram(after, before=before)
    (line,) = [line for line in figure.axes[0].lines if line.get_label().startswith("before")]
    assert line.get_label() == f"before: ECE {ece(pool(before)):.4f}"
    enough = pool(before).count >= 100
    np.testing.assert_array_equal(line.get_ydata()[enough], pool(before).accuracy[enough])


@settings(deadline=None, max_examples=30)
@given(st.lists(reliabilities(4), min_size=2, max_size=6), st.integers(0, 5))
def test_the_band_is_seeded_ordered_and_within_the_cases(cases: list[Reliability], seed: int) -> None:
    low, high = plots.bootstrap_band(cases, replicates=130, seed=seed)
    again = plots.bootstrap_band(cases, replicates=130, seed=seed)
    np.testing.assert_array_equal((low, high), again)
    filled = pool(cases).count > 0
    assert not np.isnan(low[filled]).any()
    assert np.isnan(low[~filled]).all()
    assert (low[filled] <= high[filled]).all()
    each = np.stack([case.accuracy for case in cases])[:, filled]
    assert (low[filled] >= np.nanmin(each, 0) - 1e-12).all()
    assert (high[filled] <= np.nanmax(each, 0) + 1e-12).all()


def test_the_band_holds_the_estimate_and_is_the_naive_bootstrap(demo) -> None:
    cases = [reliability(statistics) for statistics in demo]
    low, high = plots.bootstrap_band(cases, replicates=500, seed=3)
    accuracy, filled = pool(cases).accuracy, pool(cases).count > 0
    assert (low[filled] <= accuracy[filled]).all()
    assert (accuracy[filled] <= high[filled]).all()

    random = np.random.default_rng(3)
    drawn = [random.multinomial(len(cases), [1 / len(cases)] * len(cases)) for _ in range(500)]
    picked = [pool([case for case, n in zip(cases, weights, strict=True) for _ in range(n)]) for weights in drawn]
    samples = np.stack([part.accuracy for part in picked])[:, filled]
    np.testing.assert_allclose(np.nanquantile(samples, (0.025, 0.975), axis=0), (low[filled], high[filled]))


def test_the_drawn_band_is_the_bootstrap_band(demo) -> None:
    cases = [reliability(statistics) for statistics in demo]
    figure = plots.reliability_diagram(cases, replicates=50, seed=1)
    low, high = plots.bootstrap_band(cases, replicates=50, seed=1)
    enough = pool(cases).count >= 100
    drawn = np.concatenate([path.vertices[:, 1] for path in artists(figure, "95% interval")[0].get_paths()])
    assert set(low[enough]) | set(high[enough]) <= set(drawn.tolist())
    assert artists(plots.reliability_diagram(cases[0]), "95% interval") == []


def test_one_panel_per_class_with_its_numbers(demo) -> None:
    classes = [reliability(demo[0], predicted=k) for k in range(6)]
    figure = plots.classwise_diagram(classes, class_names=list("abcdef"))
    assert len(figure.axes) == 6
    total = sum(part.count.sum() for part in classes)
    for ax, name, part in zip(figure.axes, "abcdef", classes, strict=True):
        share = style.share(int(part.count.sum()), int(total))
        assert ax.get_title(loc="left") == f"{name}\n{share}, ECE {style.number(ece(part))}"
    render(figure)


def test_shares_of_class_probabilities_are_those_of_the_labels(demo) -> None:
    classes = [reliability(demo[0], probability_of=k) for k in range(6)]
    figure = plots.classwise_diagram(classes, of="probability")
    labels = demo[0].total().confusion.sum(1)
    for ax, count in zip(figure.axes, labels, strict=True):
        assert style.share(int(count), int(labels.sum())) in ax.get_title(loc="left")


def test_of_many_classes_the_worst_are_shown_worst_first() -> None:
    error = np.random.default_rng(0).permutation(150)
    classes = [Reliability(np.array([1000]), np.array([500.0 + e]), np.array([500])) for e in error]
    figure = plots.classwise_diagram(classes)
    shown = [int(ax.get_title(loc="left").split()[1]) for ax in figure.axes]
    assert [error[k] for k in shown] == list(range(149, 129, -1))
    assert "20 of 150 classes" in figure.get_suptitle()
    render(figure)


def test_classes_never_predicted_are_named_too() -> None:
    statistics = VoxelStatistics(2).update(torch.tensor([[3.0, 0.0]] * 200), torch.zeros(200, dtype=torch.int64))
    figure = plots.classwise_diagram([reliability(statistics, predicted=k) for k in range(2)])
    assert figure.axes[1].get_title(loc="left") == "class 1\n0%, ECE undefined"
    render(figure)


def test_results_become_figures(tmp_path) -> None:
    cases = scenes(3, size=(32, 40), num_classes=3, class_names=("a", "b", "c"))
    results = segcal.evaluate(cases, metrics=("ece",), regions=("everything", "boundary"))
    results.to_json(tmp_path / "results.json")
    figures = dict(plots.reliability_figures(segcal.Results.from_json(tmp_path / "results.json")))
    assert list(figures) == [
        f"{kind}-{region}" for region in ("everything", "boundary") for kind in ("reliability", "classes")
    ]
    title = figures["reliability-boundary"].axes[0].get_title(loc="left")
    assert f"ECE {results.value('ece', 'boundary'):.4f}" in title
    assert figures["classes-everything"].axes[2].get_title(loc="left").startswith("c\n")


# -- boundary ------------------------------------------------------------------------------------------------------


def test_a_profile_is_its_naive_loop() -> None:
    case = scenes(1, size=(24, 30), num_classes=3, ignored=0.1)[0]
    distance = CaseRegions(case.labels).distance
    profile = plots.BoundaryProfile(5, 1.5).update(case.logits, case.labels, distance)
    count, correct, confidence, away = np.zeros((4, 6))
    p = case.logits.double().softmax(1)
    for index in np.ndindex(24, 30):
        where = (0, *index)
        if case.labels[where] != 255:
            b = min(5, int(float(distance[where]) / 1.5))
            q = p[(0, slice(None), *index)]
            count[b] += 1
            correct[b] += int(q.argmax()) == int(case.labels[where])
            confidence[b] += float(q.max())
            away[b] += float(distance[where])
    np.testing.assert_array_equal(profile.count, count)
    np.testing.assert_array_equal(profile.correct, correct)
    np.testing.assert_allclose(profile.confidence, confidence, rtol=1e-12)
    np.testing.assert_allclose(profile.distance, away, rtol=1e-12)


def test_profiles_of_parts_merge_to_that_of_the_whole(monkeypatch) -> None:
    cases = list(scenes(3, size=(20, 24), num_classes=3))
    distances = [CaseRegions(case.labels).distance for case in cases]
    whole = plots.BoundaryProfile().update(
        torch.cat([case.logits for case in cases]), torch.cat([case.labels for case in cases]), torch.cat(distances)
    )
    monkeypatch.setattr(maps, "_PIECE_VALUES", 100)
    parts = [
        plots.BoundaryProfile().update(case.logits, case.labels, distance)
        for case, distance in zip(cases, distances, strict=True)
    ]
    for order in itertools.permutations(parts):
        merged = plots.BoundaryProfile()
        for part in order:
            merged.merge(part)
        np.testing.assert_array_equal(merged.count, whole.count)
        np.testing.assert_array_equal(merged.correct, whole.correct)
        np.testing.assert_allclose(merged.confidence, whole.confidence, rtol=1e-12)
        np.testing.assert_allclose(merged.distance, whole.distance, rtol=1e-12)


def test_band_gaps_are_those_of_the_statistics() -> None:
    case = scenes(1, num_classes=4, plant=[segcal.synthetic.Temperature(2.0)])[0]
    regions = CaseRegions(case.labels)
    profile = plots.BoundaryProfile().update(case.logits, case.labels, regions.distance)
    names = [f"band-{low:g}-{high:g}" for low, high in itertools.pairwise(BAND_EDGES)]
    statistics = VoxelStatistics(4, regions=names).update(
        case.logits, case.labels, regions={name: regions.mask(name) for name in names}
    )
    for name, low, high in zip(names, BAND_EDGES[:-1], BAND_EDGES[1:], strict=True):
        part = reliability(statistics, region=name)
        expected = (part.confidence.sum() - part.correct.sum()) / part.count.sum()
        assert profile.band_gap(low, high) == pytest.approx(expected, abs=1e-6)


def test_fine_bins_of_float32_distances_lie_where_they_should() -> None:
    distance = torch.tensor([[0.1 * k for k in range(30)]])
    profile = plots.BoundaryProfile(30, 0.1).update(torch.zeros(1, 2, 30), torch.zeros(1, 30).long(), distance)
    assert profile.count.tolist() == [1] * 30 + [0]


def test_without_a_boundary_all_is_far_away() -> None:
    labels = torch.ones(1, 6, 6, dtype=torch.int64)
    profile = plots.BoundaryProfile(4).update(torch.zeros(1, 2, 6, 6), labels, CaseRegions(labels).distance)
    assert profile.count.tolist() == [0, 0, 0, 0, 36]
    assert math.isnan(profile.band_gap(0, 3))
    render(plots.boundary_curve(profile))


def test_the_curve_shows_the_profile() -> None:
    case = scenes(1, num_classes=4, plant=[segcal.synthetic.Temperature(2.0)])[0]
    profile = plots.BoundaryProfile().update(case.logits, case.labels, CaseRegions(case.labels).distance)
    figure = plots.boundary_curve(profile, unit="mm", title="demo")
    for name, values in (("confidence", profile.mean_confidence), ("accuracy", profile.accuracy)):
        np.testing.assert_array_equal(artists(figure, name)[0].get_ydata(), values)
    np.testing.assert_allclose([top for _, _, top in bars(figure, "_share")], profile.count / profile.count.sum())
    gap = f"{profile.band_gap(0, 3):+.3f}".replace("-", "−")
    assert f"0–3\n{gap}" in {text.get_text() for text in figure.axes[0].texts}
    assert "(mm)" in figure.axes[1].get_xlabel()
    render(figure)


def test_an_empty_profile_says_so() -> None:
    labels = torch.full((1, 4, 4), 255)
    profile = plots.BoundaryProfile().update(torch.zeros(1, 2, 4, 4), labels, CaseRegions(labels).distance)
    figure = plots.boundary_curve(profile)
    assert "no valid voxels" in {text.get_text() for text in figure.axes[0].texts}
    render(figure)


# -- logits --------------------------------------------------------------------------------------------------------


def test_histograms_count_what_they_say() -> None:
    case = scenes(1, size=(16, 20), num_classes=3, ignored=0.1)[0]
    histogram = plots.LogitHistogram(3).update(case.logits, case.labels)
    valid = case.labels[0] != 255
    z, y = case.logits[0].double()[:, valid].numpy(), case.labels[0][valid].numpy()
    edges = histogram.edges
    for k in range(3):
        rivals = np.delete(z, k, 0).max(0)
        np.testing.assert_array_equal(histogram.own[k], np.histogram(z[k][y == k], edges)[0])
        np.testing.assert_array_equal(histogram.other[k], np.histogram(z[k][y != k], edges)[0])
        np.testing.assert_array_equal(histogram.margin[k], np.histogram((z[k] - rivals)[y == k], edges)[0])
        np.testing.assert_allclose(histogram.mean_magnitude[k], np.abs(z[:, y == k]).mean(1))


def test_margins_below_zero_are_the_errors() -> None:
    case = scenes(1, num_classes=4, plant=[segcal.synthetic.ConfidentlyWrong()])[0]
    histogram = plots.LogitHistogram(4).update(case.logits, case.labels)
    statistics = VoxelStatistics(4).update(case.logits, case.labels)
    wrong = histogram.margin[:, histogram.edges[:-1] < 0].sum()
    assert wrong / histogram.own.sum() == pytest.approx(1 - segcal.metrics.accuracy(statistics), abs=1e-12)


def test_histograms_merge_to_that_of_the_whole(monkeypatch) -> None:
    cases = list(scenes(3, size=(20, 24), num_classes=3))
    whole = plots.LogitHistogram(3).update(
        torch.cat([case.logits for case in cases]), torch.cat([case.labels for case in cases])
    )
    monkeypatch.setattr(maps, "_PIECE_VALUES", 100)
    merged = plots.LogitHistogram(3)
    for case in reversed(cases):
        merged.merge(plots.LogitHistogram(3).update(case.logits, case.labels))
    for name in ("own", "other", "margin"):
        np.testing.assert_array_equal(getattr(merged, name), getattr(whole, name))
    np.testing.assert_allclose(merged.magnitude, whole.magnitude, rtol=1e-12)


def test_extreme_logits_fall_into_the_outer_bins() -> None:
    logits = torch.tensor([[1e6, -torch.inf], [-1e6, 3.0]])
    histogram = plots.LogitHistogram(2).update(logits, torch.tensor([0, 0]))
    assert (histogram.own[0, 0], histogram.own[0, -1], histogram.other[1, 0]) == (1, 1, 1)


@pytest.mark.parametrize("classes", [2, 13, 40])
def test_ridges_are_drawn_for_the_most_frequent(classes: int) -> None:
    case = scenes(1, size=(48, 64), num_classes=classes)[0]
    figure = plots.logit_magnitudes(plots.LogitHistogram(classes).update(case.logits, case.labels))
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(rows) == min(classes, 20)
    assert ("20 most frequent of 40" in figure.get_suptitle()) == (classes == 40)
    assert "class 0" in rows
    render(figure)


def test_the_matrix_shows_mean_magnitudes() -> None:
    case = scenes(1, size=(32, 40), num_classes=3)[0]
    histogram = plots.LogitHistogram(3).update(case.logits, case.labels)
    (image,) = plots.logit_magnitudes(histogram).axes[2].images
    np.testing.assert_array_equal(image.get_array().data, histogram.mean_magnitude)


def test_an_empty_histogram_says_so() -> None:
    figure = plots.logit_magnitudes(plots.LogitHistogram(3))
    assert "no valid voxels" in {text.get_text() for text in figure.axes[0].texts}
    render(figure)


# -- space ---------------------------------------------------------------------------------------------------------


def shown(figure: Figure, title: str):
    """The array of the panel with this title, masked where nothing is known."""
    (ax,) = [ax for ax in figure.axes if ax.get_title(loc="left").startswith(title)]
    return ax.images[0].get_array()


def test_an_image_shows_its_maps() -> None:
    cases = scenes(1, size=(32, 40), num_classes=3, ignored=0.2, class_names=("a", "b", "c"))
    case = cases[0]
    figure = plots.spatial_maps(case, class_names=cases.class_names)
    expected = {name: values[0].numpy() for name, values in maps.voxel_maps(case.logits, case.labels).items()}
    valid = case.valid[0].numpy()
    for title, name in (("confidence balance", "confidence-balance"), ("error", "error"), ("distance band", "band")):
        drawn = shown(figure, title)
        np.testing.assert_array_equal(np.ma.getmaskarray(drawn), ~valid)
        np.testing.assert_array_equal(drawn.data[valid], expected[name][valid])
    np.testing.assert_array_equal(shown(figure, "prediction"), expected["prediction"])
    np.testing.assert_array_equal(shown(figure, "label").filled(255), case.labels[0].numpy())
    confidence = next(ax for ax in figure.axes if ax.get_title(loc="left") == "confidence")
    np.testing.assert_array_equal(confidence.images[0].get_array(), expected["confidence"])
    legend = next(ax.get_legend() for ax in figure.axes if ax.get_legend())
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "c", "ignored"]
    render(figure)


@pytest.mark.parametrize("slice_index", [None, 0, 5])
def test_a_volume_shows_one_slice(slice_index: int | None) -> None:
    case = scenes(1, size=(6, 16, 20), num_classes=3)[0]
    richest = int((case.labels[0] != 0).sum((1, 2)).argmax())
    index = richest if slice_index is None else slice_index
    figure = plots.spatial_maps(case, slice_index=slice_index)
    assert figure.get_suptitle() == f"volume-000, slice {index} of 6"
    np.testing.assert_array_equal(shown(figure, "label"), case.labels[0, index].numpy())
    # Distances are those in the volume, with its spacing.
    bands = CaseRegions(case.labels, spacing=case.spacing).bands
    np.testing.assert_array_equal(shown(figure, "distance band"), bands[0, index].numpy())
    np.testing.assert_array_equal(shown(figure, "prediction"), case.logits[0, :, index].argmax(0).numpy())


def test_only_the_slice_on_show_is_read() -> None:
    scene = scenes(1, size=(6, 16, 20), num_classes=3)[0]
    source = Memory({"logits": scene.logits, "labels": scene.labels}, scene.spacing, sliceable=True)
    case = Case(source)
    plots.spatial_maps(case, slice_index=2)
    assert "logits" not in case._read


def test_calibrated_scores_take_the_place_of_the_logits() -> None:
    case = scenes(1, size=(32, 40), num_classes=3)[0]
    log_probs = (case.logits / 3).log_softmax(1)
    confidence = maps.voxel_maps(log_probs, case.labels)["confidence"][0].numpy()
    panels = plots.spatial_maps(case, log_probs=log_probs).axes
    drawn = next(ax for ax in panels if ax.get_title(loc="left") == "confidence").images[0].get_array()
    np.testing.assert_array_equal(drawn, confidence)


def test_voxels_are_drawn_in_their_proportions() -> None:
    logits, labels = torch.randn(1, 2, 3, 8, 8), torch.randint(0, 2, (1, 3, 8, 8))
    figure = plots.spatial_maps(case_of(logits, labels, spacing=(1.0, 2.0, 0.5)))
    ax = next(ax for ax in figure.axes if ax.get_title(loc="left") == "label")
    assert ax.get_aspect() == 4.0


@pytest.mark.parametrize(
    "labels",
    [torch.zeros(1, 12, 14, dtype=torch.int64), torch.full((1, 12, 14), 255)],
    ids=["one class, no boundary", "all ignored"],
)
def test_degenerate_images_are_drawn(labels: torch.Tensor) -> None:
    case = case_of(torch.randn(1, 2, 12, 14), labels)
    figure = plots.spatial_maps(case)
    error = next(title for ax in figure.axes if (title := ax.get_title(loc="left")).startswith("error"))
    assert ("none wrong" in error) == bool((labels == 255).all())
    render(figure)
    render(plots.local_reliability(case, size=6))


def test_a_volume_without_foreground_shows_its_middle() -> None:
    case = case_of(torch.randn(1, 2, 5, 8, 8), torch.zeros(1, 5, 8, 8, dtype=torch.int64))
    assert "slice 2 of 5" in plots.spatial_maps(case).get_suptitle()


def test_each_channel_of_a_multilabel_case_can_be_shown() -> None:
    case = case_of(torch.randn(3, 2, 8, 9), torch.randint(0, 2, (3, 8, 9)), image=torch.rand(1, 2, 8, 9))
    for channel in range(3):
        figure = plots.spatial_maps(case, channel=channel)
        np.testing.assert_array_equal(shown(figure, "label"), case.labels[channel].numpy())
        plots.local_reliability(case, channel=channel, size=4)


def test_many_classes_leave_room_in_the_legend() -> None:
    labels = torch.arange(150).repeat(2).view(1, 15, 20)
    case = case_of(torch.nn.functional.one_hot(labels, 150).movedim(-1, 1).float(), labels)
    figure = plots.spatial_maps(case)
    legend = next(ax.get_legend() for ax in figure.axes if ax.get_legend())
    assert legend.get_texts()[-1].get_text() == "and 126 more"


def test_the_legend_of_a_wide_image_stays_within_the_figure() -> None:
    labels = torch.arange(30).repeat(48).view(1, 12, 120)
    figure = plots.spatial_maps(case_of(torch.nn.functional.one_hot(labels, 30).movedim(-1, 1).float(), labels))
    render(figure)
    legend = next(ax.get_legend() for ax in figure.axes if ax.get_legend())
    assert legend.get_texts()[-1].get_text().endswith("more")
    assert legend.get_window_extent().y0 >= 0


def test_patches_show_their_own_reliability() -> None:
    case = scenes(1, num_classes=4, plant=[segcal.synthetic.SpatialTemperature()], ignored=0.1)[0]
    figure = plots.local_reliability(case, count=7, size=40, seed=2)
    values = []
    for window in local_patches((128, 160), count=7, size=40, seed=2):
        rows, columns = window
        statistics = VoxelStatistics(4, bins=(10,))
        statistics.update(case.logits[:, :, rows, columns], case.labels[:, rows, columns])
        values.append(segcal.metrics.ece(statistics, num_bins=10))
    np.testing.assert_allclose([top for _, _, top in bars(figure, "_local")], sorted(values), atol=1e-9)
    assert len(artists(figure, "_patch")) == 7
    titles = {ax.get_title(loc="left") for ax in figure.axes}
    assert {f"best patch\nECE {min(values):.3f}", f"worst patch\nECE {max(values):.3f}"} <= titles
    render(figure)


def test_patches_of_a_volume_are_boxes() -> None:
    case = scenes(1, size=(12, 24, 30), num_classes=3)[0]
    figure = plots.local_reliability(case, size=5, count=6, slice_index=4)
    crossing = [w for w in local_patches((12, 24, 30), size=5, count=6) if w[0].start <= 4 < w[0].stop]
    assert len(artists(figure, "_patch")) == len(crossing)
    # By default, the slice goes through the worst.
    assert len(artists(plots.local_reliability(case, size=5, count=6), "_patch")) >= 1


def test_an_image_no_larger_than_a_patch_is_one_patch() -> None:
    case = scenes(1, size=(32, 40), num_classes=3)[0]
    figure = plots.local_reliability(case)
    assert len(artists(figure, "_patch")) == 1
    render(figure)


# -- of an evaluation -----------------------------------------------------------------------------------------------


def test_figures_of_cases_show_the_worst_through_the_calibrator(monkeypatch) -> None:
    monkeypatch.setattr(figures, "_CASES_SHOWN", 2)
    cases = scenes(4, size=(24, 96), num_classes=3, plant=[segcal.synthetic.ImageTemperature(2.0, 1.0)])
    results = segcal.evaluate(cases, lambda z: (z / 2).log_softmax(1), metrics=("ece",))
    seen = []
    drawn = dict(plots.case_figures(results, cases, lambda z: (z / 2).log_softmax(1), progress=seen.append))
    errors = {name: results.value("ece", case=name) for name in cases.ids}
    worst = sorted(errors, key=errors.get)[2:]
    expected = {f"cases/{name}-{kind}" for name in worst for kind in ("maps", "patches")}
    assert set(drawn) == {"boundary", "logits", *expected}
    assert seen == list(cases.ids)
    case = cases.select(worst)[0]
    expected_error = maps.voxel_maps(case.logits / 2, case.labels)["confidence-balance"][0]
    np.testing.assert_allclose(shown(drawn[f"cases/{case.id}-maps"], "confidence balance"), expected_error, rtol=1e-5)


def test_figures_of_multilabel_cases_are_drawn_channel_by_channel() -> None:
    cases = stacked(**channels(2, {"core": 1.0, "whole": 2.0}))
    results = segcal.evaluate(cases, metrics=("ece",))
    names = [name for name, _ in plots.case_figures(results, cases)]
    assert [name for name in names if name.endswith("/boundary")] == ["channel-0/boundary", "channel-1/boundary"]


# -- all of them ---------------------------------------------------------------------------------------------------


def draw_all(place: Callable[[], SubFigure | None] = lambda: None) -> list[Figure]:
    """One of every kind, each in a place of its own."""
    case = scenes(1, size=(24, 30), num_classes=3)[0]
    statistics = VoxelStatistics(3).update(case.logits, case.labels)
    profile = plots.BoundaryProfile().update(case.logits, case.labels, CaseRegions(case.labels).distance)
    histogram = plots.LogitHistogram(3).update(case.logits, case.labels)
    return [
        plots.reliability_diagram(reliability(statistics), figure=place()),
        plots.classwise_diagram([reliability(statistics, predicted=k) for k in range(3)], figure=place()),
        plots.boundary_curve(profile, figure=place()),
        plots.logit_magnitudes(histogram, figure=place()),
        plots.spatial_maps(case, figure=place()),
        plots.local_reliability(case, size=10, figure=place()),
    ]


def test_equal_plots_are_equal_files() -> None:
    assert [render(figure) for figure in draw_all()] == [render(figure) for figure in draw_all()]


def test_plots_can_share_a_figure() -> None:
    wholes = [Figure(figsize=(20, 8), layout="constrained") for _ in range(6)]
    left = [whole.subfigures(1, 2)[0] for whole in wholes]
    drawn = draw_all(partial(next, iter(left)))
    assert all(one is whole for one, whole in zip(drawn, wholes, strict=True))
    assert all(part.axes for part in left)


def test_global_state_is_left_alone() -> None:
    # Reading rcParams["backend"] would itself import pyplot.
    code = (
        "import sys, test_plots; from matplotlib import rcParams; before = rcParams.copy(); test_plots.draw_all();"
        "assert all(rcParams[key] == before[key] for key in set(rcParams) - {'backend'});"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    folder = str(importlib.util.find_spec("datasets").origin).removesuffix("/datasets.py")
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_matplotlib_only_drawing_fails(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("segcal.plots")]:
        monkeypatch.delitem(sys.modules, name)
    fresh = importlib.import_module("segcal.plots")
    case = scenes(1, size=(24, 30), num_classes=3)[0]
    profile = fresh.BoundaryProfile().update(case.logits, case.labels, CaseRegions(case.labels).distance)
    part = reliability(VoxelStatistics(3))
    for draw in (
        lambda: fresh.reliability_diagram(part),
        lambda: fresh.classwise_diagram([part]),
        lambda: fresh.boundary_curve(profile),
        lambda: fresh.logit_magnitudes(fresh.LogitHistogram(3)),
        lambda: fresh.spatial_maps(case),
        lambda: fresh.local_reliability(case),
    ):
        with pytest.raises(MissingExtraError, match=r"segcal\[plots\]"):
            draw()


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "PNG"])
def test_files_are_written_in_the_format_of_their_name(tmp_path, suffix: str) -> None:
    path = plots.save(plots.reliability_diagram(reliability(VoxelStatistics(2))), tmp_path / "new" / f"plot.{suffix}")
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix.lower()]
    assert path.read_bytes().startswith(start)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_equal_plots_are_saved_as_equal_files(tmp_path, suffix: str) -> None:
    stats = VoxelStatistics(2).update(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0]))
    one, other = (
        plots.save(plots.reliability_diagram(reliability(stats)), tmp_path / f"{k}.{suffix}") for k in range(2)
    )
    assert one.read_bytes() == other.read_bytes()


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    figure, path = Figure(), tmp_path / "plot.png"
    plots.save(figure, path)
    before = path.read_bytes()

    def fail(target, **options) -> None:
        target.write_bytes(b"half a file")
        raise OSError("no space left")

    monkeypatch.setattr(figure, "savefig", fail)
    with pytest.raises(OutputError, match="no space left"):
        plots.save(figure, path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["plot.png"]


def test_class_colours_are_many_stable_and_apart() -> None:
    colours = plots.class_colours(150)
    assert len(set(colours)) == 150
    assert plots.class_colours(2) == colours[:2]
    rgb = np.array([to_rgb(colour) for colour in colours[:19]])
    views = _views(rgb)
    distance = np.linalg.norm(views[:, :, None] - views[:, None], axis=-1)
    distance[:, range(19), range(19)] = np.inf
    # A just noticeable difference is about 0.02 in OKLab.
    assert distance[0].min() > 0.1
    assert distance.min() > 0.05


LABELS = torch.zeros(1, 4, 4, dtype=torch.int64)
ZEROS = torch.zeros(1, 2, 4, 4)
BINS = Reliability(np.array([1, 1]), np.array([0.2, 0.7]), np.array([0, 1]))
OTHER_BINS = Reliability(np.array([1]), np.array([0.2]), np.array([0]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.reliability_diagram([]), "parts has 0 reliabilities"),
        (lambda: plots.reliability_diagram([BINS, OTHER_BINS]), "parts has 2 reliabilities"),
        (lambda: plots.reliability_diagram(BINS, before=[]), "before has 0"),
        (lambda: plots.reliability_diagram([BINS, BINS], replicates=0), "replicates is 0"),
        (lambda: plots.classwise_diagram([BINS, BINS], class_names=["a"]), "class_names has 1"),
        (lambda: plots.classwise_diagram([BINS], of="label"), "of is 'label'"),
        (lambda: plots.BoundaryProfile(0), "num_bins is 0"),
        (lambda: plots.BoundaryProfile(3, 0.0), "width is 0"),
        (lambda: plots.BoundaryProfile().update(ZEROS, LABELS, torch.zeros(1, 3, 4)), "distance has shape"),
        (lambda: plots.BoundaryProfile().update(ZEROS, LABELS, -torch.ones(1, 4, 4)), "distance is negative"),
        (lambda: plots.BoundaryProfile().merge(plots.BoundaryProfile(3)), "24 bins of 1 and 3 of 1"),
        (lambda: plots.LogitHistogram(1), "num_classes is 1"),
        (lambda: plots.LogitHistogram(3).update(ZEROS, LABELS), r"expected \(N, 3, \*spatial\)"),
        (lambda: plots.LogitHistogram(3).merge(plots.LogitHistogram(2)), "3 and 2 classes"),
        (lambda: plots.spatial_maps(case_of(ZEROS, LABELS), slice_index=0), "none for an image"),
        (lambda: plots.spatial_maps(case_of(ZEROS, LABELS), channel=1), "channel is 1"),
        (lambda: plots.spatial_maps(case_of(ZEROS, LABELS), class_names=["a"]), "class_names has 1"),
        (lambda: plots.spatial_maps(case_of(ZEROS, LABELS), log_probs=ZEROS[..., 1:]), "log_probs have shape"),
        (lambda: plots.spatial_maps(case_of(ZEROS[..., 0], LABELS[..., 0])), "1 spatial axes"),
        (lambda: plots.spatial_maps(case_of(ZEROS[..., None], LABELS[..., None]), slice_index=4), "slice_index is 4"),
        (lambda: plots.local_reliability(case_of(ZEROS, LABELS), size=0), "size is 0"),
        (lambda: plots.save(Figure(), "plot.gif"), "ends in .png, .svg, .pdf"),
    ],
)
def test_bad_arguments(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.parametrize("accumulator", [plots.BoundaryProfile(), plots.LogitHistogram(2)])
def test_a_refused_update_changes_nothing(monkeypatch, accumulator) -> None:
    monkeypatch.setattr(maps, "_PIECE_VALUES", 4)
    logits = ZEROS.clone()
    logits[0, 0, 3, 3] = torch.nan
    distance = [torch.zeros(1, 4, 4)] if isinstance(accumulator, plots.BoundaryProfile) else []
    with pytest.raises(InputError, match="NaN logits at voxel"):
        accumulator.update(logits, LABELS, *distance)
    assert "voxels=0" in repr(accumulator)


def test_names_with_dollars_are_no_formulas(tmp_path) -> None:
    figure = style.canvas(None, 2, 2)
    ax = figure.subplots()
    style.tidy(ax, title=r"$\bad$ a$_$b", xlabel="$x$")
    style.titled(figure, "$")
    ax.set_xticks([0, 1], style.names_of([r"$\bad$", "b"], 2))
    style.save(figure, tmp_path / "a.png")
    assert ax.get_title(loc="left") == r"\$\bad\$ a\$_\$b"
