"""A case larger than memory: nothing asks for more than a few rows of it at once, and the results are the same."""

import errno
import math
from functools import partial

import pytest
import torch

import segcal
from segcal.calibrators import local
from segcal.calibrators.trust import tiles
from segcal.cases import caseset
from segcal.cases.caseset import CaseRef, CaseSet
from segcal.errors import OutputError
from segcal.evaluation import measure, rows
from segcal.evaluation.apply import write_maps
from segcal.regions import BANDS, boundary, distances
from segcal.study.results.browser import Place, write_browser
from segcal.synthetic import demo_plant, scenes
from segcal.types import Case, CaseSource, row_slices

CLASSES, SHAPE = 3, (18, 14, 16)
# Rows in a piece, and those of the halos on both sides.
ROWS, AROUND = 4, 4


class Recorded(CaseSource):
    """A volume that remembers how many rows were asked for at once."""

    batch, num_classes, spatial, ignore_index, sliceable = 1, CLASSES, SHAPE, 255, True

    def __init__(self, scene, most):
        self.id, self.spacing, self._scene, self._most = scene.id, scene.spacing, scene, most

    def _read(self, name, part):
        self._most[name] = max(self._most.get(name, 0), part.stop - part.start)
        return getattr(self._scene.source, name)(part)

    def logits(self, part):
        return self._read("logits", part)

    def labels(self, part):
        return self._read("labels", part)

    def image(self, part):
        return self._read("image", part)


@pytest.fixture(scope="module")
def whole():
    return scenes(2, size=SHAPE, num_classes=CLASSES, plant=demo_plant(CLASSES), ignored=0.05)


@pytest.fixture(scope="module")
def fitted(whole):
    return {id: segcal.CALIBRATORS[id]().fit(whole) for id in ("ts", "trust")}


@pytest.fixture
def large(whole, monkeypatch):
    """The same cases as if memory were small, and the most rows that were asked for."""
    per_row, most = math.prod(SHAPE[1:]), {}
    for function in (row_slices, Case.chunks):
        monkeypatch.setattr(function, "__defaults__", (ROWS * per_row * CLASSES,))
    for module, name, values in (
        (caseset, "PREFETCH_BYTES", 0),
        (measure, "_WINDOW", ROWS * per_row),
        (rows, "_IN_MEMORY", 0),
        (distances, "_CHUNK", ROWS * per_row),
        (distances, "_COLUMNS", 7),
        (tiles, "_TILE_VALUES", ROWS * per_row * CLASSES),
        (local, "TILE_VALUES", ROWS * per_row * CLASSES),
    ):
        monkeypatch.setattr(module, name, values)
    refs = [CaseRef(case.id, partial(Case, Recorded(case, most))) for case in whole]
    return CaseSet(refs, num_classes=CLASSES, ignore_index=255), most


def assert_few_rows(most):
    assert most.get("logits", 0) <= ROWS + AROUND
    assert most.get("labels", 0) <= ROWS + AROUND


@pytest.mark.parametrize(
    ("method", "metrics"),
    [(None, ("nll", "ba-ece", "hd95")), ("ts", ("nll", "flip")), ("trust", ("ece", "flip", "ace-adaptive"))],
)
def test_evaluations_are_the_same(whole, large, fitted, method, metrics, monkeypatch):
    cases, most = large
    work = partial(segcal.evaluate, calibrator=fitted.get(method), metrics=metrics, exact="ace-adaptive" in metrics)
    regions = ("everything", "boundary", BANDS[1], "local")
    found = work(cases, regions=regions)
    assert_few_rows(most)
    monkeypatch.undo()
    expected = work(whole, regions=regions)
    assert len(found.rows) == len(expected.rows)
    for one, other in zip(found.rows, expected.rows, strict=True):
        assert one[:3] == other[:3]
        assert one.value == pytest.approx(other.value, rel=1e-6, abs=1e-9, nan_ok=True)
        assert one.count == other.count


@pytest.mark.parametrize("method", ["ts", "cms-op", "isotonic", "lts-ti", "ibts", "trust"])
def test_fits_read_few_rows(large, method):
    cases, most = large
    options = {"epochs": 1} if method in ("lts-ti", "ibts") else {}
    segcal.CALIBRATORS[method](**options).fit(cases)
    assert_few_rows(most)


def test_files_are_the_same(whole, large, fitted, tmp_path, monkeypatch):
    cases, most = large
    works = {
        "applied": lambda own, folder: segcal.apply(fitted["trust"], own, folder),
        "packed": segcal.write_dataset,
        "maps": lambda own, folder: write_maps(own, folder, calibrator=fitted["ts"]),
        "browser": lambda own, folder: browse(own, fitted["trust"], folder),
    }
    for name, work in works.items():
        work(cases, tmp_path / name)
    assert_few_rows(most)
    monkeypatch.undo()
    for name, work in works.items():
        work(whole, tmp_path / f"{name} whole")
    for path in sorted(tmp_path.rglob("*.npy")):
        if " whole" not in str(path):
            name, *rest = path.relative_to(tmp_path).parts
            assert path.read_bytes() == tmp_path.joinpath(f"{name} whole", *rest).read_bytes(), path
    pictures = list((tmp_path / "browser").rglob("*.png"))
    assert len(pictures) > 20
    for path in pictures:
        other = tmp_path / "browser whole" / path.relative_to(tmp_path / "browser")
        assert path.read_bytes() == other.read_bytes()


def browse(cases, calibrator, folder):
    folder.mkdir()
    values = {metric: {Place(name): 0.1 for name in cases.ids} for metric in ("ece", "nll")}
    write_browser(cases, lambda case: calibrator, "trust", before=values, after=values, folder=folder)


@pytest.mark.parametrize(
    ("shape", "spacing"), [((2, 17, 23), (1.0, 1.0)), ((1, 13, 17, 19), (2.0, 0.7, 0.1)), ((1, 50), (0.3,))]
)
@pytest.mark.parametrize("share", [0.0, 0.002, 0.05, 0.5])
def test_streamed_distances_are_those_of_scipy(shape, spacing, share, monkeypatch):
    monkeypatch.setattr(distances, "_CHUNK", 60)
    monkeypatch.setattr(distances, "_COLUMNS", 4)
    edge = torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) < share
    streamed = distances.StreamedDistance(lambda part: edge[:, part], shape, spacing)
    parts = [streamed.rows(slice(start, min(start + 5, shape[1]))) for start in range(0, shape[1], 5)]
    assert torch.equal(torch.cat(parts, 1), boundary.distance_to(edge, spacing))


def test_a_full_disk_is_a_clear_error(large, monkeypatch):
    def full(file, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(distances, "reserve", full)
    with pytest.raises(OutputError, match="No space left on device"):
        segcal.evaluate(large[0], metrics=("ba-ece",))
