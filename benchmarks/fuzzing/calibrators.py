"""Calibrator files: bytes, the header of safetensors, and what segcal says in it."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

from fuzzing.damage import damaged, edited

_METHODS: dict[str, dict[str, Any]] = {
    "ts": {}, "cms-op": {}, "histogram": {}, "trust": {}, "selective": {"base": "ts"}, "lts-ti": {"epochs": 1},
}  # fmt: skip


class CalibratorFile:
    """Files of several methods, one of which is damaged."""

    name = "safetensors"
    room = 16 * 2**20

    def __init__(self) -> None:
        self._truth: dict[str, Any] = {}

    def write(self, root: Path) -> None:
        """A file of each method, fitted to the same scenes."""
        import segcal

        root.mkdir(parents=True)
        cases = segcal.synthetic.scenes(2, size=(16, 20), num_classes=3)
        for method, options in _METHODS.items():
            segcal.CALIBRATORS[method](**options).fit(cases).save(root / f"{method}.safetensors")

    def damage(self, root: Path, rng: random.Random) -> str:
        """Returns the file and what was done to it."""
        path = root / f"{rng.choice(list(_METHODS))}.safetensors"
        data = path.read_bytes()
        if rng.random() < 0.5:
            data, kind = damaged(data, rng)
            path.write_bytes(data)
            return f"{path.name} {kind}"
        size = struct.unpack("<Q", data[:8])[0]
        head = json.loads(data[8 : 8 + size])
        if rng.random() < 0.4:
            head = edited(head, rng)
        else:
            about = json.loads(head["__metadata__"]["segcal"])
            if rng.random() < 0.5:  # As a file of an earlier version, which has none.
                about.pop("digest", None)
            head["__metadata__"]["segcal"] = json.dumps(edited(about, rng))
        text = json.dumps(head).encode("utf-8", "replace")
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
        return f"{path.name} inside"

    def judge(self, root: Path, kind: str) -> str:
        """Load every file, and calibrate the same logits with it."""
        import torch

        import segcal
        from segcal.errors import SegcalError

        logits = 3 * torch.randn(1, 3, 12, 14, generator=torch.Generator().manual_seed(0))
        outcome, (name, _, deed) = "accepted", kind.partition(" ")
        for path in sorted(root.iterdir()):
            try:
                calibrator = segcal.load(path)
                found = calibrator(logits)
            except SegcalError:
                outcome = "refused"
                continue
            truth = self._truth.setdefault(path.name, found)  # The first files are undamaged.
            if not bool((found.exp().sum(1) - 1).abs().max() < 1e-4):
                return "FAIL probabilities do not sum to 1"
            if calibrator.preserves and not bool((found.argmax(1) == logits.argmax(1)).all()):
                return "FAIL a label moved"
            if path.name == name and not torch.equal(found, truth):
                outcome = "changed" if deed == "inside" else "FAIL a checksum was ignored"
        return outcome
