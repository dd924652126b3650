"""Damage by format: its own fields are edited, and its checksums made right again, so that only meaning is wrong."""

from __future__ import annotations

import gzip
import json
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fuzzing.damage import EXTREME, edit_header, edited

_TYPES = (
    "<f4", ">f4", "<f8", "<f2", "|u1", "<i8", "<u8", "|b1", "<c8", "<f16", "|O", "|S4", "<U2", "<M8[s]", "|V4", "", "x",
    "f4,u1", [["a", "<f4"]],
)  # fmt: skip
_SHAPES = (
    (), (0,), (4,), (4, 0, 128), (4, 96, 127), (1, 4, 96, 128), (49152,), (-1, 96, 128), (2**40, 96, 128), (4.0, 96,
    128),
    (4, 96, 128, 1), (96, 128), (True, 96, 128), (10**30,), ("4", 96, 128), [4, 96, 128], None, 4,
)  # fmt: skip


def _npy_header(data: bytes, rng: random.Random) -> bytes:
    """Another header in front of the same values."""
    length = struct.unpack("<H", data[8:10])[0]
    about: dict[str, Any] = {"descr": "<f4", "fortran_order": False, "shape": (4, 96, 128)}
    about[rng.choice(("descr", "shape"))] = rng.choice(rng.choice((_TYPES, _SHAPES)))
    if rng.random() < 0.3:
        about["fortran_order"] = rng.choice((True, 1, "False", None))
    if rng.random() < 0.2:
        about.pop(rng.choice(list(about)))
    if rng.random() < 0.2:
        about[rng.choice(("x", "descr "))] = rng.choice((1, "(" * 50, {"descr": 1}))
    text = repr(about).encode()
    if rng.random() < 0.2:
        text = rng.choice(
            (b"", b"{", b"[" * 2000, b"__import__('os')", text + b"\0", b"\xff" + text, b" " * 20000 + text)
        )
    version = rng.choice((b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x04\x00", b"\x00\x00"))
    size = struct.pack("<H" if version[0] == 1 else "<I", len(text) + 1)
    return data[:6] + version + size + text + b"\n" + data[10 + length :]


def npy(path: Path, rng: random.Random) -> None:
    path.write_bytes(_npy_header(path.read_bytes(), rng))


def npz(path: Path, rng: random.Random) -> None:
    """The array inside, the way it is packed, or what lies beside it."""
    with zipfile.ZipFile(path) as archive:
        name = archive.namelist()[0]
        inside = archive.read(name)
    kind = rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2))
    inside = rng.choice(
        (inside, _npy_header(inside, rng), bytes(edit_header(bytearray(inside[:128]), rng)) + inside[128:])
    )
    names = rng.choice(
        ([name], [name, name], ["../" + name], ["/" + name], [name, "b.npy"], ["a.txt"], [".npy"], ["a" * 3000])
    )
    with zipfile.ZipFile(path, "w", kind, compresslevel=1) as archive:
        for each in names:
            archive.writestr(each, inside)
    if rng.random() < 0.3:  # The directory and the file's own header disagree.
        data = bytearray(path.read_bytes())
        at = data.rfind(b"PK\x01\x02") if rng.random() < 0.5 else data.find(b"PK\x03\x04")
        where = at + rng.randrange(4, 46)
        data[where : where + 2] = struct.pack("<H", rng.choice(EXTREME) % 65536)
        path.write_bytes(data)


# Offsets and types of NIfTI's header: dim, datatype, bitpix, pixdim, vox_offset, slope, inter, codes, affine, magic.
_NIFTI = (
    (0, "i"), (40, "h"), (42, "h"), (44, "h"), (46, "h"), (48, "h"), (70, "h"), (72, "h"), (76, "f"), (80, "f"), (84,
    "f"),
    (108, "f"), (112, "f"), (116, "f"), (252, "h"), (254, "h"), (256, "f"), (280, "f"), (284, "f"), (300, "f"), (344,
    "i"),
)  # fmt: skip
_FLOATS = (0.0, -1.0, 1.0, 351.0, 352.5, 1e30, float("nan"), float("inf"), -float("inf"), 1e-45)
_SHORTS = (-1, 0, 1, 2, 3, 4, 7, 8, 16, 64, 128, 256, 512, 768, 1280, 1536, 1792, 2048, 2304, 32767, -32768)


def nifti(path: Path, rng: random.Random) -> None:
    """A field of the header, or a new extension."""
    packed = path.name.endswith(".gz")
    data = bytearray(gzip.decompress(path.read_bytes()) if packed else path.read_bytes())
    order = rng.choice("<<<>")
    for _ in range(rng.choice((1, 1, 2))):
        at, kind = rng.choice(_NIFTI)
        value = rng.choice(_FLOATS if kind == "f" else _SHORTS)
        data[at : at + struct.calcsize(kind)] = struct.pack(order + kind, value)
    if rng.random() < 0.2:
        data[348:352] = b"\x01\0\0\0"
        data[352:352] = struct.pack("<ii", rng.choice((0, 8, 16, 17, -1, 2**31 - 1)), rng.choice((0, 4, 99))) + bytes(8)
    path.write_bytes(gzip.compress(data, 1) if packed else data)


def png(path: Path, rng: random.Random) -> None:
    """Chunks edited, removed, doubled or moved, all with right checksums."""
    data, chunks, at = path.read_bytes(), [], 8
    while at < len(data):
        size = struct.unpack(">I", data[at : at + 4])[0]
        chunks.append((data[at + 4 : at + 8], bytearray(data[at + 8 : at + 8 + size])))
        at += size + 12
    deed = rng.randrange(6)
    place = rng.randrange(len(chunks))
    if deed == 0:
        head = chunks[0][1]
        at = rng.choice((0, 4))
        head[at : at + 4] = struct.pack(">I", rng.choice(EXTREME))
        head[8:10] = bytes((rng.choice((1, 2, 4, 8, 16)), rng.choice((0, 2, 3, 4, 6))))
    elif deed == 1:
        chunks[0][1][rng.randrange(8, 13)] = rng.choice((0, 1, 2, 3, 4, 6, 8, 16, 255))
    elif deed == 2:
        del chunks[place]
    elif deed == 3:
        chunks.insert(rng.randrange(len(chunks)), chunks[place])
    elif deed == 4:
        own = rng.choice((b"tRNS", b"PLTE", b"gAMA", b"iCCP", b"zTXt", b"acTL", b"fcTL", b"eXIf", b"ABCD", b"\0\0\0\0"))
        body = rng.choice((b"", rng.randbytes(rng.choice((1, 3, 4, 7, 300))), b"x\0\0" + zlib.compress(bytes(10**6))))
        chunks.insert(rng.randrange(1, len(chunks) + 1), (own, bytearray(body)))
    else:
        pixels = next(body for name, body in chunks if name == b"IDAT")
        raw = bytearray(zlib.decompress(bytes(pixels)))
        raw = rng.choice(
            (raw[:-1], raw[: len(raw) // 2], raw + bytes(100), raw + bytes(10**7), bytearray(b"\x09") + raw[1:])
        )
        pixels[:] = zlib.compress(bytes(raw), 1)
    if rng.random() < 0.1:
        rng.shuffle(chunks)
    packed = (struct.pack(">I", len(b)) + n + bytes(b) + struct.pack(">I", zlib.crc32(n + bytes(b))) for n, b in chunks)
    path.write_bytes(data[:8] + b"".join(packed))


def tif(path: Path, rng: random.Random) -> None:
    """Code, type, count or value of a tag of the first page, or where the next page is."""
    data = bytearray(path.read_bytes())
    first = struct.unpack("<I", data[4:8])[0]
    count = struct.unpack("<H", data[first : first + 2])[0]
    if rng.random() < 0.15:
        end = first + 2 + 12 * count
        data[end : end + 4] = struct.pack("<I", rng.choice((first, 8, len(data), len(data) - 1, 2**32 - 1)))
    else:
        tag = first + 2 + 12 * rng.randrange(count)
        at, kind = rng.choice(((0, "H"), (2, "H"), (4, "I"), (8, "I"), (8, "H")))
        value = rng.choice(
            (*EXTREME, 4, 5, 7, 12, 16, 32, 50, 256, 258, 259, 262, 273, 277, 279, 317, 339, 34712, 32773)
        )
        data[tag + at : tag + at + struct.calcsize(kind)] = struct.pack(
            "<" + kind, value % 256 ** struct.calcsize(kind)
        )
    path.write_bytes(data)


def zarr(path: Path, rng: random.Random) -> None:
    """A value of the description, or chunks that change places."""
    files = sorted(item for item in path.rglob("*") if item.is_file() and item.name != "zarr.json")
    if rng.random() < 0.2:
        one, other = rng.choice(files), rng.choice(files)
        content = one.read_bytes(), other.read_bytes()
        one.write_bytes(content[1])
        other.write_bytes(content[0])
    else:
        about = edited(json.loads((path / "zarr.json").read_text()), rng)
        (path / "zarr.json").write_text(json.dumps(about))


def h5(path: Path, rng: random.Random) -> None:
    """Another kind of object in place of the dataset, or beside it."""
    import h5py

    with h5py.File(path, "r+") as file:
        values = file["a"][:]
        if rng.random() < 0.7:
            del file["a"]
        name = rng.choice(("a", "b", "logits", "g/a", "x" * 200))
        with_name = rng.randrange(12)
        if name in file:
            del file[name]
        if with_name == 0:
            file[name] = h5py.SoftLink(rng.choice(("/a", "/none", f"/{name}", "..")))
        elif with_name == 1:
            file[name] = h5py.ExternalLink(
                rng.choice((path.name, "none.h5", "/etc/hostname", "../labels/case.h5")), "a"
            )
        elif with_name == 2:
            file.create_dataset(name, data=rng.choice(("text", [b"a", b"b"], 3.0, np.zeros((2, 0)), np.zeros(3, "c8"))))
        elif with_name == 3:
            file.create_dataset(name, shape=(2, 2), dtype=h5py.string_dtype())
        elif with_name == 4:
            file.create_dataset(name, shape=(4, 96, 128), dtype=h5py.vlen_dtype(np.float32))
        elif with_name == 5:
            file.create_dataset(name, shape=values.shape, dtype=h5py.enum_dtype({"a": 0, "b": 1}, basetype="u1"))
        elif with_name == 6:
            file.create_dataset(name, data=h5py.Empty("f4"))
        elif with_name == 7:
            file.create_dataset(name, shape=(4, 10**6, 10**6), dtype="f4", chunks=(1, 64, 64))
        elif with_name == 8:
            layout = h5py.VirtualLayout(values.shape, values.dtype)
            layout[:] = h5py.VirtualSource(rng.choice(("none.h5", ".", "/etc/hostname", path.name)), "a", values.shape)
            file.create_virtual_dataset(name, layout)
        elif with_name == 9:
            place = [(rng.choice(("/etc/hostname", "none.bin", path.name)), 0, values.nbytes)]
            file.create_dataset(name, shape=values.shape, dtype=values.dtype, external=place)
        elif with_name == 10:
            file[name] = np.dtype("f4")  # a named type
        else:
            file.create_group(name)


INSIDE: dict[str, Callable[[Path, random.Random], None]] = {
    "npy": npy, "npz": npz, "nii": nifti, "nii.gz": nifti, "png": png, "tif": tif, "zarr": zarr, "h5": h5,
}  # fmt: skip
