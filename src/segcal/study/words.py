"""The recommendation as sentences, with the numbers it rests on, and what should make a reader careful."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from segcal import inference
from segcal.metrics.diagnosis import in_words
from segcal.study.evidence import Evidence
from segcal.study.headline import ece_caveat, nothing_better
from segcal.study.phrases import chance, change, counted, quoted, with_interval
from segcal.study.recommend import Choice
from segcal.study.robust import shift_caveats, shift_sentence
from segcal.study.settings import FLIPS, UNCALIBRATED

#: Below so many, a calibrator depends on which cases it happened to see.
FEW_CASES = 10
#: Below so many, what a calibrator learns of a class is mostly chance.
FEW_VOXELS = 1000
_POOLED = {
    "single": "the logits of the first ensemble member alone",
    "probs": "ensemble members pooled by the mean of their probabilities",
    "logits": "ensemble members pooled by the mean of their logits",
}


def sentences(choice: Choice, evidence: Evidence) -> list[str]:
    """What was wrong, what to deploy and by what it was chosen, how sure that is, and how it does on shifted cases."""
    before, after = (
        {metric: with_interval(evidence.summary[key, metric]) for metric in ("nll", "ece")}
        for key in (UNCALIBRATED, choice.method)
    )
    channels = evidence.diagnosis.get("channels", ())
    over = f"means over {len(channels)} channels and over test cases" if channels else "means over test cases"
    found = [
        f"As it is, the network is {in_words(evidence.diagnosis)}: NLL {before['nll']}, "
        f"ECE {before['ece']}, {over} with 95% intervals."
    ]
    if choice.method == UNCALIBRATED:
        found.append(f"Leave it as it is: {nothing_better(choice)}.")
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
        found.append(f"Left out, as they lose on shifted cases: {', '.join(choice.left_out)}.")
    return found


def caveats(choice: Choice, evidence: Evidence, seed: int) -> list[str]:
    """Reasons for care: few cases, rare classes, shift, offsets, failed methods; ``seed`` is the bootstrap's."""
    found = []
    if evidence.cases < FEW_CASES:
        few = counted(evidence.cases, "case")
        found.append(f"Each method was fitted to {few}: with fewer than {FEW_CASES}, chance has a say.")
    if len(evidence.test) < FEW_CASES:
        few = counted(len(evidence.test), "case")
        found.append(f"Tested on {few}: with fewer than {FEW_CASES}, intervals are too narrow.")
    if absent := [name for name, count in evidence.voxels.items() if count == 0]:
        found.append(f"Not one calibration voxel is labelled {quoted(absent)}: nothing was learnt of it.")
    if rare := [name for name, count in evidence.voxels.items() if 0 < count < FEW_VOXELS]:
        found.append(f"Fewer than {FEW_VOXELS} calibration voxels are labelled {quoted(rare)}.")
    if evidence.groups[1] is not None and (few_groups := len(set(evidence.groups[1]))) < inference.FEW_GROUPS:
        found.append(
            f"Tested on the cases of {counted(few_groups, 'group')}: with fewer than {inference.FEW_GROUPS}, "
            "intervals over groups are too narrow."
        )
    parts = zip((evidence.validation, evidence.test), evidence.groups, strict=True)
    ends = [inference.bootstrap_interval(values, groups=groups, seed=seed) for values, groups in parts]
    if ends[0][0] > ends[1][1] or ends[0][1] < ends[1][0]:
        found.append(
            "Validation and test cases differ: the 95% intervals of the uncalibrated NLL, "
            f"{ends[0][0]:.4f} to {ends[0][1]:.4f} and {ends[1][0]:.4f} to {ends[1][1]:.4f}, do not meet."
        )
    found += ece_caveat(choice, evidence)
    found += shift_caveats(choice.method, evidence.shift, evidence.robust_choice)
    gauge = evidence.diagnosis["gauge"]
    if not evidence.methods[choice.method]["translation_invariant"] and gauge["risk"] in ("some", "high"):
        found.append(
            f"{choice.method} sees the offsets of the logits, and they vary (free-energy spread "
            f"{gauge['free_energy_std']:.2f} nats): a translation-invariant method is safer under shift."
        )
    if failed := [key for key, method in evidence.methods.items() if method["status"] == "failed"]:
        found.append(f"{counted(len(failed), 'method')} failed and could not be chosen: {', '.join(failed)}.")
    return found


def _why(choice: Choice, evidence: Evidence) -> list[str]:
    nll = choice.validation_nll[choice.method]
    if choice.best != choice.method:
        best = choice.validation_nll[choice.best]
        chosen, richer = (
            counted(evidence.methods[key]["parameters"], "parameter") for key in (choice.method, choice.best)
        )
        return [
            f"{choice.best} has the lowest NLL on validation cases ({best['mean']:.4f}), but {choice.method} "
            f"({nll['mean']:.4f}) is only {nll['minus_best']:.4f} above it, within the standard error of "
            f"{nll['minus_best_standard_error']:.4f}, with {chosen} instead of {richer}."
        ]
    if choice.method == UNCALIBRATED:
        return []
    others = counted(len(choice.candidates) - 1, "other")
    return [
        f"It was chosen by NLL on validation cases: {nll['mean']:.4f} is the lowest of all that are allowed, {others} "
        "besides it, and no simpler one lies within one standard error."
    ]


def _how_sure(metric: str, row: Mapping[str, Any]) -> str:
    if math.isnan(row["low"]):
        return f"{metric} changes by {row['mean']:+.4f}; one test case says nothing of how sure that is."
    says = {"better": "falls", "worse": "gets worse"}.get(row["verdict"], "may be lower or higher")
    return (
        f"{metric} {says}: {change(row)}, case by case; better in {row['lower']} of {counted(row['n'], 'case')} "
        f"(Wilcoxon, adjusted {chance(row['p_adjusted'])})."
    )


def _labels(method: Mapping[str, Any], flips: Mapping[str, Any]) -> str:
    changed = sum(flips[kind] for kind in FLIPS)
    if method["preserves"] is not None and changed == 0:
        return "It cannot change a label: the masks stay as they are."
    share = changed / flips["compared"] if flips["compared"] else 0.0
    counts = f"{flips['harmful']:,} for the worse, {flips['beneficial']:,} for the better"
    return f"It changed {share:.3%} of the labels of the test cases: {counts}."
