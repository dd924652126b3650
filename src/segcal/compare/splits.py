"""Which cases are fitted to, chosen on and tested on, repeat by repeat."""

from __future__ import annotations

from segcal.cases import CaseSet
from segcal.cases.caseset import Split
from segcal.errors import InputError


def split_cases(
    cases: CaseSet, repeats: int, fractions: tuple[float, float, float], seed: int
) -> tuple[list[Split], list[str]]:
    """The split of every repeat, and what the user should know of them.

    Groups stay together. The splits that ``segcal.toml`` names are one split, and used where one repeat is asked for.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> splits, warnings = split_cases(scenes(10, size=(32, 40)), 3, (0.5, 0.2, 0.3), seed=0)
        >>> [len(part) for part in splits[0]], len(splits), warnings
        ([5, 2, 3], 3, [])
    """
    warnings: list[str] = []
    if cases.splits and repeats == 1:
        splits = [_named(cases, fractions, seed, warnings)]
    else:
        if cases.splits:
            warnings.append(
                f"The dataset names its splits, but {repeats} repeats were asked for: "
                "all of them are random; use one repeat for the named splits."
            )
        splits = [cases.split(*fractions, seed=seed + repeat) for repeat in range(repeats)]
    for split in splits:
        for name, part in zip(Split._fields, split, strict=True):
            if not len(part):
                raise InputError(
                    f"{len(cases)} cases leave the {name} part empty",
                    where="fractions",
                    expected=f"at least one case in each part, of {' / '.join(f'{f:g}' for f in fractions)}",
                    fix="give more cases, or larger shares",
                )
    return splits, warnings


def _named(cases: CaseSet, fractions: tuple[float, float, float], seed: int, warnings: list[str]) -> Split:
    split = cases.split()
    if len(split.validation) or len(split.calibration) < 2:
        return split
    fit, choose, _ = fractions
    share = choose / (fit + choose)
    held = split.calibration.split(1 - share, share, 0.0, seed=seed)
    warnings.append(
        f"The named splits have no validation part: {len(held.validation)} of the "
        f"{len(split.calibration)} calibration cases are held out as one."
    )
    return Split(held.calibration, held.validation, split.test)
