"""Logits of the trained networks as datasets: of validation and test images, and of corrupted test images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import segcal
from reproduce.camvid import config
from segcal.cases import CaseSet
from segcal.scores import round_keeping_argmax
from segcal.training import Segmenter, load_network, parse_config
from segcal.training.data import Dataset, Scan, open_dataset
from segcal.training.shift import Severity, corrupt

# The part of CamVid that each dataset of logits shows, and how strongly it is corrupted.
PARTS: dict[str, tuple[str, Severity | None]] = {
    "validation": ("validation", None),
    "test": ("test", None),
    "mild": ("test", "mild"),
    "strong": ("test", "strong"),
}
# Images that are predicted at a time on a GPU, which waits for corruptions and files.
THREADS = 8
ABOUT = 'classes = {classes}\nignore_index = {ignore_index}\nbackground = "none"\n'


def prepare(name: str, part: str, data: Path, out: Path) -> None:
    """Write the logits of a network, or of the ensemble, unless they are there."""
    folder = out / "logits" / name / part
    if not (folder / "done").is_file():
        dataset, (shown, severity) = _dataset(config.images(data, out)), PARTS[part]
        scans = [dataset.scans[scan] for scan in dataset.declared.splits[shown]]
        write(networks(name, out), dataset, scans, severity, folder)


@cache
def _dataset(folder: Path) -> Dataset:
    return open_dataset(parse_config({"data": str(folder), "output": "nowhere"}))


def cases_of(source: str, part: str, out: Path) -> CaseSet:
    """The cases of a method's source, see ``methods.Method``."""
    name, _, pooling = source.partition(":")
    cases = segcal.open_cases(out / "logits" / name / part)
    if pooling == "0":
        return cases.members([0])
    if pooling == "p3":
        return cases.members([0, 1, 2]).pooled("probs")
    return cases.pooled("probs" if pooling == "p" else "logits") if pooling else cases


def weights(name: str, out: Path) -> list[Path]:
    """The files of a network: five of the ensemble, else one."""
    seeds = config.MEMBERS if name == "unet" else (0,)
    return [out / "weights" / f"{name}-{seed}.safetensors" for seed in seeds]


def networks(name: str, out: Path) -> dict[str, Segmenter]:
    """The networks of a name by the folder of their logits: those of members have their own."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    files = weights(name, out)
    folders = [path.stem for path in files] if len(files) > 1 else [""]
    return {folder: load_network(path).to(device) for folder, path in zip(folders, files, strict=True)}


def write(
    networks: Mapping[str, Segmenter], dataset: Dataset, scans: Sequence[Scan], severity: Severity | None, folder: Path
) -> None:
    """Write logits in half precision, labels and images as a dataset."""
    for name in ("labels", "images", *(f"logits/{name}" for name in networks)):
        (folder / name).mkdir(parents=True, exist_ok=True)
    about = ABOUT.format(classes=dataset.classes, ignore_index=dataset.ignore_index)
    (folder / "segcal.toml").write_text(about + ('pooling = "logits"\n' if len(networks) > 1 else ""))

    @torch.no_grad()
    def one(scan: Scan) -> None:
        everything = slice(0, scan.spatial[0])
        image = shown(scan.image(everything), scan.id, severity)
        np.save(folder / f"labels/{scan.id}.npy", scan.labels(everything).numpy().astype(np.uint8))
        np.save(folder / f"images/{scan.id}.npy", image.round().numpy().astype(np.uint8))
        for name, network in networks.items():
            device = next(network.parameters()).device
            logits = network(network.normalised(image)[None].to(device)).float().cpu()
            small = round_keeping_argmax(logits, torch.float16)
            np.save(folder / "logits" / name / f"{scan.id}.npy", small[0].numpy())

    with ThreadPoolExecutor(THREADS if torch.cuda.is_available() else 1) as pool:
        list(pool.map(one, scans))
    (folder / "done").touch()


def shown(image: Tensor, name: str, severity: Severity | None) -> Tensor:
    """An image with values from 0 to 255, corrupted or not."""
    return image if severity is None else 255 * corrupt(image / 255, name, None, severity)
