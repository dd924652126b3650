"""One of every kind of work, and the bytes that come of it; run as a program, it prints their digests."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import torch

import segcal
from segcal.statistics import VoxelStatistics
from segcal.synthetic import Temperature, scenes

#: One for each way to fit: in one dimension, by Newton's method, by histograms.
METHODS = ("ts", "ms", "isotonic")


def made():
    """Cases large enough for the compiled loops and several pieces."""
    return scenes(2, size=(220, 210), num_classes=6, plant=[Temperature(1.7)])


def statistics(cases, threads=1):
    stats = VoxelStatistics(6, threads=threads)
    for case in cases:
        stats.update(case.logits, case.labels)
    return stats


def fitted(cases, method, seed=3):
    return segcal.CALIBRATORS[method]().fit(cases, seed=seed)


def tensor_bytes(calibrator):
    return b"".join(tensor.numpy().tobytes() for _, tensor in sorted(calibrator.tensors().items()))


def applied(cases, calibrator):
    """The files that ``segcal apply`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        segcal.apply(calibrator, cases[:1], Path(folder) / "out")
        files = sorted(path for path in Path(folder).rglob("*.npy"))
        assert files
        return b"".join(path.read_bytes() for path in files)


def digests():
    """Digests of all kinds of results, by kind."""
    cases = made()
    results = {"statistics": json.dumps(statistics(cases).to_dict()).encode()}
    results["evaluate"] = segcal.evaluate(cases).to_json().encode()
    for method in METHODS:
        own = fitted(cases, method)
        results[f"fit {method}"] = tensor_bytes(own)
        results[f"apply {method}"] = applied(cases, own)
    return {kind: hashlib.sha256(content).hexdigest() for kind, content in results.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(digests(), sys.stdout)
