"""One piece of the work: calibrate a fold's votes by one method and fuse the atlases' labels (Ding et al., 4.4)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import segcal
from reproduce.common import Row, Run, machine, measure
from reproduce.hippocampus import config, posthoc
from reproduce.hippocampus.atlases import BETWEEN
from segcal import fusion, metrics
from segcal.regions.boundary import boundary_region, label_boundary
from segcal.training import parse_config
from segcal.training.data import open_dataset

# Classes of the segmentation, and the vote network's class "agrees".
CLASSES, AGREES = len(config.CLASS_NAMES), 1
# How labels are fused: as in the paper, and the simpler way.
WAYS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {"joint": fusion.joint, "weighted": fusion.weighted}
# Where the votes' calibration is measured, by the labels of the target, as in the paper.
REGIONS = ("all", "boundary")
# A score for labels that are certain.
SURE = 20.0


class Target(NamedTuple):
    """A test volume with the votes ``(M, 2, *S)`` on its atlases, nearest first, and their labels ``(M, *S)``."""

    name: str
    labels: Tensor
    votes: Tensor
    candidates: Tensor


def fuse(volumes: Path, run: Run, method: str, out: Path) -> dict[str, list[Row]]:
    """The rows of one method: fused segmentations, the votes' calibration by target, and one about the fit."""
    key = {"fold": run.name.split("-fold")[1], "seed": run.seed, "calibrator": method}
    data = posthoc.parts(run, out)
    calibrator, fit = posthoc.fitted(method, data["calibration"])
    votes, fused = [], []
    for target in targets(volumes, Path(run.keys["data"]), data["test"]):
        raw, probabilities = (_agreement(target.votes, own) for own in (None, calibrator))
        votes.append({**key, "case": target.name, **vote_metrics(target, probabilities)})
        for way, vote in WAYS.items():
            before, after = (vote(target.candidates, own, CLASSES) for own in (raw, probabilities))
            fused.append({**key, "vote": way, **segmentation(target, after), **changes(target, before, after)})
        if method == "none":
            before = fusion.joint(target.candidates, raw, CLASSES)
            fused += [{**key, **row} for row in bounds(target, before)]
    return {"fusion": fused, "votes": votes, "fusion_fits": [{**key, **fit, **machine()}]}


def targets(volumes: Path, pairs: Path, cases: Any) -> list[Target]:
    """The test volumes with all their pairs."""
    scans = open_dataset(parse_config({"data": str(volumes), "output": str(volumes)})).scans
    by_target: dict[str, list[Any]] = {}
    for case in sorted(cases, key=lambda case: str(case.id)):
        by_target.setdefault(case.id.split(BETWEEN)[0], []).append(case)
    found = []
    for name, own in by_target.items():
        labels = scans[name].labels(slice(0, scans[name].spatial[0]))
        candidates = [torch.from_numpy(np.load(pairs / "candidates" / f"{case.id}.npy")) for case in own]
        votes = torch.cat([torch.as_tensor(case.logits).float() for case in own])
        found.append(Target(name, labels, votes, torch.stack(candidates).long()))
    return found


def _agreement(votes: Tensor, calibrator: Any) -> Tensor:
    """The probability that each atlas is right, ``(M, *S)``."""
    if calibrator is None:
        return votes.softmax(1)[:, AGREES]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.cat([calibrator(vote[None].to(device)).cpu()[:, AGREES].exp() for vote in votes]).clamp(0, 1)


def vote_metrics(target: Target, probabilities: Tensor) -> Row:
    """The paper's calibration metrics of the votes on a target, means over its atlases."""
    edge = label_boundary(target.labels[None], torch.ones_like(target.labels[None], dtype=torch.bool))
    boundary = boundary_region(edge, torch.ones_like(edge))
    inside = {"all": boundary | (target.labels[None] > 0), "boundary": boundary}
    rows = []
    for candidate, p in zip(target.candidates, probabilities, strict=True):
        stats = segcal.VoxelStatistics(2, bins=(10,), regions=REGIONS, background=None)
        scores = torch.stack((1 - p, p)).clamp_min(1e-30).log()[None]
        stats.update(scores, (candidate == target.labels).long()[None], regions=inside)
        row = {"nll": metrics.nll(stats), "brier": metrics.brier(stats)}
        for region in REGIONS:
            row |= {
                f"ece-{region}": metrics.ece(stats, num_bins=10, region=region),
                f"mce-{region}": metrics.mce(stats, num_bins=10, region=region),
                f"sce-{region}": metrics.sce(stats, num_bins=10, region=region),
                f"ace-adaptive-{region}": metrics.ace_adaptive(stats, num_bins=10, region=region),
            }
        rows.append({name: float(value) for name, value in row.items()})
    return {name: float(np.nanmean([row[name] for row in rows])) for name in rows[0]}


def segmentation(target: Target, found: Tensor) -> Row:
    """The metrics of a fused segmentation; voxels are 1 mm wide, so distances are in mm."""
    scores = SURE * F.one_hot(found, CLASSES).movedim(-1, 0).float()
    batch = {"logits": scores[None], "labels": target.labels[None]}
    return {**measure(segcal.cases_from([batch]), columns=config.FUSED_COLUMNS)[0], "case": target.name}


def changes(target: Target, before: Tensor, after: Tensor) -> Row:
    """How calibration changed the fused labels: of all that could, and of those changed, made right or made wrong."""
    disputed, changed = (target.candidates != target.candidates[0]).any(0), before != after
    count = int(changed.sum())
    right, wrong = (int((changed & (labels == target.labels)).sum()) for labels in (after, before))
    return {
        "changed": count / max(1, int(disputed.sum())),
        "made_right": right / count if count else "",
        "made_wrong": wrong / count if count else "",
    }


def bounds(target: Target, before: Tensor) -> list[Row]:
    """What needs no probabilities: the nearest atlas, the plurality, and the bounds that know the truth."""
    candidates, labels = target.candidates, target.labels
    oracle = fusion.best_calibration(candidates, labels, CLASSES)
    ways = {
        "nearest atlas": candidates[0],
        "plurality": fusion.plurality(candidates, CLASSES),
        "best calibration": fusion.joint(candidates, oracle, CLASSES),
        "best fusion": fusion.best_fusion(candidates, labels, CLASSES),
    }
    return [
        {"vote": way, "calibrator": "", **segmentation(target, found), **changes(target, before, found)}
        for way, found in ways.items()
    ]
