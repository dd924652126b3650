"""The recommendation in words: a headline, sentences with the numbers behind it, and reasons for caution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segcal import inference
from segcal.metrics.diagnosis import in_words
from segcal.study.advice.choice import Choice, Rows, Shift, lost
from segcal.study.advice.phrases import change, counted, joined, ordinal, quoted, share_less, with_interval, with_method
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

# Another method's ECE is mentioned below this share of the chosen one's, if the paired difference agrees.
_CLEARLY = 0.9
_NETWORK = {
    "overconfident": "The network is overconfident.",
    "underconfident": "The network is underconfident.",
    "balanced": "On average, the network is neither overconfident nor underconfident.",
    "undefined": "The confidence of the network could not be judged.",
}


@dataclass(frozen=True)
class Evidence:
    """What the words rest on.

    Attributes:
        methods: Rows of the methods, by key.
        summary: Means over the test cases.
        differences: The same minus uncalibrated.
        beside: The same minus the chosen method.
        flips: Changed labels, by key.
        diagnosis: Findings about the uncalibrated scores.
        cases: The number of cases in the smallest calibration part.
        voxels: Voxels of every class in that part.
        validation: The mean uncalibrated NLL of the validation cases, with its interval.
        groups: The number of groups of test cases; None if each case is its own.
        shift: Results on shifted cases, if there are any.
        robust_choice: What is recommended if it must not lose on shifted cases.
    """

    methods: Mapping[str, Mapping[str, Any]]
    summary: Rows
    differences: Rows
    beside: Rows
    flips: Mapping[str, Mapping[str, Any]]
    diagnosis: Mapping[str, Any]
    cases: int
    voxels: Mapping[str, int]
    validation: Mapping[str, Any]
    groups: int | None = None
    shift: Sequence[Shift] = ()
    robust_choice: str = ""


def headline(choice: Choice, evidence: Evidence) -> list[dict[str, str]]:
    """Sentences, each with its ``tone``: ``plain``, or ``worse`` if it reports harm."""
    verdict = evidence.diagnosis["set"]["verdict"]
    mixed = f"The confidence of the network differs between channels: {in_words(evidence.diagnosis)}."
    network = _sentence(mixed if verdict == "mixed" else _NETWORK[verdict])
    if choice.method == UNCALIBRATED:
        return [network, _sentence(f"Leave the scores uncalibrated: {nothing_better(choice)}.")]
    found = [network, _by_nll(choice, evidence), _by_ece(choice, evidence)]
    return found + _near_boundaries(choice, evidence) + _by_shift(choice, evidence)


def nothing_better(choice: Choice) -> str:
    """Why the scores are left uncalibrated."""
    if len(choice.candidates) > 1:
        return (
            "no allowed method improves NLL on the validation cases by more than one standard error and by more than "
            "0.0001 nats"
        )
    if choice.left_out:
        return "every other allowed method fails or loses on shifted cases"
    return "there is no other allowed method that changes anything here"


def ece_caveat(choice: Choice, evidence: Evidence) -> list[str]:
    """What choosing by NLL costs in ECE, for readers who compare the rows of the table."""
    other = _lower_ece(choice, evidence)
    harm = choice.method != UNCALIBRATED and evidence.differences[choice.method, "ece"]["verdict"] == "worse"
    if other is None and not harm:
        return []
    ece = {key: row["mean"] for (key, metric), row in evidence.summary.items() if metric == "ece"}
    own = ece[choice.method]
    place = ordinal(1 + sum(value < own for value in ece.values()))
    facts = [f"{key} {ece[key]:.4f}" for key in (UNCALIBRATED, other) if key is not None]
    better = "leaving the scores uncalibrated" if other is None or ece[UNCALIBRATED] < ece[other] else other
    return [
        f"By ECE, {choice.method} is {place} of {len(ece)} ({own:.4f}; {', '.join(facts)}). Methods are chosen by NLL, "
        "which judges the probabilities of all classes. If you only use the confidence of the predicted label, "
        f"{better} may be the better choice."
    ]


def _lower_ece(choice: Choice, evidence: Evidence) -> str | None:
    """The allowed calibrator with the lowest ECE, if that is clearly lower than the chosen one's."""
    if choice.method == UNCALIBRATED:
        return None
    ece = {key: evidence.summary[key, "ece"]["mean"] for key in choice.candidates if key != UNCALIBRATED}
    lower = {
        key: mean
        for key, mean in ece.items()
        if mean < _CLEARLY * ece[choice.method] and evidence.beside[key, "ece"]["verdict"] in ("better", None)
    }
    return min(lower, key=lower.__getitem__, default=None)


def _by_nll(choice: Choice, evidence: Evidence) -> dict[str, str]:
    """What the choice does to the metric it was chosen by."""
    name = f"{evidence.methods[choice.method]['name']}, chosen by NLL on the validation cases,"
    kept = "" if sum(evidence.flips[choice.method][kind] for kind in FLIPS) else " and changes no labels"
    before, after = (evidence.summary[key, "nll"]["mean"] for key in (UNCALIBRATED, choice.method))
    moved = f"from {before:.4f} to {after:.4f}"
    verdict = evidence.differences[choice.method, "nll"]["verdict"]
    if verdict == "better":
        share = f" by {share_less(before, after)}" if 0 < before < math.inf else ""
        return _sentence(f"{name} lowers NLL{share} on the test cases{kept}.")
    if verdict == "worse":
        return _sentence(f"{name} raises NLL on the test cases, {moved}.", "worse")
    if verdict is None:  # One case or group has no interval.
        count = evidence.differences[choice.method, "nll"]["n"]
        where = "the only test case" if count == 1 else f"the {counted(count, 'test case')}, which are one group"
        return _sentence(f"{name} takes NLL {moved} on {where}{kept}.")
    return _sentence(f"{name} hardly changes NLL on the test cases{kept}: {moved}, which may be chance.")


def _by_ece(choice: Choice, evidence: Evidence) -> dict[str, str]:
    """What the choice does to the calibration error, and whether another allowed method lowers it more."""
    before, after = (evidence.summary[key, "ece"]["mean"] for key in (UNCALIBRATED, choice.method))
    other = _lower_ece(choice, evidence)
    moved = f"from {before:.4f} to {after:.4f}"
    verdict = evidence.differences[choice.method, "ece"]["verdict"]
    if verdict == "better":
        lower = other and f"; {other} would lower it by {share_less(before, evidence.summary[other, 'ece']['mean'])}"
        return _sentence(f"ECE falls by {share_less(before, after)}, {moved}{lower or ''}.")
    beside = "" if other is None else f"; {with_method(other)} it would be {evidence.summary[other, 'ece']['mean']:.4f}"
    if verdict == "worse":
        return _sentence(f"ECE gets worse, {moved}{beside}.", "worse")
    return _sentence(f"ECE {'goes' if verdict is None else 'shows no clear change:'} {moved}{beside}.")


def _near_boundaries(choice: Choice, evidence: Evidence) -> list[dict[str, str]]:
    """What the choice does where classes meet, if the study measured it and the change is beyond chance."""
    row = evidence.differences.get((choice.method, "ba-ece"))
    if row is None or row["verdict"] not in ("better", "worse"):
        return []
    before, after = (evidence.summary[key, "ba-ece"]["mean"] for key in (UNCALIBRATED, choice.method))
    moved = f"from {before:.4f} to {after:.4f}"
    if row["verdict"] == "worse":
        return [_sentence(f"Near boundaries it gets worse (BA-ECE), {moved}.", "worse")]
    return [_sentence(f"Near boundaries (BA-ECE) it falls by {share_less(before, after)}, {moved}.")]


def _by_shift(choice: Choice, evidence: Evidence) -> list[dict[str, str]]:
    """Where the choice loses on shifted cases."""
    found = []
    for one in evidence.shift:
        if not one.knows(choice.method):
            found.append(_sentence(f"On {one.name}, it failed.", "worse"))
        elif worse_than := one.loses_to(choice.method):
            nll = {key: f"{one.summary[key, 'nll']['mean']:.4f}" for key in (choice.method, *worse_than)}
            others = joined([f"{nll[key]} {with_method(key)}" for key in worse_than])
            found.append(_sentence(f"On {one.name}, its NLL is {nll[choice.method]}, higher than {others}.", "worse"))
    return found


def _sentence(text: str, tone: str = "plain") -> dict[str, str]:
    return {"text": text, "tone": tone}


def sentences(choice: Choice, evidence: Evidence) -> list[str]:
    """What was wrong, what to deploy and why, how certain that is, and how it does on shifted cases."""
    before, after = (
        {metric: with_interval(evidence.summary[key, metric]) for metric in ("nll", "ece")}
        for key in (UNCALIBRATED, choice.method)
    )
    channels = evidence.diagnosis.get("channels", ())
    known = "" if math.isnan(evidence.summary[UNCALIBRATED, "nll"]["low"]) else ", with 95% intervals"
    over = f"means over {len(channels)} channels and over the test cases" if channels else "means over the test cases"
    found = [
        f"Uncalibrated, the network is {in_words(evidence.diagnosis)}: NLL {before['nll']}, "
        f"ECE {before['ece']}; {over}{known}."
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
        rows = ((name, evidence.differences.get((choice.method, name.lower()))) for name in ("NLL", "ECE", "BA-ECE"))
        # Without any boundary in the test cases there is no BA-ECE.
        found += [_how_sure(name, row) for name, row in rows if row is not None and not math.isnan(row["mean"])]
        found.append(_labels(method, evidence.flips[choice.method]))
        if method["pooling"]:
            found.append(f"It expects {_POOLED[method['pooling']]}.")
    found += [shift_sentence(choice.method, one) for one in evidence.shift]
    if choice.left_out:
        found.append(f"Excluded by shifted cases, where they fail or lose: {', '.join(choice.left_out)}.")
    return found


def caveats(choice: Choice, evidence: Evidence) -> list[str]:
    """Reasons for caution: few cases, rare classes, shift, offsets, failed methods."""
    found = []
    test = evidence.summary[UNCALIBRATED, "nll"]
    if evidence.cases < FEW_CASES:
        few = counted(evidence.cases, "case")
        found.append(f"Each method was fitted to {few}. With fewer than {FEW_CASES}, chance matters.")
    if test["n"] < FEW_CASES:
        narrow = f"With fewer than {FEW_CASES}, intervals are too narrow." if test["n"] > 1 else "One has no intervals."
        found.append(f"Tested on {counted(test['n'], 'case')}. {narrow}")
    if absent := [name for name, count in evidence.voxels.items() if count == 0]:
        them = "it" if len(absent) == 1 else "them"
        found.append(f"No calibration voxel is labelled {quoted(absent)}: nothing was learnt about {them}.")
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
            f"Of the allowed methods, {choice.best} has the lowest NLL on the validation cases ({best['mean']:.4f}), "
            f"but {choice.method} ({nll['mean']:.4f}) is {higher}{within} and has {counted(own, 'parameter')} instead "
            f"of {richer:,}."
        ]
    if choice.method == UNCALIBRATED:
        return []
    return [
        f"It was chosen by NLL on the validation cases: {nll['mean']:.4f} is the lowest of the "
        f"{counted(len(choice.candidates), 'allowed method')}, and no simpler one is within one standard error."
    ]


def _how_sure(metric: str, row: Mapping[str, Any]) -> str:
    if math.isnan(row["low"]):
        few = "one test case" if row["n"] == 1 else "test cases of one group"
        return f"{metric} changes by {row['mean']:+.4f}; {few} cannot show how certain that is."
    says = {"better": "falls", "worse": "gets worse"}.get(row["verdict"], "shows no clear change")
    p = row["p_adjusted"]
    test = "" if math.isnan(p) else f" (Wilcoxon, adjusted {'p < 0.001' if p < 0.001 else f'p = {p:.2g}'})"
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
