"""The pictures of the cards, from segcal's own code: ``python docs/make_pictures.py [name ...]``.

Without names it draws all of them into docs/pictures/. Seeds are fixed, so the same versions give the same pictures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import segcal
from segcal.cases import CaseSet
from segcal.metrics.reliability import reliability
from segcal.plots.style import FAINT, INK, LEGEND, MUTED, OVER, PLAIN, UNDER
from segcal.regions import CaseRegions
from segcal.synthetic import (
    ClassAffine,
    ClassConditional,
    ConfidentlyWrong,
    ImageTemperature,
    Plant,
    SpatialTemperature,
    Temperature,
    scenes,
)

FOLDER = Path(__file__).parent / "pictures"
SIZE = (96, 128)

# The fault that each calibrator is made for, planted in the scenes that its picture shows.
_PER_CLASS = ClassConditional((2.5, 1, 1, 2, 1, 1))
FAULTS: dict[str, list[Plant]] = {
    "ts": [Temperature(2.5)],
    "ets": [Temperature(2.5), ConfidentlyWrong(0.03)],
    "vs": [ClassAffine((0.5, 0.9, 0.5, 0.9, 0.5, 0.9), (0, 0.5, 0, -0.5, 0, 0))],
    "ms": [ClassAffine((0.5, 0.9, 0.5, 0.9, 0.5, 0.9), (0, 0.5, 0, -0.5, 0, 0))],
    "ms-c": [Temperature(2.0), ConfidentlyWrong(0.05)],
    "dc": [Temperature(2.0), ConfidentlyWrong(0.05)],
    "cdc": [_PER_CLASS],
    "cms-ap": [_PER_CLASS],
    "cms-op": [_PER_CLASS],
    "lts": [SpatialTemperature()],
    "lts-ti": [SpatialTemperature()],
    "ibts": [ImageTemperature(1.8, 0.5)],
    "selective": [Temperature(1.5), ConfidentlyWrong(0.1)],
    "meta-cal": [Temperature(1.5), ConfidentlyWrong(0.1)],
    "isotonic": [Temperature(2.5)],
    "histogram": [Temperature(2.5)],
    "ensemble": [Temperature(1.5)],
    "trust": [SpatialTemperature(), _PER_CLASS],
}


def calibrator(name: str) -> Figure:
    """How a fitted calibrator moves the confidence of scenes that it was not fitted to, and what that does."""
    members = 5 if name == "ensemble" else None
    options = {"size": SIZE, "plant": FAULTS[name], "coherence": 0, "members": members}
    fitted_to, others = scenes(24, **options), scenes(12, seed=9, **options)
    fitted = segcal.CALIBRATORS[name]().fit(fitted_to)
    before, after = [], []
    for case in one_member(others):
        before.append(case.logits.softmax(1).amax(1).flatten())
    for case in others:
        scores = [case.member_logits(i) for i in range(members)] if members else case.logits
        after.append(fitted.predict_proba(scores).gather(1, predictions(case, fitted_to)).flatten())
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.hexbin(
        torch.cat(before),
        torch.cat(after),
        gridsize=40,
        bins="log",
        cmap="Purples",
        extent=(0.2, 1, 0, 1),
        linewidths=0.1,
    )
    left.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8)
    left.set(xlabel="confidence before", ylabel="after, of the same class", xlim=(0.2, 1), ylim=(0, 1))
    for label, cases, used, color in (("before", one_member(others), None, OVER), ("after", others, fitted, PLAIN)):
        draw_reliability(right, cases, used, label, color)
    right.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8)
    right.set(xlabel="confidence", ylabel="accuracy", xlim=(0.2, 1), ylim=(0.2, 1))
    right.legend(**LEGEND)
    return figure


def one_member(cases: CaseSet) -> CaseSet:
    """The first member of an ensemble; other cases as they are."""
    return cases.members([0]) if cases.num_members else cases


def predictions(case: segcal.Case, cases: CaseSet) -> torch.Tensor:
    """The predicted class of every voxel; of an ensemble, that of its first member."""
    scores = case.member_logits(0) if cases.num_members else case.logits
    return scores.argmax(1, keepdim=True)


def draw_reliability(axes: Axes, cases: CaseSet, used: object, label: str, color: str) -> None:
    """Accuracy against confidence, of bins with 200 voxels or more."""
    bins = segcal.evaluate(cases, used, metrics=("ece",), regions=("everything",)).reliability["everything"]["top"]
    count, confidence, correct = (np.array(bins[key], float) for key in ("count", "confidence", "correct"))
    seen = count >= 200
    axes.plot(
        confidence[seen] / count[seen],
        correct[seen] / count[seen],
        "o-",
        markersize=3,
        linewidth=1,
        color=color,
        label=label,
    )


# -- losses ------------------------------------------------------------------------------------------------------------

# A loss is minimised over images in which column x has class 1 with probability x: one pair of logits for every column,
# as of a network that sees the column and not the label.
COLUMNS, ROWS = 41, 400


def loss(name: str) -> Figure:
    """The probability that a loss teaches against the true one."""
    figure = Figure(figsize=(3.1, 2.9), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8)
    truth = np.linspace(0.01, 0.99, COLUMNS)
    axes.plot(truth, taught(name, truth), color=PLAIN, linewidth=1.8)
    axes.set(xlabel="true probability", ylabel="probability that the loss teaches", xlim=(0, 1), ylim=(0, 1))
    return figure


def taught(name: str, truth: np.ndarray) -> np.ndarray:
    """The probability of class 1 in every column after minimising the loss."""
    rng = np.random.default_rng(0)
    # Two images with the same columns: bwcr needs two views of one.
    labels = torch.from_numpy((rng.random((1, ROWS, COLUMNS)) < truth).astype(np.int64)).repeat(2, 1, 1)
    criterion = segcal.LOSSES[name].of_classes(2)
    columns = torch.zeros(2, COLUMNS, requires_grad=True)

    def logits() -> torch.Tensor:
        return columns[None, :, None, :].expand(2, 2, ROWS, COLUMNS)

    optimiser = torch.optim.Adam([columns], lr=0.05)
    for step in range(400):
        optimiser.zero_grad()
        criterion(logits(), labels).backward()
        optimiser.step()
        if name == "crac" and step % 40 == 39:  # an epoch ends: the multipliers are learned
            with torch.no_grad():
                criterion.observe(logits(), labels)
            criterion.update()
    return columns.detach().softmax(0)[1].numpy()


# -- metrics -----------------------------------------------------------------------------------------------------------


def binned() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count, confidence and accuracy of the bins of overconfident scenes."""
    stats = segcal.VoxelStatistics(6)
    for case in scenes(12, size=SIZE, plant=[Temperature(2.5)], coherence=0):
        stats.update(case.logits, case.labels)
    bins = reliability(stats, 10)
    count = np.asarray(bins.count, float)
    kept = count > 0
    return count[kept], np.asarray(bins.confidence)[kept] / count[kept], np.asarray(bins.correct)[kept] / count[kept]


def bins() -> Figure:
    """The gaps of a reliability diagram, and how ECE, ACE and MCE weigh them."""
    count, confidence, accuracy = binned()
    gap = np.abs(confidence - accuracy)
    weights = {
        "ece": count / count.sum(),
        "ace": np.full(len(gap), 1 / len(gap)),
        "mce": (gap == gap.max()).astype(float),
    }
    figure = Figure(figsize=(7.6, 3.1), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8)
    left.vlines(confidence, accuracy, confidence, color=OVER, linewidth=3)
    left.plot(confidence, accuracy, "o", color=INK, markersize=4)
    left.set(title="the gap of every bin", xlabel="confidence", ylabel="accuracy", xlim=(0, 1.02), ylim=(-0.02, 1.02))
    for shift, (name, weight), color in zip((-0.02, 0, 0.02), weights.items(), (PLAIN, UNDER, OVER), strict=True):
        total = float((weight * gap).sum())
        right.bar(confidence + shift, weight, width=0.02, color=color, label=f"{name} = {total:.3f}")
    right.set(title="what it weighs", xlabel="confidence", ylabel="weight", xlim=(0, 1.05))
    right.legend(**LEGEND)
    return figure


def regions() -> Figure:
    """The labels of a scene, and where each region looks."""
    case = scenes(1, size=SIZE, seed=4)[0]
    parts = CaseRegions(case.labels)
    panels: dict[str, torch.Tensor] = {"labels": case.labels[0].float()}
    panels |= {name: parts.mask(name)[0].float() for name in ("foreground", "all", "boundary", "interior")}
    panels["bands of ba-ece"] = parts.bands[0].float()
    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    for axes, (title, values) in zip(figure.subplots(2, 3).flat, panels.items(), strict=True):
        several = title.startswith(("labels", "bands"))
        axes.imshow(
            values,
            cmap="viridis" if several else "Purples",
            vmin=0,
            vmax=None if several else 1.3,
            interpolation="nearest",
        )
        axes.set_title(title, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    return figure


def pooled() -> Figure:
    """A vague and a sharp network, both calibrated over all images: within an image, the sharp one has more ECE."""
    rng = np.random.default_rng(0)
    levels = np.repeat([0.55, 0.65, 0.75, 0.85, 0.95], 2)  # ten objects an image, with these chances to be right
    right = rng.random((4000, 10)) < levels
    networks = {"vague: 75% for every object": np.full(10, 0.75), "sharp: knows which are hard": levels}
    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (title, p) in zip(panels, networks.items(), strict=True):
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8)
        said = np.unique(p)
        accuracy = np.stack([right[:, p == level].mean(1) for level in said], 1)  # of every image and bin
        share = np.array([(p == level).mean() for level in said])
        jitter = rng.normal(0, (0.006, 0.012), (150 * len(said), 2))
        axes.plot(
            np.tile(said, 150) + jitter[:, 0],
            accuracy[:150].ravel() + jitter[:, 1],
            ".",
            color=FAINT,
            label="one image",
        )
        axes.plot(said, accuracy.mean(0), "o", color=PLAIN, label="all images, pooled")
        nll = -np.log(np.where(right, p, 1 - p)).mean()
        within = (np.abs(accuracy - said) @ share).mean()
        over_all = np.abs(accuracy.mean(0) - said) @ share
        axes.set_title(f"{title}\nNLL {nll:.2f}, ECE pooled {over_all:.2f}, per image {within:.2f}", fontsize=9)
        axes.set(xlabel="confidence", xlim=(0.4, 1), ylim=(-0.08, 1.08))
    panels[0].set_ylabel("accuracy")
    panels[0].legend(**LEGEND, loc="lower left")
    return figure


METRIC_PICTURES: dict[str, Callable[[], Figure]] = {"bins": bins, "regions": regions, "pooled": pooled}


def draw(names: Iterable[str]) -> None:
    """Draw pictures by name: calibrator-ts, loss-nacl, metric-bins, ..."""
    for name in names:
        kind, _, own = name.partition("-")
        torch.manual_seed(0)
        figure = {"calibrator": calibrator, "loss": loss}[kind](own) if kind != "metric" else METRIC_PICTURES[own]()
        figure.savefig(FOLDER / f"{name}.png", dpi=110, metadata={"Software": None})
        print(name, flush=True)


if __name__ == "__main__":
    everything = [
        *(f"calibrator-{name}" for name in segcal.CALIBRATORS),
        *(f"loss-{name}" for name in segcal.LOSSES),
        *(f"metric-{name}" for name in METRIC_PICTURES),
    ]
    FOLDER.mkdir(exist_ok=True)
    draw(sys.argv[1:] or everything)
