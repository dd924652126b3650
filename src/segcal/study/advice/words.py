"""The recommendation as sentences with the numbers behind it, and reasons for caution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from segcal import inference
from segcal.metrics.diagnosis import in_words
from segcal.study.advice.choice import Choice
from segcal.study.advice.evidence import Evidence, Shift, lost
from segcal.study.advice.headline import ece_caveat, nothing_better
from segcal.study.advice.phrases import chance, change, counted, joined, quoted, with_interval, with_method
from segcal.study.settings import FLIPS, UNCALIBRATED

#: With fewer cases, a fit depends on which cases it happened to see.
FEW_CASES = 10
#: With fewer voxels of a class, what a calibrator learns about it is mostly chance.
FEW_VOXELS = 1000
_POOLED = {
    "single": "the logits of the first ensemble member alone",
    "probs": "ensemble members pooled by the mean of their probabilities",
    "logits": "ensemble members pooled by the mean of their logits",
}


def sentences(choice: Choice, evidence: Evidence) -> list[str]:
    """What was wrong, what to deploy and why, how certain that is, and how it does on shifted cases."""
    before, after = (
        {metric: with_interval(evidence.summary[key, metric]) for metric in ("nll", "ece")}
        for key in (UNCALIBRATED, choice.method)
    )
    channels = evidence.diagnosis.get("channels", ())
    over = f"means over {len(channels)} channels and over the test cases" if channels else "means over the test cases"
    found = [
        f"Uncalibrated, the network is {in_words(evidence.diagnosis)}: NLL {before['nll']}, "
        f"ECE {before['ece']}; {over}, with 95% intervals."
    ]
    if choice.method == UNCALIBRATED:
        found.append(f"Leave the scores uncalibrated: {nothing_better(choice)}.")
        found += _why(choice, evidence)
    else:
        method = evidence.methods[choice.method]
        found.append(
            f"Use {choice.method} ({method['name']}): it gives NLL {after['nll']} and ECE {after['ece']} "
            "on the same cases."
        )
        found += _why(choice, evidence)
        found += [_how_sure(metric, evidence.differences[choice.method, metric.lower()]) for metric in ("NLL", "ECE")]
        found.append(_labels(method, evidence.flips[choice.method]))
        if method["pooling"]:
            found.append(f"It expects {_POOLED[method['pooling']]}.")
    found += [shift_sentence(choice.method, one) for one in evidence.shift]
    if choice.left_out:
        found.append(f"Excluded because they lose on shifted cases: {', '.join(choice.left_out)}.")
    return found


def caveats(choice: Choice, evidence: Evidence) -> list[str]:
    """Reasons for caution: few cases, rare classes, shift, offsets, failed methods."""
    found = []
    test = evidence.summary[UNCALIBRATED, "nll"]
    if evidence.cases < FEW_CASES:
        few = counted(evidence.cases, "case")
        found.append(f"Each method was fitted to {few}. With fewer than {FEW_CASES}, chance matters.")
    if test["n"] < FEW_CASES:
        found.append(f"Tested on {counted(test['n'], 'case')}. With fewer than {FEW_CASES}, intervals are too narrow.")
    if absent := [name for name, count in evidence.voxels.items() if count == 0]:
        found.append(f"No calibration voxel is labelled {quoted(absent)}: nothing was learnt about it.")
    if rare := [name for name, count in evidence.voxels.items() if 0 < count < FEW_VOXELS]:
        found.append(f"Fewer than {FEW_VOXELS} calibration voxels are labelled {quoted(rare)}.")
    if evidence.groups is not None and evidence.groups < inference.FEW_GROUPS:
        found.append(
            f"The test cases belong to {counted(evidence.groups, 'group')}. With fewer than {inference.FEW_GROUPS}, "
            "intervals over groups are too narrow."
        )
    validation = evidence.validation
    if validation["low"] > test["high"] or validation["high"] < test["low"]:
        found.append(
            "Validation and test cases differ: the 95% intervals of the uncalibrated NLL, "
            f"{validation['low']:.4f} to {validation['high']:.4f} and {test['low']:.4f} to {test['high']:.4f}, "
            "do not overlap."
        )
    found += ece_caveat(choice, evidence)
    found += shift_caveats(choice.method, evidence.shift, evidence.robust_choice)
    gauge = evidence.diagnosis["gauge"]
    if not evidence.methods[choice.method]["translation_invariant"] and gauge["risk"] in ("some", "high"):
        found.append(
            f"{choice.method} depends on the offset of the logits, which varies here (free-energy spread "
            f"{gauge['free_energy_std']:.2f} nats): a translation-invariant method is safer under shift."
        )
    if failed := [key for key, method in evidence.methods.items() if method["status"] == "failed"]:
        found.append(f"{counted(len(failed), 'method')} failed and could not be chosen: {', '.join(failed)}.")
    return found


def _why(choice: Choice, evidence: Evidence) -> list[str]:
    nll = choice.validation_nll[choice.method]
    if choice.best != choice.method:
        best = choice.validation_nll[choice.best]
        own, richer = (evidence.methods[key]["parameters"] for key in (choice.method, choice.best))
        more, error = nll["minus_best"], nll["minus_best_standard_error"]
        higher = f"only {more:.4f} higher" if more >= 0.0001 else "less than 0.0001 higher"
        within = f", within one standard error ({error:.4f})," if 0.0001 <= more <= error else ""
        return [
            f"{choice.best} has the lowest NLL on the validation cases ({best['mean']:.4f}), but {choice.method} "
            f"({nll['mean']:.4f}) is {higher}{within} and has {counted(own, 'parameter')} instead of {richer:,}."
        ]
    if choice.method == UNCALIBRATED:
        return []
    return [
        f"It was chosen by NLL on the validation cases: {nll['mean']:.4f} is the lowest of the "
        f"{counted(len(choice.candidates), 'allowed method')}, and no simpler one is within one standard error."
    ]


def _how_sure(metric: str, row: Mapping[str, Any]) -> str:
    if math.isnan(row["low"]):
        return f"{metric} changes by {row['mean']:+.4f}; one test case cannot show how certain that is."
    says = {"better": "falls", "worse": "gets worse"}.get(row["verdict"], "shows no clear change")
    test = "" if math.isnan(row["p_adjusted"]) else f" (Wilcoxon, adjusted {chance(row['p_adjusted'])})"
    return (
        f"{metric} {says}: {change(row)}, paired by case; lower in {row['lower']} of {counted(row['n'], 'case')}{test}."
    )


def _labels(method: Mapping[str, Any], flips: Mapping[str, Any]) -> str:
    changed = sum(flips[kind] for kind in FLIPS)
    if method["preserves"] is not None and changed == 0:
        return "It never changes a label: the masks stay the same."
    share = changed / flips["compared"] if flips["compared"] else 0.0
    counts = f"{flips['harmful']:,} for the worse, {flips['beneficial']:,} for the better"
    return f"It changed {share:.3%} of the labels in the test cases: {counts}."


def shift_sentence(method: str, one: Shift) -> str:
    """How the recommended method does on one shifted set."""
    if not one.knows(method):
        return f"On {one.name}, {method} failed."
    against = one.against.get((method, "nll"))
    keys = dict.fromkeys([UNCALIBRATED, *([] if against is None else [str(against["baseline"])]), method])
    nll, ece = ([f"{one.summary[key, metric]['mean']:.4f}" for key in keys] for metric in ("nll", "ece"))
    values = joined([f"{value} {with_method(key)}" for value, key in zip(nll, keys, strict=True)])
    text = f"On {one.name} ({counted(one.summary[method, 'nll']['n'], 'case')}), NLL is {values}; ECE is {joined(ece)}."
    told = [_compared(method, row) for row in (against, one.differences.get((method, "nll"))) if row is not None]
    return " ".join([text, *told])


def shift_caveats(method: str, shifts: Sequence[Shift], robust_choice: str) -> list[str]:
    """Where the recommended method loses, and what would be recommended if it must not."""
    found = []
    for one in shifts:
        for reference in one.loses_to(method):
            row = (one.differences if reference == UNCALIBRATED else one.against)[method, "nll"]
            found.append(f"{method} loses to {reference} on {one.name}: NLL {change(row)}.")
    if found and robust_choice != method:
        found[-1] += f" With --robust, {robust_choice} would be recommended."
    return found


def _compared(method: str, row: Mapping[str, Any]) -> str:
    other = "no calibration" if row["baseline"] == UNCALIBRATED else row["baseline"]
    verdicts = {
        "better": f"{method} is better than {other} there",
        "worse": f"{method} {'loses to' if lost(row) else 'is as good as'} {other} there",
    }
    clear = verdicts.get(row["verdict"], f"{method} and {other} show no clear difference there")
    return f"{clear} (NLL {change(row)})."
