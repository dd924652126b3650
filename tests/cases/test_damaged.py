"""Files that lie about their size, contradict their checksum or hold no plain numbers: one clear error each."""

import gzip
import io
import json
import struct
import zipfile
import zlib

import h5py
import nibabel
import numpy as np
import pytest
import tifffile
import zarr
from PIL import Image
from zarr.codecs import Crc32cCodec

import segcal
from datasets import plain
from segcal.cases.formats import open_array
from segcal.errors import DataError

HUGE = 10**6


def npy_header(shape, dtype="<f4"):
    text = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def assert_refuses(path, says="cannot be read|is damaged"):
    """Opening or reading the file raises our error, which names it."""
    with pytest.raises(DataError, match=rf"{path.name}.*({says})"):
        open_array(path).read()


# -- sizes that are lies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(HUGE, HUGE), (2**32, 2**32), (-1, 4), (1, 3), "ab", (1.5, 2), (2**70,), "(" * 500], ids=str
)
def test_npy_headers(tmp_path, shape):
    (tmp_path / "a.npy").write_bytes(npy_header(shape) + bytes(64))
    assert_refuses(tmp_path / "a.npy", "cannot be read|is damaged|negative")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", npy_header(shape) + bytes(64))
    assert_refuses(tmp_path / "a.npz", "cannot be read|is damaged|negative")


@pytest.mark.parametrize("suffix", ["nii", "nii.gz"])
@pytest.mark.parametrize(("offset", "value"), [(42, "<hhh"), (70, "<h"), (108, "<f"), (40, "<h"), (112, "<f")], ids=str)
def test_nifti_headers(tmp_path, suffix, offset, value):
    stream = io.BytesIO(nibabel.Nifti1Image(np.ones((5, 6, 7), np.float32), np.eye(4)).to_bytes())
    stream.seek(offset)
    stream.write(struct.pack(value, *(30_000,) * value.count("h") or (1e30 if "f" in value else 9,)))
    data = stream.getvalue()
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(data) if suffix == "nii.gz" else data)
    if offset == 112:  # A scale of 1e30 is odd but legal.
        assert open_array(path).read().max() > 1e29
    else:
        assert_refuses(path)


def test_png_bomb(tmp_path):
    Image.fromarray(np.zeros((5, 5), np.uint8)).save(tmp_path / "a.png")
    data = bytearray((tmp_path / "a.png").read_bytes())
    data[16:24] = struct.pack(">II", HUGE, HUGE)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    (tmp_path / "a.png").write_bytes(data)
    assert_refuses(tmp_path / "a.png")


def tiff_tag(path, tag, value):
    """Overwrite the value of a tag of the first page."""
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tiff.pages[0].tags[tag].overwrite(value)


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize(
    ("tag", "value"), [("ImageWidth", 2**31), ("ImageLength", HUGE), ("StripOffsets", 2**31), ("StripByteCounts", 0)]
)
def test_tiff_tags(tmp_path, compression, tag, value):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.ones((6, 8), np.float32), compression=compression, metadata=None)
    tiff_tag(path, tag, value)
    if (compression, tag) == (None, "StripByteCounts"):  # Follows from the size where nothing is compressed.
        assert (open_array(path).read() == 1).all()
    else:
        assert_refuses(path)


def test_tiff_pages_in_a_circle_or_beyond_the_end(tmp_path):
    path = tmp_path / "a.tif"
    for next_page in ("first", "beyond"):
        tifffile.imwrite(path, np.ones((3, 6, 8), np.float32), compression="zlib", photometric="minisblack")
        with tifffile.TiffFile(path) as tiff:
            last, first = tiff.pages.next_page_offset, tiff.pages[0].offset
        data = bytearray(path.read_bytes())
        data[last : last + 4] = struct.pack("<I", first if next_page == "first" else 10**9)
        path.write_bytes(data)
        assert_refuses(path, "pages run in a circle|beyond its end")


def test_tiff_that_decodes_to_nothing(tmp_path):
    """Found by fuzzing: without a compression and with no bits a sample, tifffile returns an empty array."""
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.ones((6, 8), np.uint8), compression="zlib")
    with tifffile.TiffFile(path) as tiff:
        code = tiff.pages[0].tags["Compression"].offset
    data = bytearray(path.read_bytes())
    data[code : code + 2] = bytes(2)
    path.write_bytes(data)
    tiff_tag(path, "BitsPerSample", 0)
    assert_refuses(path, "decoded, it has shape")


def test_tiff_of_negative_width(tmp_path):
    """Found by fuzzing: as a signed byte, 128 is -128, and tifffile looks for a series of such pages for ever."""
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.ones((96, 128), np.uint8))
    with tifffile.TiffFile(path) as tiff:
        kind = tiff.pages[0].tags["ImageWidth"].offset + 2
    data = bytearray(path.read_bytes())
    data[kind] = 6  # a signed byte
    path.write_bytes(data)
    assert_refuses(path, "its first page has shape")


@pytest.mark.parametrize("attributes", [7, "ab"])
def test_zarr_attributes_that_are_no_table(tmp_path, attributes):
    """Found by fuzzing: zarr opens such an array, and fails when it is asked for an attribute; from 3.4 on at once."""
    at_once = tuple(map(int, zarr.__version__.split(".")[:2])) >= (3, 4)
    path = tmp_path / "a.zarr"
    zarr.create_array(str(path), data=np.ones((6, 8), np.float32), chunks=(6, 8))
    description = json.loads((path / "zarr.json").read_text())
    (path / "zarr.json").write_text(json.dumps({**description, "attributes": attributes}))
    assert_refuses(path, "TypeError|ValueError" if at_once else "attributes in its description are no table")


def test_zarr_shape_of_which_next_to_nothing_is_stored(tmp_path):
    root = plain(tmp_path, count=1)
    (root / "logits" / "case0.npy").unlink()
    (root / "labels" / "case0.npy").unlink()
    for name, shape in (("logits", (3, 64, 64)), ("labels", (64, 64))):
        path = root / name / "case0.zarr"
        zarr.create_array(str(path), shape=shape, chunks=(1,) * (len(shape) - 2) + (64, 64), dtype="f4")[:] = 1
        description = json.loads((path / "zarr.json").read_text())
        description["shape"][-2:] = [10**7, 10**7]
        (path / "zarr.json").write_text(json.dumps(description))
        assert open_array(path).shape[-2:] == (10**7, 10**7)
    (problem,) = segcal.check(root).problems
    assert "chunks are missing" in str(problem)


@pytest.mark.parametrize("distance", [1, 2])
def test_h5_virtual_dataset_that_leads_back_to_itself(tmp_path, distance):
    """Found by fuzzing: reading one ends the process."""
    names = ["a.h5", "b.h5"][:distance]
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        layout = h5py.VirtualLayout((6, 8), "f4")
        layout[:] = h5py.VirtualSource("." if distance == 1 else other, "a", (6, 8))
        with h5py.File(tmp_path / name, "w") as file:
            file.create_virtual_dataset("a", layout)
    assert_refuses(tmp_path / "a.h5", "refers to itself")


# -- checksums --------------------------------------------------------------------------------------------------------


def write_checked(path, array):
    """Write an array in a format that carries checksums; returns the file that holds its values."""
    suffix = path.suffix
    if suffix == ".npz":
        np.savez_compressed(path, array)
    elif suffix == ".gz":
        nibabel.Nifti1Image(array, np.eye(4)).to_filename(path)
    elif suffix == ".png":
        Image.fromarray(array).save(path)
    elif suffix == ".h5":
        with h5py.File(path, "w") as file:
            file.create_dataset("a", data=array, chunks=array.shape, fletcher32=True)
    elif suffix == ".zarr":
        zarr.create_array(str(path), data=array, chunks=array.shape, compressors=[Crc32cCodec()])
        return next(item for item in path.rglob("c/**/*") if item.is_file())
    return path


@pytest.mark.parametrize("suffix", ["npz", "nii.gz", "png", "h5", "zarr"])
def test_no_flipped_bit_changes_a_value_unnoticed(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    array = np.random.default_rng(0).integers(0, 4, (40, 30)).astype(np.uint8)
    victim = write_checked(path, array)
    truth, data = open_array(path).read(), victim.read_bytes()
    refused = 0
    for position in np.random.default_rng(1).integers(0, 8 * len(data), 60).tolist():
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        victim.write_bytes(flipped)
        try:
            values = open_array(path).read()
        except DataError:
            refused += 1
            continue
        np.testing.assert_array_equal(values, truth)
    assert refused > 8


def test_h5_chunk_that_is_stored_but_not_found(tmp_path):
    """Found by fuzzing: HDF5 reads the fill value where an entry of its index of chunks is damaged."""
    path, array = tmp_path / "a.h5", np.arange(1, 1201, dtype=np.float32).reshape(40, 30)
    with h5py.File(path, "w") as file:
        file.create_dataset("a", data=array, chunks=(10, 30), fletcher32=True)
        file.create_dataset("sparse", (40, 30), "f4", chunks=(10, 30))[10:20] = 1
    assert (open_array(path, key="sparse").read() == 0).sum() == 900  # chunks that were never stored
    assert open_array(path, key="a").read((slice(5, 5), slice(None))).shape == (0, 30)
    data = bytearray(path.read_bytes())
    # A node of the index: 24 bytes, then for every chunk its size and mask, its place, and a place that is always 0.
    data[data.index(b"TREE\x01") + 24 + 8 + 2 * 8] ^= 8
    path.write_bytes(data)
    for rows in (slice(None), slice(7, 12)):
        with pytest.raises(DataError, match=r"a\.h5.*the chunk at \(0, 0\) is stored, but cannot be found"):
            open_array(path, key="a").read((rows, slice(None)))
    assert np.array_equal(open_array(path, key="a").read((slice(10, 40), slice(None))), array[10:])


@pytest.mark.parametrize(
    ("value", "says"), [(0, "at the same place"), (50, "where none can be"), (7, "bad coordinate")]
)
def test_h5_chunk_in_a_wrong_place(tmp_path, value, says):
    """Found by fuzzing: its values are right by their checksum, and another part of the array has them."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("a", data=np.ones((40, 30), np.float32), chunks=(10, 30), fletcher32=True)
    data = bytearray(path.read_bytes())
    # The second entry of the index: after 24 bytes, the first entry (its size, mask and three places) and an address.
    place = data.index(b"TREE\x01") + 24 + (8 + 3 * 8) + 8 + 8
    assert data[place] == 10
    data[place] = value
    path.write_bytes(data)
    assert_refuses(path, says)


def test_gzip_length_and_trailing_garbage(tmp_path):
    path = tmp_path / "a.nii.gz"
    nibabel.Nifti1Image(np.ones((5, 6, 7), np.float32), np.eye(4)).to_filename(path)
    data = path.read_bytes()
    for broken in (data[:-4] + bytes(4), data[:-8], data[:-1], data + b"garbage"):
        path.write_bytes(broken)
        assert_refuses(path)


@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_cut_short_while_it_is_read(tmp_path, order):
    """As when a disk or a server fails: of a mapped file, this would end the process."""
    path = tmp_path / "a.npy"
    np.save(path, np.ones((4, 64, 64), order=order))
    file = open_array(path)
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size // 2)
    with pytest.raises(DataError, match=r"a\.npy.*is damaged: it ends .* bytes too early"):
        file.read()


# -- values that are no plain numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.ones((4, 9, 7), np.longdouble),
        np.full((9, 7), "text"),
        np.zeros((9, 7), [("R", "u1"), ("G", "u1"), ("B", "u1")]),
        np.ones((9, 7), np.complex64),
        np.zeros((9, 7), "datetime64[s]"),
        np.float32(1),
    ],
    ids=lambda array: str(array.dtype) + str(array.shape),
)
@pytest.mark.parametrize("folder", ["logits", "labels", "masks", "images"])
def test_other_types_are_refused(tmp_path, folder, array):
    root = plain(tmp_path, count=2)
    (root / folder).mkdir(exist_ok=True)
    for i in range(2):
        np.save(root / folder / f"case{i}.npy", np.ones((9, 7), np.uint8) if folder != "logits" else np.ones((4, 9, 7)))
    np.save(root / folder / "case0.npy", array)
    problems = segcal.check(root).problems
    assert [problem.case for problem in problems] == ["case0"]
    assert "values of type" in problems[0].problem or "a single number" in problems[0].problem


def test_rgb_nifti_labels(tmp_path):
    root = plain(tmp_path, count=1, shape=(5, 6, 7))
    (root / "labels" / "case0.npy").unlink()
    colours = np.zeros((7, 6, 5), [("R", "u1"), ("G", "u1"), ("B", "u1")])
    nibabel.Nifti1Image(colours, np.eye(4)).to_filename(root / "labels" / "case0.nii.gz")
    (problem,) = segcal.check(root).problems
    assert "class indices, not colours" in str(problem)


@pytest.mark.parametrize("value", [2**64 - 1, 1e300], ids=str)
def test_labels_beyond_int64(tmp_path, value):
    root = plain(tmp_path, count=1)
    labels = np.zeros((9, 7), np.uint64 if isinstance(value, int) else np.float64)
    labels[3, 3] = value
    np.save(root / "labels" / "case0.npy", labels)
    (problem,) = segcal.check(root, ignore_index=-1).problems
    assert "labels below 2^63" in str(problem)


def test_lack_of_memory_is_an_error_of_the_case(tmp_path, monkeypatch):
    import segcal.cases.formats.arrays as arrays

    root = plain(tmp_path, count=2)

    def fail(*arguments):
        raise MemoryError

    monkeypatch.setattr(arrays.NpyFile, "_read", fail)
    assert {problem.case for problem in segcal.check(root).problems} == {"case0", "case1"}


def test_lack_of_memory_in_torch_is_one_too(tmp_path, monkeypatch):
    import segcal.cases.disk as disk

    root = plain(tmp_path, count=1)

    def fail(*arguments, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(disk, "canonical_logits", fail)
    (problem,) = segcal.check(root).problems
    assert str(problem).startswith("case 'case0'")
    assert "does not fit into memory" in str(problem)
