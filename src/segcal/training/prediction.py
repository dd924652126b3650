"""What a network says of whole scans: validation scores, and datasets of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from segcal.cases import CaseRef, CaseSet, write_dataset
from segcal.losses import CRaC
from segcal.metrics import dice_per_class, ece, nll
from segcal.metrics.measure import Measure
from segcal.statistics import VoxelStatistics
from segcal.training.data import Dataset, Scan
from segcal.training.processes import Processes
from segcal.types import Case


@dataclass(frozen=True)
class Scores:
    """How a network does on the validation scans.

    Attributes:
        dice: Of every class, the mean over the scans where it occurs or is predicted; NaN where it never does.
        nll: Over all voxels, as is ``ece`` (15 bins).
    """

    dice: tuple[float, ...]
    nll: float
    ece: float

    def mean_dice(self, without: int | None) -> float:
        """Mean over the classes but one, where one is given."""
        return float(Measure.mean(value for k, value in enumerate(self.dice) if k != without))


@torch.no_grad()
def predict(network: nn.Module, scan: Scan, rows: slice, *, dims: int, batch: int) -> Iterator[tuple[slice, Tensor]]:
    """Logits ``(B, C, *S)`` float32 of some rows of a scan, on the network's device.

    Volumes go through a network for images as batches of slices, each with the rows it holds; all else at once, which
    needs all rows. No mixed precision: calibration is about small differences.
    """
    device = next(network.parameters()).device
    if len(scan.spatial) == dims:
        yield rows, network(scan.normalised(rows)[None].to(device)).float()
        return
    for start in range(rows.start, rows.stop, batch):
        part = slice(start, min(start + batch, rows.stop))
        yield part, network(scan.normalised(part).transpose(0, 1).to(device)).float()


def validate(
    network: nn.Module,
    scans: Sequence[Scan],
    processes: Processes,
    *,
    classes: int,
    dims: int,
    batch: int,
    controllers: Sequence[CRaC] = (),
) -> Scores:
    """The scores of a network, which is put into evaluation mode; CRaC's controllers see its logits.

    Every process takes its share of the scans.
    """
    network.eval()
    whole, rows = VoxelStatistics(classes, bins=(15,), classwise=False), []
    for scan in scans[processes.rank :: processes.world]:
        stats = whole.empty_like()
        for part, logits in predict(network, scan, slice(0, scan.spatial[0]), dims=dims, batch=batch):
            labels = scan.labels(part).to(logits.device)
            labels = labels[None] if labels.ndim == dims else labels
            stats.update(logits, labels, ignore_index=scan.ignore_index)
            for controller in controllers:
                controller.observe(logits, labels)
        rows.append(dice_per_class(stats).tolist())
        whole.merge(stats)
    total = whole.empty_like()
    for state in processes.gather([whole.to_dict()]):
        total.merge(VoxelStatistics.from_dict(state))
    dice = zip(*processes.gather(rows), strict=True)
    return Scores(tuple(float(Measure.mean(values)) for values in dice), float(nll(total)), float(ece(total)))


def write_logits(
    network: nn.Module,
    dataset: Dataset,
    names: Sequence[str],
    folder: Path,
    *,
    dims: int,
    batch: int,
    dtype: Literal["float16", "float32"],
    progress: Callable[[str], None],
) -> None:
    """Write logits, labels and images of some scans as a dataset, over those that the run wrote before."""
    cases = _Predictions(
        [CaseRef(name, partial(_open, network, dataset, name, dims, batch)) for name in names],
        num_classes=dataset.classes,
        ignore_index=dataset.ignore_index,
        background=dataset.background,
        class_names=dataset.class_names,
        groups=dataset.groups,
    )
    write_dataset(cases, folder, dtype=dtype, resume=True, progress=progress)


class _Predictions(CaseSet):
    """Cases that are computed, not read: one by one, with all threads, instead of ahead on one."""

    def __iter__(self) -> Iterator[Case]:
        return (ref.open() for ref in self.refs)


def _open(network: nn.Module, dataset: Dataset, name: str, dims: int, batch: int) -> Case:
    return Case(_Prediction(network.eval(), dataset, dataset.scans[name], dims, batch))


class _Prediction:
    """A scan and what the network says of it, as a ``segcal.types.CaseSource``."""

    batch = 1

    def __init__(self, network: nn.Module, dataset: Dataset, scan: Scan, dims: int, at_once: int) -> None:
        self.id, self.num_classes, self.ignore_index = scan.id, dataset.classes, dataset.ignore_index
        self.spatial, self.spacing = scan.spatial, scan.spacing
        self.sliceable = len(scan.spatial) > dims
        self._predict = partial(predict, network, scan, dims=dims, batch=at_once)
        self._scan = scan

    def logits(self, rows: slice) -> Tensor:
        parts = [logits.cpu() for _, logits in self._predict(rows)]
        return torch.cat(parts).transpose(0, 1)[None] if self.sliceable else parts[0]

    def labels(self, rows: slice) -> Tensor:
        return self._scan.labels(rows)[None]

    def mask(self, rows: slice) -> None:
        return None

    def image(self, rows: slice) -> Tensor:
        return self._scan.image(rows)[None]

    def posterior(self, rows: slice) -> None:
        return None
