"""The compiled twin of ``segcal.solvers.quadratic.minimise_quadratic``, which explains the method.

It holds no lock of the interpreter: threads that each have a quadratic of their own do not wait for each other. In
Python most of the time of a small quadratic goes to calls of numpy, between which threads would take turns.

Loops are written out: where arrays are added, or indexed by others, numba also compiles a message for shapes that
differ, which takes as long as all of this.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

from typing import Any

import numba
import numpy as np

__all__ = ["minimise"]


def _compiled(*fastmath: str) -> Any:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath)}

    def decorate(function: Any) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no folder to cache compiled code in: every process compiles again
            return numba.njit(**options)(function)

    return decorate


elementwise = _compiled("contract")
# Sums may be split into vector lanes, which is also more accurate.
reduction = _compiled("contract", "reassoc", "nsz")


@reduction
def _dot(a, b):
    total = 0.0
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


@elementwise
def _add(total, factor, row):
    for i in range(total.shape[0]):
        total[i] += factor * row[i]


@reduction
def _dots(row, a, b, c, d):
    """The products of a row with four others: it is read once for all of them."""
    first, second, third, fourth = 0.0, 0.0, 0.0, 0.0
    for i in range(row.shape[0]):
        first += row[i] * a[i]
        second += row[i] * b[i]
        third += row[i] * c[i]
        fourth += row[i] * d[i]
    return first, second, third, fourth


@elementwise
def _factor(lower, ridge):
    """Replace a symmetric matrix, of which the lower half is read, by L, LL' = matrix + ridge; whether there is one."""
    n = lower.shape[0]
    for i in range(0, n, 4):
        last = min(i + 4, n)
        for j in range(i if last - i == 4 else 0):
            row, own = lower[j, :j], lower[j, j]
            a, b, c, d = _dots(row, lower[i, :j], lower[i + 1, :j], lower[i + 2, :j], lower[i + 3, :j])
            lower[i, j] = (lower[i, j] - a) / own
            lower[i + 1, j] = (lower[i + 1, j] - b) / own
            lower[i + 2, j] = (lower[i + 2, j] - c) / own
            lower[i + 3, j] = (lower[i + 3, j] - d) / own
        for k in range(i, last):
            for j in range(i if last - i == 4 else 0, k):
                lower[k, j] = (lower[k, j] - _dot(lower[k, :j], lower[j, :j])) / lower[j, j]
            square = lower[k, k] + ridge - _dot(lower[k, :k], lower[k, :k])
            if not square > 0:
                return False
            lower[k, k] = np.sqrt(square)
    return True


@elementwise
def _solve(lower, x):
    """LL' x = x, in place."""
    for i in range(x.shape[0]):
        x[i] = (x[i] - _dot(lower[i, :i], x[:i])) / lower[i, i]
    for i in range(x.shape[0] - 1, -1, -1):
        x[i] /= lower[i, i]
        _add(x[:i], -x[i], lower[i, :i])


@elementwise
def _newton_step(hessian, free, slope, ridge, noise, longer, lower):
    """The step of the free components, and the ridge it took, which is higher where rounding has made H indefinite.

    ``lower`` is scratch memory.
    """
    n = slope.shape[0]
    step, rest, null = np.empty(n), np.empty(n), np.empty(n)
    if ridge == 0:  # without curvature no length of step is right: take 1 for the steepest component
        steepest = 0.0
        for i in range(n):
            steepest = max(steepest, abs(slope[i]))
        for i in range(n):
            step[i] = -slope[i] / (steepest if steepest else 1.0)
        return step, ridge
    while True:
        for i in range(n):
            row, own = hessian[free[i]], lower[i]
            for j in range(i + 1):
                own[j] = row[free[j]]
        if _factor(lower, ridge):
            for i in range(n):
                step[i] = -slope[i]
            _solve(lower, step)
            for i in range(n):
                row, total = hessian[free[i]], 0.0
                for j in range(n):
                    total += row[free[j]] * step[j]
                rest[i] = slope[i] + total
            _solve(lower, rest)
            for i in range(n):
                step[i] -= rest[i]
                null[i] = step[i] * (ridge * ridge)
            _solve(lower, null)
            _solve(lower, null)
            if not _dot(null, null) > longer * _dot(step, step):
                if -_dot(slope, null) <= noise:
                    _add(step, -1.0, null)
                return step, ridge
        ridge *= 100.0


@elementwise
def _clip(here, newton, low, high, trial, met):
    """Write the end of a step, clipped to the box, and which components that changes; whether there are any."""
    clipped = False
    for i in range(here.shape[0]):
        wanted = here[i] + newton[i]
        trial[i] = min(max(wanted, low[i]), high[i])
        met[i] = trial[i] != wanted
        clipped |= met[i]
    return clipped


@elementwise
def _cut(here, newton, low, high, trial, met):
    """Write where a step leaves the box, and which components do."""
    share = np.inf
    for i in range(here.shape[0]):
        if newton[i] != 0:
            share = min(share, ((high[i] if newton[i] > 0 else low[i]) - here[i]) / newton[i])
    for i in range(here.shape[0]):
        bound = high[i] if newton[i] > 0 else low[i]
        met[i] = newton[i] != 0 and (bound - here[i]) / newton[i] <= share
        trial[i] = bound if met[i] else min(max(here[i] + share * newton[i], low[i]), high[i])


@elementwise
def _change(hessian, free, here, trial, moved, change):
    """Write how far the free components move, and by how much that changes the slope."""
    change[:] = 0.0
    for i in range(free.shape[0]):
        moved[i] = trial[i] - here[i]
        if moved[i] != 0:
            _add(change, moved[i], hessian[free[i]])


@reduction
def _fall(own, free, moved, change):
    """By how much the model changes."""
    total = 0.0
    for i in range(free.shape[0]):
        total += (own[i] + 0.5 * change[free[i]]) * moved[i]
    return total


@elementwise
def _outward(x, slope, low, high):
    return (x <= low and slope >= 0) or (x >= high and slope <= 0)


@elementwise
def minimise(given, slope, low, high, unit, ridge, noise, max_steps, decrease, rounding, longer):
    """The minimum ``(n,)`` of ``slope.t + t'H t / 2`` over the box, from 0; ``slope`` becomes that at the minimum.

    H is ``given``, in these units; everything else is in them already.
    """
    n = slope.shape[0]
    hessian, scratch = np.empty((n, n)), np.empty(n * n)
    for i in range(n):
        row, scaled, own_unit = given[i], hessian[i], unit[i]
        for j in range(n):
            scaled[j] = row[j] * unit[j] * own_unit
    target, held, change = np.zeros(n), np.empty(n, np.bool_), np.empty(n)
    places, parts, meets = np.empty(n, np.int64), np.empty((6, n)), np.empty(n, np.bool_)
    model, reached = 0.0, np.inf
    for i in range(n):
        held[i] = low[i] == high[i] or _outward(0.0, slope[i], low[i], high[i])
    for _ in range(max_steps):
        size = 0
        for i in range(n):
            if not held[i]:
                places[size] = i
                size += 1
        if size:
            free, met = places[:size], meets[:size]
            here, own, lower, upper = parts[0, :size], parts[1, :size], parts[2, :size], parts[3, :size]
            trial, moved = parts[4, :size], parts[5, :size]
            for i in range(size):
                place = free[i]
                here[i], own[i], lower[i], upper[i] = target[place], slope[place], low[place], high[place]
            newton, ridge = _newton_step(
                hessian, free, own, ridge, noise, longer, scratch[: size * size].reshape(size, size)
            )
            clipped = _clip(here, newton, lower, upper, trial, met)
            _change(hessian, free, here, trial, moved, change)
            fall = _fall(own, free, moved, change)
            if clipped and fall > decrease * _dot(own, moved):
                _cut(here, newton, lower, upper, trial, met)
                _change(hessian, free, here, trial, moved, change)
                fall = _fall(own, free, moved, change)
            for i in range(size):
                target[free[i]] = trial[i]
            _add(slope, 1.0, change)
            model += fall
            if clipped:
                for i in range(size):
                    held[free[i]] = met[i]
                continue
        released = 0
        for i in range(n):
            if held[i] and low[i] != high[i] and not _outward(target[i], slope[i], low[i], high[i]):
                released += 1
        if released == 0 or reached - model <= rounding * abs(model):
            break
        for i in range(n):
            held[i] = held[i] and (low[i] == high[i] or _outward(target[i], slope[i], low[i], high[i]))
        reached = model
    return target
