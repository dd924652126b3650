"""Statistics of the processes of a distributed training job."""

from __future__ import annotations

from typing import Any

from torch import distributed

from segcal.statistics import VoxelStatistics


def of_all_processes(own: VoxelStatistics | None) -> VoxelStatistics | None:
    """The statistics of all processes, in each of them; a process that has seen no image gives None.

    Examples:
        >>> of_all_processes(VoxelStatistics(2))  # a single process
        VoxelStatistics(num_classes=2, voxels=0)
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return own
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, None if own is None else own.to_dict())
    parts = [VoxelStatistics.from_dict(part) for part in found if part is not None]
    if not parts:
        return None
    whole = parts[0].empty_like()
    for part in parts:
        whole.merge(part)
    return whole
