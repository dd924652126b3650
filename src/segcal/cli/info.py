"""``segcal show`` and ``segcal doctor``: what is in a calibrator, and what this machine offers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from rich.markup import escape
from typer import Argument

from segcal.calibrators import Calibrator, load
from segcal.cli.console import new_table, out, show_notes, show_table, waiting
from segcal.cli.data import Json
from segcal.files.plain import plain
from segcal.files.versions import SEGCAL
from segcal.fitting.cost import available_memory, bytes_in_words, seconds_in_words
from segcal.kernels import Backend
from segcal.statistics import VoxelStatistics
from segcal.types import FitReport

# Packages that some features need, and the extra that installs each.
_EXTRAS = {
    "nibabel": "nifti",
    "zarr": "zarr",
    "s3fs": "remote",
    "h5py": "h5",
    "matplotlib": "plots",
    "torchmetrics": "torchmetrics",
    "optuna": "tune",
    "lightning": "lightning",
    "onnx": "onnx",
}

_KEPT = {"argmax": "every label", "order": "every label, and the order of all classes"}


def show_command(
    calibrator: Annotated[Path, Argument(metavar="CALIBRATOR", help="A file of segcal fit or compare.")],
    as_json: Json = False,
) -> None:
    """Show what is in a calibrator: its method, its map, and how the fit went.

    Example: segcal show cal.safetensors
    """
    found = load(calibrator)
    if as_json:
        out.print_json(json.dumps(plain(_facts(found, calibrator))))
        return
    _show(_in_words(found, calibrator))
    show_notes(() if found.fit_report is None else found.fit_report.notes)
    out.print(f"Next: segcal apply {escape(shlex.quote(str(calibrator)))} NEW -o calibrated/")


def _facts(found: Calibrator, path: Path) -> dict[str, Any]:
    return {
        "method": found.id,
        "title": found.title,
        "classes": found.num_classes,
        "class_names": None if found.class_names is None else list(found.class_names),
        "channels": None if found.channel_names is None else list(found.channel_names),
        "preserves": found.preserves,
        "translation_invariant": found.translation_invariant,
        "map": found.summary(),
        "parameters": found.size(),
        "arguments": found.arguments(),
        "fit": None if found.fit_report is None else asdict(found.fit_report),
        "bytes": path.stat().st_size,
    }


def _in_words(found: Calibrator, path: Path) -> dict[str, str]:
    names = f": {', '.join(found.class_names)}" if found.class_names else ""
    arguments = ", ".join(f"{name} = {value}" for name, value in found.arguments().items())
    offsets = "ignored" if found.translation_invariant else "seen: adding a number to all logits changes the result"
    return {
        "method": f"{found.id}: {found.title}",
        "classes": f"{found.num_classes}{names}",
        **({"channels": ", ".join(found.channel_names)} if found.channel_names else {}),
        "keeps": _KEPT.get(found.preserves or "", "nothing: it may change labels"),
        "offsets": offsets,
        "map": found.summary(),
        **({"arguments": arguments} if arguments else {}),
        **({} if found.fit_report is None else _fit_in_words(found.fit_report, path)),
        "file": f"{path.resolve()}, {bytes_in_words(path.stat().st_size)}",
    }


def _fit_in_words(report: FitReport, path: Path) -> dict[str, str]:
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(path.stat().st_mtime))
    when = f"the file is of {written}" if report.fitted is None else report.fitted.replace("T", " ")[:16] + " UTC"
    cases = "" if report.cases is None else f"{report.cases:,} case{'s' * (report.cases != 1)}, "
    state = "converged" if report.converged else "not converged"
    steps = f"{state} in {report.iterations} steps and {seconds_in_words(report.seconds)}"
    return {
        "fitted": when,
        "fitted to": f"{cases}{report.voxels_used:,} voxels",
        "fit": f"{steps}, gradient {report.certificate:.1e}",
        "NLL": f"{report.nll_before:.6g} before, {report.nll_after:.6g} after, on what it was fitted to",
    }


def doctor_command(as_json: Json = False) -> None:
    """Show what segcal finds on this machine: versions, processors, compiled kernels, optional packages.

    Compiled kernels are tried, and compared with PyTorch's results. The first time, that compiles them.

    Example: segcal doctor
    """
    with waiting("trying the compiled kernels"):
        about = _machine()
    if as_json:
        out.print_json(json.dumps(about))
    else:
        _show(about)


def _machine() -> dict[str, str]:
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    missing = [f"{name} (pip install 'segcal[{extra}]')" for name, extra in _EXTRAS.items() if not _there(name)]
    return {
        "segcal": f"{SEGCAL}, in {Path(__file__).parent.parent}",
        "python": f"{platform.python_version()}, {platform.platform()}",
        "torch": f"{torch.__version__}, {built}",
        "processors": f"{os.cpu_count()} cores, of which torch uses {torch.get_num_threads()}",
        "memory": f"{bytes_in_words(available_memory())} free",
        "gpu": ", ".join(f"{own.name}, {bytes_in_words(own.total_memory)}" for own in gpus) or "none that PyTorch sees",
        "kernels, CPU": _kernels("numba", "cpu"),
        "kept in": _cache_folder(),
        "kernels, GPU": _kernels("triton", "cuda") if gpus else f"{_named('triton')}; not used without a GPU",
        "installed": ", ".join(map(_named, filter(_there, _EXTRAS))) or "no optional package",
        "not installed": ", ".join(missing) or "nothing is missing",
    }


def _show(facts: Mapping[str, str]) -> None:
    table = new_table()
    table.add_column(style="bold")
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, escape(value))
    show_table(table)


def _kernels(backend: Backend, device: str) -> str:
    """Whether the compiled loops run, and give what the reference gives."""
    if not _there(backend):
        return f"{backend} is not installed: slower loops of PyTorch take its place (pip install {backend})"
    logits = torch.randn(1000, 5, generator=torch.Generator().manual_seed(0)).to(device)
    labels = logits.cpu().roll(1, 0).argmax(1).to(device)
    try:
        own, reference = (VoxelStatistics(5, backend=b).update(logits, labels).total() for b in (backend, "reference"))
        same = np.array_equal(own.confusion, reference.confusion) and np.allclose(own.losses, reference.losses, 1e-5)
    except Exception as error:  # Whatever a compiler raises, the user should read it here.
        return f"{_named(backend)}; fails: {type(error).__name__}: {error}"
    return f"{_named(backend)}; {'works' if same else 'gives other results than PyTorch: please report this'}"


def _cache_folder() -> str:
    if not _there("numba"):
        return "nothing is compiled"
    from segcal.kernels.cpu_loops import tally_range

    folder = getattr(getattr(tally_range, "stats", None), "cache_path", None)
    return folder or "no folder that can be written: every process compiles again (set NUMBA_CACHE_DIR)"


def _there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _named(package: str) -> str:
    """A package with its version, or that it is missing."""
    return f"{package} {importlib.metadata.version(package)}" if _there(package) else f"{package} is not installed"
