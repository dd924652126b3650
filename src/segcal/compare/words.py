"""The recommendation as sentences, with the numbers it rests on, and what should make a reader careful."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segcal import inference
from segcal.compare.recommend import Choice
from segcal.compare.settings import FLIPS, UNCALIBRATED
from segcal.statistics import EVERYTHING

#: Below so many, a calibrator depends on which cases it happened to see.
FEW_CASES = 10
#: Below so many, what a calibrator learns of a class is mostly chance.
FEW_VOXELS = 1000
# Another method's ECE is worth a word below this share of the chosen one's.
_CLEARLY = 0.9
_POOLED = {
    "single": "the logits of the first ensemble member alone",
    "probs": "ensemble members pooled by the mean of their probabilities",
    "logits": "ensemble members pooled by the mean of their logits",
}


@dataclass(frozen=True)
class Evidence:
    """What the words rest on.

    Attributes:
        methods: Rows of the methods, by key.
        summary: Rows of NLL and ECE over whole test cases, by key and metric.
        differences: The same against uncalibrated.
        flips: Changed labels, by key.
        diagnosis: Findings of the scores as they are.
        cases: In the smallest calibration part.
        voxels: Of every class in that part.
        validation: Uncalibrated NLL of the validation cases.
        test: The same of the test cases.
        shift: Results on shifted cases, where there are some.
    """

    methods: Mapping[str, Mapping[str, Any]]
    summary: Mapping[tuple[str, str], Mapping[str, Any]]
    differences: Mapping[tuple[str, str], Mapping[str, Any]]
    flips: Mapping[str, Mapping[str, Any]]
    diagnosis: Mapping[str, Any]
    cases: int
    voxels: Mapping[str, int]
    validation: Sequence[float]
    test: Sequence[float]
    shift: Sequence[Mapping[str, Any]] = ()


def sentences(choice: Choice, evidence: Evidence) -> list[str]:
    """What was wrong, what to deploy, how sure that is, and why this method."""
    before, after = (
        {metric: _with_interval(evidence.summary[key, metric]) for metric in ("ece", "nll")}
        for key in (UNCALIBRATED, choice.method)
    )
    found = [
        f"As it is, the network is {evidence.diagnosis['set']['verdict']}: ECE {before['ece']}, "
        f"NLL {before['nll']}, means over test cases with 95% intervals."
    ]
    if choice.method == UNCALIBRATED:
        alone = "there is no other method to choose from"
        others = "no allowed method is better by more than one standard error"
        found.append(f"Leave it as it is: {others if len(choice.candidates) > 1 else alone}.")
    else:
        method = evidence.methods[choice.method]
        found.append(
            f"Use {choice.method} ({method['name']}): it gives ECE {after['ece']} and NLL {after['nll']} "
            "on the same cases."
        )
        found += [_how_sure(metric, evidence.differences[choice.method, metric.lower()]) for metric in ("ECE", "NLL")]
        found.append(_labels(method, evidence.flips[choice.method]))
        if method["pooling"]:
            found.append(f"It expects {_POOLED[method['pooling']]}.")
    return [*found, *_why(choice, evidence), *(_under_shift(choice.method, one) for one in evidence.shift)]


def caveats(choice: Choice, evidence: Evidence, seed: int) -> list[str]:
    """Reasons for care: few cases, rare classes, shift, offsets, failed methods; ``seed`` is the bootstrap's."""
    found = []
    if evidence.cases < FEW_CASES:
        few = _count(evidence.cases, "case")
        found.append(f"Each method was fitted to {few}: with fewer than {FEW_CASES}, chance has a say.")
    if len(evidence.test) < FEW_CASES:
        few = _count(len(evidence.test), "case")
        found.append(f"Tested on {few}: with fewer than {FEW_CASES}, intervals are too narrow.")
    if absent := [name for name, count in evidence.voxels.items() if count == 0]:
        found.append(f"Not one calibration voxel is labelled {_listed(absent)}: nothing was learnt of it.")
    if rare := [name for name, count in evidence.voxels.items() if 0 < count < FEW_VOXELS]:
        found.append(f"Fewer than {FEW_VOXELS} calibration voxels are labelled {_listed(rare)}.")
    ends = [inference.bootstrap_interval(values, seed=seed) for values in (evidence.validation, evidence.test)]
    if ends[0][0] > ends[1][1] or ends[0][1] < ends[1][0]:
        found.append(
            "Validation and test cases differ: the 95% intervals of the uncalibrated NLL, "
            f"{ends[0][0]:.4f} to {ends[0][1]:.4f} and {ends[1][0]:.4f} to {ends[1][1]:.4f}, do not meet."
        )
    found += _better_by_ece(choice, evidence)
    gauge = evidence.diagnosis["gauge"]
    if not evidence.methods[choice.method]["translation_invariant"] and gauge["risk"] in ("some", "high"):
        found.append(
            f"{choice.method} sees the offsets of the logits, and they vary (free-energy spread "
            f"{gauge['free_energy_std']:.2f} nats): a translation-invariant method is safer under shift."
        )
    if failed := [key for key, method in evidence.methods.items() if method["status"] == "failed"]:
        found.append(f"{_count(len(failed), 'method')} failed and could not be chosen: {', '.join(failed)}.")
    return found


def _better_by_ece(choice: Choice, evidence: Evidence) -> list[str]:
    """A method that was not chosen, but is better calibrated in the winning class: a reader will see it and wonder."""
    ece = {key: evidence.summary[key, "ece"]["mean"] for key in choice.candidates}
    lowest = min(ece, key=lambda key: math.inf if math.isnan(ece[key]) else ece[key])
    if not ece[lowest] < _CLEARLY * ece[choice.method]:
        return []
    return [
        f"{lowest} has a lower ECE ({ece[lowest]:.4f}, {choice.method} {ece[choice.method]:.4f}). Methods are chosen "
        "by NLL, which judges all classes; where only the confidence in the label is used, it may be the better choice."
    ]


def _why(choice: Choice, evidence: Evidence) -> list[str]:
    nll = choice.validation_nll[choice.method]
    if choice.best != choice.method:
        best = choice.validation_nll[choice.best]
        chosen, richer = (
            _count(evidence.methods[key]["parameters"], "parameter") for key in (choice.method, choice.best)
        )
        return [
            f"{choice.best} has the lowest validation NLL ({best['mean']:.4f}), but {choice.method} "
            f"({nll['mean']:.4f}) is only {nll['minus_best']:.4f} above it, within the standard error of "
            f"{nll['minus_best_standard_error']:.4f}, with {chosen} instead of {richer}."
        ]
    if choice.method == UNCALIBRATED:
        return []
    others = len(choice.candidates) - 1
    return [
        f"It has the lowest validation NLL ({nll['mean']:.4f}) of all that are allowed, {_count(others, 'other')} "
        "besides it, and no simpler one lies within one standard error."
    ]


def _under_shift(method: str, entry: Mapping[str, Any]) -> str:
    rows = {row["method"]: row for row in entry["summary"] if (row["metric"], row["region"]) == ("ece", EVERYTHING)}
    if UNCALIBRATED not in rows or method not in rows:
        return f"On {entry['name']}, nothing is known of {method}'s ECE."
    text = f"On {entry['name']}, ECE is {_with_interval(rows[UNCALIBRATED])} as it is"
    return text + ("." if method == UNCALIBRATED else f" and {_with_interval(rows[method])} with {method}.")


def _how_sure(metric: str, row: Mapping[str, Any]) -> str:
    if math.isnan(row["low"]):
        return f"{metric} changes by {row['mean']:+.4f}; one test case says nothing of how sure that is."
    sure = "is lower" if row["high"] < 0 else "is higher" if row["low"] > 0 else "may be lower or higher"
    return (
        f"Case by case, {metric} {sure}: {row['mean']:+.4f} on average, 95% interval {row['low']:+.4f} to "
        f"{row['high']:+.4f} over {_count(row['n'], 'case')} (Wilcoxon, adjusted {_chance(row['p_adjusted'])})."
    )


def _chance(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def _labels(method: Mapping[str, Any], flips: Mapping[str, Any]) -> str:
    changed = sum(flips[kind] for kind in FLIPS)
    if method["preserves"] is not None and changed == 0:
        return "It cannot change a label: the masks stay as they are."
    share = changed / flips["compared"] if flips["compared"] else 0.0
    counts = f"{flips['harmful']:,} for the worse, {flips['beneficial']:,} for the better"
    return f"It changed {share:.3%} of the labels of the test cases: {counts}."


def _with_interval(row: Mapping[str, Any]) -> str:
    if math.isnan(row["low"]):
        return f"{row['mean']:.4f}"
    return f"{row['mean']:.4f} ({row['low']:.4f} to {row['high']:.4f})"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
