"""The compiled loops of ``segcal.calibrators.trust``: what voxels and their windows say, and levelling."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import math

import numpy as np

from segcal.kernels.compiled import DEEP, MINUS_INF, ONE, ZERO, elementwise, exp, exp64, log1p

# Voxels at once, so that their arrays stay in the first cache: in most loops, and in the networks with their units.
_BLOCK, _FEW = 256, 128
# Below all scores; unlike -inf it can be subtracted from -inf.
SMALLEST_SCORE = np.float32(-3e38)


@elementwise
def describe_range(z, start, stop, beta, lowest, widest, unit, winner, point, rounded, predicted, sums):
    """Winner, point features ``(5, V)`` and two of them in units, of the voxels ``start`` to ``stop`` of ``z (C, V)``.

    Adds how often each class was ``predicted (C,)`` and the ``sums (5,)`` of the features in units.
    """
    classes = z.shape[0]
    first, second, third = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    others, moment = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    best = np.empty(_BLOCK, np.int32)
    for begin in range(start, stop, _BLOCK):
        size = min(_BLOCK, stop - begin)
        for v in range(size):
            first[v], second[v], third[v], best[v] = z[0, begin + v], MINUS_INF, MINUS_INF, 0
            others[v], moment[v] = ZERO, ZERO
        for k in range(1, classes):
            row = z[k]
            for v in range(size):
                x = row[begin + v]
                top, next_, last = first[v], second[v], third[v]
                lower = x if x < top else top  # what does not come first
                best[v] = np.int32(k) if x > top else best[v]
                first[v] = x if x > top else top
                least = lower if lower < next_ else next_
                second[v] = lower if lower > next_ else next_
                third[v] = least if least > last else last
        for k in range(classes):
            row = z[k]
            for v in range(size):
                gap = row[begin + v] - first[v]
                x = beta * gap
                e = ZERO if best[v] == k or gap < -DEEP else exp(x)
                others[v] += e
                moment[v] += e * (x if e > ZERO else ZERO)
        for v in range(size):
            total = math.log1p(others[v])
            place = begin + v
            winner[place] = best[v]
            predicted[best[v]] += 1
            point[0, place] = max(lowest, np.float32(math.log(others[v]) - total)) if others[v] > ZERO else lowest
            point[1, place] = ONE / (ONE + others[v])
            point[2, place] = min(widest, beta * (first[v] - second[v]))
            beyond = second[v] == MINUS_INF or first[v] - second[v] > DEEP or third[v] == MINUS_INF
            beyond = beyond or first[v] - third[v] > DEEP
            point[3, place] = widest if beyond else min(widest, beta * (second[v] - third[v]))
            if classes == 2:
                point[3, place] = ZERO
            point[4, place] = np.float32(total - moment[v] / (ONE + others[v]))
            for j in range(5):
                units = np.int64(np.rint(np.float64(point[j, place]) * unit))
                sums[j] += units
                if j < 2:
                    rounded[j, place] = units


@elementwise
def window_plane(winner, values, sides, unit, out):
    """For each side, the share of the own prediction and the means of ``values (2, H, W)`` int64; ``out (S, 3, H, W)``.

    Running sums: a column of the window loses a row and gains one, then the window loses a column and gains one.
    """
    _, height, width = values.shape
    classes = winner.max() + 1
    for s in range(len(sides)):
        half = sides[s] // 2
        columns, sums = np.zeros((width, classes), np.int32), np.zeros((2, width), np.int64)
        inside = np.empty(classes, np.int32)
        for y in range(-half, height):
            if y + half < height:
                for x in range(width):
                    columns[x, winner[y + half, x]] += 1
                    sums[0, x] += values[0, y + half, x]
                    sums[1, x] += values[1, y + half, x]
            if y - half - 1 >= 0:
                for x in range(width):
                    columns[x, winner[y - half - 1, x]] -= 1
                    sums[0, x] -= values[0, y - half - 1, x]
                    sums[1, x] -= values[1, y - half - 1, x]
            if y < 0:
                continue
            rows = min(y + half, height - 1) - max(y - half, 0) + 1
            inside[:] = 0
            a = b = np.int64(0)
            for x in range(-half, width):
                if x + half < width:
                    for k in range(classes):
                        inside[k] += columns[x + half, k]
                    a += sums[0, x + half]
                    b += sums[1, x + half]
                if x - half - 1 >= 0:
                    for k in range(classes):
                        inside[k] -= columns[x - half - 1, k]
                    a -= sums[0, x - half - 1]
                    b -= sums[1, x - half - 1]
                if x >= 0:
                    count = rows * (min(x + half, width - 1) - max(x - half, 0) + 1)
                    out[s, 0, y, x] = inside[winner[y, x]] / count
                    out[s, 1, y, x] = a / (count * unit)
                    out[s, 2, y, x] = b / (count * unit)


@elementwise
def distance_plane(winner, reach, out):
    """Distance to the nearest voxel beside another prediction, at most ``reach``; ``winner`` and ``out (H, W)``."""
    height, width = winner.shape
    along = np.empty((height, width), np.int32)
    for y in range(height):
        last = reach
        for x in range(width):
            own = winner[y, x]
            edge = (
                (x > 0 and winner[y, x - 1] != own) or (x + 1 < width and winner[y, x + 1] != own)
                or (y > 0 and winner[y - 1, x] != own) or (y + 1 < height and winner[y + 1, x] != own)
            )  # fmt: skip
            last = 0 if edge else min(last + 1, reach)
            along[y, x] = last
        last = reach
        for x in range(width - 1, -1, -1):
            last = min(last + 1, along[y, x])
            along[y, x] = last
    for y in range(height):
        for x in range(width):
            nearest = along[y, x] * along[y, x]
            step = 1
            while step * step < nearest and step < reach:
                if y >= step:
                    nearest = min(nearest, along[y - step, x] * along[y - step, x] + step * step)
                if y + step < height:
                    nearest = min(nearest, along[y + step, x] * along[y + step, x] + step * step)
                step += 1
            out[y, x] = math.sqrt(min(nearest, reach * reach))


@elementwise
def level_range(scores, start, stop, winner, odds, below, least, levelled):
    """Turn the losers' scores ``(C, V)`` into log-probabilities, in place; see ``levelling.level``."""
    classes = scores.shape[0]
    equal_share = np.array([np.inf] + [least - math.log(m) for m in range(1, classes)])  # log-odds, by possible losers
    top, total, possible = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.int32)
    log_q, shift, log_cap, limit = np.empty(_BLOCK), np.empty(_BLOCK), np.empty(_BLOCK), np.empty(_BLOCK, np.float32)
    r = np.empty((classes, _BLOCK), np.float32)
    for begin in range(start, stop, _BLOCK):
        size = min(_BLOCK, stop - begin)
        for v in range(size):
            scores[winner[begin + v], begin + v] = MINUS_INF
            top[v], total[v], possible[v] = SMALLEST_SCORE, ZERO, 0
        for j in range(classes):
            for v in range(size):
                x = scores[j, begin + v]
                top[v] = x if x > top[v] else top[v]
                possible[v] += np.int32(x > MINUS_INF)
        for j in range(classes):
            for v in range(size):
                x = scores[j, begin + v]
                r[j, v] = exp(x - top[v]) if x > MINUS_INF else ZERO
                total[v] += r[j, v]
        for v in range(size):
            o = max(np.float64(odds[begin + v]), equal_share[possible[v]])
            tail = log1p(exp64(-abs(o)))
            log_rest = -max(o, 0.0) - tail
            log_total = log1p(np.float64(total[v]) - 1.0)
            log_q[v], log_cap[v] = min(o, 0.0) - tail, o + below + log_rest
            shift[v] = log_rest - top[v] - log_total
            levelled[begin + v] = possible[v] > 0 and (o > odds[begin + v] or -log_total > o + below)
            limit[v] = np.float32(np.inf)
        for v in range(size):
            if levelled[begin + v]:
                # o + below is log_cap less log_rest, the logarithm of the cap
                o = max(np.float64(odds[begin + v]), equal_share[possible[v]])
                cap = math.exp(o + below)
                factor = _water_level(r[:, v], cap)
                limit[v] = np.float32(cap / factor)
                shift[v] = log_cap[v] - o - below - top[v] + (math.log(factor) if factor < np.inf else 0.0)
            elif possible[v] == 0:
                log_q[v], shift[v], log_cap[v] = 0.0, 0.0, 0.0
        for v in range(size):
            log_q[v] = np.float32(log_q[v])
            top[v] = np.nextafter(np.float32(log_q[v]), MINUS_INF)
        for j in range(classes):
            for v in range(size):
                x = np.float32(scores[j, begin + v] + shift[v])
                x = np.float32(log_cap[v]) if r[j, v] >= limit[v] else x
                scores[j, begin + v] = top[v] if x > top[v] else x
        for v in range(size):
            scores[winner[begin + v], begin + v] = log_q[v]


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
def _layer(weight, x, size, out):
    """``out (U, B) += weight (U, J) x (J, B)``; U is even. Two units and six inputs at a time stay in registers."""
    units, inputs = weight.shape
    for u in range(0, units, 2):
        one, two, first, second = weight[u], weight[u + 1], out[u], out[u + 1]
        for j in range(0, inputs - 5, 6):
            a0, a1, a2, a3, a4, a5 = one[j], one[j + 1], one[j + 2], one[j + 3], one[j + 4], one[j + 5]
            b0, b1, b2, b3, b4, b5 = two[j], two[j + 1], two[j + 2], two[j + 3], two[j + 4], two[j + 5]
            x0, x1, x2, x3, x4, x5 = x[j], x[j + 1], x[j + 2], x[j + 3], x[j + 4], x[j + 5]
            for v in range(size):
                p, q, r, s, t, w = x0[v], x1[v], x2[v], x3[v], x4[v], x5[v]
                first[v] += a0 * p + a1 * q + a2 * r + a3 * s + a4 * t + a5 * w
                second[v] += b0 * p + b1 * q + b2 * r + b3 * s + b4 * t + b5 * w
        for j in range(inputs - inputs % 6, inputs):
            row = x[j]
            for v in range(size):
                first[v] += one[j] * row[v]
                second[v] += two[j] * row[v]


@elementwise
def correct_range(features, start, stop, winner, mean, scale, widest, first, classes, second, bias, last, out):
    """The mean correction ``(V,)`` of F networks for ``features (J, V)``; see ``segcal.calibrators.trust.network``.

    ``first (F, U, J)``, ``classes (F, C, U)``, ``second (F, U, U)``, ``bias (F, U)`` and ``last (F, U)``.
    """
    inputs = features.shape[0]
    networks, units, _ = second.shape
    x, total = np.empty((inputs, _FEW), np.float32), np.empty(_FEW, np.float32)
    hidden, deeper = np.empty((units, _FEW), np.float32), np.empty((units, _FEW), np.float32)
    for begin in range(start, stop, _FEW):
        size = min(_FEW, stop - begin)
        for j in range(inputs):
            centre, factor, row = mean[j], ONE / scale[j], features[j]
            for v in range(size):
                value = (row[begin + v] - centre) * factor
                value = widest if value > widest else value
                x[j, v] = -widest if value < -widest else value
        total[:size] = ZERO
        for f in range(networks):
            v = 0
            while v < size:  # neighbours mostly have one winner
                k, run = winner[begin + v], v + 1
                while run < size and winner[begin + run] == k:
                    run += 1
                for u in range(units):
                    hidden[u, v:run] = classes[f, k, u]
                v = run
            _layer(first[f], x, size, hidden)
            for u in range(units):
                deeper[u, :size] = bias[f, u]
                for v in range(size):
                    hidden[u, v] = hidden[u, v] if hidden[u, v] > ZERO else ZERO
            _layer(second[f], hidden, size, deeper)
            for u in range(units):
                weight = last[f, u]
                for v in range(size):
                    total[v] += weight * (deeper[u, v] if deeper[u, v] > ZERO else ZERO)
        for v in range(size):
            out[begin + v] = total[v] / networks


@elementwise
def _risen(values, place):
    """A map given at bins, linear between them, at a real place."""
    place = min(max(place, 0.0), len(values) - 1.0)
    low = min(int(place), len(values) - 2)
    return values[low] + (values[low + 1] - values[low]) * (place - low)


@elementwise
def odds_range(rest, correction, start, stop, first, second, share, known, origin, width, out):
    """Log-odds of the winner ``(V,)`` from ``log(1 - p1)`` and the networks' correction; see ``TrustCalibration``."""
    for v in range(start, stop):
        r = min(float(rest[v]), -1e-6)
        plain = math.log1p(-math.exp(r)) - r
        odds = _risen(first, (plain + origin) / width)
        if share > 0:
            odds = _risen(second, (odds + share * correction[v] + origin) / width)
        out[v] = plain + known * (odds - plain)
