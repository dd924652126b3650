"""``segcal show`` and ``segcal doctor``: what is in a calibrator, and what this machine offers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.markup import escape
from typer import Argument

from segcal.calibrators import load
from segcal.cli.console import new_table, out, show_notes, show_table
from segcal.cli.data import Json
from segcal.files.plain import plain
from segcal.fitting.cost import bytes_in_words, seconds_in_words

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
    report, written = found.fit_report, time.strftime("%Y-%m-%d %H:%M", time.localtime(calibrator.stat().st_mtime))
    about: dict[str, Any] = {
        "method": f"{found.id}: {found.title}",
        "classes": found.num_classes,
        "class names": None if found.class_names is None else list(found.class_names),
        "channels": None if found.channel_names is None else list(found.channel_names),
        "keeps": _KEPT.get(found.preserves or ""),
        "map": found.summary(),
        "arguments": found.arguments() or None,
        "written": written,
        "fit": None if report is None else asdict(report),
    }
    if as_json:
        out.print_json(json.dumps(plain(about)))
        return
    table = new_table()
    table.add_column(style="bold")
    for name, value in about.items():
        if value is not None and name != "fit":
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            table.add_row(name, escape(text))
    if report is not None:
        state = "converged" if report.converged else "not converged"
        steps = f"{state} in {report.iterations} steps and {seconds_in_words(report.seconds)}"
        table.add_row("fit", f"{steps}, to {report.voxels_used:,} voxels, gradient {report.certificate:.1e}")
        table.add_row("NLL", f"{report.nll_before:.6g} before, {report.nll_after:.6g} after, on what it was fitted to")
    show_table(table)
    show_notes(() if report is None else report.notes)


def doctor_command(as_json: Json = False) -> None:
    """Show what segcal finds on this machine: versions, processors, compiled kernels, optional packages.

    Example: segcal doctor
    """
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    missing = [f"{name} (pip install 'segcal[{extra}]')" for name, extra in _EXTRAS.items() if not _there(name)]
    about = {
        "segcal": importlib.metadata.version("segcal"),
        "python": f"{platform.python_version()}, {platform.platform()}",
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads of {os.cpu_count()} cores",
        "gpu": ", ".join(f"{own.name}, {bytes_in_words(own.total_memory)}" for own in gpus) or "none that PyTorch sees",
        "compiled on the CPU": _version("numba"),
        "compiled code is kept in": _cache_folder(),
        "compiled on a GPU": _version("triton") + ("" if gpus else ", not used without a GPU"),
        "optional packages": ", ".join(f"{name} {_version(name)}" for name in _EXTRAS if _there(name)) or "none",
        "not installed": ", ".join(missing) or "none",
    }
    if as_json:
        out.print_json(json.dumps(about))
        return
    table = new_table()
    table.add_column(style="bold")
    for name, value in about.items():
        table.add_row(name, escape(value))
    show_table(table)


def _cache_folder() -> str:
    if not _there("numba"):
        return "-"
    from segcal.kernels.cpu_loops import tally_range

    return getattr(getattr(tally_range, "stats", None), "cache_path", None) or "no folder: every process compiles again"


def _there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _version(package: str) -> str:
    """The version of a package, or that it is missing."""
    return importlib.metadata.version(package) if _there(package) else "not installed"
