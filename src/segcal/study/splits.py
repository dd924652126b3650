"""Which cases are fitted to, chosen on and tested on, repeat by repeat; and shifted cases to test on."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from torch import Tensor

from segcal.cases import CaseSet
from segcal.cases.calibrated import check_classes
from segcal.cases.caseset import CaseRef, Split
from segcal.cases.splits import in_no_part
from segcal.errors import InputError
from segcal.study.advice.phrases import counted
from segcal.study.settings import Settings
from segcal.study.work.store import fingerprints
from segcal.training.shift import SEVERITIES, CorruptedCase, Severity
from segcal.types import Case

#: Number of random splits if the dataset declares none.
REPEATS = 3
# After this many draws in a row without a new split, there are assumed to be no more.
_TRIES = 100


Model = Callable[[Tensor], Tensor]


def split_cases(
    cases: CaseSet, repeats: int | None, fractions: tuple[float, float, float], seed: int
) -> tuple[list[Split], str, list[str]]:
    """The split of every repeat, all different; where they come from, in words; and warnings. Groups stay together.

    Declared test cases are never used for anything else. One repeat uses the parts as declared; several redraw the
    calibration and validation parts from the cases declared for these two. By default, ``repeats`` is 1 if splits are
    declared, and 3 otherwise.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> splits, origin, warnings = split_cases(scenes(10, size=(32, 40)), None, (0.5, 0.2, 0.3), seed=0)
        >>> [len(part) for part in splits[0]], len(splits), origin, warnings
        ([5, 2, 3], 3, '3 random splits', [])
    """
    warnings = in_no_part(cases.undeclared)
    if not cases.splits:
        wanted = repeats or REPEATS
        splits = _different((cases.split(*fractions, seed=seed + number) for number in count()), wanted)
        origin = f"{len(splits)} random split{'s' * (len(splits) > 1)}"
    elif (wanted := repeats or 1) == 1:
        splits, origin = [_declared(cases, fractions, seed, warnings)], "the splits that the dataset declares"
    else:
        splits = _different(_redrawn(cases, fractions, seed), wanted)
        origin = f"the declared test part, {len(splits)} random splits of the others"
    if len(splits) < wanted:
        warnings.append(f"{len(splits)} repeats instead of {wanted}: these cases give no more different splits.")
    for split in splits:
        for name, part in zip(Split._fields, split, strict=True):
            if not len(part):
                raise InputError(
                    f"{counted(len(cases), 'case')} leave{'s' * (len(cases) == 1)} the {name} part empty",
                    where="splits" if cases.splits else "fractions",
                    expected=f"at least one case in each part, of {' / '.join(f'{f:g}' for f in fractions)}",
                    fix="give more cases, or larger shares",
                )
    return splits, origin, warnings


def counted_once(parts: Sequence[CaseSet]) -> list[tuple[str, ...]]:
    """The cases whose voxels are counted in each part: every case in one part, spread evenly over the parts.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> cases = scenes(4, size=(32, 40))
        >>> [len(names) for names in counted_once([cases, cases[:2]])], counted_once([cases[:1], cases[:1]])
        ([2, 2], [('image-000',), ()])
    """
    found: list[list[str]] = [[] for _ in parts]
    names = [set(part.ids) for part in parts]
    # Cases that are in few parts come first; the others then balance the parts.
    where = {name: [r for r, own in enumerate(names) if name in own] for name in sorted(set().union(*names))}
    for name in sorted(where, key=lambda name: len(where[name])):
        found[min(where[name], key=lambda r: len(found[r]))].append(name)
    return [tuple(sorted(own)) for own in found]


def _different(drawn: Iterator[Split], wanted: int) -> list[Split]:
    """The first ``wanted`` different splits, or all there are."""
    found: dict[tuple[frozenset[str], ...], Split] = {}
    tries = 0
    for split in drawn:
        key = tuple(frozenset(part.ids) for part in split)
        tries = tries + 1 if key in found else 0
        found.setdefault(key, split)
        if len(found) == wanted or tries == _TRIES:
            break
    return list(found.values())


def _declared(cases: CaseSet, fractions: Sequence[float], seed: int, warnings: list[str]) -> Split:
    split = cases.split()
    if len(split.validation) or len(split.calibration) < 2:
        return split
    held = _held_out(split.calibration, fractions, seed)
    warnings.append(
        f"No validation part is declared: {len(held.validation)} of the "
        f"{len(split.calibration)} calibration cases are held out as one."
    )
    return held._replace(test=split.test)


def _redrawn(cases: CaseSet, fractions: Sequence[float], seed: int) -> Iterator[Split]:
    """The declared test part, and random calibration and validation parts of the declared sizes."""
    declared = cases.split()
    sizes = (len(declared.calibration), len(declared.validation), 0)
    others = {*declared.calibration.ids, *declared.validation.ids}
    pool = cases.select([name for name in cases.ids if name in others])
    for number in count(seed):
        again = pool.split(*sizes, seed=number) if sizes[1] else _held_out(pool, fractions, number)
        yield again._replace(test=declared.test)


def _held_out(cases: CaseSet, fractions: Sequence[float], seed: int) -> Split:
    """Calibration and validation parts, in the proportion of their shares."""
    fit, choose, _ = fractions
    share = choose / (fit + choose)
    return cases.split(1 - share, share, 0.0, seed=seed)


@dataclass(frozen=True)
class ShiftedSet:
    """Cases to test the calibrators on; ``known`` are their fingerprints, ``modelled`` if a model predicts them."""

    name: str
    cases: CaseSet
    known: Mapping[str, str]
    modelled: bool = False

    def left(self, split: Split) -> CaseSet:
        """The cases that this repeat has not seen, by their names; corrupted copies are those of its test cases."""
        seen, tested = {*split.calibration.ids, *split.validation.ids}, set(split.test.ids)
        left = [case for case in self.cases.ids if (case in tested if self.modelled else case not in seen)]
        cases = self.cases.select(left)
        if not len(cases):
            raise InputError(
                f"all cases of '{self.name}' were fitted to or chosen on",
                where="shifted",
                expected="cases with new names, or with the names of test cases",
            )
        return cases


def given_sets(cases: CaseSet, shifted: Mapping[str, CaseSet]) -> list[ShiftedSet]:
    """Second datasets. They must have the classes of the first."""
    for name, other in shifted.items():
        check_classes(other, cases, have=f"'{name}' has", whose="the dataset")
    return [ShiftedSet(name, other, fingerprints(other)) for name, other in shifted.items()]


def corrupted_sets(cases: CaseSet, model: Model | None, settings: Settings) -> list[ShiftedSet]:
    """The model's predictions for mildly and strongly corrupted images of the cases."""
    if model is None:
        raise InputError("shift without a model", expected="model=, a function from images to logits")
    if cases[0].image is None:
        raise InputError("the cases have no images", where="shift", expected="a folder images/ in the dataset")
    if settings.pooling:
        raise InputError("shift with pooling", expected="one of them: a model gives one prediction, not an ensemble's")
    # A model has no fingerprint, so its predictions get a new one each time: nothing is reused from an earlier run.
    once, multilabel = uuid.uuid4().hex, cases.channel_names is not None
    found = []
    for severity in SEVERITIES:
        opens = {ref.id: partial(_open, ref, model, severity, settings.seed, multilabel) for ref in cases.refs}
        corrupted = replace(cases, refs=tuple(CaseRef(*item) for item in opens.items()), num_members=None)
        known = dict.fromkeys(cases.ids, f"{once} {severity}")
        found.append(ShiftedSet(f"photometric {severity}", corrupted, known, modelled=True))
    return found


def _open(ref: CaseRef, model: Model, severity: Severity, seed: int, multilabel: bool) -> Case:
    return Case(CorruptedCase(ref.open(), model, severity, seed, multilabel=multilabel))
