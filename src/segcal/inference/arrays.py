"""What all of inference does with arrays: check them, subtract them, average them without NaN."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from segcal.errors import InputError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def checked(values: ArrayLike, name: str, axes: tuple[str, ...], *, trailing: bool = False) -> FloatArray:
    """``values`` as float64 with the named axes, none of them empty; with ``trailing``, more axes may follow."""
    expected = f"numbers of shape ({', '.join((*axes, '...') if trailing else axes)})"
    try:
        array = np.asarray(values)
    except ValueError:
        raise InputError(f"{name} is a ragged list", expected=expected, fix="put NaN where there is no value") from None
    if array.dtype.kind not in "biuf":
        raise InputError(f"{name} has dtype {array.dtype}", expected=expected)
    if not (array.ndim == len(axes) or (trailing and array.ndim > len(axes))):
        raise InputError(f"{name} has shape {array.shape}", expected=expected)
    if 0 in array.shape[: len(axes)]:
        raise InputError(f"{name} has shape {array.shape}", expected=expected + ", at least one of each")
    return array.astype(np.float64)


def checked_groups(groups: ArrayLike | None, cases: int) -> IntArray:
    """The number of every case's group, in order of appearance; without groups, every case is its own group."""
    if groups is None:
        return np.arange(cases)
    names = np.asarray(groups)
    if names.shape != (cases,) or names.dtype.kind not in "biuUS":
        raise InputError(
            f"groups has shape {names.shape} and dtype {names.dtype}",
            expected=f"the name or the number of a group for each of {cases} cases",
        )
    _, first, found = np.unique(names, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[found]


def sum_by_group(values: FloatArray, groups: IntArray) -> FloatArray:
    """Sums over the cases of each group: ``(cases, ...)`` to ``(groups, ...)``."""
    total = np.zeros((int(groups.max(initial=-1)) + 1, *values.shape[1:]))
    with np.errstate(invalid="ignore"):  # opposite infinities
        np.add.at(total, groups, values)
    return total


def mean_by_group(values: FloatArray, groups: IntArray) -> FloatArray:
    """Means of the values of each group that are not NaN, ``(cases, ...)`` to ``(groups, ...)``; NaN for none."""
    there = ~np.isnan(values)
    return ratio(sum_by_group(np.where(there, values, 0.0), groups), sum_by_group(there.astype(float), groups))


def difference(first: FloatArray, second: FloatArray) -> FloatArray:
    """``first - second``; equal infinities differ by 0."""
    with np.errstate(invalid="ignore"):
        return np.where(first == second, 0.0, first - second)


def mean(values: FloatArray, axis: int | tuple[int, ...]) -> tuple[FloatArray, IntArray]:
    """Mean and number of the values that are not NaN; the mean of none is NaN."""
    count = np.asarray(np.sum(~np.isnan(values), axis=axis, dtype=np.int64))
    with np.errstate(invalid="ignore"):  # opposite infinities
        return ratio(np.nansum(values, axis=axis), count), count


def ratio(total: FloatArray, count: FloatArray | IntArray) -> FloatArray:
    """``total / count``, NaN where the count is 0."""
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
