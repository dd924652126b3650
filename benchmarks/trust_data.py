"""The real logits of ``benchmarks/trust.py``: ``python benchmarks/trust_data.py DATA TOOL OUT [--only camvid]``.

DATA holds ``camvid.npz`` with the weights of two U-Nets, ``acdc.npz`` and ``hippocampus/``; TOOL is the script that
defines those U-Nets. CamVid: logits of the test images, of the validation images (another sequence), and of the test
images under photometric shift of severity 1, 3 and 5, by network. ACDC and hippocampus: networks are trained with
``segcal train``, ACDC slice by slice, hippocampus as volumes. Runs on a GPU where there is one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal.training import train
from segcal.training.packed import convert
from segcal.training.shift import corrupt

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NETWORKS = ("cedice", "ce")
SEVERITIES = (1, 3, 5)
MEAN, SCALE = torch.tensor([103.0, 107.0, 109.0]).view(3, 1, 1), 75.0  # of the U-Nets' inputs

TRAINING = {
    "acdc": 'data = "{data}"\noutput = "{out}"\nloss = "ce-dice"\nwidth = 24\ndepth = 5\nepochs = {epochs}\n'
    'batch = 32\namp = true\nlogits = "float16"\nmilestones = [20]\nworkers = 6\n'
    "split = {{ train = 0.4, validation = 0.05, test = 0.55 }}\n",
    "hippocampus": 'data = "{data}"\noutput = "{out}"\nloss = "ce-dice"\nwidth = 16\ndepth = 3\ndims = 3\nclasses = 3\n'
    'epochs = {epochs}\nbatch = 4\nlogits = "float16"\nmilestones = [20]\ncrop = [32, 48, 32]\n'
    "split = {{ train = 0.3, validation = 0.05, test = 0.65 }}\n",
}


def shifted(image: Tensor, name: str, severity: int) -> Tensor:
    """A corrupted image in [0, 1]: mild at severity 1, strong at 5, the mean of both at 3."""
    mild, strong = corrupt(image, name, None, "mild"), corrupt(image, name, None, "strong")
    return {1: mild, 3: (mild + strong) / 2, 5: strong}[severity]


def camvid(data: Path, tool: Path, out: Path) -> None:
    spec = importlib.util.spec_from_file_location("camvid_tool", tool)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    packed = np.load(data / "camvid.npz")
    images = {split: module.blobs(packed, f"{split}_images") for split in ("test", "val")}
    labels = {split: module.blobs(packed, f"{split}_labels") for split in ("test", "val")}
    for name in NETWORKS:
        weights = np.load(data / f"camvid_unet_{name}.npz")
        network = module.UNet()
        network.load_state_dict({key: torch.from_numpy(weights[key]) for key in weights.files})
        network.to(DEVICE).eval()
        parts = [("test", "test", 0), ("val", "val", 0), *((f"shift-{s}", "test", s) for s in SEVERITIES)]
        for part, split, severity in parts:
            write(network, out / name / part, packed[f"{split}_names"], images[split], labels[split], severity)


def write(network: Any, folder: Path, names: Any, images: Any, labels: Any, severity: int) -> None:
    """A dataset of logits."""
    for kind in ("logits", "labels"):
        (folder / kind).mkdir(parents=True, exist_ok=True)

    def one(item: tuple[str, Any, Any]) -> None:
        name, image, label = item
        pixels = torch.from_numpy(image).permute(2, 0, 1).float() / 255
        pixels = shifted(pixels, str(name), severity) if severity else pixels
        with torch.no_grad():
            logits = network(((pixels * 255 - MEAN) / SCALE)[None].to(DEVICE))[0]
        np.save(folder / f"logits/{name}.npy", logits.cpu().numpy().astype(np.float16))
        np.save(folder / f"labels/{name}.npy", np.where(label >= 11, 255, label).astype(np.uint8))

    with ThreadPoolExecutor(8 if DEVICE.type == "cuda" else 1) as pool:
        list(pool.map(one, zip(names, images, labels, strict=True)))


def trained(name: str, dataset: Path, out: Path, epochs: int) -> None:
    """Train a network; its logits of the test part are the dataset."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{name}.toml"
    file.write_text(TRAINING[name].format(data=dataset.resolve(), out=(out / name).resolve(), epochs=epochs))
    print(json.dumps({name: str(train(file))[:400]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "tool", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--only", nargs="*", default=["camvid", "acdc", "hippocampus"])
    parser.add_argument("--epochs", type=int, default=30)
    arguments = parser.parse_args()
    if "camvid" in arguments.only:
        camvid(arguments.data, arguments.tool, arguments.out)
    if "acdc" in arguments.only:
        convert(arguments.data / "acdc.npz", arguments.out / "acdc-images")
        trained("acdc", arguments.out / "acdc-images", arguments.out, arguments.epochs)
    if "hippocampus" in arguments.only:
        trained("hippocampus", arguments.data / "hippocampus", arguments.out, 2 * arguments.epochs)


if __name__ == "__main__":
    main()
