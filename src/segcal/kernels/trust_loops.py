"""The compiled loops of ``segcal.calibrators.trust``: what voxels and their windows say, and levelling."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import math

import numpy as np

from segcal.kernels.compiled import DEEP, MINUS_INF, ONE, ZERO, elementwise, exp, exp64, log, log1p
from segcal.kernels.softmax_loops import next_lower
from segcal.kernels.tiles import ROWS, TILE, multiply_tall_tile

# Voxels at once, so that their arrays stay in the first cache: in most loops, and in the networks with their units.
_BLOCK, _FEW = 256, 128
# Below all scores; unlike -inf it can be subtracted from -inf.
SMALLEST_SCORE = np.float32(-3e38)


@elementwise
def describe_range(z, start, stop, beta, lowest, widest, unit, winner, point, rounded, predicted, sums):
    """Winner, point features ``(5, V)`` and two of them in units, of the voxels ``start`` to ``stop`` of ``z (C, V)``.

    Adds how often each class was ``predicted (C,)``, where there is a softmax, and ``sums (5,)`` of features in units.
    """
    classes = z.shape[0]
    first, second, third = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    others, moment = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    best = np.empty(_BLOCK, np.int32)
    for begin in range(start, stop, _BLOCK):
        size = min(_BLOCK, stop - begin)
        own, units, row = point[:, begin : begin + size], rounded[:, begin : begin + size], z[0, begin : begin + size]
        for v in range(size):
            first[v], second[v], third[v], best[v] = row[v], MINUS_INF, MINUS_INF, 0
        for k in range(1, classes):
            row = z[k, begin : begin + size]
            for v in range(size):
                x = row[v]
                top, next_, last = first[v], second[v], third[v]
                lower = x if x < top else top  # what does not come first
                best[v] = np.int32(k) if x > top else best[v]
                first[v] = x if x > top else top
                least = lower if lower < next_ else next_
                second[v] = lower if lower > next_ else next_
                third[v] = least if least > last else last
        for v in range(size):
            others[v] = moment[v] = first[v] - first[v]  # NaN where that is not finite, else 0
        for k in range(classes):
            row = z[k, begin : begin + size]
            for v in range(size):
                gap = row[v] - first[v]
                x = beta * gap
                e = ZERO if (best[v] == k) | (gap < -DEEP) else exp(x)
                others[v] += e
                moment[v] += e * (x if e > ZERO else ZERO)
        for v in range(size):
            more = np.float64(others[v])
            total = log1p(more)
            rest = np.float32(log(more) - total)
            own[0, v] = rest if (more > 0.0) & (rest > lowest) else lowest
            own[1, v] = ONE / (ONE + others[v])
            own[4, v] = np.float32(total - moment[v] / (ONE + others[v]))
        for v in range(size):
            ahead, below = beta * (first[v] - second[v]), beta * (second[v] - third[v])
            # whether the third is a possible class; false also for the NaN that two classes of -inf leave
            seen = (first[v] - third[v] <= DEEP) & (below < widest)
            own[2, v] = ahead if ahead < widest else widest
            own[3, v] = ZERO if classes == 2 else below if seen else widest
        for v in range(size):
            winner[begin + v] = best[v]
            predicted[best[v]] += own[1, v] == own[1, v]  # not NaN
        for j in range(5):
            total = np.int64(0)
            for v in range(size):
                whole = np.int32(np.rint(np.float64(own[j, v]) * unit))
                total += whole
                if j < 2:
                    units[j, v] = whole
            sums[j] += total


@elementwise
def count_changes(winner, found):
    """Add to ``found (N,)`` how often neighbours in a row of ``winner (N, rows, W)`` differ."""
    for n in range(len(winner)):
        for row in winner[n]:
            for x in range(1, len(row)):
                found[n] += row[x] != row[x - 1]


@elementwise
def _add_row(winner, p, rest, sign, columns, sums):
    """Add a row to the ``columns (W, classes)`` and ``sums (2, W)`` of windows."""
    first, second = sums
    for x in range(len(winner)):
        columns[x, winner[x]] += sign
    for x in range(len(winner)):
        first[x] += sign * p[x]
        second[x] += sign * rest[x]


@elementwise
def window_rows(winner, p, rest, side, unit, start, stop, share, mean_p, mean_rest):
    """The share of the own prediction and the means of ``p`` and ``rest``, in units, in windows of one side.

    All are planes ``(H, W)``, of which the rows ``start`` to ``stop`` are written. Running sums: a column of the window
    loses a row and gains one, then the window loses a column and gains one.
    """
    height, width = winner.shape
    half, classes = side // 2, winner.max() // 8 * 8 + 8  # whole vectors
    columns, inside = np.zeros((width + side, classes), np.int32), np.zeros(classes, np.int32)  # columns beyond are 0
    sums, found, per_row = np.zeros((2, width + side), np.int64), np.zeros((3, width), np.int64), np.empty(width)
    for x in range(width):
        per_row[x] = 1 / (min(x + half, width - 1) - max(x - half, 0) + 1)
    for y in range(max(start - half, 0), stop + half):
        centre, gone = y - half, y - side
        if y < height:
            _add_row(winner[y], p[y], rest[y], 1, columns[half + 1 :], sums[:, half + 1 :])
        if gone >= max(start - half, 0):
            _add_row(winner[gone], p[gone], rest[gone], -1, columns[half + 1 :], sums[:, half + 1 :])
        if centre < start:
            continue
        inside[:] = 0
        first, second, a, b = sums[0], sums[1], np.int64(0), np.int64(0)
        for x in range(-2 * half, width):
            gained, lost = columns[x + side], columns[max(x, 0)]
            for k in range(classes):
                inside[k] += gained[k] - lost[k]
            a += first[x + side] - first[max(x, 0)]
            b += second[x + side] - second[max(x, 0)]
            if x >= 0:
                found[0, x], found[1, x], found[2, x] = inside[winner[centre, x]], a, b
        scale = 1.0 / (min(centre + half, height - 1) - max(centre - half, 0) + 1)
        for x in range(width):
            share[centre, x] = found[0, x] * (per_row[x] * scale)
            mean_p[centre, x] = found[1, x] * (per_row[x] * scale / unit)
            mean_rest[centre, x] = found[2, x] * (per_row[x] * scale / unit)


@elementwise
def distance_rows(winner, reach, start, stop, out):
    """``log(1 + d)`` for the distance d to the nearest voxel beside another prediction, at most ``reach``.

    ``winner`` and ``out`` are planes ``(H, W)``, of which the rows ``start`` to ``stop`` are written.
    """
    height, width = winner.shape
    along, nearest = np.empty((height, width), np.int32), np.empty(width, np.int32)
    top, bottom = max(start - reach, 0), min(stop + reach, height)
    for y in range(top, bottom):
        row, above, under = winner[y], winner[max(y - 1, 0)], winner[min(y + 1, height - 1)]
        for x in range(width):
            nearest[x] = (above[x] != row[x]) | (under[x] != row[x])
        for x in range(1, width):
            nearest[x] |= row[x - 1] != row[x]
        for x in range(width - 1):
            nearest[x] |= row[x + 1] != row[x]
        last = reach
        for x in range(width):
            last = 0 if nearest[x] else min(last + 1, reach)
            along[y, x] = last
        last = reach
        for x in range(width - 1, -1, -1):
            last = min(last + 1, along[y, x])
            along[y, x] = last * last
    for y in range(start, stop):
        nearest[:] = along[y]
        for step in range(1, reach):
            # a row beyond the border is replaced by the last one, which was nearer
            above, under = along[max(y - step, top)], along[min(y + step, bottom - 1)]
            for x in range(width):
                nearest[x] = min(nearest[x], min(above[x], under[x]) + step * step)
        for x in range(width):
            out[y, x] = log1p(math.sqrt(np.float64(nearest[x])))


@elementwise
def level_range(scores, start, stop, winner, odds, below, least, levelled):
    """Turn the losers' scores ``(C, V)`` into log-probabilities, in place; see ``levelling.level``."""
    classes = scores.shape[0]
    equal_share = np.array([np.inf] + [least - math.log(m) for m in range(1, classes)])  # log-odds, by possible losers
    top, total, possible = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.int32)
    raised, log_q, shift, log_cap = np.empty(_BLOCK), np.empty(_BLOCK), np.empty(_BLOCK), np.empty(_BLOCK)
    limit, r = np.empty(_BLOCK, np.float32), np.empty((classes, _BLOCK), np.float32)
    for begin in range(start, stop, _BLOCK):
        size = min(_BLOCK, stop - begin)
        own, who, moved = odds[begin : begin + size], winner[begin : begin + size], levelled[begin : begin + size]
        for v in range(size):
            scores[who[v], begin + v] = MINUS_INF
            top[v], total[v], possible[v] = SMALLEST_SCORE, ZERO, 0
        for j in range(classes):
            row = scores[j, begin : begin + size]
            for v in range(size):
                top[v] = row[v] if row[v] > top[v] else top[v]
                possible[v] += np.int32(row[v] > MINUS_INF)
        for j in range(classes):
            row, share = scores[j, begin : begin + size], r[j]
            for v in range(size):
                e = exp(row[v] - top[v]) if row[v] > MINUS_INF else ZERO
                share[v] = e
                total[v] += e
        for v in range(size):
            raised[v] = max(np.float64(own[v]), equal_share[possible[v]])
        for v in range(size):
            o = raised[v]
            tail = log1p(exp64(-abs(o)))
            log_rest = -max(o, 0.0) - tail
            log_total = log1p(np.float64(total[v]) - 1.0)
            some = possible[v] > 0
            log_q[v], log_cap[v] = min(o, 0.0) - tail if some else 0.0, o + below + log_rest if some else 0.0
            shift[v] = log_rest - top[v] - log_total if some else 0.0
            moved[v] = some & ((o > own[v]) | (-log_total > o + below))
            limit[v] = np.float32(np.inf)
        for v in range(size):
            if moved[v]:
                o = raised[v]
                cap = math.exp(o + below)  # log_cap is its logarithm and that of what q leaves
                factor = _water_level(r[:, v], cap)
                limit[v] = np.float32(cap / factor)
                shift[v] = log_cap[v] - o - below - top[v] + (math.log(factor) if factor < np.inf else 0.0)
        for v in range(size):
            top[v] = next_lower(np.float32(log_q[v]), 0)
        for j in range(classes):
            row, share = scores[j, begin : begin + size], r[j]
            for v in range(size):
                x = np.float32(row[v] + shift[v])
                x = np.float32(log_cap[v]) if share[v] >= limit[v] else x
                row[v] = top[v] if x > top[v] else x
        for v in range(size):
            scores[who[v], begin + v] = log_q[v]


@elementwise
def _water_level(r, cap):
    """The c for which ``min(cap, c r)`` sums to one; infinite where every positive r is at the cap."""
    factor = 0.0
    while True:
        tail, left = 0.0, 1.0
        for value in r:
            if factor > 0 and value * factor >= cap:
                left -= cap
            else:
                tail += value
        if not (tail > 0 and left > 0):
            return np.inf
        if left / tail <= factor:
            return factor
        factor = left / tail


@elementwise
def correct_range(features, start, stop, winner, mean, scale, widest, first, second, classes, last, out):
    """The mean correction ``(V,)`` of F networks for ``features (J, V)``; see ``segcal.calibrators.trust.network``.

    ``first (F, U, J + 1)`` and ``second (F, U, U + 1)`` end with biases, ``classes (F, C, U)`` and ``last (F, U)``. U
    is a multiple of ``2 ROWS``.
    """
    inputs = features.shape[0]
    networks, units, _ = second.shape
    x, total = np.zeros((inputs, _FEW), np.float32), np.empty(_FEW, np.float32)
    hidden, deeper = np.empty((units, _FEW), np.float32), np.empty((units, _FEW), np.float32)
    for begin in range(start, stop, _FEW):
        size = min(_FEW, stop - begin)
        for j in range(inputs):
            centre, factor, row = mean[j], ONE / scale[j], features[j, begin : begin + size]
            for v in range(size):
                value = (row[v] - centre) * factor
                value = widest if value > widest else value
                x[j, v] = -widest if value < -widest else value
        total[:size] = ZERO
        for f in range(networks):
            for column in range(0, size, TILE):
                for u in range(0, units, 2 * ROWS):
                    multiply_tall_tile(first[f], x, hidden, u, column)
            v = 0
            while v < size:  # neighbours mostly have one winner
                bias, run = classes[f, winner[begin + v]], v + 1
                while run < size and winner[begin + run] == winner[begin + v]:
                    run += 1
                for u in range(units):
                    row = hidden[u, v:run]
                    for i in range(run - v):
                        value = row[i] + bias[u]
                        row[i] = value if value > ZERO else ZERO
                v = run
            for column in range(0, size, TILE):
                for u in range(0, units, 2 * ROWS):
                    multiply_tall_tile(second[f], hidden, deeper, u, column)
            for u in range(units):
                weight, row = last[f, u], deeper[u]
                for v in range(size):
                    total[v] += weight * (row[v] if row[v] > ZERO else ZERO)
        for v in range(size):
            out[begin + v] = total[v] / networks


@elementwise
def _risen(values, place):
    """A map given at bins, linear between them, at a real place."""
    place = min(max(place, 0.0), len(values) - 1.0)
    low = min(int(place), len(values) - 2)
    return values[low] + (values[low + 1] - values[low]) * (place - low)


@elementwise
def odds_range(x, winner, correction, start, stop, first, second, slopes, share, known, origin, width, out):
    """Log-odds of the winner ``(V,)`` from the features ``x (J, V)``, of which the first is ``log(1 - p1)``, and the
    networks' correction; see ``TrustCalibration``."""
    x, winner, correction, out = x[:, start:stop], winner[start:stop], correction[start:stop], out[start:stop]
    per_bin = 1 / width
    for v in range(stop - start):
        r = min(np.float64(x[0, v]), -1e-6)
        out[v] = log(1.0 - exp64(r)) - r
    for v in range(stop - start):
        plain = np.float64(out[v])
        odds = _risen(first, (plain + origin) * per_bin)
        if share > 0:
            own = slopes[winner[v]]
            line = own[0] + own[1] * odds
            for j in range(2, len(own)):
                line += own[j] * x[j - 2, v]
            odds = _risen(second, (odds + share * (correction[v] + line) + origin) * per_bin)
        out[v] = plain + known * (odds - plain)
