"""What the recipes share: runs side by side that stop in time, measurements, and tables as CSV files."""

from __future__ import annotations

import argparse
import csv
import gc
import json
import multiprocessing
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

import segcal
from segcal.errors import SegcalError
from segcal.evaluation.results import Results
from segcal.files.atomic import atomic_path, write_text
from segcal.metrics import PRESETS, Column
from segcal.parallel.workers import end_with_parent
from segcal.training import Trainer, load_network, parse_config
from segcal.training.loop import BEST, LAST

Row = dict[str, Any]
Item = TypeVar("Item")

# Seconds before the limit after which no new run is started, and after it until a run that goes on is ended.
LEAST_SECONDS, GRACE_SECONDS = 20.0, 25.0
# What is measured of every test volume: the columns of both papers, NLL and Brier score, by short names.
COLUMNS = {
    column.metric: column
    for column in (*PRESETS["nacl"].columns, *PRESETS["crac"].columns, Column("nll"), Column("brier"))
}


@dataclass(frozen=True)
class Run:
    """One network to train: the name of its row, its seed, the keys of its training file, and what is measured."""

    name: str
    seed: int
    keys: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Column] = field(default_factory=lambda: COLUMNS)
    """What is measured of its test cases. Columns that are pooled go to the row of the run."""

    @property
    def id(self) -> str:
        """The name of its folder."""
        return f"{self.name}-{self.seed}"


def measure(cases: Any, calibrator: Any = None, columns: Mapping[str, Column] = COLUMNS) -> list[Row]:
    """A row with all metrics for every case."""
    results = segcal.evaluate(cases, calibrator, metrics=list(columns.values()), device="auto")
    return case_rows(results, {name: column.key for name, column in columns.items()})


def case_rows(results: Results, keys: Mapping[str, tuple[str, str]]) -> list[Row]:
    """A row for every case; ``keys`` are metric and region of each of its columns."""
    found = {name: results.values(*key) for name, key in keys.items()}
    return [{"case": case, **{name: found[name][case] for name in keys}} for case in next(iter(found.values()))]


def train_and_measure(run: Run, out: Path, deadline: float, keep_weights: bool) -> bool:
    """Train a network until it is done or time is up; if done, measure the test volumes. Returns whether it is done."""
    folder = out / "runs" / run.id
    if not (folder / LAST).is_file():
        shutil.rmtree(folder, ignore_errors=True)
    config = parse_config({**run.keys, "output": str(folder), "seed": run.seed})
    trainer = Trainer(config, resume=(folder / LAST).is_file())
    report = trainer.fit(stop=lambda: time.time() > deadline)
    clock = folder / "seconds.txt"
    seconds = report.seconds + (float(clock.read_text()) if clock.is_file() else 0.0)
    write_text(clock, str(seconds))
    print(f"{run.id}: epoch {report.epochs} of {config.epochs}, {seconds:.0f} s", flush=True)
    if report.epochs < config.epochs:
        return False
    key = {"run": run.name, "seed": run.seed}
    about: Row = {
        "epochs": report.epochs, "best_epoch": report.best_epoch, "validation_dice": report.dice,
        "seconds": round(seconds, 1), **machine(),
    }  # fmt: skip
    results = segcal.evaluate(trainer.predictions("test"), metrics=list(run.columns.values()), device="auto")
    pooled = {name for name, column in run.columns.items() if column.aggregation == "pooled"}
    about |= {f"test_{name}": results.value(*run.columns[name].key) for name in sorted(pooled)}
    keys = {name: column.key for name, column in run.columns.items() if name not in pooled}
    cases = [{**key, **row} for row in case_rows(results, keys)]
    if keep_weights:
        save_half(folder / BEST, out / "weights" / f"{run.id}.safetensors")
    write_text(folder / "measured.json", json.dumps({"run": {**key, **about}, "cases": cases}))
    (folder / LAST).unlink()
    return True


def save_half(source: Path, target: Path) -> None:
    """A network in half precision, small enough to be carried; running means and variances stay float32."""
    network = load_network(source)
    learned = {name for name, _ in network.named_parameters()}
    target.parent.mkdir(parents=True, exist_ok=True)
    network.save(target, {name: t.half() if name in learned else t for name, t in network.state_dict().items()})


def machine() -> dict[str, str]:
    """The hardware and software of a measurement."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    return {"device": name, "torch": torch.__version__, "segcal": segcal.__version__}


def side_by_side(
    runs: Sequence[Run],
    out: Path,
    deadline: float,
    parallel: int,
    keep_weights: Iterable[str],
    tick: Callable[[], None],
) -> None:
    """Train all runs, several at a time in processes of their own, until the deadline; ``tick`` is called meanwhile."""
    work = partial(_train, out=out, deadline=deadline, keep_weights=frozenset(keep_weights))
    in_processes(runs, work, deadline, parallel, tick)


def _train(run: Run, out: Path, deadline: float, keep_weights: frozenset[str]) -> None:
    try:
        train_and_measure(run, out, deadline, run.id in keep_weights)
    except SegcalError as error:  # A run that diverges must not take the others with it.
        print(f"{run.id}: {error}", flush=True)


def in_processes(
    items: Sequence[Item], work: Callable[[Item], None], deadline: float, parallel: int, tick: Callable[[], None]
) -> None:
    """Do some work on each item, several at a time in processes of their own; ``tick`` is called meanwhile.

    Shortly before the deadline no more items are begun, and shortly after it those that go on are ended.
    """
    context = multiprocessing.get_context("spawn")
    waiting = context.Queue()
    for item in items:
        waiting.put(item)
    # Every process computes with its share of the cores.
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // parallel))
    workers = [context.Process(target=_work, args=(waiting, work, deadline)) for _ in range(min(parallel, len(items)))]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        time.sleep(1)
        tick()
        if time.time() > deadline + GRACE_SECONDS:
            for worker in workers:
                worker.terminate()  # Files are written whole or not at all.
    tick()
    waiting.cancel_join_thread()


def _work(waiting: Any, work: Callable[[Any], None], deadline: float) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.backends.cudnn.benchmark = True
    while time.time() < deadline - LEAST_SECONDS:
        try:
            item = waiting.get(timeout=1)
        except queue.Empty:
            return
        work(item)
        torch.compiler.reset()  # Every network is compiled anew, and after a few torch would give up.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def collect(out: Path, results: Path) -> set[tuple[str, str]]:
    """Add what was measured to ``runs.csv`` and ``cases.csv``; returns name and seed of all runs there."""
    runs, cases = read_rows(results / "runs.csv"), read_rows(results / "cases.csv")
    there = {(row["run"], row["seed"]) for row in runs}
    for file in sorted((out / "runs").glob("*/measured.json")):
        found = json.loads(file.read_text())
        key = (found["run"]["run"], str(found["run"]["seed"]))
        if key not in there:
            runs.append(found["run"])
            cases += found["cases"]
            there.add(key)
    write_rows(results / "runs.csv", runs)
    write_rows(results / "cases.csv", cases)
    return there


def train_all(wanted: Sequence[Run], kept: Iterable[str], given: argparse.Namespace) -> None:
    """Train the runs that are not in the results yet until all are done or time is up, and say what is left."""
    deadline = time.time() + 60 * given.minutes
    done = collect(given.out, given.results)
    left = [run for run in wanted if (run.name, str(run.seed)) not in done]
    side_by_side(
        left, given.out, deadline, given.parallel, kept, lambda: done.update(collect(given.out, given.results))
    )
    left = [run for run in left if (run.name, str(run.seed)) not in done]
    print(
        f"{len(wanted) - len(left)} of {len(wanted)} runs are done; left: {' '.join(run.id for run in left) or 'none'}"
    )


def recipe_parser(about: str | None, here: Path, parallel: int) -> argparse.ArgumentParser:
    """The arguments that all recipes have; ``here`` is the recipe's folder."""
    found = _parser(about, here)
    found.add_argument("data", type=Path, nargs="?")
    found.add_argument("out", type=Path, nargs="?")
    found.add_argument(
        "--minutes", type=float, default=9.0, help="work stops after this time, to go on in the next call"
    )
    found.add_argument("--parallel", type=int, default=parallel, help="runs at a time")
    found.add_argument("--smoke", action="store_true", help="all in miniature; needs neither DATA nor OUT")
    return found


def start(
    parser: argparse.ArgumentParser, smoke: Callable[[], None], work: Callable[[argparse.Namespace], Any]
) -> None:
    """Do what the command line asks for."""
    given = parser.parse_args()
    if given.smoke:
        smoke()
    elif given.data is None or given.out is None:
        parser.error("DATA and OUT are needed")
    else:
        work(given)


def results_of(about: str | None, here: Path, arguments: Sequence[str] | None) -> Path:
    """The folder of the CSV files that a command line names, for scripts that print tables."""
    found: Path = _parser(about, here).parse_args(arguments).results
    return found


def _parser(about: str | None, here: Path) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--results", type=Path, default=here / "results", help="the folder of the CSV files")
    return found


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file, all values as texts; none if there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as a CSV file; numbers have six digits."""
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table in Markdown."""
    print(f"\n### {title}\n")
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(map(str, row)) + " |")
