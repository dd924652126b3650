"""A disk that is full, or a file that may not grow: an error that says so, and no trace of what was begun."""

import json
import re
import subprocess
import sys

from datasets import plain
from segcal.cases.formats import SCORE_FORMATS

SCRIPT = """
import json, pathlib, resource, sys
from contextlib import suppress
import numpy as np, torch
import segcal
from segcal.evaluation.apply import apply
from segcal.cases import write_dataset
from segcal.cases.formats import SCORE_FORMATS, ArraySpec, create_array
from segcal.errors import OutputError
from segcal.files.atomic import check_writable
from segcal.training.loop import save_checkpoint
from segcal.training.networks import UNet

data, *disks = (pathlib.Path(word) for word in sys.argv[1:])
cases = segcal.open_cases(data)
calibrator = segcal.calibrators.TemperatureScaling().fit(cases)
noise = np.random.default_rng(0).normal(size=(4, 400, 200)).astype(np.float32)


def array(format):
    with create_array(disk / "deep" / f"a.{format}", ArraySpec(noise.shape, noise.dtype, row_axis=1)) as sink:
        for row in range(0, 400, 100):
            sink.write((slice(None), slice(row, row + 100), slice(None)), noise[:, row : row + 100])


def vectors(calibrator):
    calibrator.register_buffer("ballast", torch.zeros(400_000))
    calibrator.save(disk / "cal.safetensors")


attempts = {f"array {format}": lambda format=format: array(format) for format in SCORE_FORMATS}
attempts |= {f"pack {f}": lambda f=f: write_dataset(cases, disk / "packed", format=f) for f in ("npy", "zarr", "h5")}
attempts["apply"] = lambda: apply(calibrator, cases, disk / "applied", confidence=True)
attempts["network"] = lambda: UNet(1, 4, width=32, depth=3).save(disk / "best.safetensors")
attempts["checkpoint"] = lambda: save_checkpoint(disk / "last.pt", {"weights": torch.zeros(400_000)})
attempts["calibrator"] = lambda: vectors(calibrator)
found = {}
if len(disks) > 1:  # filled to the last byte, it is known as full before any work
    with suppress(OSError), (disks[0] / "fill").open("wb") as file:
        while file.write(bytes(4096)):
            file.flush()
    try:
        check_writable(disks[0] / "cal.safetensors")
    except OutputError as error:
        assert "No space left" in str(error)
    else:
        raise AssertionError("a full disk passed for writable")
    (disks[0] / "fill").unlink()
for disk in disks:
    if disk == disks[-1]:  # not full, but no file may grow beyond this
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    for name, attempt in attempts.items():
        try:
            attempt()
            result = ["written", ""]
        except BaseException as error:
            result = [type(error).__name__, str(error)]
        left = sorted(str(path.relative_to(disk)) for path in disk.rglob("*"))
        found[f"{name} to {disk.name}"] = [*result, left]
print(json.dumps(found))
"""
SIZE = str(2**20)  # bytes; every attempt wants more


def test_disks_that_are_full_and_files_that_may_not_grow(tmp_path):
    data, full, limited = plain(tmp_path / "data", count=1, shape=(400, 300)), tmp_path / "full", tmp_path / "limited"
    full.mkdir()
    limited.mkdir()
    # Mounted in a name space of its own, which ends with the process.
    mount = 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"'
    small_disk = ["unshare", "-rm", "sh", "-c", mount, "sh", SIZE, str(full)]
    try:
        possible = subprocess.run([*small_disk, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        possible = False
    command = [sys.executable, "-c", SCRIPT, data, *([full] if possible else []), limited]
    done = subprocess.run([*small_disk, *command] if possible else command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # -7 would be the SIGBUS of a mapped file
    # Some versions of numpy and gzip leave a file open when they cannot go on, and say so later.
    assert re.sub(r"^Exception ignored in.*\nTraceback.*\n( .*\n)*\S.*\n", "", done.stderr, flags=re.M) == ""
    found = json.loads(done.stdout)
    assert len(found) == (7 + len(SCORE_FORMATS)) * (2 if possible else 1)
    for name, (kind, text, left) in found.items():
        assert kind == "OutputError", name
        assert "cannot be written" in text, name
        reason = "No space left on device" if name.endswith("to full") else "File too large"
        assert reason in text or name.startswith("checkpoint"), name
        assert left == [], name
