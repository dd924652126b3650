"""The command line: options and arguments of every command, with odd values, too many and too few."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import sys
from importlib import resources
from pathlib import Path

import numpy as np

# A command that works on the dataset "ds", and the folder or file it may write.
_COMMANDS = (
    ("check", "ds"),
    ("plan", "ds"),
    ("evaluate", "ds", "--metrics", "nll,ece", "--regions", "everything", "-o", "out/r.json"),
    ("fit", "ds", "--method", "ts", "-o", "out/c.safetensors"),
    ("apply", "cal.safetensors", "ds", "-o", "out/applied"),
    ("compare", "ds", "--methods", "ts", "--repeats", "1", "--metrics", "nll", "-o", "out/study"),
    ("show", "cal.safetensors"),
    ("pack", "ds", "out/packed"),
    ("convert", "ds/labels/p0.npy", "out/converted"),
    ("train", "ds/segcal.toml"),
    ("nnunet", "evaluate", "ds"),
)
_VALUES = (
    "", " ", ",", ",,", "-", "--", "-1", "0", "1", "2", "3", "0.5", "1e400", "nan", "inf", "-inf", "9" * 30, "x", "[",
    "]",
    "[/bold]", "[bold]x", "ece[", "ece[]", "ece[num_bins=0]", "ece[num_bins=7]", "ece[num_bins=1e9]", "ece[x=1]",
    "ece[num_bins=]",
    "nll,nll", "nll,", "all", "ts", "ts,ts", "cms-op", "trust", "everything", "everything,boundary", "boundary", "ds",
    "ds/",
    "ds/logits", "./ds/../ds", ".", "..", "/", "~", "none", "cal.safetensors", "out/x", "out/x.json", "/proc/x", "é",
    "\udcff",
    "\x1b[31m", "a" * 300, "*", "foo://x", "C:\\x", "0.5,0.2,0.3", "1,0,0", "0.1,0.1", "nan,nan,nan", "bins", "size",
    "test",
    "calibration", "argmax", "order", "float16", "npy", "nii.gz", "tif", "png", "cpu", "cuda", "cuda:99", "meta",
    "nnunet", "plain",
)  # fmt: skip

# What names the file to write, which may exist.
_OUTPUT = ("-o", "--output")


class Options:
    """One command line in a folder of its own."""

    name = "options"
    room = 2**30  # of the work, where an odd value is a valid one

    def write(self, root: Path) -> None:
        """Six tiny cases, a calibrator, and a file that no command may touch."""
        import segcal

        rng = np.random.default_rng(0)
        for folder in ("logits", "labels"):
            (root / "ds" / folder).mkdir(parents=True)
        for k in range(6):
            np.save(root / "ds" / "logits" / f"p{k}.npy", rng.normal(0, 2, (3, 12, 16)).astype(np.float32))
            np.save(root / "ds" / "labels" / f"p{k}.npy", rng.integers(0, 3, (12, 16)).astype(np.uint8))
        (root / "ds" / "segcal.toml").write_text("classes = 3\n")
        segcal.calibrators.TemperatureScaling().fit(segcal.open_cases(root / "ds")).save(root / "cal.safetensors")
        (root / "mine.txt").write_text("mine")
        (root / "arguments.json").write_text(json.dumps(_COMMANDS[0]))

    def damage(self, root: Path, rng: random.Random) -> str:
        """Writes the arguments to a file; returns them."""
        command = rng.choice(_COMMANDS)
        words = list(command)
        known = json.loads((resources.files("segcal.cli") / "completions.json").read_text()).get(words[0], {})
        options = [option for option in known.get("options", []) if "--device" not in option["names"]]
        for _ in range(rng.choice((1, 1, 2, 3))):
            deed = rng.random()
            if deed < 0.6 and options:
                option = rng.choice(options)
                name = rng.choice(option["names"].replace("/", " ").replace(",", " ").split())
                value = rng.choice([*option["values"]] if option["values"] and rng.random() < 0.3 else _VALUES)
                words += [name] if option["flag"] else [f"{name}={value}"] if rng.random() < 0.3 else [name, value]
            elif deed < 0.8:
                words[rng.randrange(1, len(words))] = rng.choice(_VALUES)
            elif deed < 0.9:
                del words[rng.randrange(1, len(words))]
            else:
                words.insert(rng.randrange(1, len(words) + 1), rng.choice(_VALUES))
            if len(words) == 1:
                break
        (root / "arguments.json").write_text(json.dumps(words))
        return json.dumps(words)

    def judge(self, root: Path, kind: str) -> str:
        """Run it: exit code 0, 1 or 2, a message if it is not 0, and what was there stays as it was, but for ``-o``."""
        import segcal.cli
        import segcal.cli.commands

        words = json.loads((root / "arguments.json").read_text())
        before, place, streams = _hashes(root), Path.cwd(), (sys.stdout, sys.stderr)
        shown, told = io.StringIO(), io.StringIO()
        os.chdir(root)
        sys.argv, code = ["segcal", *words], 0
        try:
            with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(told):
                segcal.cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            os.chdir(place)
            sys.stdout, sys.stderr = streams
        meant = {words[n + 1] for n, word in enumerate(words[:-1]) if word in _OUTPUT}
        meant |= {word.partition("=")[2] for word in words if word.partition("=")[0] in _OUTPUT}
        after = _hashes(root)
        changed = [name for name, digest in before.items() if after.get(name) != digest and name not in meant]
        if changed:
            return f"FAIL changed {changed}"
        if code not in (0, 1, 2):
            return f"FAIL exit code {code}"
        if "Traceback" in told.getvalue() + shown.getvalue():
            return f"FAIL a traceback: {told.getvalue()}"
        if code and not (told.getvalue() + shown.getvalue()).strip():
            return "FAIL no message"
        return "refused" if code else "accepted"


def _hashes(root: Path) -> dict[str, str]:
    paths = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
