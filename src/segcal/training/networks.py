"""The networks that ``segcal train`` knows by name, and those in files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from safetensors import SafetensorError, safe_open

from segcal.errors import DataError, check_name
from segcal.training.densenet import FCDenseNet
from segcal.training.efficientnet import EfficientUNet
from segcal.training.segmenter import KEY, Segmenter
from segcal.training.unet import UNet

Network = Literal["unet", "residual-unet", "fc-densenet", "efficientnet-unet"]
#: The options of each network.
OPTIONS: dict[Network, tuple[str, ...]] = {
    "unet": ("width", "depth", "norm", "dims"),
    "residual-unet": ("width", "depth", "norm", "dims"),
    "fc-densenet": ("width", "layers"),
    "efficientnet-unet": ("width",),
}


def new_network(
    channels: int,
    classes: int,
    network: Network,
    *,
    encoder: str | None = None,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    **options: Any,
) -> Segmenter:
    """A network with random weights; options that it does not have are left out.

    ``encoder`` is a file with weights for the encoder of an EfficientNet U-Net. ``mean`` and ``std`` are those of
    ``Segmenter.normalised``, by default of each image.

    Examples:
        >>> new_network(3, 11, "fc-densenet", width=12, layers=(4, 4), depth=5).options["layers"]
        [4, 4]
    """
    check_name("network", network, get_args(Network))
    own = {name: options[name] for name in OPTIONS[network] if name in options}
    found: Segmenter
    if network == "fc-densenet":
        found = FCDenseNet(channels, classes, **own)
    elif network == "efficientnet-unet":
        found = EfficientUNet(channels, classes, **own)
        if encoder is not None:
            found.load_encoder(encoder)
    else:
        found = UNet(channels, classes, network=network, **own)
    if mean:
        found.options |= {"mean": list(mean), "std": list(std)}
    return found


def load_network(path: str | Path) -> Segmenter:
    """The network in a file written by training, in evaluation mode.

    Examples:
        >>> import tempfile, torch
        >>> file = Path(tempfile.mkdtemp()) / "best.safetensors"
        >>> UNet(1, 3, width=4, depth=2).save(file)
        >>> load_network(file)(torch.zeros(1, 1, 8, 8)).shape
        torch.Size([1, 3, 8, 8])
    """
    try:
        with safe_open(path, "pt") as file:
            options = (file.metadata() or {}).get(KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot be read ({error})", where=str(path), expected="a network of segcal train") from None
    if options is None:
        raise DataError("holds no segcal network", where=str(path), expected="best.safetensors of segcal train")
    network = new_network(**json.loads(options))
    network.load_state_dict(tensors)
    return network.eval()
