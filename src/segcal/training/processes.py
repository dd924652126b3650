"""The device, and the processes of a torchrun job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from segcal.errors import ConfigError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Processes:
    """The device of this process, its rank, and the number of processes."""

    device: torch.device
    rank: int = 0
    world: int = 1
    joined: bool = False
    """Whether ``join`` initialised the process group, so that ``leave`` must destroy it."""

    @property
    def first(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def wrap(self, network: nn.Module) -> nn.Module:
        """The network with gradients averaged over all processes."""
        if self.world == 1:
            return network
        return DistributedDataParallel(network, device_ids=[self.device] if self.device.type == "cuda" else None)

    def gather(self, items: list[Item]) -> list[Item]:
        """The items of all processes, in order of rank."""
        if self.world == 1:
            return items
        gathered: list[Any] = [None] * self.world
        distributed.all_gather_object(gathered, items)
        return [item for part in gathered for item in part]

    def share_buffers(self, network: nn.Module) -> None:
        """Copy the first process's buffers (running means), which are the ones it saves, to all processes."""
        if self.world > 1:
            for buffer in network.buffers():
                distributed.broadcast(buffer, 0)

    def leave(self) -> None:
        """Destroy the process group if ``join`` initialised it."""
        if self.joined and distributed.is_initialized():
            distributed.destroy_process_group()


def join(device: str) -> Processes:
    """Choose the device and, under torchrun, join the process group: NCCL on CUDA, Gloo elsewhere.

    Examples:
        >>> join("cpu")
        Processes(device=device(type='cpu'), rank=0, world=1, joined=False)
    """
    chosen = _device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes(chosen)
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    new = not distributed.is_initialized()
    if new:
        distributed.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    return Processes(chosen, distributed.get_rank(), distributed.get_world_size(), new)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device = {name!r}", expected="'auto', 'cpu', 'cuda' or 'cuda:1'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device = {name!r}, but there is no CUDA device", expected="'auto' or 'cpu' on this machine")
    return device
