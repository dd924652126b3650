"""Chunks that are not stored: left out because they hold one value only, or lost."""

import h5py
import numpy as np
import pytest
import zarr

import segcal
from datasets import labels, logits, plain, softmax
from segcal.cases import write_dataset
from segcal.cases.formats import open_array
from segcal.errors import DataError

SHAPE = (8, 8)


def save(path, array, chunks, *, empty=False, **options):
    """A zarr store as zarr writes it by default, or with ``empty`` chunks stored as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    store = zarr.create_array(
        str(path), shape=array.shape, dtype=array.dtype, chunks=chunks, config={"write_empty_chunks": empty}, **options
    )
    store[:] = array


def chunk_files(path):
    return sorted(item for item in path.rglob("*") if item.is_file() and item.name != "zarr.json")


def dataset(root, kind="logits"):
    """One case as npy; tests put stores in the place of its files."""
    return plain(root, count=1, shape=SHAPE, kind=kind)


def replaced(root, folder):
    """Where a store is to go, the file that was there removed."""
    (root / folder / "case0.npy").unlink(missing_ok=True)
    return root / folder / "case0.zarr"


def one_hot_below(rows):
    """Probabilities whose last two classes are exactly 0 in the first rows, as padding makes them."""
    p = softmax(logits(0, shape=SHAPE))
    p[:, :rows] = np.array([0.75, 0.25, 0, 0], np.float32)[:, None, None]
    return p


# -- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"zarr_format": 2}, {"shards": (4, 4, 8)}], ids=str)
def test_probabilities_without_their_zero_chunks_are_read(tmp_path, options):
    p = one_hot_below(4)
    root = dataset(tmp_path, "probs")
    save(replaced(root, "probs"), p, (1, 4, 8), **options)
    stored = open_array(root / "probs" / "case0.zarr").stored()
    assert (stored.there, stored.chunks) == (6, 8)
    report = segcal.check(root)
    assert not report.problems
    np.testing.assert_allclose(segcal.open_cases(root)[0].logits[0].exp(), p, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("mass", [0.5, 2e-3, 5e-5])
def test_lost_probability_is_seen(tmp_path, mass):
    p = np.full((2, *SHAPE), mass, np.float32)
    p[0] = 1 - mass
    root = dataset(tmp_path, "probs")
    np.save(root / "labels" / "case0.npy", labels(0, 2, SHAPE))
    path = replaced(root, "probs")
    save(path, p, (1, 4, 8))
    assert not segcal.check(root).problems
    chunk_files(path)[-1].unlink()
    (problem,) = segcal.check(root).problems
    assert "1 of 4 chunks are missing" in str(problem)
    assert "sum to 1 only within" in str(problem)


@pytest.mark.parametrize("declared", [{}, {"kind": "probs", "scores": "probs", "multilabel": True}], ids=str)
def test_scores_without_a_sum_need_every_chunk(tmp_path, declared):
    kind = declared.get("kind", "logits")
    root = dataset(tmp_path, kind)
    np.save(root / "labels" / "case0.npy", labels(0, 2, (4, *SHAPE)) if declared else labels(0, 4, SHAPE))
    scores = one_hot_below(4)
    path = replaced(root, kind)
    save(path, scores, (1, 4, 8), empty=True)
    assert not segcal.check(root, **declared).problems
    chunk_files(path)[0].unlink()
    with pytest.raises(DataError, match="1 of 8 chunks are missing"):
        segcal.open_cases(root, **declared)


def test_half_written_shards_are_seen(tmp_path):
    path = replaced(dataset(tmp_path), "logits")
    store = zarr.create_array(str(path), shape=(4, *SHAPE), dtype="f4", chunks=(1, 2, 8), shards=(4, 8, 8))
    store[:, :6] = logits(0, shape=SHAPE)[:, :6]
    with pytest.raises(DataError, match="4 of 16 chunks are missing"):
        segcal.open_cases(tmp_path)
    store[:] = logits(0, shape=SHAPE)
    segcal.open_cases(tmp_path)


def test_shards_at_the_edge_have_room_to_spare(tmp_path):
    save(tmp_path / "a.zarr", np.ones((3, 7, 5), np.float32), (1, 2, 2), shards=(2, 4, 4))
    stored = open_array(tmp_path / "a.zarr").stored()
    assert (stored.there, stored.chunks) == (3 * 4 * 3, 3 * 4 * 3)


# -- labels and masks -------------------------------------------------------------------------------------------------


def background_in_part():
    y = labels(0, 4, SHAPE)
    y[:4, :4] = 0
    y[y == 0] = 1
    y[:4, :4] = 0
    y[7, 7] = 0
    return y


@pytest.mark.parametrize("folder", ["labels", "masks"])
@pytest.mark.parametrize(
    "options", [{}, {"zarr_format": 2}, {"zarr_format": 2, "fill_value": None}, {"shards": (4, 4)}], ids=str
)
def test_label_maps_without_their_zero_chunks_are_read_and_noted(tmp_path, folder, options):
    root = dataset(tmp_path)
    y = background_in_part()
    save(replaced(root, folder), y, (2, 4) if "shards" in options else (4, 4), **options)
    report = segcal.check(root)
    assert not report.problems
    missing, chunks = (2, 8) if "shards" in options else (1, 4)
    note = f"{folder}: {missing} of {chunks} chunks of 1 zarr stores are not stored and read as 0"
    assert any(note in line for line in report.notes)
    cases = segcal.open_cases(root)
    assert any(note in line for line in cases.notes)
    read = cases[0].labels[0] if folder == "labels" else cases[0].mask[0]
    np.testing.assert_array_equal(read, y if folder == "labels" else y > 0)


@pytest.mark.parametrize("folder", ["labels", "masks"])
def test_a_chunk_lost_from_a_full_store_is_seen(tmp_path, folder):
    root = dataset(tmp_path)
    path = replaced(root, folder)
    save(path, background_in_part(), (4, 4), empty=True)
    assert not segcal.check(root).problems
    chunk_files(path)[-1].unlink()
    (problem,) = segcal.check(root).problems
    assert "1 of 4 chunks are missing, although others that hold nothing but 0 are stored" in str(problem)


@pytest.mark.parametrize("folder", ["labels", "masks"])
def test_a_store_that_was_never_filled_is_seen(tmp_path, folder):
    root = dataset(tmp_path)
    save(replaced(root, folder), np.zeros(SHAPE, np.uint8), (4, 4))
    (problem,) = segcal.check(root).problems
    assert "4 of 4 chunks are missing" in str(problem)


def test_segcals_own_stores_hold_every_chunk(tmp_path):
    write_dataset(segcal.open_cases(dataset(tmp_path / "in")), tmp_path / "out", format="zarr")
    assert not segcal.check(tmp_path / "out").problems
    chunk_files(tmp_path / "out" / "labels" / "case0.zarr")[0].unlink()
    (problem,) = segcal.check(tmp_path / "out").problems
    assert "chunks are missing" in str(problem)


# -- HDF5 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["logits", "labels", "masks"])
@pytest.mark.parametrize("chunked", [True, False])
def test_hdf5_that_was_not_written_is_seen(tmp_path, folder, chunked):
    root = dataset(tmp_path)
    (root / folder).mkdir(exist_ok=True)
    (root / folder / "case0.npy").unlink(missing_ok=True)
    shape, dtype = ((4, *SHAPE), "f4") if folder == "logits" else (SHAPE, "u1")
    chunks = (1,) * (len(shape) - 2) + (4, 8)
    with h5py.File(root / folder / "case0.h5", "w") as file:
        data = file.create_dataset("a", shape, dtype, chunks=chunks if chunked else None)
        if chunked:
            data[..., :4, :] = 1
    (problem,) = segcal.check(root).problems
    assert f"{'4 of 8' if folder == 'logits' and chunked else '1 of'}" in str(problem)
    with h5py.File(root / folder / "case0.h5", "r+") as file:
        file["a"][...] = 0
    assert not segcal.check(root).problems


def test_virtual_hdf5_needs_its_sources(tmp_path):
    root = dataset(tmp_path)
    layout = h5py.VirtualLayout((4, *SHAPE), "f4")
    for k in range(4):
        with h5py.File(root / f"{k}.h5", "w") as file:
            file["a"] = logits(0, shape=SHAPE)[k]
        layout[k] = h5py.VirtualSource(str(root / f"{k}.h5"), "a", SHAPE)
    (root / "logits" / "case0.npy").unlink()
    with h5py.File(root / "logits" / "case0.h5", "w") as file:
        file.create_virtual_dataset("a", layout)
    assert not segcal.check(root).problems
    np.testing.assert_array_equal(segcal.open_cases(root)[0].logits[0], logits(0, shape=SHAPE))
    (root / "2.h5").unlink()
    (problem,) = segcal.check(root).problems
    assert "1 of 4 chunks are missing" in str(problem)
