import struct
import zlib

import numpy as np
import pytest

from segcal.cases.formats import FORMATS, SCORE_FORMATS, ArraySpec, create_array, open_array
from segcal.errors import DataError, MissingExtraError, OutputError

ALL_FORMATS = [format.name for format in FORMATS]


def write(path, array, *, replace=False, **options):
    with create_array(path, ArraySpec(array.shape, array.dtype, **options), replace=replace) as sink:
        half = array.shape[0] // 2
        rest = (slice(None),) * (array.ndim - 1)
        sink.write((slice(0, half), *rest), array[:half])
        sink.write((slice(half, array.shape[0]), *rest), array[half:])


@pytest.mark.parametrize("format", SCORE_FORMATS)
@pytest.mark.parametrize("shape", [(4, 9, 7), (3, 5, 6, 7)])
def test_scores_come_back_bit_for_bit_whole_and_in_parts(tmp_path, format, shape):
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    path = tmp_path / f"a.{format}"
    write(path, array)
    file = open_array(path)
    assert (file.shape, file.dtype) == (shape, np.float32)
    np.testing.assert_array_equal(file.read(), array)
    part = (slice(1, 3), slice(2, 4), *(slice(None),) * (len(shape) - 2))
    np.testing.assert_array_equal(file.read(part), array[part])
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("format", ALL_FORMATS)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.bool_])
def test_label_maps_and_masks_come_back(tmp_path, format, dtype):
    array = np.random.default_rng(1).integers(0, 2 if dtype == np.bool_ else 200, (9, 7)).astype(dtype)
    write(tmp_path / f"a.{format}", array)
    np.testing.assert_array_equal(open_array(tmp_path / f"a.{format}").read(), array)


@pytest.mark.parametrize("format", ["png", "tif", "npy"])
def test_colour_images_are_channels_first(tmp_path, format):
    array = np.random.default_rng(2).integers(0, 256, (3, 9, 7)).astype(np.uint8)
    write(tmp_path / f"a.{format}", array)
    np.testing.assert_array_equal(open_array(tmp_path / f"a.{format}").read(), array)


def test_interleaved_tif_and_lzw_tif_are_read(tmp_path):
    import tifffile
    from PIL import Image

    colours = np.random.default_rng(3).integers(0, 256, (9, 7, 3)).astype(np.uint8)
    tifffile.imwrite(tmp_path / "rgb.tif", colours, photometric="rgb")
    np.testing.assert_array_equal(open_array(tmp_path / "rgb.tif").read(), np.moveaxis(colours, -1, 0))
    pages = [Image.fromarray(colours[..., k]) for k in range(3)]
    pages[0].save(tmp_path / "lzw.tif", compression="tiff_lzw")
    np.testing.assert_array_equal(open_array(tmp_path / "lzw.tif").read(), colours[..., 0])
    pages[0].save(tmp_path / "pages.tif", compression="tiff_lzw", save_all=True, append_images=pages[1:])
    np.testing.assert_array_equal(open_array(tmp_path / "pages.tif").read(), np.moveaxis(colours, -1, 0))


def png(rows, depth, colour):
    """A PNG made by hand from the format's specification: samples packed high bits first, no filter."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    packed = b""
    for row in rows:
        bits = "".join(f"{value:0{depth}b}" for value in row)
        bits += "0" * (-len(bits) % 8)
        packed += b"\0" + bytes(int(bits[k : k + 8], 2) for k in range(0, len(bits), 8))
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), depth, colour, 0, 0, 0)
    palette = chunk(b"PLTE", bytes(3 * 2**depth)) if colour == 3 else b""
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + palette
        + chunk(b"IDAT", zlib.compress(packed))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(("depth", "colour"), [(d, 0) for d in (1, 2, 4, 8, 16)] + [(d, 3) for d in (1, 2, 4, 8)])
def test_png_of_any_depth_gives_the_stored_values(tmp_path, depth, colour):
    values = np.random.default_rng(4).integers(0, 2**depth, (9, 7))
    values[0, :2] = 0, 2**depth - 1
    (tmp_path / "a.png").write_bytes(png(values.tolist(), depth, colour))
    file = open_array(tmp_path / "a.png")
    np.testing.assert_array_equal(file.read(), values)
    assert file.read().dtype == file.dtype


def test_16_bit_colours_are_refused_because_pillow_would_round_them(tmp_path):
    (tmp_path / "a.png").write_bytes(png([[1, 2, 3] * 4] * 5, 16, 2))
    with pytest.raises(DataError, match="16-bit colours"):
        open_array(tmp_path / "a.png")


def test_large_pngs_are_no_bombs(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Stands for an image beyond Pillow's 179 million pixels.
    Image.new("1", (40, 30)).save(tmp_path / "a.png")
    assert open_array(tmp_path / "a.png").read().shape == (30, 40)


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_truncated_files_are_named(tmp_path, format):
    path = tmp_path / f"a.{format}"
    array = np.random.default_rng(5).normal(size=(64, 64)).astype(np.float32)
    write(path, (array > 0).astype(np.uint8) if format == "png" else array)
    victim = next(item for item in path.rglob("c/**/*") if item.is_file()) if format == "zarr" else path
    data = victim.read_bytes()
    victim.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=rf"a\.{format}.*(cannot be read|is damaged)"):
        open_array(path).read()


def test_objects_and_pickles_are_refused_and_never_run(tmp_path):
    import pickle

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    np.save(tmp_path / "a.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "b.npz", probabilities=np.array([Bomb()], dtype=object))
    (tmp_path / "c.npy").write_bytes(pickle.dumps(Bomb()))
    for name in ("a.npy", "b.npz", "c.npy"):
        with pytest.raises(DataError, match="never unpickles"):
            open_array(tmp_path / name).read()
    assert not (tmp_path / "ran").exists()


def test_one_of_several_arrays_is_picked_by_name(tmp_path):
    np.savez(tmp_path / "a.npz", probabilities=np.ones(3), other=np.zeros(2))
    usual = ("probabilities", "logits")
    assert open_array(tmp_path / "a.npz", usual=usual).shape == (3,)
    assert open_array(tmp_path / "a.npz", key="other").shape == (2,)
    with pytest.raises(DataError, match="holds the arrays 'probabilities', 'other'"):
        open_array(tmp_path / "a.npz")
    with pytest.raises(DataError, match="one named 'nope'"):
        open_array(tmp_path / "a.npz", key="nope")


@pytest.mark.parametrize("format", SCORE_FORMATS)
def test_a_failed_write_leaves_nothing_and_keeps_the_old_file(tmp_path, format):
    path = tmp_path / f"a.{format}"
    write(path, np.zeros((4, 4), np.float32))

    def fail():
        with create_array(path, ArraySpec((4, 4), np.float32), replace=True) as sink:
            sink.write((slice(0, 2), slice(None)), np.ones((2, 4), np.float32))
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fail()
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    np.testing.assert_array_equal(open_array(path).read(), 0)
    write(path, np.ones((4, 4), np.float32), replace=True)
    np.testing.assert_array_equal(open_array(path).read(), 1)


def test_unwritable_and_unfit_outputs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write(tmp_path / "file" / "a.npy", np.zeros((4, 4)))
    with pytest.raises(OutputError, match="does not fit a PNG"):
        write(tmp_path / "a.png", np.zeros((4, 4), np.float32))
    with pytest.raises(OutputError, match="unknown format"):
        write(tmp_path / "a.xyz", np.zeros((4, 4)))


def test_nifti_geometry_and_scaling(tmp_path):
    import nibabel

    affine = np.array([[0, 2, 0, 5], [-1, 0, 0, 6], [0, 0, 3, 7], [0, 0, 0, 1.0]])
    image = nibabel.Nifti1Image(np.arange(24, dtype=np.int16).reshape(2, 3, 4), affine)
    image.header.set_slope_inter(0.5, 1)
    image.to_filename(tmp_path / "a.nii.gz")
    file = open_array(tmp_path / "a.nii.gz")
    np.testing.assert_array_equal(file.read(), np.asarray(nibabel.load(tmp_path / "a.nii.gz").dataobj).T)
    np.testing.assert_array_equal(file.geometry.affine, affine)
    assert file.geometry.zooms == (1.0, 2.0, 3.0)
    array = np.random.default_rng(6).normal(size=(5, 4, 3, 2)).astype(np.float32)
    write(tmp_path / "b.nii.gz", array, geometry=file.geometry)
    written = nibabel.load(tmp_path / "b.nii.gz")
    np.testing.assert_array_equal(written.affine, affine)
    np.testing.assert_array_equal(np.asarray(written.dataobj), array.T)
    assert written.get_data_dtype() == np.float32


@pytest.mark.parametrize(
    ("format", "module", "extra"), [("nii", "nibabel", "nifti"), ("zarr", "zarr", "zarr"), ("h5", "h5py", "h5")]
)
def test_a_missing_library_names_its_extra(tmp_path, monkeypatch, format, module, extra):
    path = tmp_path / f"a.{format}"
    write(path, np.zeros((4, 4), np.float32))
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"segcal\[{extra}\]"):
        open_array(path)
