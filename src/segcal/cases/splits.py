"""Groups of cases that belong together, declared splits, and random splits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from segcal.errors import ConfigError, InputError

Groups = str | Mapping[str, str] | Callable[[str], str]

PARTS = ("calibration", "validation", "test")
# Random assignments of groups to parts, which are compared by how close their sizes are to the wanted ones.
_DRAWS = 32
# The closest share of these, from which one is taken. Always the closest would give nearly the same parts each time.
_NEAREST = 0.5


def by_group(ids: Sequence[str], groups: Groups | None) -> dict[str, list[str]]:
    """The cases of every group; without groups every case is its own group."""
    members: dict[str, list[str]] = {}
    for name in ids:
        members.setdefault(group_of(name, groups), []).append(name)
    return members


def group_of(name: str, groups: Groups | None) -> str:
    """The group of a case.

    Examples:
        >>> group_of("p01_scan2", r"^(p\\d+)_"), group_of("a", {"a": "first"}), group_of("a", None)
        ('p01', 'first', 'a')
    """
    if groups is None:
        return name
    if isinstance(groups, str):
        try:
            match = re.search(groups, name)
        except re.error as error:
            problem = f"the pattern {groups!r} is not valid ({error})"
            raise InputError(problem, where="groups", expected="a regular expression") from None
        if match is None or (match.re.groups and match.group(1) is None):
            problem = f"the pattern {groups!r} does not match case '{name}'"
            expected = "a regular expression that finds the group in every case name"
            raise InputError(problem, where="groups", expected=expected)
        return match.group(1) if match.re.groups else match.group()
    if isinstance(groups, Mapping):
        if name not in groups:
            raise InputError(f"case '{name}' has no group", where="groups", expected="a group for every case")
        return groups[name]
    return groups(name)


def check_splits(splits: Mapping[str, Sequence[str]], ids: Sequence[str], groups: Groups | None) -> None:
    """Raise unless the declared parts are disjoint, name existing cases, and keep groups together."""
    known = set(ids)
    part_of: dict[str, str] = {}
    for part, names in splits.items():
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(
                f"splits.{part} names {some(unknown)}: no such case",
                expected=f"names of cases, such as {some(ids[:2])}",
                fix="correct or remove these names",
            )
        counts = Counter(names)
        if twice := sorted(name for name, count in counts.items() if name in part_of or count > 1):
            raise ConfigError(
                f"{some(twice)} in splits.{part} and in splits.{part_of.get(twice[0], part)}",
                expected="every case in one part, once",
                fix="remove them from one of the two: testing on the cases of a fit shows nothing",
            )
        part_of |= dict.fromkeys(names, part)
    for group, names in by_group(list(part_of), groups).items():
        one_of = {part_of[name]: name for name in names}
        if len(one_of) > 1:
            found = ", ".join(f"'{name}' is in splits.{part}" for part, name in one_of.items())
            raise ConfigError(
                f"group '{group}' is divided: {found}",
                expected="all cases of a group in the same part",
                fix="move them together, or correct 'groups'",
            )


def in_no_part(names: Sequence[str]) -> list[str]:
    """A note about cases that are in no declared part; none if there are no such cases.

    Examples:
        >>> in_no_part([]), in_no_part(["a", "b"])
        ([], ["2 cases are in no declared part and are left out: 'a', 'b'"])
    """
    if not names:
        return []
    count, be = ("1 case", "is") if len(names) == 1 else (f"{len(names)} cases", "are")
    return [f"{count} {be} in no declared part and {be} left out: {some(names)}"]


def part_sizes(parts: Sequence[float | int], total: int) -> list[int]:
    """Sizes of parts in cases, from fractions or whole numbers; cumulative shares are rounded."""
    whole = all(isinstance(part, int) or part == 0 for part in parts)
    if any(part < 0 for part in parts) or not (whole or sum(parts) <= 1 + 1e-9):
        expected = "fractions that sum to at most 1, or whole numbers, none negative"
        raise InputError(f"sizes {tuple(parts)}", where="split", expected=expected)
    edges = np.cumsum(parts) if whole else np.floor(np.cumsum(parts) * total + 0.5)
    counts: list[int] = np.diff(edges.astype(int), prepend=0).tolist()
    if sum(counts) > total:
        raise InputError(f"{sum(counts)} cases asked for", where="split", expected=f"at most the {total} there are")
    return counts


def draw_parts(
    members: Mapping[str, Sequence[str]], sizes: Sequence[int], asked: Sequence[bool], seed: int
) -> list[set[str]]:
    """Assign groups at random to parts of about these sizes, at least one to each part that is asked for.

    Returns the cases of each part. Each draw gives the groups, in random order, to the part that lacks the most cases.
    Of 32 draws, the first one of the closer half is taken. If every case is its own group, one draw meets the sizes.
    """
    names = sorted(members)
    random = np.random.default_rng(seed)
    drawn: list[tuple[int, list[list[str]]]] = []
    for _ in range(_DRAWS if any(len(own) > 1 for own in members.values()) else 1):
        random.shuffle(names)
        parts = _fill([(name, len(members[name])) for name in names], sizes, asked)
        found = (sum(len(members[name]) for name in part) for part in parts)
        drawn.append((sum(abs(size - wanted) for size, wanted in zip(found, sizes, strict=True)), parts))
    near = np.quantile([distance for distance, _ in drawn], _NEAREST)
    chosen = next(parts for distance, parts in drawn if distance <= near)
    return [{case for name in part for case in members[name]} for part in chosen]


def _fill(groups: Sequence[tuple[str, int]], sizes: Sequence[int], asked: Sequence[bool]) -> list[list[str]]:
    parts: list[list[str]] = [[] for _ in sizes]
    missing = list(sizes)
    spare = sum(size for _, size in groups) - sum(sizes)  # cases that no part needs
    for place, (name, size) in enumerate(groups):
        empty = [part for part, own in enumerate(parts) if asked[part] and not own]
        last = len(groups) - place <= len(empty)  # All groups left are needed by parts that have none.
        part = max(empty if last else range(len(sizes)), key=missing.__getitem__)
        # A group that would exceed the part's size by more than it now lacks is left out if it can be spared.
        if last or (missing[part] > 0 and not (size > 2 * missing[part] and spare >= size)):
            parts[part].append(name)
            missing[part] -= size
        else:
            spare -= size
    return parts


def some(names: Sequence[str]) -> str:
    """The first few names, quoted.

    Examples:
        >>> some(["a", "b"]), some(list("abcdefg"))
        ("'a', 'b'", "'a', 'b', 'c', 'd', 'e', ... (7 in all)")
    """
    shown = ", ".join(map(repr, names[:5]))
    return shown + (f", ... ({len(names)} in all)" if len(names) > 5 else "")
