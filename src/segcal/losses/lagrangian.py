"""The multipliers of CRaC, one per class and region, updated on the validation set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from segcal.errors import InputError

# Bounds of the multipliers, which start at the lower one.
LOWEST, HIGHEST = 1e-6, 1e6
# Start, upper bound and growth factor of the penalty parameter rho.
RHO_START, RHO_HIGHEST, RHO_GROWTH = 0.1, 10.0, 1.2
# Epochs between two checks of whether the violation shrinks.
CHECK_EPOCHS = 10
# rho grows if the mean violation exceeds this share of its value at the previous check.
IMPROVEMENT = 0.9


class Multipliers(nn.Module):
    """Lagrange multipliers and penalty parameters ``(2, C)``; rows are the inner and the outer region.

    An update sets ``lambda <- mean of lambda + rho h`` over the validation voxels of the region (h is the violation of
    the constraint), within [1e-6, 1e6]. Every tenth update, rho grows by 1.2, up to 10, where mean h exceeds 0.9 of its
    value ten updates earlier. Only the sums of h are kept, so batches and processes of ``torch.distributed`` add up. A
    region without voxels keeps its values.

    Attributes:
        values: lambda ``(2, C)``.
        rho: ``(2, C)``.
        trace: One dict per update: ``epoch``, and ``multipliers``, ``rho``, ``violation`` (mean h; NaN without voxels)
            as nested lists, inner then outer.

    Examples:
        >>> multipliers = Multipliers(2)
        >>> multipliers.add(torch.tensor([[2.0, 4.0], [9.0, 9.0]]), torch.tensor([2, 3]))
        >>> multipliers.update()
        >>> multipliers.values
        tensor([[0.1000, 0.2000],
                [0.3000, 0.3000]], dtype=torch.float64)
    """

    values: Tensor
    rho: Tensor
    previous: Tensor
    epoch: Tensor
    sums: Tensor
    voxels: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        if num_classes < 2:
            raise InputError(f"num_classes is {num_classes}", expected="at least 2")
        start = torch.zeros(2, num_classes, dtype=torch.float64)
        self.register_buffer("values", start + LOWEST)
        self.register_buffer("rho", start + RHO_START)
        self.register_buffer("previous", start + torch.nan)
        self.register_buffer("epoch", torch.zeros((), dtype=torch.int64))
        self.register_buffer("sums", start)
        self.register_buffer("voxels", torch.zeros(2, dtype=torch.int64))
        self.trace: list[dict[str, Any]] = []

    def add(self, sums: Tensor, voxels: Tensor) -> None:
        """Add sums of violations ``(2, C)`` over this many voxels ``(2,)`` of each region."""
        self.sums += sums.to(self.sums)
        self.voxels += voxels.to(self.voxels)

    def merge(self, other: Multipliers) -> None:
        """Add the sums that other multipliers have collected since their last update."""
        self.add(other.sums, other.voxels)

    def update(self) -> None:
        """Update from the sums added since the last update, in all processes together."""
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(self.sums)
            distributed.all_reduce(self.voxels)
        if not int(self.voxels.sum()):
            raise InputError(
                "CRaC was given no validation voxel since the last update",
                expected="a validation set: the multipliers are learned on it",
                fix="call observe(logits, labels) for every validation batch before update()",
            )
        seen = (self.voxels > 0).unsqueeze(1).expand_as(self.sums)
        mean = self.sums / self.voxels.unsqueeze(1)
        if not bool(mean[seen].isfinite().all()):
            raise InputError("validation logits are not finite", expected="finite logits", fix="lower the step size")
        self.epoch += 1
        self.values.copy_(torch.where(seen, (self.values + self.rho * mean).clamp(LOWEST, HIGHEST), self.values))
        if int(self.epoch) % CHECK_EPOCHS == 0:
            stuck = seen & (mean > IMPROVEMENT * self.previous)  # False at the first check, as NaN compares false
            self.rho.copy_(torch.where(stuck, (self.rho * RHO_GROWTH).clamp_max(RHO_HIGHEST), self.rho))
            self.previous.copy_(torch.where(seen, mean, self.previous))
        entry = {"multipliers": self.values, "rho": self.rho, "violation": mean}
        self.trace.append({"epoch": int(self.epoch)} | {name: values.tolist() for name, values in entry.items()})
        self.sums.zero_()
        self.voxels.zero_()

    def get_extra_state(self) -> list[dict[str, Any]]:
        """The trace, which goes into the checkpoint with the tensors."""
        return self.trace

    def set_extra_state(self, state: list[dict[str, Any]]) -> None:
        """Restore the trace from a checkpoint."""
        self.trace = list(state)
