"""Chunks that lie in memory are given to a function together, with the same result as one by one."""

import pytest
import torch

import segcal
from segcal.errors import InputError
from segcal.fitting import data


@pytest.fixture
def tensors():
    random = torch.Generator().manual_seed(0)
    return torch.randn(6, 3, 8, 9, generator=random), torch.randint(3, (6, 8, 9), generator=random)


@pytest.mark.parametrize("together", [1, 500, 2**26])
def test_all_voxels_come_once_in_their_order(tensors, together, monkeypatch):
    monkeypatch.setattr(data, "_TOGETHER", together)
    cases = segcal.cases_from(tensors)
    groups = list(data.in_groups(cases, lambda voxels: [own.logits for own in voxels]))
    assert torch.equal(torch.cat([logits for group in groups for logits in group]), tensors[0])
    assert (len(groups) == 1) == (together == 2**26)


def test_an_error_names_the_case(tensors):
    tensors[0][4, 0, 2, 3] = torch.nan
    batches = [
        {"logits": z[None], "labels": y[None], "id": [f"case{n}"]}
        for n, (z, y) in enumerate(zip(*tensors, strict=True))
    ]
    cases = segcal.cases_from(batches)
    with pytest.raises(InputError, match="case4"):
        segcal.calibrators.TemperatureScaling().fit(cases)


def test_threads_do_not_change_the_sample(tensors):
    found = []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        found.append(segcal.calibrators.TemperatureScaling().fit(*tensors).beta.item())
    torch.set_num_threads(1)
    assert found[0] == pytest.approx(found[1], rel=1e-12)
