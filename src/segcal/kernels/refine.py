"""Class-probability histograms with some bins split further: the second pass of exact equal-mass bins."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from segcal.kernels.grid import BinGrid
from segcal.kernels.reference import batches, bins, device_of
from segcal.kernels.tally import Counts, Sums
from segcal.kernels.voxels import Voxels


def refine(voxels: Voxels, grid: BinGrid, cells: NDArray[np.int64]) -> tuple[Counts, Sums, Counts]:
    """Count, sum of probabilities and positives per cell; bin i of class c is split into ``cells[c, i]`` equal cells.

    The arrays hold all cells of the first class in ascending order, then of the second, and so on. Float64, any device.

    Examples:
        >>> grid = BinGrid.from_edges([0.5])
        >>> voxels = Voxels(torch.tensor([[3.0, 0.0]]), torch.tensor([1]), grid, None)
        >>> refine(voxels, grid, np.array([[1, 1], [4, 1]]))[0]
        array([0, 1, 1, 0, 0, 0, 0])
    """
    device = device_of(voxels)
    sizes = torch.from_numpy(cells).to(device)
    starts = (sizes.reshape(-1).cumsum(0) - sizes.reshape(-1)).reshape(sizes.shape)
    lower, upper = torch.from_numpy(grid.lower).to(device), torch.from_numpy(grid.upper).to(device)
    length = int(sizes.sum())
    count = torch.zeros(length, dtype=torch.int64, device=device)
    positive, total = torch.zeros_like(count), torch.zeros(length, dtype=torch.float64, device=device)
    for z, y, *_ in batches(voxels):
        p = torch.softmax(z, 0)
        i = bins(grid, p)
        size = sizes.gather(1, i)
        cell = ((p - lower[i]) / (upper[i] - lower[i]) * size).ceil().long() - 1
        where = starts.gather(1, i) + torch.minimum(cell.clamp_(min=0), size - 1)
        count += torch.bincount(where.reshape(-1), minlength=length)
        positive += torch.bincount(where.gather(0, y[None]).reshape(-1), minlength=length)
        total.index_put_((where.reshape(-1),), p.reshape(-1), accumulate=True)
    return count.cpu().numpy(), total.cpu().numpy(), positive.cpu().numpy()
