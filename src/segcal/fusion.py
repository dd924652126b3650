"""Label fusion: one segmentation from several candidates, such as the labels of registered atlases.

Shapes: ``candidates (M, *spatial)`` are the labels that M candidates propose, ``probabilities (M, *spatial)`` the
probability that each label is right. Voxels are fused in chunks, so memory beyond the inputs and the result does not
grow with the image.

Votes are weighted by probabilities, so calibration matters: an overconfident candidate outvotes calibrated ones.

Examples:
    >>> candidates = torch.tensor([[0, 1], [0, 2], [1, 2]])  # three candidates, two voxels
    >>> plurality(candidates, num_classes=3)
    tensor([0, 2])
    >>> weighted(candidates, torch.tensor([[0.6, 0.9], [0.6, 0.3], [0.9, 0.4]]), num_classes=3)
    tensor([0, 1])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from segcal.errors import InputError

__all__ = ["best_calibration", "best_fusion", "joint", "joint_weights", "majority", "plurality", "weighted"]

# Most votes (voxels of a chunk times classes) in memory at once.
_CHUNK_VALUES = 2**22

Weights = Callable[[Tensor], Tensor]


def majority(candidates: Tensor, num_classes: int, *, undecided: int = 255) -> Tensor:
    """The label that more than half of the candidates propose, or ``undecided`` if there is none.

    Examples:
        >>> majority(torch.tensor([[0, 1], [0, 2], [1, 0]]), num_classes=3)
        tensor([  0, 255])
    """
    labels, votes = _vote(candidates, num_classes)
    return torch.where(2 * votes > len(candidates), labels, undecided)


def plurality(candidates: Tensor, num_classes: int) -> Tensor:
    """The label that most candidates propose; of ties, the smallest.

    Examples:
        >>> plurality(torch.tensor([[2, 1], [2, 2], [1, 0]]), num_classes=3)
        tensor([2, 0])
    """
    return _vote(candidates, num_classes)[0]


def weighted(candidates: Tensor, probabilities: Tensor, num_classes: int) -> Tensor:
    """Spatially weighted voting: the label with the largest sum of ``w_i = p_i`` over its candidates.

    Examples:
        >>> candidates = torch.tensor([[0], [0], [1]])
        >>> weighted(candidates, torch.tensor([[0.3], [0.3], [0.9]]), num_classes=2)
        tensor([1])
    """
    return _vote(candidates, num_classes, probabilities)[0]


def joint(candidates: Tensor, probabilities: Tensor, num_classes: int, *, epsilon: float = 0.1) -> Tensor:
    """Joint label fusion: weighted voting with ``joint_weights``, which account for correlated errors.

    Wang et al., PAMI 2013, with error probabilities instead of intensities (Ding et al. 2021, appendix K).

    Args:
        candidates: Labels 0..C-1, ``(M, *spatial)``.
        probabilities: The probability that each is right, ``(M, *spatial)``, in [0, 1].
        num_classes: C.
        epsilon: See ``joint_weights``.

    Examples:
        >>> candidates = torch.tensor([[0], [0], [1]])
        >>> joint(candidates, torch.tensor([[0.3], [0.3], [0.9]]), num_classes=2)
        tensor([1])
    """
    if not epsilon > 0:
        raise InputError(f"epsilon is {epsilon}", expected="a positive number")
    return _vote(candidates, num_classes, probabilities, partial(joint_weights, epsilon=epsilon))[0]


def joint_weights(probabilities: Tensor, *, epsilon: float = 0.1) -> Tensor:
    """Weights ``(M, *spatial)`` that sum to 1 at each voxel and minimise the expected squared error of the vote.

    ``w = M^-1 1 / (1' M^-1 1)`` with ``M_ij = q_i q_j + epsilon [i = j]`` and ``q_i = 1 - p_i``, the probability that i
    and j are both wrong. M is of rank one plus a multiple of the identity, so by Sherman and Morrison

        w_i = (1 - d_i sum_j q_j / (epsilon + sum_j d_j^2)) / M,    d_i = q_i - mean q

    without a matrix. Candidates that are much worse than the others get negative weights. A large epsilon makes all
    weights equal.

    Examples:
        >>> joint_weights(torch.tensor([[0.9], [0.9], [0.2]])).flatten()
        tensor([ 0.5156,  0.5156, -0.0312])
    """
    wrong = 1 - (probabilities if probabilities.dtype == torch.float64 else probabilities.float())
    difference = wrong - wrong.mean(0)
    return (1 - difference * wrong.sum(0) / (epsilon + difference.square().sum(0))) / len(wrong)


def best_fusion(candidates: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """The upper bound of fusion: the true label wherever any candidate proposes it, else the plurality's.

    Examples:
        >>> best_fusion(torch.tensor([[0, 1], [2, 1]]), torch.tensor([2, 0]), num_classes=3)
        tensor([2, 1])
    """
    _check_truth(candidates, labels)
    return torch.where((candidates == labels).any(0), labels, plurality(candidates, num_classes))


def best_calibration(candidates: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """The upper bound of calibration: probability 1 where a candidate is right, ``1 / C`` where it is wrong.

    Pass it to ``joint`` (Ding et al. 2021, section 4.4).

    Examples:
        >>> best_calibration(torch.tensor([[0, 1], [2, 1]]), torch.tensor([2, 1]), num_classes=4)
        tensor([[0.2500, 1.0000],
                [1.0000, 1.0000]])
    """
    _check_truth(candidates, labels)
    return torch.where(candidates == labels, 1.0, 1 / num_classes)


def _vote(
    candidates: Tensor, num_classes: int, probabilities: Tensor | None = None, weights: Weights = Tensor.double
) -> tuple[Tensor, Tensor]:
    """The label with the largest sum of weights (of ties, the smallest) and that sum: ``(*spatial)`` each.

    Weights are a function of the probabilities, by default these themselves; without any, all votes count alike.
    """
    _check(candidates, probabilities, num_classes)
    flat = candidates.flatten(1)
    trust = flat.new_ones(()).expand_as(flat) if probabilities is None else probabilities.flatten(1)
    labels = torch.empty(flat.shape[1], dtype=torch.int64, device=flat.device)
    largest = torch.empty(flat.shape[1], dtype=torch.float64, device=flat.device)
    step = max(1, _CHUNK_VALUES // max(num_classes, len(flat)))
    for start in range(0, flat.shape[1], step):
        here = slice(start, start + step)
        proposed = flat[:, here].long()
        votes = torch.zeros(num_classes, proposed.shape[1], dtype=torch.float64, device=flat.device)
        votes.scatter_add_(0, proposed, weights(trust[:, here]).double())
        largest[here], labels[here] = votes.amax(0), votes.argmax(0)
    return labels.view(candidates.shape[1:]), largest.view(candidates.shape[1:])


def _check(candidates: Tensor, probabilities: Tensor | None, num_classes: int) -> None:
    if candidates.ndim < 2 or not len(candidates) or candidates.is_floating_point():
        raise InputError(
            f"candidates have shape {tuple(candidates.shape)} and dtype {candidates.dtype}",
            expected="(M, *spatial) integers, at least one candidate",
        )
    low, high = map(int, candidates.long().aminmax()) if candidates.numel() else (0, 0)  # uint16 has no minimum
    if not 0 <= low <= high < num_classes:
        raise InputError(
            f"candidates hold labels {low} to {high}",
            expected=f"0..{num_classes - 1}",
            fix="give every candidate a label everywhere, background included",
        )
    if probabilities is None:
        return
    if probabilities.shape != candidates.shape:
        raise InputError(
            f"probabilities have shape {tuple(probabilities.shape)}",
            expected=f"{tuple(candidates.shape)}, one for each candidate's label",
        )
    least, most = (float(probabilities.min()), float(probabilities.max())) if probabilities.numel() else (0.0, 1.0)
    if math.isnan(least) or least < 0 or most > 1:
        raise InputError(f"probabilities lie between {least:g} and {most:g}", expected="values in [0, 1]")


def _check_truth(candidates: Tensor, labels: Tensor) -> None:
    if candidates.shape[1:] != labels.shape:
        raise InputError(
            f"labels have shape {tuple(labels.shape)}", expected=f"{tuple(candidates.shape[1:])} as the candidates have"
        )
