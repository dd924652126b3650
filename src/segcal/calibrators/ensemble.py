"""An ensemble as a calibrator: the members' scores averaged as logits or as probabilities."""

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
    """``ensemble``: the members of a case pooled in a space of choice, and then the ``base``, if any.

    ``"probs"``: the mean of the softmaxes, ``log(sum_m S(z_m) / M)`` (deep ensembles; Lakshminarayanan et al. 2017).
    ``"logits"``: the softmax of the mean, ``log S(sum_m z_m / M)``, which is the normalised geometric mean of the
    members' probabilities. Neither sees the members' gauge. Where members disagree the first is less confident.

    Pooling fits nothing. It reads the members of every case, so a case needs as many as the calibrator was fitted to;
    cases without members, as tensors are, are taken as pooled already. Labels may change where the cases themselves are
    pooled in the other space, so none are promised. ``forward`` takes a sequence of the members' logits, or one tensor
    that is pooled already; members in one tensor, which could be a volume, are taken apart by ``tensor.unbind(0)``.

    Args:
        space: ``"logits"`` or ``"probs"``.
        base: A calibrator, or its id, that is fitted to the pooled scores and comes after.

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
    # Not its neighbours, but more than the pooled logits of a voxel matters: ``pieces`` has to see the case.
    spatial = True
    members: Tensor

    def __init__(self, space: Kind = "probs", base: Base = None) -> None:
        super().__init__(base)
        self.space: Kind = check_pooling(space)
        if self.base is not None:
            self.translation_invariant = self.base.translation_invariant
        self.register_buffer("members", torch.zeros((), dtype=torch.float64))  # 0 where the cases had none

    def shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        """A number, and those of the base."""
        return {"members": (), **super().shapes(num_classes)}

    def limits(self) -> dict[str, Limits]:
        """A number of members."""
        return {"members": COUNT}

    def _fit(self, data: FitData) -> Fitted:
        before = mean_loss(data.cases)
        notes = []
        self.members.fill_(data.cases.num_members or 0)
        if data.cases.num_members is None:
            notes.append("the cases have no ensemble members: their scores are taken as pooled already")
        else:
            validation = None if data.validation is None else data.validation.pooled(self.space)
            data = data._replace(cases=data.cases.pooled(self.space), validation=validation)
        if self.base is None:
            fitted = Fitted(before.nll, mean_loss(data.cases).nll, True, 0.0, 0, before.voxels)
        else:
            notes += self._fit_base(data)
            report = self.base.fit_report
            assert report is not None
            fitted = Fitted(
                nll_before=before.nll,
                nll_after=report.nll_after,
                converged=report.converged,
                certificate=report.certificate,
                iterations=report.iterations,
                voxels_used=report.voxels_used,
            )
        if fitted.nll_after > fitted.nll_before:
            notes.append(f"NLL {compared(fitted.nll_after, before.nll)} that of the cases as they are pooled: worse")
        return fitted._replace(notes=notes)

    def _log_probs(self, logits: Tensor | Sequence[Tensor], image: Tensor | None) -> Tensor:
        if isinstance(logits, Tensor):
            return super()._log_probs(logits, image)
        self._check_members(len(logits))
        pooled = pool((z if z.dtype == torch.float64 else z.float() for z in logits), self.space)
        return super()._log_probs(pooled, image).to(logits[0].dtype)

    def _scores(self, logits: Tensor) -> Tensor:
        if self.base is None:
            return logits - logits.amax(1, keepdim=True)
        scores: Tensor = self.base(logits)
        return scores

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
