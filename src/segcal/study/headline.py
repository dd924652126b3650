"""The advice in two or three sentences: what is wrong, what to use and by what it was chosen, what that costs."""

from __future__ import annotations

import math

from segcal.metrics.diagnosis import in_words
from segcal.study.evidence import Evidence
from segcal.study.phrases import joined, ordinal, share_less
from segcal.study.recommend import Choice
from segcal.study.settings import FLIPS, UNCALIBRATED

# Another method's ECE is worth a word below this share of the chosen one's, if the paired difference agrees.
_CLEARLY = 0.9
_NETWORK = {
    "overconfident": "The network is too sure of itself.",
    "underconfident": "The network is less sure than it should be.",
    "balanced": "On average the network is as sure as it is right.",
    "undefined": "How sure the network is could not be compared with how often it is right.",
}


def headline(choice: Choice, evidence: Evidence) -> list[dict[str, str]]:
    """Sentences, each with its ``tone``: ``plain``, or ``worse`` where it tells of harm."""
    found = [_sentence(_network(evidence))]
    if choice.method == UNCALIBRATED:
        return [*found, _sentence(f"Leave it as it is: {nothing_better(choice)}.")]
    return [*found, _by_criterion(choice, evidence), _by_ece(choice, evidence), *_by_shift(choice, evidence)]


def _network(evidence: Evidence) -> str:
    """How sure the network is of itself; of multi-label data, of which channels."""
    verdict = evidence.diagnosis["set"]["verdict"]
    if verdict == "mixed":
        return f"The network is not as sure of one channel as of another: {in_words(evidence.diagnosis)}."
    return _NETWORK[verdict]


def nothing_better(choice: Choice) -> str:
    """Why the scores are left as they are."""
    if len(choice.candidates) > 1:
        return "no allowed method is better by more than one standard error of NLL on validation cases"
    return (
        "every other allowed method loses on shifted cases" if choice.left_out else "there is no other allowed method"
    )


def lower_ece(choice: Choice, evidence: Evidence) -> str | None:
    """The allowed calibrator with the lowest ECE, where that is clearly lower than the chosen one's."""
    if choice.method == UNCALIBRATED:
        return None
    ece = {key: evidence.summary[key, "ece"]["mean"] for key in choice.candidates if key != UNCALIBRATED}
    lower = {
        key: mean
        for key, mean in ece.items()
        if mean < _CLEARLY * ece[choice.method] and evidence.beside[key, "ece"]["verdict"] in ("better", None)
    }
    return min(lower, key=lower.__getitem__, default=None)


def ece_caveat(choice: Choice, evidence: Evidence) -> list[str]:
    """What choosing by NLL costs in ECE: a reader sees the other rows of the table and wonders."""
    other = lower_ece(choice, evidence)
    harm = choice.method != UNCALIBRATED and evidence.differences[choice.method, "ece"]["verdict"] == "worse"
    if other is None and not harm:
        return []
    ece = {key: row["mean"] for (key, metric), row in evidence.summary.items() if metric == "ece"}
    own = ece[choice.method]
    place = ordinal(1 + sum(value < own for value in ece.values()))
    facts = [f"uncalibrated {ece[UNCALIBRATED]:.4f}"] + ([] if other is None else [f"{other} {ece[other]:.4f}"])
    better = "leaving the scores as they are" if other is None or ece[UNCALIBRATED] < ece[other] else other
    return [
        f"By ECE, {choice.method} is {place} of {len(ece)} ({own:.4f}; {', '.join(facts)}). Methods are chosen by NLL, "
        "which judges the probabilities of all classes; where only the confidence in the label is used, "
        f"{better} may be the better choice."
    ]


def _by_criterion(choice: Choice, evidence: Evidence) -> dict[str, str]:
    name = f"{evidence.methods[choice.method]['name']}, chosen by NLL on validation cases,"
    kept = "" if sum(evidence.flips[choice.method][kind] for kind in FLIPS) else " and changes no label"
    before, after = (evidence.summary[key, "nll"]["mean"] for key in (UNCALIBRATED, choice.method))
    moved = f"from {before:.4f} to {after:.4f}"
    verdict = evidence.differences[choice.method, "nll"]["verdict"]
    if verdict == "better":
        share = f" by {share_less(before, after)}" if 0 < before < math.inf else ""
        return _sentence(f"{name} lowers it{share} on test cases{kept}.")
    if verdict == "worse":
        return _sentence(f"{name} makes it worse on test cases: {moved}.", "worse")
    if verdict is None:  # One case has no interval.
        return _sentence(f"{name} takes it {moved} in the only test case{kept}.")
    return _sentence(f"{name} hardly changes it on test cases{kept}: {moved}, too little to be sure of.")


def _by_ece(choice: Choice, evidence: Evidence) -> dict[str, str]:
    """What the choice does to the calibration error, and whether another allowed method takes more of it away."""
    before, after = (evidence.summary[key, "ece"]["mean"] for key in (UNCALIBRATED, choice.method))
    other = lower_ece(choice, evidence)
    moved = f"from {before:.4f} to {after:.4f}"
    beside = "" if other is None else f"; {other} would give {evidence.summary[other, 'ece']['mean']:.4f}"
    verdict = evidence.differences[choice.method, "ece"]["verdict"]
    if verdict == "worse":
        return _sentence(f"ECE gets worse: {moved}{beside}.", "worse")
    if verdict == "better":
        text = f"ECE falls by {share_less(before, after)}, {moved}"
        if other is not None:
            text += f"; {other} would lower it by {share_less(before, evidence.summary[other, 'ece']['mean'])}"
        return _sentence(f"{text}.")
    return _sentence(f"ECE {'goes' if verdict is None else 'may be lower or higher:'} {moved}{beside}.")


def _by_shift(choice: Choice, evidence: Evidence) -> list[dict[str, str]]:
    """Where the choice loses on the user's shifted cases."""
    found = []
    for one in evidence.shift:
        if not one.knows(choice.method):
            found.append(_sentence(f"On {one.name}, it failed.", "worse"))
        elif lost := one.loses_to(choice.method):
            nll = {key: one.summary[key, "nll"]["mean"] for key in (choice.method, *lost)}
            others = joined([f"{nll[key]:.4f} {'as it is' if key == UNCALIBRATED else f'with {key}'}" for key in lost])
            found.append(_sentence(f"On {one.name}, NLL is higher: {nll[choice.method]:.4f}, but {others}.", "worse"))
    return found


def _sentence(text: str, tone: str = "plain") -> dict[str, str]:
    return {"text": text, "tone": tone}
