"""Every metric as naive loops in float64, written from the formulas of METHODS.md, not from segcal's code.

``p`` is a list of probability vectors, ``y`` the labels, both of the voxels that count.
"""

from __future__ import annotations

import itertools
import math


def softmax(z: list[float]) -> list[float]:
    best = max(z)
    e = [math.exp(value - best) for value in z]
    return [value / math.fsum(e) for value in e]


def argmax(values: list[float]) -> int:
    return values.index(max(values))


def mean(values) -> float:
    values = list(values)
    return math.fsum(values) / len(values) if values else math.nan


def bin_of(value: float, bins: int) -> int:
    """(lo, hi], 0 in the first."""
    for index in range(bins):
        if value <= (index + 1) / bins:
            return index
    return bins - 1


def gaps(confidences, hits, bins: int) -> list[tuple[int, float]]:
    """(voxels, |mean confidence - share of hits|) of the non-empty bins."""
    members = [[] for _ in range(bins)]
    for confidence, hit in zip(confidences, hits, strict=True):
        members[bin_of(confidence, bins)].append((confidence, hit))
    return [(len(m), abs(mean(c for c, _ in m) - mean(float(h) for _, h in m))) for m in members if m]


def top(p, y):
    winners = [argmax(q) for q in p]
    return [max(q) for q in p], [w == label for w, label in zip(winners, y, strict=True)], winners


def nll(p, y):
    return mean(-math.log(q[label]) for q, label in zip(p, y, strict=True))


def brier(p, y):
    return mean(math.fsum((v - (k == label)) ** 2 for k, v in enumerate(q)) for q, label in zip(p, y, strict=True))


def entropy(p, y):
    return mean(-math.fsum(v * math.log(v) for v in q if v > 0) for q in p)


def confidence_balance(p, y):
    return nll(p, y) - entropy(p, y)


def ece(p, y, bins):
    confidences, hits, _ = top(p, y)
    return math.fsum(n * gap for n, gap in gaps(confidences, hits, bins)) / len(y) if y else math.nan


def mce(p, y, bins):
    confidences, hits, _ = top(p, y)
    return max((gap for _, gap in gaps(confidences, hits, bins)), default=math.nan)


def ace(p, y, bins):
    confidences, hits, _ = top(p, y)
    return mean(gap for _, gap in gaps(confidences, hits, bins))


def sce(p, y, bins):
    confidences, hits, winners = top(p, y)
    total = 0.0
    for c in range(len(p[0])):
        here = [i for i, w in enumerate(winners) if w == c]
        total += math.fsum(n * gap for n, gap in gaps([confidences[i] for i in here], [hits[i] for i in here], bins))
    return total / len(y)


def cece(p, y, bins):
    return mean(
        math.fsum(n * gap for n, gap in gaps([q[c] for q in p], [label == c for label in y], bins)) / len(y)
        for c in range(len(p[0]))
    )


def ace_adaptive(p, y, bins, threshold=None):
    """Equal-mass bins of n / R voxels each; a voxel on the edge of two bins is shared, tied voxels share as one."""
    errors = []
    for c in range(len(p[0])):
        pairs = sorted(
            (q[c], label == c) for q, label in zip(p, y, strict=True) if threshold is None or q[c] > threshold
        )
        if not pairs:
            continue
        values = sorted({value for value, _ in pairs})
        blocks = [[h for v, h in pairs if v == value] for value in values]
        size = len(pairs) / bins
        error = 0.0
        for r in range(bins):
            start, stop, position, gap = r * size, (r + 1) * size, 0.0, 0.0
            for value, block in zip(values, blocks, strict=True):
                share = max(0.0, min(stop, position + len(block)) - max(start, position)) / len(block)
                gap += share * (value * len(block) - sum(block))
                position += len(block)
            error += abs(gap) / size
        errors.append(error / bins)
    return mean(errors)


def tace_width(p, y, bins, threshold):
    """The released code of Murugesan et al. 2024."""
    errors = []
    for c in range(len(p[0])):
        kept = [(q[c], label == c) for q, label in zip(p, y, strict=True) if q[c] > threshold]
        if kept:
            found = gaps([v for v, _ in kept], [h for _, h in kept], bins)
            errors.append(math.fsum(n * gap for n, gap in found) / len(kept))
    return mean(errors)


def ba_ece(p, y, distance, edges=(0.0, 3.0, 7.0, 15.0, math.inf)):
    confidences, hits, _ = top(p, y)
    total = weights = 0.0
    for low, high in itertools.pairwise(edges):
        here = [i for i, d in enumerate(distance) if low <= d < high]
        if here:
            weight = 1 / (mean(distance[i] for i in here) + 1)
            total += weight * abs(mean(confidences[i] for i in here) - mean(float(hits[i]) for i in here))
            weights += weight
    return total / weights if weights else math.nan


def ece_wrong(p, y, bins):
    confidences, hits, _ = top(p, y)
    wrong = [c for c, h in zip(confidences, hits, strict=True) if not h]
    return math.fsum(n * gap for n, gap in gaps(wrong, [False] * len(wrong), bins)) / len(wrong) if wrong else math.nan


def ece_right(p, y, bins):
    confidences, hits, _ = top(p, y)
    right = [c for c, h in zip(confidences, hits, strict=True) if h]
    return math.fsum(n * gap for n, gap in gaps(right, [True] * len(right), bins)) / len(right) if right else math.nan


def smece(p, y, points=800):
    """The fixed point of the reflected-Gaussian smoothed error, by a Riemann sum and images of the kernel."""
    confidences, hits, _ = top(p, y)
    residuals = [c - h for c, h in zip(confidences, hits, strict=True)]

    def smoothed(width):
        total = 0.0
        for point in range(points):
            t = (point + 0.5) / points
            here = 0.0
            for c, r in zip(confidences, residuals, strict=True):
                images = (image for shift in (-2, 0, 2) for image in (shift + c, shift - c))
                kernel = sum(math.exp(-(((t - image) / width) ** 2) / 2) for image in images)
                here += r * kernel / (width * math.sqrt(2 * math.pi))
            total += abs(here) / len(y)
        return total / points

    low, high = 1e-3, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if smoothed(middle) > middle else (low, middle)
    return (low + high) / 2


def dice(prediction, y, classes):
    scores = []
    for c in range(classes):
        a = {i for i, w in enumerate(prediction) if w == c}
        b = {i for i, label in enumerate(y) if label == c}
        scores.append(2 * len(a & b) / (len(a) + len(b)) if a or b else math.nan)
    return scores


def iou(prediction, y, classes):
    scores = []
    for c in range(classes):
        a = {i for i, w in enumerate(prediction) if w == c}
        b = {i for i, label in enumerate(y) if label == c}
        scores.append(len(a & b) / len(a | b) if a or b else math.nan)
    return scores
