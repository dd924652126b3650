"""The definition itself, in pieces of any size, against plain numpy."""

import numpy as np
import pytest
import torch

from segcal.errors import InputError
from segcal.kernels import BinGrid, Voxels, reference

CLASSES = BinGrid.classwise((15,), (1e-3,))
TOP = BinGrid.top_label((15,), CLASSES)


def voxels(shape=(2, 12, 11), classes=3, seed=0, **options):
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(shape[0], classes, *shape[1:], generator=random)
    labels = torch.randint(0, classes, shape, generator=random)
    labels[torch.rand(shape, generator=random) < 0.1] = 255
    options = {"slots": (labels % 2).to(torch.uint8), "num_slots": 2, **options}
    return Voxels(logits, labels, TOP, CLASSES, ignore_index=255, **options)


@pytest.mark.parametrize(("piece", "matrix"), [(50, 30), (37, 300), (2**15, 60)])
def test_pieces_of_any_size_give_the_same_sums(piece, matrix, monkeypatch):
    whole = reference.tally(voxels(), 1)
    monkeypatch.setattr(reference, "PIECE_VOXELS", piece)
    monkeypatch.setattr(reference, "_MATRIX_SIZE", matrix)
    parts = reference.tally(voxels(), 1)
    for name, expected in whole._asdict().items():
        np.testing.assert_allclose(getattr(parts, name), expected, rtol=1e-12, atol=1e-12, err_msg=name)


def test_a_bad_voxel_of_a_later_piece_is_named(monkeypatch):
    monkeypatch.setattr(reference, "PIECE_VOXELS", 50)
    monkeypatch.setattr(reference, "_MATRIX_SIZE", 30)
    data = voxels()
    data.labels[1, 7, 5] = 3
    with pytest.raises(InputError, match=r"label 3 at voxel \(1, 7, 5\)"):
        reference.tally(data, 1)


def test_cells_are_bins_split_evenly():
    grid = BinGrid.from_edges([0.25, 0.5])
    cells = np.array([[4, 2, 8], [1, 5, 3], [2, 2, 2]])
    data = voxels(slots=None, num_slots=1)
    count, total, positive = reference.refine(data, grid, cells)
    valid = data.labels != 255
    labels = data.labels[valid].numpy()
    p = data.logits.double().softmax(1).movedim(1, -1)[valid].numpy()
    start = 0
    for k, row in enumerate(cells):
        ends = [
            np.linspace(*edges, parts + 1) for edges, parts in zip([(0, 0.25), (0.25, 0.5), (0.5, 1)], row, strict=True)
        ]
        edges = np.concatenate([[0.0], *(part[1:] for part in ends)])
        own = np.searchsorted(edges, p[:, k]) - 1
        here = slice(start, start + row.sum())
        assert np.array_equal(count[here], np.bincount(own, minlength=row.sum()))
        assert np.array_equal(positive[here], np.bincount(own[labels == k], minlength=row.sum()))
        np.testing.assert_allclose(total[here], np.bincount(own, p[:, k], minlength=row.sum()), rtol=1e-12)
        start += row.sum()


def test_sums_in_parts_are_the_sums():
    random = torch.Generator().manual_seed(0)
    index, values = torch.randint(0, 7, (5000,), generator=random), torch.rand(5000, generator=random).double()
    plain, parts = torch.ones(7).double().index_add_(0, index, values), torch.ones(7).double()
    reference.sum_in_parts(parts, values, index)
    torch.testing.assert_close(parts, plain)
