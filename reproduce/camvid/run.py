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
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from reproduce.camvid import config, posthoc, table
from reproduce.camvid.methods import TABLES
from reproduce.camvid.tiny import write_tiny
from reproduce.common import collect, read_rows, side_by_side

RESULTS = Path(__file__).parent / "results"


def train(arguments: argparse.Namespace) -> None:
    """Train until all is done or time is up."""
    out, results = arguments.out, arguments.results
    deadline = time.time() + 60 * arguments.minutes
    options = {"only": arguments.only, "compile": arguments.compile, "smoke": arguments.smoke}
    wanted = config.runs(str(config.images(arguments.data, out)), **options)
    done = collect(out, results)
    left = [run for run in wanted if (run.name, str(run.seed)) not in done]
    kept = [run.id for run in wanted]
    side_by_side(left, out, deadline, arguments.parallel, kept, lambda: done.update(collect(out, results)))
    left = [run for run in left if (run.name, str(run.seed)) not in done]
    print(
        f"{len(wanted) - len(left)} of {len(wanted)} runs are done; left: {' '.join(run.id for run in left) or 'none'}"
    )
    for row in read_rows(results / "runs.csv"):
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
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("data", type=Path, nargs="?")
    found.add_argument("out", type=Path, nargs="?")
    found.add_argument("--results", type=Path, default=RESULTS, help="the folder of the CSV files")
    found.add_argument(
        "--minutes", type=float, default=9.0, help="runs stop after this time, to go on in the next call"
    )
    found.add_argument("--parallel", type=int, default=4, help="runs at a time")
    found.add_argument("--only", nargs="*", default=[], help="names of runs: unet, unet-0, tiramisu, tiramisu-focal")
    found.add_argument("--compile", action="store_true", help="compile the networks")
    found.add_argument("--smoke", action="store_true", help="all in miniature; needs neither DATA nor OUT")
    return found


if __name__ == "__main__":
    given = parser().parse_args()
    if given.smoke:
        smoke()
    elif given.data is None or given.out is None:
        parser().error("DATA and OUT are needed")
    else:
        train(given)
