"""An ensemble as a calibrator: the mean of the members' logits or probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from segcal.calibrators.composed import Base, ComposedCalibrator
from segcal.errors import InputError
from segcal.fitting.data import FitData, Fitted
from segcal.fitting.limits import COUNT, Limits
from segcal.fitting.measured import compared, mean_loss
from segcal.scores import pool
from segcal.types import Case, Kind, check_pooling

__all__ = ["Ensemble"]


class Ensemble(ComposedCalibrator):
    """``ensemble``: the members of a case are pooled in the given space, and then mapped by the ``base``, if any.

    ``"probs"``: the mean of the softmaxes, ``log(sum_m S(z_m) / M)`` (deep ensembles; Lakshminarayanan et al. 2017).
    ``"logits"``: the softmax of the mean, ``log S(sum_m z_m / M)``, which is the normalised geometric mean of the
    members' probabilities. Neither depends on offsets of the members' logits. Where members disagree, the first is less
    confident.

    Pooling has no parameters. It reads the members of every case, so a case needs as many as the calibrator was fitted
    to; cases without members, such as tensors, count as pooled already. Labels may change if the cases themselves are
    pooled in the other space, so no guarantee is given. ``forward`` takes a sequence of the members' logits, or one
    pooled tensor; split a tensor of members by ``tensor.unbind(0)``, as it could be a volume.

    Args:
        space: ``"logits"`` or ``"probs"``.
        base: A calibrator, or its id, that is fitted to the pooled scores and maps them.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(4, size=(32, 40), members=3, member_noise=3.0)
        >>> one, all_three = cases.members([0]), Ensemble().fit(cases)
        >>> segcal.evaluate(cases, all_three).value("nll") < segcal.evaluate(one).value("nll")
        True
        >>> z = [cases[0].member_logits(m) for m in range(3)]
        >>> all_three(z).shape
        torch.Size([1, 6, 32, 40])
    """

    id = "ensemble"
    title = "Ensemble"
    translation_invariant = True
    preserves = None
    # A voxel needs the logits of all members, so ``pieces`` has to see the case.
    spatial = True
    members: Tensor

    def __init__(self, space: Kind = "probs", base: Base = None) -> None:
        super().__init__(base)
        self.space: Kind = check_pooling(space)
        if self.base is not None:
            self.translation_invariant = self.base.translation_invariant
        self.register_buffer("members", torch.zeros((), dtype=torch.float64))  # 0 where the cases had none

    def shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        """The number of members, and the shapes of the base."""
        return {"members": (), **super().shapes(num_classes)}

    def limits(self) -> dict[str, Limits]:
        """The number of members."""
        return {"members": COUNT}

    def _fit(self, data: FitData) -> Fitted:
        before = mean_loss(data.cases)
        notes = []
        self.members.fill_(data.cases.num_members or 0)
        if data.cases.num_members is None:
            notes.append("the cases have no ensemble members: their scores count as pooled already")
        else:
            validation = None if data.validation is None else data.validation.pooled(self.space)
            data = data._replace(cases=data.cases.pooled(self.space), validation=validation)
        if self.base is None:
            nll, outcome = mean_loss(data.cases).nll, (True, 0.0, 0, before.voxels)
        else:
            notes += self._fit_base(data)
            report = self.base.fit_report
            assert report is not None
            nll = report.nll_after
            outcome = report.converged, report.certificate, report.iterations, report.voxels_used
        if nll > before.nll:
            notes.append(f"NLL {compared(nll, before.nll)} that of the cases as they are pooled: worse")
        return Fitted(before.nll, nll, *outcome, notes)

    def _log_probs(self, logits: Tensor | Sequence[Tensor], image: Tensor | None) -> Tensor:
        if not isinstance(logits, list | tuple):
            return super()._log_probs(logits, image)
        self._check_members(len(logits))
        pooled = pool((z if z.dtype == torch.float64 else z.float() for z in logits), self.space)
        return super()._log_probs(pooled, image).to(logits[0].dtype)

    def _of_base(self, scores: Tensor) -> Tensor:
        return scores - scores.amax(1, keepdim=True) if self.base is None else scores

    @torch.no_grad()
    def _pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        if case.members is not None:
            self._check_members(case.members)
            case = case if case.pooling == self.space else case.pooled(self.space)
        if self.base is None:
            yield from super()._pieces(case)
            return
        if not case.source.sliceable:
            _ = case.logits
        yield from self.base.pieces(case)

    def _check_members(self, count: int) -> None:
        fitted = int(self.members)
        if fitted and count != fitted:
            raise InputError(f"{count} ensemble members", expected=f"{fitted}, as the calibrator was fitted to")
