"""The modules in a real ``MetricCollection``, in one process and in two; see also ``tests/metrics/test_modules.py``."""

import numpy as np
import pytest
import torch
from torch import multiprocessing

import torchmetrics_ranks
from peers import peer

torchmetrics = peer("torchmetrics")


def assert_same(found, expected, tolerance=1e-12):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(float(value), float(expected[name]), rtol=tolerance, atol=tolerance, err_msg=name)


def batches():
    logits, labels = torchmetrics_ranks.images()
    return [(logits[n : n + 3], labels[n : n + 3]) for n in range(0, 9, 3)]


def whole():
    collection = torchmetrics_ranks.metrics()
    collection.update(*torchmetrics_ranks.images())
    return collection.compute()


GROUPS = [["agreement"], ["calibration"], ["l1", "l2", "max"], ["top label"]]


@pytest.mark.parametrize("groups", [True, False, GROUPS])
def test_groups_change_nothing(groups):
    parts = dict(torchmetrics_ranks.metrics().items(keep_base=True))
    collection = torchmetrics.MetricCollection(parts, prefix="val/", compute_groups=groups)
    for _ in range(2):
        for batch in batches():
            collection.update(*batch)
        assert_same(collection.compute(), whole())
        if groups is True:
            # Torchmetrics finds those that share a state, and updates it once for all of them.
            assert sorted(map(sorted, collection.compute_groups.values())) == GROUPS
        collection.reset()
    assert not any(bool(state.any()) for state in collection["calibration"].metric_state.values())


def test_forward_gives_the_batch_and_adds_it():
    collection = torchmetrics_ranks.metrics()
    for batch in batches():
        alone = torchmetrics_ranks.metrics()
        alone.update(*batch)
        assert_same(collection(*batch), alone.compute())
    assert_same(collection.compute(), whole(), 1e-9)  # torchmetrics' accuracy is float32


def test_state_dict_and_clone_carry_on():
    collection, (first, *others) = torchmetrics_ranks.metrics(), batches()
    collection.update(*first)
    collection.persistent(True)
    loaded = torchmetrics_ranks.metrics()
    missing = loaded.load_state_dict(collection.state_dict(), strict=False)
    assert not missing.missing_keys
    copies = [collection, loaded, collection.clone(prefix="val/")]
    for one in copies:
        for batch in others:
            one.update(*batch)
    for one in copies:
        assert_same(one.compute(), whole(), 1e-9)


def test_two_processes_give_the_values_of_one(tmp_path):
    multiprocessing.spawn(torchmetrics_ranks.measure, args=(str(tmp_path),), nprocs=2)
    expected, labels = whole(), torchmetrics_ranks.images()[1]
    seen = 0
    for rank in range(2):
        values, confusion, own, groups, merged, everyone = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert_same(values, expected, 1e-9)
        assert int(confusion.sum()) == int((labels != 255).sum())
        assert confusion.dtype == torch.int64
        assert ["l1", "l2", "max"] in list(groups.values())
        assert merged == torchmetrics_ranks.statistics(range(2, 9)).to_dict()
        assert everyone == torchmetrics_ranks.statistics(range(9)).total("left").confusion.tolist()
        seen += own  # each process has its own voxels again
    assert seen == int((labels != 255).sum())
