"""All errors of segcal. Every message names the case or argument, what came, what was expected, and what to do."""

from __future__ import annotations

import copyreg
import difflib
import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

#: The largest seed. Some libraries accept only 32 bits, and repeat k of a study uses seed + k.
MAX_SEED = 2**31 - 1
# Names of classes that a sentence lists.
_LISTED = 20


class SegcalError(ValueError):
    """Base class of all errors that segcal raises on purpose.

    Args:
        problem: What came, in one clause.
        expected: What was expected.
        fix: What the user can do about it.
        case: The case where it happened.
        where: The file, folder or argument where it happened.

    Examples:
        >>> print(SegcalError("label 9", expected="0..5", fix="set ignore_index = 9", case="p01"))
        case 'p01': label 9; expected 0..5. To fix: set ignore_index = 9.
    """

    def __init__(
        self,
        problem: str,
        *,
        expected: str | None = None,
        fix: str | None = None,
        case: str | None = None,
        where: str | None = None,
    ) -> None:
        self.problem, self.expected, self.fix, self.case, self.where = problem, expected, fix, case, where
        super().__init__(problem)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled without calling __init__, whose arguments differ from class to class: workers send errors back.
        new = copyreg.__newobj__  # type: ignore[attr-defined]  # in no stub; pickle itself uses it
        return new, (type(self), *self.args), self.__dict__

    @property
    def place(self) -> str:
        """Case and file or argument, as far as they are known."""
        return ", ".join(filter(None, (self.case and f"case '{self.case}'", self.where)))

    def __str__(self) -> str:
        text = f"{self.place}: {self.problem}" if self.place else self.problem
        if self.expected:
            text += f"; expected {self.expected}"
        if self.fix:
            text += f". To fix: {self.fix}"
        return text if text.endswith((".", "?")) else text + "."

    def at(self, *, case: str | None = None, where: str | None = None) -> SegcalError:
        """Fill in the case and the place where they are not known yet. Returns the error itself."""
        self.case, self.where = self.case or case, self.where or where
        return self


@contextmanager
def naming(*, case: str | None = None, where: str | None = None) -> Iterator[None]:
    """Let errors that are raised in this block name the case and the place.

    Examples:
        >>> with naming(case="p01"):
        ...     raise SegcalError("label 9")
        Traceback (most recent call last):
        segcal.errors.SegcalError: case 'p01': label 9.
    """
    try:
        yield
    except SegcalError as error:
        raise error.at(case=case, where=where) from None


@contextmanager
def left_for_later() -> Iterator[None]:
    """Ignore errors that will be raised again; a server that cannot be reached is an error now."""
    try:
        yield
    except UnreachableError:
        raise
    except SegcalError:
        pass


class InputError(SegcalError):
    """An argument has the wrong shape, type or values."""


class DataError(SegcalError):
    """A dataset, or one case of it, is not as declared."""


class ConfigError(SegcalError):
    """A configuration file or option is wrong."""


class OutputError(SegcalError):
    """A result could not be written."""


class UnreachableError(DataError, OutputError):
    """A server does not answer, or denies access: whatever comes next would fail, too."""


class WorkerError(SegcalError):
    """A worker process was killed."""

    def __init__(self) -> None:
        super().__init__(
            "a worker process died, probably because memory ran out",
            fix="use fewer workers; commands with --resume continue where they stopped",
        )


class RankError(SegcalError):
    """Another process of a torchrun job ended or cannot be reached."""

    def __init__(self, rank: int, world: int, detail: str) -> None:
        super().__init__(
            f"rank {rank} of {world} lost another rank, which ended or cannot be reached ({detail})",
            where="torchrun",
            fix="see what that rank and torchrun say; if it was killed, memory may have run out: start fewer ranks on "
            "a machine. Commands with --resume continue where they stopped",
        )


class MissingExtraError(SegcalError, ImportError):
    """A library behind an optional extra is not installed."""

    def __init__(self, library: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {library}, which is not installed", fix=f"pip install 'segcal[{extra}]'")


def import_extra(library: str, extra: str, purpose: str) -> Any:
    """Import a library that comes with an optional extra of segcal.

    Examples:
        >>> import_extra("no_such_library", "nifti", "reading NIfTI")
        Traceback (most recent call last):
        segcal.errors.MissingExtraError: reading NIfTI needs no_such_library, which is not installed...
    """
    try:
        return importlib.import_module(library)
    except ImportError:
        raise MissingExtraError(library, extra, purpose) from None


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """The first names, and how many more there are.

    Examples:
        >>> listed(["a", "b"]), listed([str(k) for k in range(1000)])[-23:]
        ('a, b', '17, 18, 19 and 980 more')
    """
    return separator.join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def did_you_mean(name: object, known: Iterable[str]) -> str | None:
    """Suggest the known name that is closest to a misspelt one.

    Examples:
        >>> did_you_mean("CMSop", ["ts", "cms-ap", "cms-op"]), did_you_mean("xyz", ["ts"])
        ("did you mean 'cms-op'?", None)
    """
    folded = {one.casefold(): one for one in known}
    close = difflib.get_close_matches(str(name).casefold(), list(folded), n=1)
    return f"did you mean '{folded[close[0]]}'?" if close else None


def check_name(
    what: str,
    name: object,
    known: Iterable[str],
    *,
    expected: str | None = None,
    where: str | None = None,
    error: type[SegcalError] = InputError,
) -> None:
    """Raise unless a name is known. Used for methods, metrics, regions, presets, losses and other choices.

    Examples:
        >>> check_name("metric", "ece", ["nll", "ece"])
        >>> check_name("metric", "eec", ["nll", "ece"])
        Traceback (most recent call last):
        segcal.errors.InputError: metric is 'eec'; expected one of nll, ece. To fix: did you mean 'ece'?
    """
    names = list(known)
    if name not in names:
        raise error(
            f"{what} is {name!r}",
            expected=expected or f"one of {', '.join(names)}",
            fix=did_you_mean(name, names),
            where=where,
        )


def check_whole(what: str, value: object, low: int, high: int | None = None) -> None:
    """Raise unless a value is a whole number from ``low`` to ``high``.

    Examples:
        >>> check_whole("workers", 2, 1)
        >>> check_whole("workers", 0, 1)
        Traceback (most recent call last):
        segcal.errors.InputError: workers is 0; expected a whole number of at least 1.
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or int(value) < low or (high is not None and int(value) > high):  # type: ignore[call-overload]
        wanted = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise InputError(f"{what} is {value!r}", expected=f"a whole number {wanted}")


def check_seed(seed: object) -> None:
    """Raise unless this is a whole number that every random generator accepts as a seed."""
    check_whole("seed", seed, 0, MAX_SEED)
