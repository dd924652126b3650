"""``segcal check`` on damaged files: does it refuse them clearly, in time and without taking much memory?

A valid dataset of one case is written in each format. Then its score file or its label file is damaged, over and over
with the same seed: bits flipped, ends cut off, blocks overwritten, moved, inserted and removed, numbers in the header
replaced by extreme ones; in the compressed formats the header is also edited inside and packed again, checksum and all.
Each result is checked in a worker process under a time limit. A file that is accepted is compared with the valid one.

Memory is the most that a check adds to the worker's resident memory, compared with what the valid files need.

    python benchmarks/mutated_files.py [--count 500] [--seed 0] [--formats npy,png]
"""

from __future__ import annotations

import argparse
import gzip
import io
import multiprocessing
import os
import random
import shutil
import struct
import sys
import tempfile
import time
import traceback
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = (4, 384, 512)
# Seconds after which a check counts as hanging; a valid one takes a fraction of a second.
LIMIT = 20.0
# Formats whose checksums cover all that is damaged here: no other values may be accepted without a word. (In zarr
# stores with checksums only chunks are damaged; the description, zarr.json, has none.)
COVERED = ("npz", "nii.gz", "png", "zarr+crc32c")
# Numbers that headers are edited with.
EXTREME = (0, 1, 2, 3, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1, 10**6, 10**7, 10**9)


# -- the valid dataset ------------------------------------------------------------------------------------------------


def write_valid(root: Path, format: str) -> None:
    rng = np.random.default_rng(0)
    labels = np.kron(rng.integers(0, SHAPE[0], (SHAPE[1] // 16, SHAPE[2] // 16)), np.ones((16, 16))).astype(np.uint8)
    logits = rng.normal(0, 1, SHAPE).astype(np.float32) + 4 * (np.arange(SHAPE[0])[:, None, None] == labels)
    logits = logits.round(1).astype(np.float32)  # Compresses a little.
    for folder, array in (("logits", logits), ("labels", labels)):
        (root / folder).mkdir(parents=True)
        write_array(root / folder / "case", array, "npy" if format == "png" and folder == "logits" else format)


def write_array(stem: Path, array: Any, format: str) -> None:
    path = stem.with_name(f"{stem.name}.{format.split('+')[0]}")
    if format == "npy":
        np.save(path, array)
    elif format == "npz":
        np.savez_compressed(path, array)
    elif format in ("nii", "nii.gz"):
        import nibabel

        nibabel.Nifti1Image(array.T, np.eye(4)).to_filename(path)
    elif format == "png":
        from PIL import Image

        Image.fromarray(array).save(path)
    elif format == "tif":
        import tifffile

        tifffile.imwrite(path, array, photometric="minisblack", compression="zlib")
    elif format.startswith("zarr"):
        import zarr
        from zarr.codecs import Crc32cCodec, ZstdCodec

        codecs = [ZstdCodec(), Crc32cCodec()] if format.endswith("crc32c") else [ZstdCodec()]
        chunks = (1,) * (array.ndim - 2) + (array.shape[-2] // 3, array.shape[-1])
        store = zarr.create_array(str(path), shape=array.shape, dtype=array.dtype, chunks=chunks, compressors=codecs)
        store[:] = array
    else:
        import h5py

        with h5py.File(path, "w") as file:
            chunks = (1,) * (array.ndim - 2) + (array.shape[-2] // 3, array.shape[-1])
            file.create_dataset(
                "a", data=array, chunks=chunks, compression="gzip", fletcher32=format.endswith("fletcher32")
            )


# -- the damage -------------------------------------------------------------------------------------------------------


def flip_bits(data: bytearray, rng: random.Random) -> bytearray:
    for _ in range(rng.choice((1, 1, 1, 4, 32))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def cut_off(data: bytearray, rng: random.Random) -> bytearray:
    return data[: rng.choice((0, 1, rng.randrange(len(data)), rng.randrange(len(data)), len(data) - 1))]


def overwrite(data: bytearray, rng: random.Random) -> bytearray:
    start, size = rng.randrange(len(data)), rng.choice((1, 8, 512, 4096))
    data[start : start + size] = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))
    return data


def splice(data: bytearray, rng: random.Random) -> bytearray:
    """Move, insert or remove some bytes."""
    start, size = rng.randrange(len(data)), rng.choice((1, 3, 64, 5000))
    block, target = bytes(data[start : start + size]), rng.randrange(len(data))
    if rng.random() < 0.5:
        del data[start : start + size]
    if rng.random() < 0.7:
        data[target:target] = block
    return data


def edit_header(data: bytearray, rng: random.Random) -> bytearray:
    """A number of 1, 2, 4 or 8 bytes in the first kilobyte, or a decimal number in a text header."""
    end = min(len(data), 1024)
    digits = [k for k in range(end) if chr(data[k]).isdigit()]
    if digits and rng.random() < 0.3:
        at = rng.choice(digits)
        data[at : at + 1] = str(rng.choice(EXTREME)).encode()
        return data
    size, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
    at = rng.randrange(end)
    data[at : at + size] = (rng.choice(EXTREME) % 256**size).to_bytes(size, order)
    return data


MUTATIONS: tuple[Callable[[bytearray, random.Random], bytearray], ...] = (
    flip_bits, flip_bits, cut_off, overwrite, splice, edit_header, edit_header,
)  # fmt: skip


def repack(path: Path, rng: random.Random) -> bool:
    """Edit the header inside a compressed file, with right checksums; False for formats that have no inside."""
    if path.name.endswith(".nii.gz"):
        path.write_bytes(gzip.compress(edit_header(bytearray(gzip.decompress(path.read_bytes())), rng), 1))
    elif path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            name = archive.namelist()[0]
            inside = bytearray(archive.read(name))
        inside[:128] = edit_header(inside[:128], rng)
        kind = rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2))
        with zipfile.ZipFile(path, "w", kind, compresslevel=1) as archive:
            archive.writestr(name, bytes(inside))
    elif path.suffix == ".png":
        data = bytearray(path.read_bytes())
        at = rng.choice((16, 20))
        data[at : at + 4] = struct.pack(">I", rng.choice(EXTREME))
        data[24:26] = bytes((rng.choice((1, 2, 4, 8, 16)), rng.choice((0, 2, 3, 4, 6))))
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
        path.write_bytes(data)
    else:
        return False
    return True


def damage(root: Path, format: str, rng: random.Random) -> str:
    """Damage one file of the dataset; returns what was done."""
    folder = "labels" if format == "png" or rng.random() < 0.3 else "logits"
    path = next((root / folder).iterdir())
    if path.is_dir():
        files = sorted(item for item in path.rglob("*") if item.is_file())
        described = [item for item in files if item.name == "zarr.json"]
        # Where chunks have checksums, these are what is tested.
        path = rng.choice(files if "+" not in format and rng.random() < 0.5 else sorted(set(files) - set(described)))
        path = rng.choice(described) if "+" not in format and rng.random() < 0.3 else path
        if rng.random() < 0.05:
            path.unlink()
            return "remove"
    if rng.random() < 0.2 and repack(path, rng):
        return "repack"
    mutate = rng.choice(MUTATIONS)
    path.write_bytes(mutate(bytearray(path.read_bytes()), rng))
    return mutate.__name__


# -- the worker -------------------------------------------------------------------------------------------------------


def resident(name: str) -> int:
    """VmRSS or VmHWM (the highest since the last reset) in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def work(connection: Connection) -> None:
    """Check the datasets whose paths come in; send what came of it."""
    sys.stderr = io.StringIO()  # Libraries log what they find odd.
    import segcal
    from segcal.errors import SegcalError

    valid: list[Any] = []
    while True:
        root = connection.recv()
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # Resets the high-water mark.
        started, detail = time.perf_counter(), ""
        try:
            report = segcal.check(root)
            outcome = "refused" if report.problems else "accepted"
        except SegcalError:
            outcome = "refused"
        except BaseException:
            outcome, detail = "tracebacks", traceback.format_exc()
        seconds, memory = time.perf_counter() - started, resident("VmHWM") - before
        if outcome == "accepted":
            case = segcal.open_cases(root)[0]
            read = [case.logits.numpy(), case.labels.numpy()]
            valid = valid or read  # The first dataset is the undamaged one.
            if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(read, valid, strict=True)):
                outcome = "noted" if any("not stored" in note for note in report.notes) else "changed"
        connection.send((outcome, seconds, memory, detail))


class Worker:
    """A process that checks datasets, started anew when it hangs or dies."""

    def __init__(self, original: Path) -> None:
        self._original = original
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=work, args=(there,), daemon=True)
        self._process.start()
        there.close()
        for _ in range(2):  # The second time, nothing is imported or compiled any more.
            self._here.send(str(self._original))
            outcome, _, self.memory, detail = self._here.recv()
            assert outcome == "accepted", detail

    def check(self, root: Path) -> tuple[str, float, int, str]:
        """Outcome, seconds, bytes, and the traceback if there was one."""
        self._here.send(str(root))
        try:
            if self._here.poll(LIMIT):
                return self._here.recv()
            outcome = "hangs"
        except EOFError:
            outcome = "crashes"
        self.close()
        self._start()
        return outcome, LIMIT, 0, ""

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


# -- the table --------------------------------------------------------------------------------------------------------

FORMATS = ("npy", "npz", "nii", "nii.gz", "png", "tif", "zarr", "zarr+crc32c", "h5", "h5+fletcher32")


OUTCOMES = ("refused", "accepted", "noted", "changed", "tracebacks", "hangs", "crashes")


def run(format: str, count: int, seed: int, folder: Path) -> tuple[str, list[str]]:
    """A row of the table, and what should not be."""
    original, root = folder / format / "valid", folder / format / "damaged"
    write_valid(original, format)
    worker = Worker(original)
    outcomes: Counter[str] = Counter()
    slowest, peak, odd = 0.0, 0, []
    for number in range(count):
        rng = random.Random(f"{seed}/{format}/{number}")
        shutil.copytree(original, root)
        kind = damage(root, format, rng)
        outcome, seconds, memory, detail = worker.check(root)
        shutil.rmtree(root)
        outcomes[outcome] += 1
        slowest, peak = max(slowest, seconds), max(peak, memory)
        unseen = outcome == "changed" and kind != "repack" and format in COVERED
        if unseen or outcome in ("tracebacks", "hangs", "crashes"):
            odd.append(f"{format} {number} {kind}: {outcome}\n{detail}")
    worker.close()
    if peak > 2 * worker.memory:
        odd.append(f"{format}: more than twice the memory of the valid files")
    numbers = "".join(f"{outcomes[name]:>11}" for name in OUTCOMES)
    return f"{format:<14}{numbers}{peak / 1e6:>9.1f}{worker.memory / 1e6:>10.1f}{slowest:>11.2f}", odd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", default=",".join(FORMATS))
    options = parser.parse_args()
    # Large blocks go back to the system when they are freed, so that every check starts from the same memory.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    print(f"segcal check on {options.count} damaged files of each format, seed {options.seed}; logits {SHAPE} float32")
    print("accepted: with the values that were written. noted: with others, and a note on chunks that are not stored.")
    print("changed: with others, which no checksum of the format covers.\n")
    heads = "".join(f"{name:>11}" for name in OUTCOMES)
    print(f"{'format':<14}{heads}{'peak MB':>9}{'valid MB':>10}{'slowest s':>11}")
    odd: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for format in options.formats.split(","):
            row, strange = run(format, options.count, options.seed, Path(folder))
            print(row, flush=True)
            odd += strange
    good = "no traceback, no hang, no crash, less than twice the memory, no checksum ignored"
    print("\n" + ("\n".join(odd) or good))
    sys.exit(bool(odd))


if __name__ == "__main__":
    main()
