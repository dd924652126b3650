"""The advice in a few sentences: what is wrong, which method to use and why it was chosen, and what that costs."""

from __future__ import annotations

import math

from segcal.metrics.diagnosis import in_words
from segcal.study.advice.choice import Choice
from segcal.study.advice.evidence import Evidence
from segcal.study.advice.phrases import joined, ordinal, share_less, with_method
from segcal.study.settings import FLIPS, UNCALIBRATED

# Another method's ECE is mentioned below this share of the chosen one's, if the paired difference agrees.
_CLEARLY = 0.9
_NETWORK = {
    "overconfident": "The network is overconfident.",
    "underconfident": "The network is underconfident.",
    "balanced": "On average, the network is neither overconfident nor underconfident.",
    "undefined": "The confidence of the network could not be judged.",
}


def headline(choice: Choice, evidence: Evidence) -> list[dict[str, str]]:
    """Sentences, each with its ``tone``: ``plain``, or ``worse`` if it reports harm."""
    verdict = evidence.diagnosis["set"]["verdict"]
    mixed = f"The confidence of the network differs between channels: {in_words(evidence.diagnosis)}."
    network = _sentence(mixed if verdict == "mixed" else _NETWORK[verdict])
    if choice.method == UNCALIBRATED:
        return [network, _sentence(f"Leave the scores uncalibrated: {nothing_better(choice)}.")]
    return [network, _by_nll(choice, evidence), _by_ece(choice, evidence), *_by_shift(choice, evidence)]


def nothing_better(choice: Choice) -> str:
    """Why the scores are left uncalibrated."""
    if len(choice.candidates) > 1:
        return "no allowed method improves NLL on the validation cases by more than one standard error"
    return (
        "every other allowed method loses on shifted cases" if choice.left_out else "there is no other allowed method"
    )


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
    if verdict is None:  # One case has no interval.
        return _sentence(f"{name} takes NLL {moved} on the only test case{kept}.")
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
