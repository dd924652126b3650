"""``apply``: write calibrated probabilities of every case, in the format and geometry of the input."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from segcal.calibrators import Calibrator
from segcal.cases import CaseSet
from segcal.cases.calibrated import check_classes, score_pieces
from segcal.cases.formats import ArraySpec
from segcal.cases.output import OutputFolder, score_path, write_scores
from segcal.errors import naming
from segcal.files.atomic import file_name
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
    cases: CaseSet,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    confidence: bool = False,
    resume: bool = False,
    progress: Callable[[str], None] = lambda case: None,
) -> ApplyReport:
    """Write calibrated probabilities, case by case and in chunks. Labels are not needed.

    Args:
        calibrator: A fitted calibrator.
        cases: What to calibrate.
        folder: Where to write ``probs/<case>.*`` (nnU-Net layout: ``<case>.npz`` and its sidecars). It must be apart
            from the folders of the cases.
        dtype: float32 or float16; with both, every voxel keeps the argmax of the calibrator.
        confidence: Also write ``confidence/<case>.npy``, the largest probability of every voxel.
        resume: Skip finished outputs that the same calibrator made from the same files, and that read back right.
        progress: Called with the name of each case before it is read.

    Examples:
        >>> import tempfile, segcal
        >>> cases = segcal.synthetic.scenes(2, size=(32, 40))
        >>> apply(segcal.calibrators.TemperatureScaling().fit(cases), cases, tempfile.mkdtemp()).flips
        0
    """
    check_classes(cases, calibrator)
    # The digest of its file covers everything that determines its output.
    digest = hashlib.blake2b(calibrator.to_bytes(), digest_size=16).hexdigest()
    settings = {"calibrator": digest, "dtype": str(dtype)}
    report = ApplyReport()
    with OutputFolder(Path(folder), cases, "calibrated scores", settings=settings, resume=resume) as output:
        for case in cases:
            progress(case.id)
            map_path = f"confidence/{file_name(case.id)}.npy"
            if output.finished(score_path(case), case) and (not confidence or output.finished(map_path, case)):
                report.skipped += 1
                continue
            batch, _, *spatial = case.shape
            spec = ArraySpec((batch, *spatial) if batch > 1 else spatial, "float32", row_axis=int(batch > 1))
            with naming(case=case.id), output.array(map_path, case, spec) if confidence else nullcontext() as write:
                write_scores(output, case, _counted_pieces(calibrator, case, report, write), dtype)
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
            confidence = log_probs.amax(1).exp().numpy()
            write(rows, confidence if len(confidence) > 1 else confidence[0])
        yield rows, log_probs
