"""What two processes do in ``tests/integrations/test_torchmetrics.py``; spawned processes import it from here."""

from pathlib import Path

import torch
from torch import distributed

from segcal.integrations.processes import of_all_processes
from segcal.statistics import VoxelStatistics


def metrics():
    """All metrics of segcal beside one of torchmetrics; those with a norm share a state."""
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy

    from segcal.metrics import METRICS
    from segcal.metrics.modules import Calibration, MulticlassCalibrationError

    usable = [spec.id for spec in METRICS.values() if set(spec.needs) <= {"classwise"}]
    norms = ("l1", "l2", "max")
    return MetricCollection(
        {
            "calibration": Calibration(4, metrics=usable),
            "top label": Calibration(4, metrics=("nll", "ece")),
            **{norm: MulticlassCalibrationError(4, norm=norm, ignore_index=255, kind="logits") for norm in norms},
            "agreement": MulticlassAccuracy(4, average="micro", ignore_index=255),
        },
        prefix="val/",
    )


def images(count=9):
    """Logits and labels; the free energies of later images have another origin."""
    random = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(count, 4, 6, 5, generator=random)
    labels = (logits / 3 + torch.randn(logits.shape, generator=random)).argmax(1)
    labels[torch.rand(labels.shape, generator=random) < 0.1] = 255
    labels[6] = 255
    logits[5:] += 300
    return logits, labels


def statistics(some):
    """Statistics of some images, in the left half and in all."""
    found = VoxelStatistics(4, regions=("left",))
    logits, labels = (part[list(some)] for part in images())
    left = torch.zeros(labels.shape, dtype=torch.bool)
    left[..., :3] = True
    return found.update(logits, labels, regions={"left": left})


def measure(rank: int, folder: str) -> None:
    """One of two processes; the first has two images and the second seven."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    collection, (logits, labels) = metrics(), images()
    mine = range(2) if rank == 0 else range(2, 9)
    for _ in range(2):
        collection.reset()
        for n in mine:
            collection.update(logits[n : n + 1], labels[n : n + 1])
        values = collection.compute()
    with collection["calibration"].sync_context():
        confusion = collection["calibration"].confusion.clone()
    seen = int(collection["calibration"].confusion.sum())
    # The statistics behind MONAI's metric: only the second process has some, in regions.
    own = None if rank == 0 else statistics(mine)
    merged = of_all_processes(own).to_dict()
    everyone = of_all_processes(statistics(mine)).total("left").confusion.tolist()
    torch.save((values, confusion, seen, collection.compute_groups, merged, everyone), Path(folder, f"{rank}.pt"))
    distributed.destroy_process_group()
