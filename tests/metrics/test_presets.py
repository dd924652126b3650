import pytest

from segcal.errors import InputError
from segcal.metrics import METRICS, PRESETS, check_options, preset


@pytest.mark.parametrize("chosen", PRESETS.values(), ids=PRESETS)
def test_columns_are_metrics_with_options_that_these_have(chosen):
    for column in chosen.columns:
        assert check_options(METRICS[column.metric], column.options) == dict(column.options)
        assert column.aggregation in ("per-image", "pooled")


def test_bins_are_those_of_the_papers():
    bins = {
        name: {column.options["num_bins"] for column in chosen.columns if "num_bins" in column.options}
        for name, chosen in PRESETS.items()
    }
    assert bins == {"lts": {10}, "nacl": {15}, "selective": {10}, "rethinking": {15, 50}, "crac": {15}}


def test_ace_of_rethinking_and_miou_of_selective_are_pooled():
    pooled = [(id, c.metric) for id, chosen in PRESETS.items() for c in chosen.columns if c.aggregation == "pooled"]
    assert pooled == [("selective", "miou"), ("rethinking", "ace")]


def test_unknown_presets_are_refused():
    with pytest.raises(InputError, match="one of lts, nacl, selective, rethinking, crac"):
        preset("guo")
