"""What a calibrator makes of a case: the one way in which evaluation, maps, pictures, fits and files come by it.

Logits alone are not all that a calibrator may see of a case: there are its image, its ensemble members, and the
neighbours of a voxel. So nobody but this module decides what a calibrator is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from segcal.kernels import AffineMap
from segcal.types import Case


@runtime_checkable
class CaseCalibrator(Protocol):
    """What is seen of a calibrator."""

    @property
    def spatial(self) -> bool:
        """Whether more of a case matters to a voxel than its own logits: then only ``pieces`` is right."""

    @property
    def score_map(self) -> AffineMap | None:
        """The map as an affine one, where it is, to be fused into the pass over the voxels."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Log-probabilities of any voxels ``(N, C, *spatial)``; of a whole case where ``spatial``."""

    def pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        """Rows of a case and their log-probabilities ``(N, C, rows, ...)``, in order."""


#: A calibrator, a plain function from the logits of a whole case to its log-probabilities, or the scores as they are.
AnyCalibrator = CaseCalibrator | Callable[[Tensor], Tensor] | None


class _Function:
    """A plain function as a calibrator; nothing is known of it, so it sees whole cases."""

    spatial, score_map = True, None

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, logits: Tensor) -> Tensor:
        return self.function(logits)

    def pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, case.shape[2]), self.function(case.logits)


class _Uncalibrated:
    """The scores as they are."""

    spatial, score_map = False, None

    def __call__(self, logits: Tensor) -> Tensor:
        return logits

    def pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        return case.logit_rows()


def as_calibrator(calibrator: AnyCalibrator) -> CaseCalibrator:
    """Whatever stands for a calibrator, as one.

    Examples:
        >>> as_calibrator(lambda logits: logits / 2).spatial, as_calibrator(None).spatial
        (True, False)
    """
    if calibrator is None:
        return _Uncalibrated()
    return calibrator if isinstance(calibrator, CaseCalibrator) else _Function(calibrator)


@torch.no_grad()
def score_pieces(case: Case, calibrator: AnyCalibrator) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a case and their calibrated log-probabilities ``(N, C, rows, ...)``, in order; logits without one.

    Only some rows are in memory at a time, where the calibrator and the format of the case allow it.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> [(rows.stop, part.shape) for rows, part in score_pieces(scenes(1, size=(32, 40))[0], lambda z: z / 2)]
        [(32, torch.Size([1, 6, 32, 40]))]
    """
    yield from as_calibrator(calibrator).pieces(case)


def case_scores(case: Case, calibrator: AnyCalibrator) -> Tensor:
    """The whole of ``score_pieces``, ``(N, C, *spatial)``."""
    return torch.cat([scores for _, scores in score_pieces(case, calibrator)], 2)
