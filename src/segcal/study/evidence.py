"""What the words of a study rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segcal.study.robust import Shift

#: Rows by method and metric.
Rows = Mapping[tuple[str, str], Mapping[str, Any]]


@dataclass(frozen=True)
class Evidence:
    """What the words rest on.

    Attributes:
        methods: Rows of the methods, by key.
        summary: Rows of NLL and ECE over whole test cases, by key and metric.
        differences: The same against uncalibrated.
        beside: The same against the chosen method.
        flips: Changed labels, by key.
        diagnosis: Findings of the scores as they are.
        cases: In the smallest calibration part.
        voxels: Of every class in that part.
        validation: Uncalibrated NLL of the validation cases.
        test: The same of the test cases.
        groups: Those of the validation and of the test cases, None where each case is its own.
        shift: Results on shifted cases, where there are some.
        robust_choice: What is recommended where it must not lose on shifted cases.
    """

    methods: Mapping[str, Mapping[str, Any]]
    summary: Rows
    differences: Rows
    beside: Rows
    flips: Mapping[str, Mapping[str, Any]]
    diagnosis: Mapping[str, Any]
    cases: int
    voxels: Mapping[str, int]
    validation: Sequence[float]
    test: Sequence[float]
    groups: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None)
    shift: Sequence[Shift] = ()
    robust_choice: str = ""
