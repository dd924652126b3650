"""Predictions for whole scans: validation scores, and datasets of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from segcal.cases import CaseRef, CaseSet, write_dataset
from segcal.losses import CRaC
from segcal.metrics import dice_per_class, ece, nll
from segcal.metrics.measure import Measure
from segcal.statistics import VoxelStatistics
from segcal.training.config import TrainingConfig
from segcal.training.data import Dataset, Scan
from segcal.training.processes import Processes
from segcal.training.windows import in_windows
from segcal.types import Case, CaseSource


@dataclass(frozen=True)
class Scores:
    """The scores of a network on the validation scans.

    Attributes:
        dice: For each class, the mean over the scans where it occurs or is predicted; NaN if there are none.
        nll: Over all voxels.
        ece: Over all voxels, with 15 bins.
    """

    dice: tuple[float, ...]
    nll: float
    ece: float

    def mean_dice(self, without: int | None) -> float:
        """The mean over all classes except ``without``."""
        return float(Measure.mean(value for k, value in enumerate(self.dice) if k != without))


@torch.no_grad()
def predict(network: nn.Module, scan: Scan, rows: slice, config: TrainingConfig) -> Iterator[tuple[slice, Tensor]]:
    """Logits ``(B, C, *S)`` float32 of some rows of a scan, on the network's device.

    A network for images takes a volume in batches of slices, which are yielded with their rows. Otherwise the scan is
    predicted at once, from all its rows. Mixed precision is off, because calibration depends on small differences.
    """
    device = next(network.parameters()).device
    if len(scan.spatial) == config.dims:
        yield rows, in_windows(network, scan.normalised(rows)[None].to(device), config.window)
        return
    for start in range(rows.start, rows.stop, config.batch):
        part = slice(start, min(start + config.batch, rows.stop))
        yield part, in_windows(network, scan.normalised(part).transpose(0, 1).to(device), config.window)


def validate(
    network: nn.Module,
    scans: Sequence[Scan],
    processes: Processes,
    classes: int,
    config: TrainingConfig,
    controllers: Sequence[CRaC] = (),
) -> Scores:
    """The scores of a network, which is put into evaluation mode. CRaC losses (``controllers``) observe its logits.

    Every process takes its share of the scans. Without scans, all scores are NaN.
    """
    network.eval()
    whole, rows = VoxelStatistics(classes, bins=(15,), classwise=False), []
    for scan in scans[processes.rank :: processes.world]:
        stats = whole.empty_like()
        everything = slice(0, scan.spatial[0])
        for part, logits in predict(network, scan, everything, config):
            labels = scan.labels(part).to(logits.device).long().view(len(logits), *logits.shape[2:])
            stats.update(logits, labels, ignore_index=scan.ignore_index)
            for controller in controllers:
                controller.observe(logits, labels)
        rows.append(dice_per_class(stats).tolist())
        whole.merge(stats)
    total = whole.empty_like()
    for state in processes.gather([whole.to_dict()]):
        total.merge(VoxelStatistics.from_dict(state))
    found = processes.gather(rows)
    dice = tuple(float(Measure.mean(row[k] for row in found)) for k in range(classes))
    return Scores(dice, float(nll(total)), float(ece(total)))


def write_logits(cases: CaseSet, folder: Path, config: TrainingConfig, progress: Callable[[str], None]) -> None:
    """Write logits, labels and images of predicted cases as a dataset, replacing those of an earlier run."""
    write_dataset(cases, folder, dtype=config.logits, resume=True, progress=progress)


def predictions(network: nn.Module, dataset: Dataset, scans: Sequence[Scan], config: TrainingConfig) -> CaseSet:
    """Scans with the logits of a network, which is put into evaluation mode, as cases; computed whenever read."""
    network.eval()
    sources = [_Prediction(network, dataset, scan, config) for scan in scans]
    return _Predictions(
        [CaseRef(source.id, partial(Case, source)) for source in sources],
        num_classes=dataset.classes,
        ignore_index=dataset.ignore_index,
        background=dataset.background,
        class_names=dataset.declared.class_names,
        groups=dataset.declared.groups,
    )


class _Predictions(CaseSet):
    """Cases that are computed, not read: one at a time on all threads, not ahead of time on one thread."""

    def __iter__(self) -> Iterator[Case]:
        return (ref.open() for ref in self.refs)


class _Prediction(CaseSource):
    """A scan with the network's logits."""

    batch = 1

    def __init__(self, network: nn.Module, dataset: Dataset, scan: Scan, config: TrainingConfig) -> None:
        self.id, self.num_classes, self.ignore_index = scan.id, dataset.classes, dataset.ignore_index
        self.spatial, self.spacing = scan.spatial, scan.spacing
        self.sliceable = len(scan.spatial) > config.dims
        self._predict = partial(predict, network, scan, config=config)
        self._scan = scan

    def logits(self, rows: slice) -> Tensor:
        parts = [logits.cpu() for _, logits in self._predict(rows)]
        return torch.cat(parts).transpose(0, 1)[None] if self.sliceable else parts[0]

    def labels(self, rows: slice) -> Tensor:
        return self._scan.labels(rows)[None]

    def image(self, rows: slice) -> Tensor:
        return self._scan.image(rows)[None]
