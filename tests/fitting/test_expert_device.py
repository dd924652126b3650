"""The sums and samples that are computed on accelerators: plain torch, so they can be tested on the CPU."""

import numpy as np
import pytest
import torch

from segcal.fitting import sampling
from segcal.fitting.expert_device import DeviceRows, device_sums
from segcal.fitting.expert_sums import Rows, expert_sums


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("features", ["logits", "own-logit", "log-probs", "margins", "gaps"])
def test_device_sums_equal_those_of_the_cpu(features, routed):
    if features == "own-logit" and routed:
        return
    random, classes = torch.Generator().manual_seed(0), 4
    z = 3 * torch.randn(800, classes, generator=random)
    y = torch.randint(classes, (800,), generator=random)
    z[:50, 2], y[:50] = -torch.inf, 0
    weights = torch.rand(800, generator=random).double() + 0.5
    outputs, experts = classes - (features == "gaps"), classes if routed else 1
    theta = np.random.default_rng(1).normal(size=(experts, outputs, 2 if features == "own-logit" else outputs + 1))
    rows, there = (kind.of(z, y, w, features, experts) for kind, w in ((Rows, weights.numpy()), (DeviceRows, weights)))
    for some in (None, [0]):
        expected = expert_sums(rows, theta, features, curvature=True, experts=some)
        for own, other in zip(device_sums(there, theta, features, curvature=True, experts=some), expected, strict=True):
            assert np.allclose(own, other, rtol=1e-10, atol=1e-10 * np.abs(other).max())


def test_the_sample_of_a_device_is_that_of_the_cpu():
    positions = np.arange(1000, dtype=np.uint64) * np.uint64(7919) + np.uint64(2**63 - 500)
    there = sampling._hash_on_device(torch.from_numpy(positions.view(np.int64)))
    assert np.array_equal(there.numpy().view(np.uint64), sampling._hash(positions))
    random = np.random.default_rng(0)
    strata = random.integers(-1, 20, 3000)
    highest = random.integers(2**62, 2**64 - 1, 20, dtype=np.uint64)
    sizes, other_sizes = np.zeros(20, np.int64), np.zeros(20, np.int64)
    kept, keys = sampling._choose(strata, np.uint64(5), highest, sizes)
    found = sampling._choose_on_device(torch.from_numpy(strata), 5, highest, other_sizes, 10**9)
    for own, other in zip(found, (kept, strata[kept], keys), strict=True):
        assert np.array_equal(own, other)
    assert np.array_equal(sizes, other_sizes)


def test_a_device_gives_no_more_voxels_than_a_sample_can_hold():
    strata = torch.from_numpy(np.random.default_rng(0).integers(0, 20, 3000))
    highest = np.full(20, np.iinfo(np.uint64).max, np.uint64)
    lowered = highest.copy()
    kept, of_kept, keys = sampling._choose_on_device(strata, 5, lowered, np.zeros(20, np.int64), 300)
    assert 300 <= len(kept) <= 300 + 3 * 20
    everything, of_all, all_keys = sampling._choose_on_device(strata, 5, highest, np.zeros(20, np.int64), 10**9)
    for stratum in range(20):  # the lowest keys of every stratum
        lowest = np.sort(all_keys[of_all == stratum])[: np.count_nonzero(of_kept == stratum)]
        assert np.array_equal(np.sort(keys[of_kept == stratum]), lowest)
        assert lowered[stratum] == lowest[-1]  # so that later voxels with higher keys are not kept either
    assert len(everything) == 3000
