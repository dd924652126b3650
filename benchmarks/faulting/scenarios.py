"""Commands on small data, and their results without time stamps and measured seconds."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

OUT = "out"
# Keys whose values are times, or what was measured on the way, and differ from run to run.
_TIMES = {"timings", "seconds", "created", "fitted", "fit_seconds", "peak_memory_mb", "wall_time", "digest"}


@dataclass(frozen=True)
class Scenario:
    """A command in a folder with data. ``again`` is what continues it; ``ranks`` of a torchrun job share it."""

    name: str
    command: tuple[str, ...]
    again: tuple[str, ...] = ("--resume",)
    ranks: int = 1


SCENARIOS = (
    Scenario("apply", ("apply", "cal.safetensors", "ds", "-o", OUT, "--confidence")),
    Scenario("pack", ("pack", "ds", OUT, "--format", "zarr")),
    Scenario("compare", ("compare", "ds", "--methods", "ts,vs", "--repeats", "2", "--metrics", "nll,ece", "-o", OUT)),
    Scenario("train", ("train", "run.toml")),
    Scenario("evaluate", ("evaluate", "ds", "--metrics", "nll,ece", "-o", f"{OUT}/r.json"), ranks=2),
)


def write_data(root: Path) -> None:
    """A dataset with images, a calibrator, a training file, and a file of the user's beside the output."""
    import segcal
    from segcal.cases import write_dataset

    cases = segcal.synthetic.scenes(8, size=(48, 64), num_classes=3)
    write_dataset(cases, root / "ds")
    segcal.calibrators.TemperatureScaling().fit(segcal.open_cases(root / "ds")).save(root / "cal.safetensors")
    about = {"data": "ds", "output": OUT, "width": 4, "depth": 2, "batch": 2, "epochs": 3, "device": "cpu"}
    lines = [
        *(f"{name} = {value!r}" for name, value in about.items()),
        "split = {train = 0.5, validation = 0.25, test = 0.25}",
    ]
    (root / "run.toml").write_text("\n".join(lines))
    (root / "mine").mkdir()
    (root / "mine" / "work.txt").write_text("years")


def hashes(root: Path, without: str | None = None) -> dict[str, str]:
    """Every file under a folder, by name, with a digest of its bytes."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_file() and (without is None or not name.startswith(f"{without}/")):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def results(root: Path) -> dict[str, str]:
    """The files of a finished command: all but its journal, each without what differs from run to run."""
    paths = (path for path in sorted((root / OUT).rglob("*")) if path.is_file())
    return {
        path.relative_to(root / OUT).as_posix(): hashlib.sha256(_lasting(path)).hexdigest()
        for path in paths
        if path.name != ".segcal-journal.jsonl"
    }


def _lasting(path: Path) -> bytes:
    """The content without times; all bytes of formats that hold none."""
    if path.suffix == ".json" and path.name != "zarr.json":
        return _text(_without_times(json.loads(path.read_text())))
    if path.name == "index.html":
        html = path.read_text()
        found = re.search(r'<script type="application/json" id="study">(.*?)</script>', html, re.S)
        assert found is not None
        return (html[: found.start()] + html[found.end() :]).encode() + _text(_without_times(json.loads(found[1])))
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            about = {name: _without_times(json.loads(text)) for name, text in (file.metadata() or {}).items()}
        return _text(about) + b"".join(name.encode() + np.asarray(value).tobytes() for name, value in tensors.items())
    if path.name == "log.csv":
        rows = list(csv.DictReader(io.StringIO(path.read_text())))
        return _text([_without_times(row) for row in rows])
    if path.suffix == ".pt":
        import torch

        # Not the bytes, which depend on where tensors were in memory.
        return _text(_without_times(torch.load(path, weights_only=True)))
    return path.read_bytes()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if key not in _TIMES}
    if isinstance(value, list | tuple):
        return type(value)(_without_times(item) for item in value)
    return value


def _text(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, default=_exactly).encode()


def _exactly(value: Any) -> Any:
    """Tensors by their type, shape and bytes."""
    return [str(value.dtype), list(value.shape), value.contiguous().numpy().tobytes().hex()]
