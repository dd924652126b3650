"""Multi-label data: one map per channel, fitted and applied as if that channel were the only one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from segcal.cases import CaseSet
from segcal.cases.calibrated import CaseCalibrator, score_pieces
from segcal.errors import InputError, naming
from segcal.types import Case, FitReport

T = TypeVar("T")


def for_each_channel(
    function: Callable[[int, CaseSet, CaseSet | None], T], cases: CaseSet, validation: CaseSet | None
) -> list[T]:
    """``function(index, cases, validation)`` for every channel; errors name the channel."""
    found = []
    for index, name in enumerate(cases.channel_names or ()):
        with naming(where=f"channel '{name}'"):
            held_out = None if validation is None else validation.channel(index)
            found.append(function(index, cases.channel(index), held_out))
    return found


def split_channels(names: Sequence[str], logits: Tensor) -> tuple[Tensor, ...]:
    """``(K, 2, *spatial)`` as K tensors ``(1, 2, *spatial)``."""
    if logits.ndim < 2 or len(logits) != len(names):
        raise InputError(
            f"logits have shape {tuple(logits.shape)}",
            expected=f"({len(names)}, 2, *spatial), one for each of the channels {', '.join(names)}",
        )
    return tuple(logits[index : index + 1] for index in range(len(names)))


def channel_pieces(calibrators: Sequence[CaseCalibrator], case: Case) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a multi-label case and their log-probabilities ``(K, 2, rows, ...)``, each channel by its calibrator."""
    if case.shape[0] != len(calibrators):
        raise InputError(f"{case.shape[0]} channels", case=case.id, expected=f"{len(calibrators)}, as fitted")
    if not case.source.sliceable:
        _ = case.logits  # decoded once for all channels
    pieces = [score_pieces(case.channel(index), own) for index, own in enumerate(calibrators)]
    for parts in zip(*pieces, strict=True):
        rows = parts[0][0]
        assert all(own == rows for own, _ in parts), "the same kind of map and case, so the same pieces"
        yield rows, torch.cat([log_probs for _, log_probs in parts])


def report_of_channels(names: Sequence[str], reports: Sequence[FitReport | None]) -> FitReport | None:
    """One report for all channels: mean NLL, largest certificate, converged if all did; None if one is missing.

    Examples:
        >>> one = FitReport(2.0, 1.0, True, 1e-9, 3, 0.1, 10, notes=("a",))
        >>> report_of_channels(("liver", "tumour"), (one, FitReport(4.0, 2.0, True, 1e-8, 4, 0.1, 10)))
        FitReport(nll_before=3.0, nll_after=1.5, converged=True, certificate=1e-08, iterations=7, seconds=0.2,
                  voxels_used=20, notes=('liver: a',), cases=None, fitted=None)
    """
    known = [report for report in reports if report is not None]
    if len(known) < len(reports):
        return None
    return replace(
        known[0],
        nll_before=math.fsum(report.nll_before for report in known) / len(known),
        nll_after=math.fsum(report.nll_after for report in known) / len(known),
        converged=all(report.converged for report in known),
        certificate=max(report.certificate for report in known),
        iterations=sum(report.iterations for report in known),
        seconds=math.fsum(report.seconds for report in known),
        voxels_used=sum(report.voxels_used for report in known),
        notes=tuple(f"{name}: {note}" for name, own in zip(names, known, strict=True) for note in own.notes),
    )
