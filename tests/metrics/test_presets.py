import pytest
import torch

from segcal import metrics
from segcal.errors import InputError
from segcal.metrics import METRICS, PRESETS, preset
from segcal.statistics import VoxelStatistics


def cases_for(chosen, count=3):
    random = torch.Generator().manual_seed(0)
    cases = []
    for _ in range(count):
        logits = torch.randn(1, 3, 20, 30, generator=random) * 2
        labels = torch.randint(0, 3, (1, 20, 30), generator=random)
        distance = torch.rand(labels.shape, generator=random) * 20
        regions = {name: torch.rand(labels.shape, generator=random) < 0.5 for name in chosen.regions}
        stats = VoxelStatistics(3, chosen.bins or (15,), regions=chosen.regions)
        uncalibrated = torch.randint(0, 3, labels.shape, generator=random)
        cases.append(stats.update(logits, labels, regions=regions, distance=distance, uncalibrated=uncalibrated))
    return cases


@pytest.mark.parametrize("chosen", PRESETS.values(), ids=PRESETS)
def test_every_preset_computes_what_it_promises(chosen):
    cases = cases_for(chosen)
    values = chosen.compute(cases, METRICS)
    for column in chosen.columns:
        surface = column.metric in ("hd95", "asd", "surface-dice")
        assert (column.name in values) == (not surface and column.region != "local")
    for column in chosen.columns:
        if column.name in values and column.aggregation == "per-image":
            function = METRICS[column.metric].function
            each = [function(case, region=column.region, **column.options) for case in cases]
            assert values[column.name] == pytest.approx(sum(each) / len(each), rel=1e-12)
            assert values[column.name].count == len(cases)


def test_bins_are_those_of_the_papers():
    assert {name: chosen.bins for name, chosen in PRESETS.items()} == {
        "lts": (10,),
        "nacl": (15,),
        "selective": (10,),
        "rethinking": (15, 50),
        "crac": (15,),
    }


def test_rethinking_pools_ace():
    chosen = preset("rethinking")
    cases = cases_for(chosen)
    pooled = cases[0] + cases[1] + cases[2]
    assert chosen.compute(cases, METRICS)["ace"] == pytest.approx(metrics.ace(pooled, num_bins=15), rel=1e-12)


def test_unknown_presets_are_refused():
    with pytest.raises(InputError, match="one of lts, nacl, selective, rethinking, crac"):
        preset("guo")
