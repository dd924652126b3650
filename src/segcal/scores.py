"""Canonical logits, pooling of ensemble members, free energy, and the multi-label view.

Shapes are ``(N, C, *spatial)`` throughout. Probabilities become ``log(clamp(p, tiny))``, which are logits up to a
constant per voxel. Logits keep their offset, because some calibrators depend on it and the user should know.

Examples:
    >>> canonical_logits(torch.tensor([[0.25, 0.75]]), "probs").exp()
    tensor([[0.2500, 0.7500]])
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from segcal.errors import InputError, check_name
from segcal.types import Kind

KINDS: tuple[Kind, ...] = ("logits", "probs")

#: A class this many nats below the best of its voxel counts as impossible, exactly as one at -inf. No softmax can tell
#: them apart (the smallest positive float64 is exp(-745)), and masks are written as -1e4, -65504, -1e9 or -1e30.
DEPTH = 1e3
#: The largest logit offset that maps see: all finite logits then give finite scores, and no voxel with a huge offset
#: costs its neighbours precision.
OFFSET_LIMIT = 1e4


def canonical_logits(scores: Tensor, kind: Kind, *, multilabel: bool = False, first_row: int = 0) -> Tensor:
    """Logits of the declared scores in float32 (float64 stays), checked: no NaN, no +inf, probabilities sum to 1.

    With ``multilabel`` the K channels are sigmoid scores and come back as K two-class problems ``(N*K, 2, *spatial)``.
    ``first_row`` is the row of the case at which these scores begin, so that errors name the right voxel.

    Examples:
        >>> canonical_logits(torch.tensor([[0.25, 0.75]]), "probs").exp()
        tensor([[0.2500, 0.7500]])
    """
    check_name("kind", kind, KINDS, expected="'logits' or 'probs', whichever the scores are")
    if scores.ndim < 2:
        raise InputError(f"scores have shape {tuple(scores.shape)}", expected="(N, C, *spatial)")
    if not scores.is_floating_point():
        raise InputError(
            f"scores have dtype {scores.dtype}",
            expected="floating point logits or probabilities",
            fix="save the network's softmax or logits, not the label map or 8-bit previews",
        )
    if scores.shape[1] == 1 and not multilabel:
        raise one_channel()
    rounding = torch.finfo(scores.dtype).eps
    scores = at_least_float32(scores)
    if kind == "probs":
        _check_probabilities(scores, rounding, first_row, sums_to_one=not multilabel)
    else:
        _check_logits(scores, first_row)
    if multilabel:
        return multilabel_view(scores, kind)
    return log_clamped(scores) if kind == "probs" else scores


def multilabel_view(scores: Tensor, kind: Kind) -> Tensor:
    """K sigmoid channels as K two-class problems: ``(N, K, *spatial)`` to ``(N*K, 2, *spatial)``.

    Examples:
        >>> multilabel_view(torch.zeros(1, 3, 4, 5), "logits").shape
        torch.Size([3, 2, 4, 5])
    """
    scores = scores.flatten(0, 1)
    if kind == "probs":
        return torch.stack((log_clamped(1 - scores), log_clamped(scores)), 1)
    return torch.stack((torch.zeros_like(scores), scores), 1)


class Pool:
    """The running pool of ensemble members, which are added one by one and need not be kept in memory.

    ``logits``: mean of the logits. ``probs``: log of the mean of the softmaxes, by log-sum-exp. Sums in float64; the
    result has the members' dtype. The logits of a single member stay as they are, with their offset.
    """

    def __init__(self, space: Kind) -> None:
        check_name("pooling", space, KINDS)
        self.space, self.count = space, 0
        self._first: Tensor | None = None
        self._total: Tensor | None = None

    def add(self, member: Tensor) -> None:
        """Add the logits ``(N, C, *spatial)`` of one member."""
        self.count += 1
        if self._first is None:
            self._first, self._shape = member, member.shape
            return
        if member.shape != self._shape:
            raise InputError(
                f"ensemble member {self.count} has shape {tuple(member.shape)}",
                expected=f"{tuple(self._shape)} as the first member has",
            )
        if self._total is None:
            self._total = self._term(self._first)
            self._first = self._first[:0]  # Only its dtype is still needed.
        if self.space == "logits":
            self._total.add_(member)
        else:
            torch.logaddexp(self._total, self._term(member), out=self._total)

    def _term(self, member: Tensor) -> Tensor:
        return member.double() if self.space == "logits" else member.double().log_softmax(1)

    def result(self) -> Tensor:
        """The pooled logits."""
        if self._first is None:
            raise InputError("an ensemble without members", expected="at least one")
        if self._total is None:
            return self._first
        pooled = self._total / self.count if self.space == "logits" else self._total - math.log(self.count)
        return pooled.to(self._first.dtype)


def pool(members: Iterable[Tensor], space: Kind) -> Tensor:
    """Pool the logits of ensemble members, one member in memory at a time; see ``Pool``.

    Examples:
        >>> a, b = torch.tensor([[0.0, 2.0]]), torch.tensor([[0.0, 0.0]])
        >>> pool([a, b], "logits")
        tensor([[0., 1.]])
        >>> pool([a, b], "probs").exp()
        tensor([[0.3096, 0.6904]])
    """
    running = Pool(space)
    for member in members:
        running.add(member)
    return running.result()


def keep_argmax(scores: Tensor, winner: Tensor) -> Tensor:
    """Scores ``(N, C, *spatial)`` whose argmax is ``winner (N, *spatial)``, bit for bit.

    For scores that went through a monotone map or a smaller type: rounding can create a tie, and a tie goes to the
    first index. Scores that reach the winner's value become the next smaller number; the others stay.

    Examples:
        >>> keep_argmax(torch.tensor([[-1.0, -1.0, -9.0]]), torch.tensor([1])).argmax(1)
        tensor([1])
    """
    winner = winner.unsqueeze(1)
    best = scores.gather(1, winner)
    with torch.no_grad():  # nextafter has no derivative before torch 2.12
        step = torch.nextafter(best, torch.full_like(best, -torch.inf)) - best
        step = torch.where(torch.isneginf(best), 0.0, step)
    return torch.minimum(scores, best + step).scatter(1, winner, best)


def keep_order(scores: Tensor, logits: Tensor) -> Tensor:
    """Scores whose falling order is that of the logits, both ``(N, C, *spatial)``.

    For maps that keep the order but for rounding: a score above that of a class with a larger logit is lowered to it.

    Examples:
        >>> keep_order(torch.tensor([[-1.0, -3.0, -2.9]]), torch.tensor([[5.0, 2.0, 1.0]]))
        tensor([[-1., -3., -3.]])
    """
    order = logits.sort(dim=1, descending=True, stable=True).indices
    return torch.zeros_like(scores).scatter(1, order, scores.gather(1, order).cummin(1).values)


def round_keeping_argmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits in a smaller type with the argmax of every voxel unchanged.

    Values that the type cannot represent are an error, never an infinity.

    Examples:
        >>> z = torch.tensor([[1.0, 1.0001]])
        >>> round_keeping_argmax(z, torch.float16).argmax(1)
        tensor([1])
    """
    if logits.dtype == dtype:
        return logits
    rounded = logits.to(dtype)
    overflow = torch.isinf(rounded) & ~torch.isinf(logits)
    if bool(overflow.any()):
        raise InputError(
            f"logits up to {float(logits[overflow].abs().max()):.6g} do not fit {dtype}",
            expected=f"at most {torch.finfo(dtype).max:.6g}",
            fix="choose float32",
        )
    return keep_argmax(rounded, logits.argmax(1))


def log_probabilities(logits: Tensor) -> Tensor:
    """``log S(z)``, ``(N, C, *spatial)``, that keeps the order exactly and 1 - p of the winner precisely."""
    best, winner = logits.max(1, keepdim=True)
    gap = logits - best
    others = gap.exp().scatter(1, winner, 0.0).sum(1, keepdim=True)
    return gap - torch.log1p(others)


def probabilities(log_probs: Tensor, dtype: torch.dtype) -> Tensor:
    """Probabilities ``(N, C, *spatial)`` of log-probabilities. No argmax changes by the exponential or by rounding.

    Examples:
        >>> probabilities(torch.tensor([[-0.7, -0.68615]]), torch.float16)
        tensor([[0.4966, 0.5034]], dtype=torch.float16)
    """
    return keep_argmax(log_probs.exp().to(dtype), log_probs.argmax(1))


def presence(log_probs: Tensor, dtype: torch.dtype) -> Tensor:
    """The probability ``(N, *spatial)`` of the second of two classes; above 0.5 exactly where it is the argmax.

    Examples:
        >>> presence(torch.tensor([[-0.7, -0.68615], [-0.1, -2.3522]]), torch.float32)
        tensor([0.5035, 0.0952])
    """
    inside = (log_probs[:, 1] - log_probs[:, 0]).sigmoid().to(dtype)
    above = 0.5 + 0.5 * torch.finfo(dtype).eps  # the next number
    return torch.where(log_probs.argmax(1) == 1, inside.clamp(min=above), inside.clamp(max=0.5))


def at_least_float32(logits: Tensor) -> Tensor:
    """Logits in float32, or in float64 if they are."""
    return logits if logits.dtype == torch.float64 else logits.float()


def only_possible(logits: Tensor) -> Tensor:
    """Logits ``(N, C, *spatial)`` with -inf for every class ``DEPTH`` below the best of its voxel.

    Examples:
        >>> only_possible(torch.tensor([[3e38, 0.0, -3e38], [2.0, 0.0, -1e9]]))
        tensor([[3.0000e+38,       -inf,       -inf],
                [2.0000e+00, 0.0000e+00,       -inf]])
    """
    return torch.where(logits.amax(1, keepdim=True) - logits > DEPTH, -torch.inf, logits)


def some_impossible(logits: Tensor) -> bool:
    """Whether a voxel of logits ``(N, C, *spatial)`` has a class ``DEPTH`` below its best; usually from one read."""
    if not logits.numel():
        return False
    lowest, highest = torch.aminmax(logits)
    if float(highest) - float(lowest) <= DEPTH:
        return False
    exact = at_least_float32(logits)
    return bool((exact.amax(1) - exact.amin(1) > DEPTH).any())


def one_channel() -> InputError:
    """The error for scores of a single channel that are not declared as multi-label."""
    return InputError(
        "scores have one channel",
        expected="at least two classes",
        fix="declare a sigmoid output with multilabel = true",
    )


def impossible_label() -> InputError:
    """The error for voxels whose true class is impossible."""
    return InputError(
        f"some voxels are labelled with a class whose logit is -inf, or more than {DEPTH:g} below the best: their NLL "
        "is infinite",
        expected="impossible classes to be absent from the labels",
        fix="mask these voxels, or divide all logits by a constant if they are meant to be so large",
    )


def without_softmax(best: float, place: str) -> InputError:
    """The error for voxels whose best logit is NaN or infinite; ``place`` says which, in words."""
    if math.isnan(best):
        problem, fix = "NaN logits", "find where the network makes them; write 0 in padding"
    elif best > 0:
        problem, fix = "infinite logits", "save float32, which overflows above 3e38 (float16 above 65504)"
    else:
        problem, fix = "every class is -inf", "leave at least one class possible, or mask the voxels"
    return InputError(f"{problem} {place}", expected="finite logits (-inf only for impossible classes)", fix=fix)


def free_energy(logits: Tensor) -> Tensor:
    """``logsumexp(z)`` per voxel: the offset of the logits, which the softmax does not see.

    Sign as in Kirscher et al., so that ``log S(z) = z - free_energy(z)``. ``(N, C, *spatial)`` to ``(N, *spatial)``.

    Examples:
        >>> free_energy(torch.zeros(1, 4)).exp()
        tensor([4.])
    """
    return torch.logsumexp(logits, 1)


def sum_to_one(logits: Tensor) -> bool:
    """Whether logits ``(N, C, rows, ...)`` look like probabilities, by some of their rows."""
    some = logits[:, :, :: max(1, logits.shape[2] // 8)]
    return bool((some.min() >= 0) & ((some.sum(1) - 1).abs().max() < 1e-3))


def log_clamped(probabilities: Tensor) -> Tensor:
    """Logits of probabilities: ``log(max(p, tiny))``.

    Examples:
        >>> log_clamped(torch.tensor([1.0, 0.0]))
        tensor([  0.0000, -87.3365])
    """
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()


def _first(bad: Tensor, first_row: int) -> str:
    """The first offending voxel of an ``(N, *spatial)`` mask, in words; without spatial axes, its index in N."""
    item, *space = bad.nonzero()[0].tolist()
    if space:
        space[0] += first_row
    return f"at voxel {tuple(space) if space else item} and {int(bad.sum()) - 1} others"


def _check_logits(logits: Tensor, first_row: int) -> None:
    # The maximum over classes propagates NaN and +inf, and is -inf only where every class is impossible.
    best = logits.amax(1)
    for bad in (torch.isnan(best), ~torch.isfinite(best)):
        if bool(bad.any()):
            raise without_softmax(float(best[bad][0]), _first(bad, first_row))


def _check_probabilities(p: Tensor, rounding: float, first_row: int, *, sums_to_one: bool) -> None:
    if bool(torch.isnan(p).any()):
        raise InputError(f"NaN probabilities {_first(torch.isnan(p).any(1), first_row)}", expected="values in [0, 1]")
    tolerance = max(1e-3, 4 * rounding)
    outside = (p.amin(1) < -tolerance) | (p.amax(1) > 1 + tolerance)
    if bool(outside.any()):
        raise InputError(
            f"values from {float(p.min()):.4g} to {float(p.max()):.4g}, outside [0, 1] {_first(outside, first_row)}",
            expected="probabilities",
            fix="if these are logits, declare kind = 'logits' (folder logits/)",
        )
    if sums_to_one:
        off = (p.sum(1) - 1).abs() > tolerance
        if bool(off.any()):
            worst = float((p.sum(1) - 1).abs().max())
            raise InputError(
                f"probabilities do not sum to 1 (off by up to {worst:.3g}) {_first(off, first_row)}",
                expected=f"sums within {tolerance:.0e} of 1",
                fix="apply the softmax before saving; for sigmoid outputs declare multilabel = true",
            )
