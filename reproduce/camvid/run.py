"""Trains and measures all networks: ``python reproduce/camvid/run.py DATA OUT [--minutes 9] [--parallel 4]``.

DATA holds ``camvid.npz``. OUT holds the images, checkpoints and weights, which ``posthoc.py`` needs. The numbers go to
``reproduce/camvid/results``: ``runs.csv`` and ``cases.csv``. Call it again until it says that nothing is left: runs go
on from their checkpoints, and what is in the CSV files is not done again. ``--smoke`` does all in miniature on a CPU,
the post-hoc part and the tables included, with data of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from reproduce.camvid import config, posthoc, table
from reproduce.camvid.methods import TABLES
from reproduce.camvid.tiny import write_tiny
from reproduce.common import read_rows, recipe_parser, start, train_all


def train(arguments: argparse.Namespace) -> None:
    """Train until all is done or time is up."""
    options = {"only": arguments.only, "compile": arguments.compile, "smoke": arguments.smoke}
    wanted = config.runs(str(config.images(arguments.data, arguments.out)), **options)
    train_all(wanted, [run.id for run in wanted], arguments)
    for row in read_rows(arguments.results / "runs.csv"):
        print(f"{row['run']}-{row['seed']}: test mIoU {float(row['test_miou']):.3f} after {row['seconds']} s")


def smoke() -> None:
    """All steps in miniature; fails if a row of a table is missing."""
    torch.set_num_threads(1)  # Small tensors: on a busy machine more threads only wait for each other.
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "data", Path(folder) / "out"
        write_tiny(data / "camvid.npz")
        common = [str(data), str(out), "--results", str(out / "results"), "--minutes", "10", "--smoke"]
        train(parser().parse_args([*common, "--parallel", "2"]))
        posthoc.main([*common, "--parallel", "2"])
        table.main(["--results", str(out / "results")])
        for name, own in TABLES.items():
            rows = read_rows(out / "results" / f"{name}_pooled.csv")
            missing = set(own.methods) - {row["method"] for row in rows}
            assert not missing, (name, missing)


def parser() -> argparse.ArgumentParser:
    """The arguments of the command line."""
    found = recipe_parser(__doc__, Path(__file__).parent, parallel=4)
    found.add_argument("--only", nargs="*", default=[], help="names of runs: unet, unet-0, unet-focal, tiramisu-ce")
    found.add_argument("--compile", action="store_true", help="compile the networks")
    return found


if __name__ == "__main__":
    start(parser(), smoke, train)
