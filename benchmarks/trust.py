"""``trust`` beside every other calibrator on real logits, with paired intervals.

    python benchmarks/trust_data.py DATA TOOL OUT     # makes the logits
    python benchmarks/trust.py WORK --data camvid-ce=OUT/ce/test:80 --ablate camvid-ce --shift camvid-ce/fog=OUT/ce/fog

Every method is fitted to FIT cases (or groups) of a dataset and measured on all others, in several random splits. Each
fit is a task of its own; its result is kept in WORK, so that a run can be interrupted and tasks can be added. Values
are means over the test cases of all splits. Intervals are 95% percentile bootstraps over test cases (or groups) of the
difference from ``trust``: the same cases are drawn for both.

A dataset of the form NAME=FIT_FOLDER,TEST_FOLDER:FIT is fitted to one folder and measured on the other. ``--shift``
names a folder with other logits of the same cases, on which the fits of the first split are measured too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import segcal
from segcal.calibrators.trust import TrustCalibration, calibrator, fit, losers, network, slopes, tiles
from segcal.cases import CaseSet

METRICS = ("nll", "brier", "ece", "ba-ece")
COLUMNS = (*METRICS, "pooled ece")
DRAWS = 2000
#: Most useful first: a run that is stopped has them.
METHODS = (
    "trust", "ts", "isotonic", "cms-ap", "uncalibrated", "lts-ti", "cms-op", "fiducio CMSAP",
    "fiducio TemperatureScaling", "ets", "selective", "ibts", "lts", "meta-cal", "histogram", "vs", "ms",
    "ms-c", "dc", "cdc",
)  # fmt: skip
SHIFTED = ("trust", "ts", "isotonic", "cms-ap", "uncalibrated", "lts-ti", "trust, no guard")
SIZES = (10, 20, 40)
PEER_VOXELS = 400_000


class Data(NamedTuple):
    """A dataset: where the cases to fit to are, and those to measure on, and how many to fit to."""

    name: str
    fit: Path
    test: Path
    count: int

    @classmethod
    def parse(cls, text: str) -> Data:
        """From NAME=FOLDER:FIT or NAME=FIT_FOLDER,TEST_FOLDER:FIT."""
        name, rest = text.split("=", 1)
        folders, count = rest.rsplit(":", 1)
        first, *second = folders.split(",")
        return cls(name, Path(first), Path(second[0] if second else first), int(count))

    def parts(self, split: int, count: int) -> tuple[CaseSet, CaseSet]:
        """Cases to fit to, by groups, and to measure on."""
        cases = segcal.open_cases(self.fit)
        groups = cases.case_groups
        names = sorted(set(groups.values()))
        np.random.default_rng(split).shuffle(names)
        chosen = set(names[: self.count][:count])
        inside = [case for case in cases.ids if groups[case] in chosen]
        if self.test != self.fit:
            return cases.select(inside), segcal.open_cases(self.test)
        kept = set(names[: self.count])  # fits to fewer cases are measured on the same ones
        return cases.select(inside), cases.select([case for case in cases.ids if groups[case] not in kept])


class Task(NamedTuple):
    """One method, fitted to ``count`` cases of one split; ``shifts`` are names and folders to measure on, too."""

    data: Data
    split: int
    method: str
    count: int
    shifts: tuple[tuple[str, str], ...] = ()
    device: str = "cpu"

    def file(self, work: Path) -> Path:
        """Where the result is kept."""
        return work / f"{self.data.name} {self.split} {self.method} {self.count}.json"


# -- variants of trust, for the ablations ------------------------------------------------------------------------------


def _blind(columns: slice) -> Any:
    """Features without some of them."""
    whole = tiles.features

    def blinded(*args: Any) -> Tensor:
        found = whole(*args).clone()
        found[:, columns] = 0.0
        return found

    return patch.object(tiles, "features", blinded)


def _raise_winner(self: Any, tile: Any) -> tuple[Tensor, Tensor]:
    """Where a loser reaches the winner, raise the winner to it instead of lowering the losers."""
    known, z = self._known(tile), tile.logits.float()
    odds = self._odds(tile, known)
    index = tile.winner.unsqueeze(1)
    r = self._loser_scores(z, tile.winner, known).scatter(1, index, -torch.inf).softmax(1)
    q = torch.sigmoid(odds).unsqueeze(1)
    p = r * (1 - q)
    raised = torch.maximum(q, p.amax(1, keepdim=True) * (1 + 1e-5))
    p = p.scatter(1, index, raised)
    return (p / p.sum(1, keepdim=True)).clamp(min=1e-38).log(), (raised > q)[:, 0]


def _one_fold(own: network.TrustNetwork, sample: network.Sample, offsets: Tensor, seed: int) -> None:
    """Networks that see all cases, also those that they are judged by."""
    network.train(own, sample._replace(folds=torch.full_like(sample.folds, -1)), offsets, seed)


VARIANTS: dict[str, Callable[[], Any]] = {
    **{f"trust, w = {w:g}": lambda w=w: patch.object(fit, "SHARES", (w,)) for w in fit.SHARES},
    "trust, no cross-fitting": lambda: patch.object(calibrator, "train", _one_fold),
    "trust, winner raised": lambda: patch.object(TrustCalibration, "_level", _raise_winner),
    "trust, losers by one temperature": lambda: patch.object(losers.fit_losers, "__defaults__", ((np.inf,),)),
    "trust, losers by biases": lambda: patch.object(losers, "_MATRICES", 2),
    "trust, no linear maps": lambda: patch.object(slopes, "_RIDGE", 1e9),
    "trust, no windows": lambda: _blind(slice(6, 15)),
    "trust, no image features": lambda: _blind(slice(15, 18)),
    "trust, no guard": lambda: patch.object(
        TrustCalibration, "_known", lambda self, tile: torch.ones_like(tile.summary[:, 0]) * float(self.fitted)
    ),
}


# -- tasks -------------------------------------------------------------------------------------------------------------


def fiducio_map(name: str, cases: CaseSet, device: str) -> Callable[[Tensor], Tensor]:
    """A map of fiducio, fitted with its defaults to a uniform sample of voxels."""
    import fiducio

    random, drawn = torch.Generator().manual_seed(0), []
    for case in cases:
        z, y = case.logits.movedim(1, -1)[case.valid], case.labels[case.valid]
        chosen = torch.randint(len(y), (PEER_VOXELS // len(cases),), generator=random)
        drawn.append((z[chosen], y[chosen]))
    z, y = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    found = getattr(fiducio, name)(device=device).fit(z.T[None].to(device), y[None].to(device))
    return lambda z: found.transform(z).clamp(min=1e-38).log()


def fitted(method: str, cases: CaseSet, device: str) -> Any:
    if method == "uncalibrated":
        return None
    if method.startswith("fiducio "):
        return fiducio_map(method.removeprefix("fiducio "), cases, device)
    return segcal.CALIBRATORS[method.split(",")[0]]().fit(cases, device=device)


def measured(cases: CaseSet, mapping: Any, device: str) -> dict[str, Any]:
    """Values by metric and case, and reliability bins by case."""
    metrics = (*METRICS, *(("flip",) if mapping is not None else ()))
    found = segcal.evaluate(cases, mapping, metrics=metrics, device=device)
    bins = found.reliability["everything"]["cases"]
    return {
        "values": {metric: found.values(metric) for metric in {row.metric for row in found.rows}},
        "bins": {case: [own["count"], own["confidence"], own["correct"]] for case, own in bins.items()},
        "groups": dict(cases.case_groups),
    }


def run(task: Task, work: Path) -> str:
    torch.set_num_threads(1)
    calibration, test = task.data.parts(task.split, task.count)
    started = time.perf_counter()
    with VARIANTS[task.method]() if task.method in VARIANTS else patch.object(fit, "SHARES", fit.SHARES):
        mapping = fitted(task.method, calibration, task.device)
        seconds = time.perf_counter() - started
        report = getattr(mapping, "fit_report", None)
        content: dict[str, Any] = {
            "": measured(test, mapping, task.device),
            "seconds": seconds,
            "notes": report.notes if report else [],
        }
        for name, folder in task.shifts:
            content[name] = measured(segcal.open_cases(folder).select(test.ids), mapping, task.device)
    file = task.file(work)
    temporary = file.with_suffix(".part")
    temporary.write_text(json.dumps(content))
    temporary.replace(file)
    return f"{file.stem}: fit {seconds:.0f} s, all {time.perf_counter() - started:.0f} s"


def tasks(arguments: argparse.Namespace) -> Iterator[Task]:
    shifts: dict[str, list[tuple[str, str]]] = {}
    for text in arguments.shift:
        place, folder = text.split("=", 1)
        name, label = place.split("/", 1)
        shifts.setdefault(name, []).append((label, folder))
    for method in arguments.methods:
        for split in range(arguments.splits):
            for data in arguments.data:
                own = tuple(shifts.get(data.name, ())) if split == 0 and method in SHIFTED else ()
                yield Task(data, split, method, data.count, own, arguments.device)
    for data in arguments.data:
        if data.name in arguments.ablate:
            for method in VARIANTS:
                own = tuple(shifts.get(data.name, ())) if method in SHIFTED else ()
                yield Task(data, 0, method, data.count, own, arguments.device)
            for count in (size for size in SIZES if size < data.count):
                yield Task(data, 0, "trust", count, device=arguments.device)
                yield Task(data, 0, "ts", count, device=arguments.device)


# -- tables ------------------------------------------------------------------------------------------------------------

Array = NDArray[np.float64]


class Column(NamedTuple):
    """One method in one split: values by metric and voxels ``(cases,)``, gaps of bins ``(cases, bins)``, groups."""

    values: dict[str, Array]
    gaps: Array
    voxels: Array
    groups: list[str]

    @classmethod
    def of(cls, content: dict[str, Any]) -> Column:
        """From what a task kept."""
        cases = sorted(content["bins"])
        bins = np.array([content["bins"][case] for case in cases])
        values = {m: np.array([own.get(c, np.nan) for c in cases], float) for m, own in content["values"].items()}
        return cls(values, bins[:, 1] - bins[:, 2], bins[:, 0].sum(1), [content["groups"][case] for case in cases])

    def mean(self, metric: str, draws: Array) -> Array:
        """The value of each draw, from the number of times that each case is in it ``(draws, cases)``."""
        if metric == "pooled ece":
            return np.abs(draws @ self.gaps).sum(1) / (draws @ self.voxels)
        values = self.values[metric]
        known = np.isfinite(values)
        return draws[:, known] @ values[known] / draws[:, known].sum(1)


def drawn(column: Column, seed: int) -> Array:
    """All cases once, then bootstrap draws of groups of cases ``(1 + DRAWS, cases)``."""
    names = sorted(set(column.groups))
    place = np.array([names.index(group) for group in column.groups])
    counts = np.random.default_rng(seed).multinomial(len(names), np.full(len(names), 1 / len(names)), DRAWS)
    return np.concatenate((np.ones((1, len(place))), counts[:, place].astype(float)))


def table(title: str, rows: dict[str, list[Column]], beside: str = "trust", other: str | None = None) -> None:
    """Means, with the interval of the difference from the method beside which all stand.

    Below them, how that method compares with the lowest of those that keep labels, or with one other.
    """
    splits = len(rows[beside])
    draws = [drawn(own, split) for split, own in enumerate(rows[beside])]
    keeps = {
        name: all(not np.nansum(own.values.get("flip", np.zeros(1))) for own in columns)
        for name, columns in rows.items()
    }
    found = {
        name: {m: np.mean([own.mean(m, d) for own, d in zip(columns, draws, strict=True)], 0) for m in COLUMNS}
        for name, columns in rows.items() if len(columns) == splits
    }  # fmt: skip
    print(f"\n{title}: {sum(len(own.voxels) for own in rows[beside])} test cases in {splits} splits")
    print(f"{'':34}" + "".join(f"{metric:>28}" for metric in COLUMNS) + "   labels")
    for name, own in found.items():
        cells = []
        for metric in COLUMNS:
            low, high = np.percentile((own[metric] - found[beside][metric])[1:], (2.5, 97.5))
            beside_it = "" if name == beside else f"[{low:+.4f}, {high:+.4f}]"
            cells.append(f"{own[metric][0]:8.4f} {beside_it:>19}")
        print(f"{name:34}" + "".join(cells) + ("   kept" if keeps[name] else "   moved"))
    for metric in COLUMNS:
        kept = {name: own[metric] for name, own in found.items() if keeps[name] and not name.startswith("trust,")}
        lowest = other or min(kept, key=lambda name: kept[name][0])
        low, high = np.percentile((kept[beside] - kept[lowest])[1:], (2.5, 97.5)) if beside in kept else (np.nan,) * 2
        verdict = "the lowest" if lowest == beside else f"above {lowest} by [{low:+.4f}, {high:+.4f}]"
        print(f"  {metric}: {beside} is {verdict}" + ("" if lowest == beside or low <= 0 else ", a MISS"))


def report(arguments: argparse.Namespace) -> None:
    version = importlib.metadata.version
    versions = f"segcal {segcal.__version__}, torch {torch.__version__}, fiducio {version('fiducio')}"
    print(f"{versions}; fitted and measured on {arguments.device}")
    done = [task for task in tasks(arguments) if task.file(arguments.work).exists()]
    loaded = {task: json.loads(task.file(arguments.work).read_text()) for task in done}

    def rows(chosen: list[Task], test: str = "") -> dict[str, list[Column]]:
        """Columns by method, of those tasks that were measured on this test set."""
        chosen = [task for task in chosen if test in loaded[task]]
        names = dict.fromkeys(task.method for task in chosen)
        return {m: [Column.of(loaded[task][test]) for task in chosen if task.method == m] for m in names}

    for data in arguments.data:
        own = [task for task in done if task.data == data]
        main = [task for task in own if task.count == data.count and task.method not in VARIANTS]
        if not any(task.method == "trust" for task in main):
            continue
        table(f"{data.name}, {data.count} cases or groups to fit to", rows(main))
        for task in main:
            if task.method == "trust":
                print(f"  split {task.split}: fit {loaded[task]['seconds']:.0f} s; " + "; ".join(loaded[task]["notes"]))
        first = [task for task in own if task.split == 0]
        full = [task for task in first if task.count == data.count]
        for name in dict.fromkeys(name for task in full for name, _ in task.shifts):
            table(f"{data.name}, fitted without shift, {name}", rows(full, name), other="ts")
        variants = [task for task in full if task.method in VARIANTS or task.method in ("trust", "ts")]
        if any(task.method in VARIANTS for task in variants):
            sizes = {f"{t.method}, {t.count} cases": rows([t])[t.method] for t in first if t.count < data.count}
            table(f"{data.name}, ablations, one split", rows(variants) | sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", type=Data.parse, nargs="+", default=[], metavar="NAME=FOLDER:FIT")
    parser.add_argument("--shift", nargs="*", default=[], metavar="NAME/LABEL=FOLDER")
    parser.add_argument("--ablate", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="cpu or cuda: where to fit and to measure")
    parser.add_argument("--seconds", type=float, default=np.inf, help="begin no task after this time")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    waiting = [task for task in tasks(arguments) if not task.file(arguments.work).exists()]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        running: set[Any] = set()
        while waiting or running:
            while waiting and len(running) < arguments.processes and time.monotonic() - started < arguments.seconds:
                running.add(pool.submit(run, waiting.pop(0), arguments.work))
            if not running:
                break
            for done in as_completed(running):
                running.remove(done)
                print(done.exception() or done.result(), flush=True)
                break
    report(arguments)


if __name__ == "__main__":
    main()
