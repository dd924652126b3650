"""What is written for every case: calibrated probabilities (``apply``), and voxel maps (``write_maps``)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators import Calibrator
from segcal.cases import CaseSet, Source, cases_from
from segcal.cases.calibrated import AnyCalibrator, check_classes, score_pieces
from segcal.cases.device import Device
from segcal.cases.disk import DiskCase
from segcal.cases.formats import ArraySpec, Geometry, open_array
from segcal.cases.output import OutputFolder
from segcal.cases.written import nifti_path, score_path, write_scores
from segcal.errors import naming
from segcal.evaluation.maps import MAPS, score_maps
from segcal.evaluation.rows import CaseRows
from segcal.files.atomic import file_name
from segcal.files.remote import as_path
from segcal.types import Case


@dataclass
class ApplyReport:
    """Numbers of cases written and skipped, of voxels, and of labels that changed."""

    written: int = 0
    skipped: int = 0
    voxels: int = 0
    flips: int = 0


def apply(
    calibrator: Calibrator,
    cases: Source,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    confidence: bool = False,
    nifti: bool = False,
    device: Device | None = None,
    resume: bool = False,
    progress: Callable[[str], None] = lambda case: None,
) -> ApplyReport:
    """Write calibrated probabilities, case by case and in chunks. Labels are not needed.

    Args:
        calibrator: A fitted calibrator.
        cases: What to calibrate.
        folder: Where to write ``probs/<case>.*`` (nnU-Net layout: ``<case>.npz``, its sidecars and its segmentation).
            It must be apart from the folders of the cases. In an object store (``s3://``, ``gs://``) only zarr can be
            written.
        dtype: float32 or float16; with both, every voxel keeps the argmax of the calibrator.
        confidence: Also write the largest probability of every voxel, ``confidence/<case>.npy`` (at a URL ``.zarr``).
        nifti: In nnU-Net's layout, also write ``nifti/<case>.nii.gz``, the probabilities ``(x, y, z, C)`` with the
            geometry of nnU-Net's segmentation.
        device: Where to compute: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``; None for where the cases are.
        resume: Skip finished outputs that the same calibrator made from the same files, and that read back right.
        progress: Called with the name of each case before it is read.

    Examples:
        >>> import tempfile, segcal
        >>> cases = segcal.synthetic.scenes(2, size=(32, 40))
        >>> apply(segcal.calibrators.TemperatureScaling().fit(cases), cases, tempfile.mkdtemp()).flips
        0
    """
    cases = cases_from(cases)
    check_classes(cases, calibrator)
    # The digest of its file covers everything that determines its output.
    digest = hashlib.blake2b(calibrator.to_bytes(), digest_size=16).hexdigest()
    settings = {"calibrator": digest, "dtype": str(dtype)}
    report = ApplyReport()
    with OutputFolder(as_path(folder), cases, "calibrated scores", settings=settings, resume=resume) as output:
        for case in output.watched(cases).on(device):
            progress(case.id)
            map_path = f"confidence/{file_name(case.id)}{output.suffix}"
            asked = {score_path(output, case): True, map_path: confidence, nifti_path(case): nifti}
            if all(output.finished(path, case) for path, wanted in asked.items() if wanted):
                report.skipped += 1
                continue
            batch, _, *spatial = case.shape
            spec = ArraySpec((batch, *spatial) if batch > 1 else spatial, "float32", row_axis=int(batch > 1))
            with naming(case=case.id), output.array(map_path, case, spec) if confidence else nullcontext() as write:
                pieces = _counted_pieces(calibrator, case, report, write)
                write_scores(output, case, pieces, dtype, same_labels=calibrator.preserves is not None, nifti=nifti)
            report.written += 1
            del case
    return report


def _counted_pieces(
    calibrator: Calibrator, case: Case, report: ApplyReport, write: Callable[..., None] | None
) -> Iterator[tuple[slice, Tensor]]:
    """The calibrated pieces of a case; voxels and changed labels are counted and confidences written on the way."""
    for rows, log_probs in score_pieces(case, calibrator):
        report.voxels += log_probs[:, 0].numel()
        report.flips += int((log_probs.argmax(1) != case.rows("logits", rows).argmax(1)).sum())
        if write is not None:
            confidence = log_probs.amax(1).exp().cpu().numpy()
            write(rows, confidence if len(confidence) > 1 else confidence[0])
        yield rows, log_probs.cpu()


def write_maps(
    cases: CaseSet,
    folder: str | Path,
    *,
    calibrator: AnyCalibrator = None,
    progress: Callable[[str], None] = lambda case: None,
) -> None:
    """Write the maps of every case to ``folder/<map>/<case>``, each complete or not at all.

    Cases whose labels are NIfTI give ``.nii.gz`` with the geometry of the labels, all others ``.npy`` of shape
    ``(*spatial)``, or ``(N, *spatial)`` for a multi-label case. Predictions are unsigned integers.

    Args:
        cases: The cases to map.
        folder: Where to write. Maps of an earlier run are replaced; other files in their place are an error.
        calibrator: A calibrator, a function from logits to log-probabilities, or None for the uncalibrated scores.
        progress: Called with the name of each case before it is read.

    Examples:
        >>> import tempfile
        >>> from segcal.synthetic import scenes
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_maps(scenes(1, size=(32, 40)), folder)
        ...     np.load(f"{folder}/confidence/image-000.npy").shape
        (32, 40)
    """
    check_classes(cases, calibrator)
    with open_maps(cases, folder) as output:
        for case in cases:
            progress(case.id)
            batch, _, *spatial = case.shape
            shape, geometry = (batch, *spatial) if batch > 1 else tuple(spatial), _label_geometry(case)
            types = {"prediction": np.min_scalar_type(case.shape[1] - 1), "band": np.dtype(np.int8)}
            with naming(case=case.id), ExitStack() as stack:
                writers = {}
                for name in MAPS:
                    path = f"{name}/{file_name(case.id)}{'.npy' if geometry is None else '.nii.gz'}"
                    spec = ArraySpec(shape, types.get(name, np.float32), int(batch > 1), geometry=geometry)
                    writers[name] = stack.enter_context(output.array(path, case, spec))
                where = CaseRows(case, distances=True)
                for rows, scores in score_pieces(case, calibrator):
                    regions, inner = where.regions(rows)
                    labels, valid, bands = (one[:, inner] for one in (regions.labels, regions.valid, regions.bands))
                    for name, values in {**score_maps(scores, labels, valid), "band": bands}.items():
                        block = values.cpu().numpy()
                        writers[name](rows, block if batch > 1 else block[0])
            del case  # Otherwise it would stay in memory while the next one is read.


def open_maps(cases: CaseSet, folder: str | Path) -> OutputFolder:
    """The folder for maps, created with the first one. Raises if files that segcal did not write are in the way."""
    output = OutputFolder(Path(folder), cases, "voxel maps", settings={}, shared=True)
    for name in MAPS:
        output.check_own(name)
    return output


def _label_geometry(case: Case) -> Geometry | None:
    """The geometry of the labels of a case, if they have one and its maps have the same axes."""
    label = case.source.files.label if isinstance(case.source, DiskCase) else None
    file = None if label is None else open_array(label)
    return file.geometry if file is not None and file.shape == case.shape[2:] and case.shape[0] == 1 else None
