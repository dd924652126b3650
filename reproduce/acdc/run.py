"""Trains and measures all networks: ``python reproduce/acdc/run.py DATA OUT [--minutes 9] [--parallel 3]``.

DATA holds ``acdc.npz``. OUT holds the images, checkpoints and kept weights, which may be thrown away in the end. The
numbers go to ``reproduce/acdc/results``: ``runs.csv`` and ``cases.csv``. Call it again until it says that nothing is
left: runs go on from their checkpoints, and what is in the CSV files is not done again. ``--half`` trains small
networks at half the resolution, for machines without a GPU; its numbers go to ``results/half``. ``--smoke`` does all
in miniature on a CPU, the post-hoc part and the tables included, with data of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from reproduce.acdc import config, posthoc, table
from reproduce.acdc.tiny import write_tiny
from reproduce.common import collect, recipe_parser, start, train_all


def train(arguments: argparse.Namespace) -> None:
    """Train until all is done or time is up."""
    training = config.SMOKE if arguments.smoke else config.HALF if arguments.half else config.TRAINING
    if arguments.half:
        arguments.out, arguments.results = arguments.out / "half", arguments.results / "half"
    options = {"only": arguments.only, "seeds": arguments.seeds, "compile": arguments.compile}
    images = config.images(arguments.data, arguments.out, half=arguments.half)
    train_all(config.runs(str(images), training, **options), config.KEPT, arguments)


def smoke() -> None:
    """All steps in miniature; fails if a run or a table is missing."""
    torch.set_num_threads(1)  # Small tensors: on a busy machine more threads only wait for each other.
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "data", Path(folder) / "out"
        write_tiny(data / "acdc.npz")
        common = [str(data), str(out), "--results", str(out / "results"), "--smoke"]
        train(parser().parse_args([*common, "--parallel", "2", "--seeds", "0", "1", "--minutes", "10"]))
        posthoc.main([str(data), str(out), "--results", str(out / "results")])
        table.main(["--results", str(out / "results")])
        wanted = config.runs("", config.SMOKE, seeds=(0, 1))
        missing = {(run.name, str(run.seed)) for run in wanted} - collect(out, out / "results")
        assert not missing, missing


def parser() -> argparse.ArgumentParser:
    """The arguments of the command line."""
    found = recipe_parser(__doc__, Path(__file__).parent, parallel=3)
    found.add_argument("--only", nargs="*", default=[], help="groups (main, ablation, sensitivity) or names of rows")
    found.add_argument("--seeds", type=int, nargs="*", default=config.SEEDS)
    found.add_argument("--compile", action="store_true", help="compile the networks")
    found.add_argument("--half", action="store_true", help="small networks at half the resolution")
    return found


if __name__ == "__main__":
    start(parser(), smoke, train)
