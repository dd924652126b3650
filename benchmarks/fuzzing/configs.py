"""``segcal.toml`` of a dataset, and the file of a training run, with keys, values and text damaged."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from fuzzing.damage import damaged

_VALID = {
    "kind": '"logits"', "scores": '"logits"', "labels": '"labels"', "classes": "3", "class_names": '["a", "b", "c"]',
    "ignore_index": "255", "background": "0", "pooling": '"logits"', "multilabel": "false", "exterior": '"keep"',
    "axes": '"zyx"', "spacing": "[1.0, 2.0]", "groups": '"^(p.)"',
    "splits": '{calibration = ["p0"], validation = ["p1"], test = ["p2", "p3"]}',
}  # fmt: skip
_TRAINING = {
    "data": '"."', "output": '"out"', "loss": '{id = "nacl", factor = 1.0, options = {weight = 0.1}}', "epochs": "2",
    "batch": "2", "width": "4", "depth": "2", "split": "{train = 0.5, validation = 0.25, test = 0.25}", "seed": "0",
    "augment": '["flip"]', "milestones": "[1]", "crop": "[16, 16]", "learning_rate": "0.001", "device": '"cpu"',
}  # fmt: skip
_ODD = (
    '""', '"x"', '"."', '".."', '"../.."', '"/"', '"/etc"', '"\\u0000"', '"labels/../logits"', '"s3:"', "'[/bold]'",
    "0", "-1", "1", "3.5", "1e400", "-0.0", "nan", "inf", "9223372036854775807", "9" * 40, "1" * 5000, "true",
    "2020-01-01", "07:32:00", "[]", "[[]]", "[1, 2]", '["a", "a", "b"]', '["p0", "p0"]', "[0, 1, 2]", "{}", "{x = 1}",
    '{x = [1, 2]}', '{p0 = [1.0, 2.0]}', '{test = ["p0"]}', '{test = []}', '{calibration = ["none"]}', "[1e-13, 1]",
    '"logits"', '"probs"', '"none"', '"mask"', '"nnunet"', '"xyz"', '"("', '"(?P<a>"', '"(.*)*$"', '"\\\\d"',
    "[" * 200 + "]" * 200, '"' + "a" * 5000 + '"', '"\\uFFFF\\u202E"',
)  # fmt: skip
# Keys that say nothing about values: with any of theirs that is accepted, the numbers stay the same.
_NEUTRAL = {"class_names", "spacing", "groups", "splits", "pooling"}


class Toml:
    """A configuration; the other files stay as they are."""

    room = 16 * 2**20

    def __init__(self, name: str) -> None:
        self.name, self._training = name, name == "run.toml"
        self._truth = ""

    def write(self, root: Path) -> None:
        """Four small cases with logits, labels and images, and the file."""
        rng = np.random.default_rng(0)
        for folder in ("logits", "labels", "images"):
            (root / folder).mkdir(parents=True)
        for k in range(4):
            np.save(root / "logits" / f"p{k}.npy", rng.normal(0, 2, (3, 16, 20)).astype(np.float32))
            np.save(root / "labels" / f"p{k}.npy", rng.integers(0, 3, (16, 20)).astype(np.uint8))
            np.save(root / "images" / f"p{k}.npy", rng.normal(0, 1, (1, 16, 20)).astype(np.float32))
        (root / "segcal.toml").write_text(_text(_VALID))
        (root / "run.toml").write_text(_text(_TRAINING))

    def damage(self, root: Path, rng: random.Random) -> str:
        """Other values or keys, or damaged text. Returns the keys that differ."""
        path, keys = root / self.name, dict(_TRAINING if self._training else _VALID)
        if rng.random() < 0.25:
            data, _ = damaged(path.read_bytes(), rng)
            path.write_bytes(data)
            return "text"
        names = [*keys, "layout", "images", "masks", "posteriors", "key", "regions", "typo", "network", "dims", "norm"]
        changed = set()
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            name = rng.choice(names)
            changed.add(name)
            if rng.random() < 0.1:
                keys.pop(name, None)
            else:
                keys[name] = rng.choice(rng.choice((_ODD, tuple(_VALID.values()))))
        lines = _text(keys).splitlines()
        if rng.random() < 0.1:
            lines.append(rng.choice(lines))
        path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
        return json.dumps(sorted(changed))

    def judge(self, root: Path, kind: str) -> str:
        """What opening and evaluating, or preparing a training run, says."""
        import segcal
        from segcal.errors import SegcalError
        from segcal.training.config import build_loss, load_config

        try:
            if self._training:
                config = load_config(root / self.name)
                build_loss(config.loss, 3, 255)
                return "accepted" if kind == "[]" else "changed"
            cases = segcal.open_cases(root)
            found = segcal.evaluate(cases, metrics=("nll",)).to_json()
        except SegcalError:
            return "refused"
        numbers = json.dumps(json.loads(found)["rows"])
        self._truth = self._truth or numbers
        if numbers == self._truth:
            return "accepted"
        neutral = kind != "text" and set(json.loads(kind)) <= _NEUTRAL
        return "FAIL other numbers, though no key changes them" if neutral else "changed"


def _text(keys: dict[str, str]) -> str:
    return "".join(f"{name} = {value}\n" for name, value in keys.items())
