"""Every loss as naive loops in float64, written from the formulas of METHODS.md, not from segcal's code.

An image is a dict from voxel coordinates to ``(z, y)``: the list of logits and the label, None where ignored.
"""

from __future__ import annotations

import itertools
import math


def images(logits, labels, ignore=255):
    """The images of a batch."""
    found = []
    for z, y in zip(logits.tolist(), labels.tolist(), strict=True):
        shape = labels.shape[1:]
        found.append(
            {
                v: ([_at(plane, v) for plane in z], None if _at(y, v) == ignore else _at(y, v))
                for v in itertools.product(*map(range, shape))
            }
        )
    return found


def _at(nested, voxel):
    for i in voxel:
        nested = nested[i]
    return nested


def valid(batch):
    return [(image, v, z, y) for image in batch for v, (z, y) in image.items() if y is not None]


def log_softmax(z):
    top, winner = max(z), z.index(max(z))
    # The winner's own term is 1. Without it nothing is rounded away, however large the logits are.
    total = math.log1p(math.fsum(math.exp(x - top) for k, x in enumerate(z) if k != winner))
    return [(x - top) - total for x in z]


def softmax(z):
    return [math.exp(x) for x in log_softmax(z)]


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values) if values else 0.0


def weighted(pairs):
    """sum of values / sum of weights."""
    pairs = list(pairs)
    total = math.fsum(w for _, w in pairs)
    return math.fsum(x for x, _ in pairs) / total if total else 0.0


def soft_cross_entropy(batch, target, weights=None):
    def one(image, v, z, y):
        t, lp = target(image, v, y, len(z)), log_softmax(z)
        w = weights or [1.0] * len(z)
        return -math.fsum(w[k] * t[k] * lp[k] for k in range(len(z)) if t[k]), w[y]

    return weighted(one(*voxel) for voxel in valid(batch))


def onehot(y, classes):
    return [float(k == y) for k in range(classes)]


def ce(batch, weights=None):
    return soft_cross_entropy(batch, lambda image, v, y, c: onehot(y, c), weights)


def ls(batch, alpha=0.1, weights=None):
    return soft_cross_entropy(
        batch, lambda image, v, y, c: [(1 - alpha) * h + alpha / c for h in onehot(y, c)], weights
    )


def focal(batch, gamma=3.0, weights=None):
    def one(image, v, z, y):
        lp, w = log_softmax(z)[y], (weights or [1.0] * len(z))[y]
        return -w * (1 - math.exp(lp)) ** gamma * lp, w

    return weighted(one(*voxel) for voxel in valid(batch))


def entropy(z):
    return -math.fsum(p * lp for p, lp in zip(softmax(z), log_softmax(z), strict=True) if p)


def ecp(batch, weight=0.1):
    return ce(batch) - weight * mean(entropy(z) for _, _, z, _ in valid(batch))


def meep(batch, weight=1.0):
    return ce(batch) - weight * mean(entropy(z) for _, _, z, y in valid(batch) if z.index(max(z)) != y)


def mbls(batch, weight=0.1, margin=10.0):
    return ce(batch) + weight * mean(mean(max(0, max(z) - x - margin) for x in z) for _, _, z, _ in valid(batch))


def around(voxel, radius):
    """Offsets and voxels of a patch, itself included."""
    for offset in itertools.product(range(-radius, radius + 1), repeat=len(voxel)):
        yield offset, tuple(i + o for i, o in zip(voxel, offset, strict=True))


def neighbours(image, voxel, radius):
    """(offset, label) of what exists and is not ignored in a patch."""
    return [(o, image[n][1]) for o, n in around(voxel, radius) if n in image and image[n][1] is not None]


def gaussian(offset, sigma):
    return math.exp(-math.fsum(o * o for o in offset) / (2 * sigma**2))


def svls(batch, sigma=2.0, weights=None):
    def target(image, v, y, classes):
        shape = [max(axis) for axis in zip(*image, strict=True)]
        share = [0.0] * classes
        for offset, n in around(v, 1):
            inside = tuple(min(max(i, 0), s) for i, s in zip(n, shape, strict=True))
            if any(offset) and image[inside][1] is not None:
                share[image[inside][1]] += gaussian(offset, sigma)
        total = math.fsum(share)
        if not total:
            return onehot(y, classes)
        return [0.5 * h + 0.5 * s / total for h, s in zip(onehot(y, classes), share, strict=True)]

    return soft_cross_entropy(batch, target, weights)


def tau(image, v, classes, prior="mean", patch=3, sigma=2.0):
    around_v = neighbours(image, v, patch // 2)
    labels = sorted(y for _, y in around_v)
    if prior in ("mean", "gaussian"):
        mass = [gaussian(o, sigma) if prior == "gaussian" else 1.0 for o, _ in around_v]
        total = math.fsum(mass)
        of_class = [[m for m, (_, y) in zip(mass, around_v, strict=True) if y == k] for k in range(classes)]
        return [math.fsum(part) / total for part in of_class]
    chosen = {
        "max": labels[-1],
        "min": labels[0],
        "median": labels[(len(labels) - 1) // 2],
        "mode": max(set(labels), key=lambda k: (labels.count(k), -k)),
    }[prior]
    return onehot(chosen, classes)


def nacl(batch, weight=0.1, prior="mean", patch=3, penalty="l1", on="logits", sigma=2.0):
    def one(image, v, z, y):
        t = tau(image, v, len(z), prior, patch, sigma)
        gaps = [abs(a - b) for a, b in zip(t, z if on == "logits" else softmax(z), strict=True)]
        return mean(g if penalty == "l1" else g * g for g in gaps)

    return ce(batch) + weight * mean(one(*voxel) for voxel in valid(batch))


def region(image, v, patch):
    labels = [y for _, y in neighbours(image, v, patch // 2)]
    return int(max(labels) != min(labels))


def violations(image, v, z, margin, patch):
    r = region(image, v, patch)
    return r, [abs((1 if r else margin) * t - x) for t, x in zip(tau(image, v, len(z), patch=patch), z, strict=True)]


def crac(batch, multipliers, rho, margin=1.0, patch=3):
    def one(image, v, z, y):
        r, hs = violations(image, v, z, margin, patch)
        found = []
        for k, h in enumerate(hs):
            x = multipliers[r][k] + rho[r][k] * h
            found.append((x**2 - multipliers[r][k] ** 2) / (2 * rho[r][k]))
        return mean(found)

    return ce(batch) + mean(one(*voxel) for voxel in valid(batch))


def dice(batch, smooth=1.0, weights=None):
    def one(image, k):
        voxels = [(softmax(z)[k], float(y == k)) for z, y in image.values() if y is not None]
        overlap = math.fsum(p * h for p, h in voxels)
        return 1 - (2 * overlap + smooth) / (math.fsum(p + h for p, h in voxels) + smooth)

    classes = len(next(iter(batch[0].values()))[0])
    weights = weights or [1.0] * classes
    return mean(weighted((weights[k] * one(image, k), weights[k]) for k in range(classes)) for image in batch)


def mmce(batch, weight=1.0, width=0.4):
    found = []
    for _, _, z, y in valid(batch):
        confidence = max(softmax(z))
        found.append((confidence, confidence - float(z.index(max(z)) == y)))
    square = math.fsum(a * b * math.exp(-abs(r - s) / width) for r, a in found for s, b in found)
    return ce(batch) + weight * math.sqrt(max(square, 0)) / len(found)


def ml1_ace(batch, weight=1.0, bins="hard", num_bins=20):
    def share(p, b):
        if bins == "hard":
            return float(b / num_bins < p <= (b + 1) / num_bins or (b == 0 and p == 0))
        place = min(max(p * num_bins - 0.5, 0), num_bins - 1)  # in units of bins, centres at whole numbers
        return max(0.0, 1 - abs(place - b))

    def one(image, k):
        voxels = [(softmax(z)[k], float(y == k)) for z, y in image.values() if y is not None]
        gaps = []
        for b in range(num_bins):
            mass = math.fsum(share(p, b) for p, _ in voxels)
            if mass:
                gap = abs(math.fsum(share(p, b) * (p - h) for p, h in voxels)) / mass
                gaps.append((min(mass, 1) * gap, min(mass, 1)))
        return weighted(gaps)

    classes = len(next(iter(batch[0].values()))[0])
    return ce(batch) + weight * mean(mean(one(image, k) for k in range(classes)) for image in batch)


def bwcr(batch, weight=1.0):
    half = len(batch) // 2
    found = []
    for first, second in zip(batch[:half], batch[half:], strict=True):
        both = {v for v in first if first[v][1] is not None and second[v][1] is not None}

        def edge(v, both=both, first=first):
            steps = [n for o, n in around(v, 1) if sum(map(abs, o)) == 1]
            return any(n in both and first[n][1] != first[v][1] for n in steps)

        edges = [v for v in both if edge(v)]
        for v in both:
            d = min((math.dist(v, e) for e in edges), default=math.inf)
            square = mean((a - b) ** 2 if a != b else 0.0 for a, b in zip(first[v][0], second[v][0], strict=True))
            found.append((max(10 - d, 0) / 10 + 0.01) * square)
    return ce(batch) + weight * mean(found)
