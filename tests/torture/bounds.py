"""What is promised: the largest error of each function on hard inputs. Tests hold every function to it.

Written by ``torture/table.py --measure``, which also prints it for ``docs/reliability.md``. A part is a kind of
function; a path is a type, or another way through the code.
"""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    """The largest error seen when this was written, and the largest that tests allow."""

    seen: float
    bound: float


BOUNDS: dict[str, dict[str, dict[str, Bound]]] = {
    "metrics": {
        "accuracy": {"float64": Bound(0.0e00, 0e00), "compiled": Bound(0.0e00, 0e00)},
        "ace": {"float64": Bound(1.7e-16, 1e-15), "compiled": Bound(4.8e-08, 2e-07)},
        "ace-adaptive": {"float64": Bound(2.8e-17, 2e-16), "compiled": Bound(8.9e-10, 5e-09)},
        "ba-ece": {"float64": Bound(2.2e-16, 1e-15), "compiled": Bound(5.3e-08, 5e-07)},
        "brier": {"float64": Bound(2.1e-14, 1e-13), "compiled": Bound(4.4e-07, 2e-06)},
        "cece": {"float64": Bound(1.1e-16, 5e-16), "compiled": Bound(3.9e-09, 2e-08)},
        "confidence-balance": {"float64": Bound(3.9e-16, 2e-15), "compiled": Bound(2.4e-06, 1e-05)},
        "dsc": {"float64": Bound(0.0e00, 0e00), "compiled": Bound(0.0e00, 0e00)},
        "ece": {"float64": Bound(1.9e-16, 1e-15), "compiled": Bound(5.7e-08, 5e-07)},
        "ece-right": {"float64": Bound(2.5e-16, 1e-15), "compiled": Bound(8.3e-08, 5e-07)},
        "ece-wrong": {"float64": Bound(2.2e-16, 1e-15), "compiled": Bound(9.0e-08, 5e-07)},
        "entropy": {"float64": Bound(1.1e-15, 5e-15), "compiled": Bound(9.2e-07, 5e-06)},
        "flip": {"float64": Bound(0.0e00, 0e00), "compiled": Bound(0.0e00, 0e00)},
        "free-energy-std": {"float64": Bound(2.2e-15, 1e-14), "compiled": Bound(3.9e-07, 2e-06)},
        "mce": {"float64": Bound(2.2e-16, 1e-15), "compiled": Bound(9.1e-08, 5e-07)},
        "miou": {"float64": Bound(0.0e00, 0e00), "compiled": Bound(0.0e00, 0e00)},
        "nll": {"float64": Bound(3.9e-16, 2e-15), "compiled": Bound(8.2e-07, 5e-06)},
        "sce": {"float64": Bound(2.2e-16, 1e-15), "compiled": Bound(7.9e-08, 5e-07)},
        "tace": {"float64": Bound(0.0e00, 0e00), "compiled": Bound(0.0e00, 0e00)},
    },
    "losses": {
        "bwcr": {"float64": Bound(4.4e-16, 2e-15), "float32": Bound(1.1e-07, 5e-07), "gradient": Bound(1.3e-07, 1e-06)},
        "ce": {"float64": Bound(2.2e-16, 1e-15), "float32": Bound(5.7e-08, 5e-07), "gradient": Bound(3.3e-07, 2e-06)},
        "ce-dice": {
            "float64": Bound(2.2e-16, 1e-15),
            "float32": Bound(8.7e-08, 5e-07),
            "gradient": Bound(4.9e-07, 2e-06),
        },
        "crac": {"float64": Bound(3.1e-16, 2e-15), "float32": Bound(1.3e-07, 1e-06), "gradient": Bound(2.1e-07, 1e-06)},
        "dice": {"float64": Bound(1.1e-16, 5e-16), "float32": Bound(3.0e-08, 2e-07), "gradient": Bound(1.7e-07, 1e-06)},
        "ecp": {"float64": Bound(3.4e-16, 2e-15), "float32": Bound(6.3e-08, 5e-07), "gradient": Bound(3.4e-07, 2e-06)},
        "focal": {
            "float64": Bound(3.1e-16, 2e-15),
            "float32": Bound(1.4e-07, 1e-06),
            "gradient": Bound(3.4e-07, 2e-06),
        },
        "ls": {"float64": Bound(3.4e-16, 2e-15), "float32": Bound(7.0e-08, 5e-07), "gradient": Bound(3.7e-07, 2e-06)},
        "mbls": {"float64": Bound(3.4e-16, 2e-15), "float32": Bound(5.0e-08, 2e-07), "gradient": Bound(3.2e-07, 2e-06)},
        "meep": {"float64": Bound(6.0e-16, 5e-15), "float32": Bound(4.7e-07, 2e-06), "gradient": Bound(3.5e-07, 2e-06)},
        "ml1-ace": {
            "float64": Bound(2.2e-16, 1e-15),
            "float32": Bound(7.4e-08, 5e-07),
            "gradient": Bound(6.0e-02, 5e-01),
        },
        "mmce": {"float64": Bound(2.2e-16, 1e-15), "float32": Bound(8.7e-08, 5e-07), "gradient": Bound(3.3e-07, 2e-06)},
        "nacl": {"float64": Bound(2.8e-16, 2e-15), "float32": Bound(7.0e-08, 5e-07), "gradient": Bound(3.3e-07, 2e-06)},
        "svls": {"float64": Bound(3.9e-16, 2e-15), "float32": Bound(7.5e-08, 5e-07), "gradient": Bound(3.4e-07, 2e-06)},
    },
    "maps": {
        "cdc": {
            "float64": Bound(5.7e-15, 5e-14),
            "float32": Bound(8.0e-06, 5e-05),
            "compiled": Bound(2.2e-05, 1e-04),
            "float16": Bound(1.8e-04, 1e-03),
            "bfloat16": Bound(1.4e-03, 1e-02),
        },
        "cms-ap": {
            "float64": Bound(2.2e-16, 1e-15),
            "float32": Bound(1.6e-07, 1e-06),
            "compiled": Bound(5.4e-08, 5e-07),
            "float16": Bound(1.8e-04, 1e-03),
            "bfloat16": Bound(3.9e-03, 2e-02),
        },
        "cms-op": {
            "float64": Bound(2.2e-16, 1e-15),
            "float32": Bound(1.8e-07, 1e-06),
            "compiled": Bound(7.2e-08, 5e-07),
            "float16": Bound(1.8e-04, 1e-03),
            "bfloat16": Bound(3.8e-03, 2e-02),
        },
        "dc": {
            "float64": Bound(8.9e-16, 5e-15),
            "float32": Bound(1.2e-06, 5e-06),
            "compiled": Bound(1.2e-06, 5e-06),
            "float16": Bound(1.8e-04, 1e-03),
            "bfloat16": Bound(1.4e-03, 1e-02),
        },
        "ensemble": {
            "float32": Bound(1.8e-07, 1e-06),
            "compiled": Bound(1.8e-07, 1e-06),
            "float16": Bound(1.8e-04, 1e-03),
            "bfloat16": Bound(1.4e-03, 1e-02),
        },
        "ets": {
            "float64": Bound(3.3e-16, 2e-15),
            "float32": Bound(2.0e-07, 1e-06),
            "compiled": Bound(8.2e-08, 5e-07),
            "float16": Bound(5.2e-04, 5e-03),
            "bfloat16": Bound(4.2e-03, 2e-02),
        },
        "histogram": {
            "float64": Bound(1.1e-16, 5e-16),
            "float32": Bound(1.3e-07, 1e-06),
            "compiled": Bound(5.7e-08, 5e-07),
            "float16": Bound(1.7e-04, 1e-03),
            "bfloat16": Bound(1.4e-03, 1e-02),
        },
        "ibts": {
            "float32": Bound(2.1e-07, 1e-06),
            "compiled": Bound(7.7e-08, 5e-07),
            "float16": Bound(5.2e-04, 5e-03),
            "bfloat16": Bound(4.0e-03, 2e-02),
        },
        "isotonic": {
            "float64": Bound(9.8e-14, 5e-13),
            "float32": Bound(1.2e-06, 5e-06),
            "compiled": Bound(1.2e-06, 5e-06),
            "float16": Bound(5.1e-04, 5e-03),
            "bfloat16": Bound(4.1e-03, 2e-02),
        },
        "lts": {
            "float32": Bound(5.9e-06, 5e-05),
            "compiled": Bound(5.9e-06, 5e-05),
            "float16": Bound(5.0e-04, 2e-03),
            "bfloat16": Bound(4.1e-03, 2e-02),
        },
        "lts-ti": {
            "float32": Bound(2.7e-07, 2e-06),
            "compiled": Bound(2.2e-07, 1e-06),
            "float16": Bound(5.0e-04, 2e-03),
            "bfloat16": Bound(4.1e-03, 2e-02),
        },
        "meta-cal": {
            "float64": Bound(3.3e-16, 2e-15),
            "float32": Bound(2.2e-07, 1e-06),
            "compiled": Bound(2.2e-07, 1e-06),
            "float16": Bound(3.5e-04, 2e-03),
            "bfloat16": Bound(3.6e-03, 2e-02),
        },
        "ms": {
            "float64": Bound(7.8e-16, 5e-15),
            "float32": Bound(1.1e-06, 5e-06),
            "compiled": Bound(1.0e-06, 5e-06),
            "float16": Bound(1.7e-04, 1e-03),
            "bfloat16": Bound(1.4e-03, 1e-02),
        },
        "ms-c": {
            "float64": Bound(4.4e-16, 2e-15),
            "float32": Bound(9.9e-07, 5e-06),
            "compiled": Bound(7.8e-07, 5e-06),
            "float16": Bound(1.8e-04, 1e-03),
            "bfloat16": Bound(1.4e-03, 1e-02),
        },
        "selective": {
            "float32": Bound(1.6e-07, 1e-06),
            "compiled": Bound(1.6e-07, 1e-06),
            "float16": Bound(4.6e-04, 2e-03),
            "bfloat16": Bound(4.2e-03, 2e-02),
        },
        "trust": {
            "float32": Bound(1.0e-05, 5e-05),
            "compiled": Bound(1.5e-06, 1e-05),
            "float16": Bound(4.7e-04, 2e-03),
            "bfloat16": Bound(3.8e-03, 2e-02),
        },
        "ts": {
            "float64": Bound(3.3e-16, 2e-15),
            "float32": Bound(2.0e-07, 1e-06),
            "compiled": Bound(8.7e-08, 5e-07),
            "float16": Bound(5.3e-04, 5e-03),
            "bfloat16": Bound(4.0e-03, 2e-02),
        },
        "vs": {
            "float64": Bound(1.1e-16, 5e-16),
            "float32": Bound(2.0e-07, 1e-06),
            "compiled": Bound(8.8e-08, 5e-07),
            "float16": Bound(1.8e-04, 1e-03),
            "bfloat16": Bound(1.4e-03, 1e-02),
        },
    },
    "fits": {
        "cdc": {
            "before": Bound(2.8e-16, 2e-15),
            "after": Bound(7.6e-08, 5e-07),
            "worse": Bound(0.0e00, 0e00),
            "optimum": Bound(5.3e-05, 5e-04),
        },
        "cms-ap": {
            "before": Bound(2.8e-16, 2e-15),
            "after": Bound(3.4e-08, 2e-07),
            "worse": Bound(0.0e00, 0e00),
            "optimum": Bound(8.4e-09, 5e-08),
        },
        "cms-op": {
            "before": Bound(2.9e-16, 2e-15),
            "after": Bound(7.8e-08, 5e-07),
            "worse": Bound(0.0e00, 0e00),
            "optimum": Bound(8.4e-09, 5e-08),
        },
        "dc": {
            "before": Bound(2.8e-16, 2e-15),
            "after": Bound(3.2e-08, 2e-07),
            "worse": Bound(0.0e00, 0e00),
            "optimum": Bound(4.4e-15, 2e-14),
        },
        "ensemble": {"before": Bound(6.2e-15, 5e-14), "after": Bound(4.3e-08, 2e-07), "worse": Bound(0.0e00, 0e00)},
        "ets": {"before": Bound(2.8e-16, 2e-15), "after": Bound(9.3e-08, 5e-07), "worse": Bound(0.0e00, 0e00)},
        "histogram": {"before": Bound(2.9e-16, 2e-15), "after": Bound(9.6e-08, 5e-07), "worse": Bound(0.0e00, 0e00)},
        "ibts": {"before": Bound(2.8e-16, 2e-15), "after": Bound(7.8e-08, 5e-07), "worse": Bound(0.0e00, 0e00)},
        "isotonic": {"before": Bound(2.8e-16, 2e-15), "after": Bound(7.8e-08, 5e-07), "worse": Bound(0.0e00, 0e00)},
        "lts": {"before": Bound(2.8e-16, 2e-15), "after": Bound(7.8e-08, 5e-07), "worse": Bound(0.0e00, 0e00)},
        "lts-ti": {"before": Bound(2.8e-16, 2e-15), "after": Bound(8.1e-08, 5e-07), "worse": Bound(0.0e00, 0e00)},
        "meta-cal": {"before": Bound(2.8e-16, 2e-15), "after": Bound(8.1e-08, 5e-07), "worse": Bound(0.0e00, 0e00)},
        "ms": {
            "before": Bound(2.8e-16, 2e-15),
            "after": Bound(2.7e-07, 2e-06),
            "worse": Bound(0.0e00, 0e00),
            "optimum": Bound(5.2e-15, 5e-14),
        },
        "ms-c": {
            "before": Bound(2.9e-16, 2e-15),
            "after": Bound(2.3e-07, 1e-06),
            "worse": Bound(0.0e00, 0e00),
            "optimum": Bound(1.7e-15, 1e-14),
        },
        "selective": {"before": Bound(6.2e-15, 5e-14), "after": Bound(7.8e-08, 5e-07), "worse": Bound(0.0e00, 0e00)},
        "trust": {"before": Bound(2.8e-16, 2e-15), "after": Bound(2.1e-09, 1e-08), "worse": Bound(0.0e00, 0e00)},
        "ts": {"before": Bound(2.9e-16, 2e-15), "after": Bound(7.8e-08, 5e-07), "worse": Bound(0.0e00, 0e00)},
        "vs": {
            "before": Bound(2.8e-16, 2e-15),
            "after": Bound(5.3e-08, 5e-07),
            "worse": Bound(0.0e00, 0e00),
            "optimum": Bound(5.2e-15, 5e-14),
        },
    },
}
