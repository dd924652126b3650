"""Trains, calibrates, fuses: ``python reproduce/hippocampus/run.py DATA OUT [--minutes 9] [--parallel 3]``.

DATA holds ``hippocampus/images`` and ``hippocampus/labels``. OUT holds checkpoints, weights, logits and pairs, which
may be thrown away in the end. The numbers go to ``reproduce/hippocampus/results``, those of every piece as soon as it
is done. Call it again until it says that nothing is left: what is in the CSV files is not done again. ``--smoke`` does
one fold in miniature on a CPU, the tables included, with data of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from reproduce.common import Row, Run, collect, read_rows, recipe_parser, side_by_side, start, write_rows
from reproduce.hippocampus import config, fusion, posthoc, table
from reproduce.hippocampus.atlases import write_pairs
from reproduce.hippocampus.tiny import write_tiny

# Seconds before the limit after which no piece is started: about what the slowest takes.
PIECE_SECONDS = 60.0
Rows = dict[str, list[Row]]
Job = Callable[[], Rows]
# A network and the calibrator to fit to it.
Piece = tuple[Run, str]


def main(given: argparse.Namespace) -> int:
    """Work until all is done or time is up; returns how many pieces are left."""
    deadline = time.time() + 60 * given.minutes
    left = calibrate(given, deadline) + fuse(given, deadline)
    print(f"{left or 'no'} pieces are left", flush=True)
    return left


def calibrate(given: argparse.Namespace, deadline: float) -> int:
    """Train the segmentation networks and calibrate them; returns how many pieces are left."""
    runs = config.network_runs(given.data, given.out, given.folds, smoke=given.smoke)
    fits = given.results / "posthoc_fits.csv"
    train(_missing(runs, fits, config.METHODS), given.out, given.results, given, deadline)
    jobs = _ready(_missing(runs, fits, config.METHODS), given.out, deadline)
    work([partial(posthoc.calibrate, run, method, given.out) for run, method in jobs], given, deadline)
    return len(_missing(runs, fits, config.METHODS))


def fuse(given: argparse.Namespace, deadline: float) -> int:
    """Register atlases, train the vote networks, calibrate them and fuse; returns how many pieces are left."""
    runs = config.vote_runs(given.out, given.folds, smoke=given.smoke)
    fits, out = given.results / "fusion_fits.csv", given.out / "vote"
    volumes = {run.id: config.dataset(given.data, given.out, fold) for fold, run in zip(given.folds, runs, strict=True)}
    for run, _ in _missing(runs, fits, config.FUSED):
        if time.time() < deadline - PIECE_SECONDS:
            write_pairs(volumes[run.id], Path(run.keys["data"]))
    paired = [run for run in runs if (Path(run.keys["data"]) / "segcal.toml").is_file()]
    train(_missing(paired, fits, config.FUSED), out, given.results / "vote", given, deadline)
    jobs = _ready(_missing(paired, fits, config.FUSED), out, deadline)
    work([partial(fusion.fuse, volumes[run.id], run, method, out) for run, method in jobs], given, deadline)
    return len(_missing(runs, fits, config.FUSED))


def train(pieces: Sequence[Piece], out: Path, results: Path, given: argparse.Namespace, deadline: float) -> None:
    """Train the networks that pieces wait for."""
    left = {run.id: run for run, _ in pieces if not posthoc.weights(run, out).is_file()}
    if left:
        side_by_side([*left.values()], out, deadline, given.parallel, left, lambda: _save_runs(out, results))


def _save_runs(out: Path, results: Path) -> None:
    """Add networks that were measured to the CSV files."""
    collect(out, results)


def _missing(runs: Sequence[Run], fits: Path, methods: Sequence[str]) -> list[Piece]:
    """The pieces that are not in the results."""
    there = {(row.get("run", "vote"), row["fold"], row["calibrator"]) for row in read_rows(fits)}
    return [(run, method) for run in runs for method in methods if (*run.name.split("-fold"), method) not in there]


def _ready(pieces: Sequence[Piece], out: Path, deadline: float) -> list[Piece]:
    """Those whose network is trained, while there is time; its logits are written if need be."""
    runs = {run.id: run for run, _ in pieces}.values()
    ready = {run.id: time.time() < deadline - PIECE_SECONDS and posthoc.write_parts(run, out) for run in runs}
    return [(run, method) for run, method in pieces if ready[run.id]]


def work(jobs: Sequence[Job], given: argparse.Namespace, deadline: float) -> None:
    """Do jobs, several at a time in processes of their own, and save the rows of each at once."""
    if given.parallel == 1:
        for job in jobs:
            _save(_in_time(job, deadline), given.results)
        return
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // given.parallel))
    with ProcessPoolExecutor(given.parallel, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_in_time, job, deadline) for job in jobs]):
            _save(done.result(), given.results)


def _in_time(job: Job, deadline: float) -> Rows:
    """What a job returns; nothing if it is too late to begin, or if it breaks, so that the others go on."""
    try:
        return {} if time.time() > deadline - PIECE_SECONDS else job()
    except Exception:
        traceback.print_exc()
        return {}


def _save(found: Rows, results: Path) -> None:
    for name, rows in found.items():
        write_rows(results / f"{name}.csv", [*read_rows(results / f"{name}.csv"), *rows])
        if name.endswith("_fits"):
            print(" ".join(str(value) for value in rows[0].values()), flush=True)


def smoke() -> None:
    """All steps in miniature; fails if a piece is missing."""
    torch.set_num_threads(1)  # Small tensors: on a busy machine more threads only wait for each other.
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "data", Path(folder) / "out"
        write_tiny(data / "hippocampus")
        results = ["--results", str(out / "results")]
        options = ["--smoke", "--folds", "0", "--parallel", "1", "--minutes", "10"]
        left = main(parser().parse_args([str(data), str(out), *results, *options]))
        table.main(results)
        assert not left, left


def parser() -> argparse.ArgumentParser:
    """The arguments of the command line."""
    found = recipe_parser(__doc__, Path(__file__).parent, parallel=3)
    found.add_argument("--folds", type=int, nargs="*", default=range(config.FOLDS))
    return found


if __name__ == "__main__":
    start(parser(), smoke, main)
