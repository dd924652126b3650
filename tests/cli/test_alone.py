"""Commands reach nothing but their files: no network, and no file outside their output, whatever cases are called."""

import json
import subprocess
import sys

import numpy as np

from datasets import labels, logits, snapshot

# Names that a file can have and a shell, an URL, a page, a terminal or a pattern could take for something else.
NAMES = ("-rf", "$(touch x)", "a;b&c", "%2e%2e%2fx", "<b>bold", "[red]x", "é ü*?", "a'b\"c", "x" * 120)
COMMANDS = (
    ("check", "ds"),
    ("evaluate", "ds", "--metrics", "nll,ece", "-o", "out/r.json", "--csv", "out/r.csv", "--maps", "out/m"),
    ("fit", "ds", "--method", "ts", "-o", "out/c.safetensors"),
    ("show", "out/c.safetensors"),
    ("apply", "out/c.safetensors", "ds", "-o", "out/a", "--confidence"),
    ("pack", "ds", "out/k", "--format", "zarr"),
    ("compare", "ds", "--methods", "ts", "--repeats", "1", "--metrics", "nll", "-o", "out/s"),
)
SCRIPT = """
import json, sys
from segcal.cli import main

def forbid(event, arguments):
    if event in ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "urllib.Request"):
        raise AssertionError(f"{event} {arguments}")

sys.addaudithook(forbid)
for command in json.loads(sys.argv[1]):
    sys.argv = ["segcal", *command]
    try:
        main()
    except SystemExit as stop:
        if stop.code:
            sys.exit(f"{command} ended with {stop.code}")
"""


def test_no_network_and_no_file_elsewhere(tmp_path):
    place = tmp_path / "place"
    for folder, make in (("logits", logits), ("labels", labels)):
        (place / "ds" / folder).mkdir(parents=True)
        for k, name in enumerate(NAMES):
            np.save(place / "ds" / folder / f"{name}.npy", make(k, 3, (12, 16)))
    before = snapshot(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(COMMANDS)], cwd=place, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    after = snapshot(tmp_path)
    assert {name: state for name, state in after.items() if not name.startswith("place/out")} == before
    assert {path.stem for path in (place / "out" / "a" / "probs").iterdir()} == set(NAMES)
