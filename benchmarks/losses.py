"""Losses beside their peers in one run: ``python benchmarks/losses.py [--rounds 60] [--threads 2] [--device cpu]``.

Forward and backward at 16 x 4 x 224 x 224. Times are minima over rounds that go over all contenders in turn; memory is
what a process of its own needs at its peak beyond logits and labels. "research" is the formulation of the released
code of each method, written anew from its description: float one-hots, convolutions, taped autograd.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal import losses

IMAGES, CLASSES, SIDE = 16, 4, 224
LIMIT = 1.5
LIMITED = ("svls", "mbls", "nacl", "crac")
Loss = Callable[[Tensor, Tensor], Tensor]


def scene(device: str) -> tuple[Tensor, Tensor]:
    """Random logits that want a gradient, and blocky labels; images come in pairs of equal labels, for ``bwcr``."""
    random = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(IMAGES, CLASSES, SIDE, SIDE, generator=random)
    coarse = torch.randint(0, CLASSES, (IMAGES // 2, 1, SIDE // 16, SIDE // 16), generator=random).float()
    labels = F.interpolate(coarse, size=(SIDE, SIDE))[:, 0].long().repeat(2, 1, 1)
    return logits.to(device).requires_grad_(), labels.to(device)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=255)


def proportions(labels: Tensor, kernel: Tensor) -> Tensor:
    hot = F.one_hot(labels, CLASSES).permute(0, 3, 1, 2).contiguous().float()
    weight = kernel.expand(CLASSES, 1, 3, 3).contiguous()
    return F.conv2d(F.pad(hot, (1, 1, 1, 1), mode="replicate"), weight, groups=CLASSES)


def research_nacl(logits: Tensor, labels: Tensor) -> Tensor:
    tau = proportions(labels, torch.full((3, 3), 1 / 9, device=logits.device))
    return cross_entropy(logits, labels) + 0.1 * (tau - logits).abs().mean()


def research_svls(logits: Tensor, labels: Tensor) -> Tensor:
    steps = torch.arange(-1, 2, device=logits.device) ** 2
    kernel = torch.exp(-(steps[:, None] + steps) / 8.0)
    kernel[1, 1] = 0
    kernel[1, 1] = kernel.sum()
    targets = proportions(labels, kernel / kernel.sum())
    return (-targets * F.log_softmax(logits, 1)).sum(1).mean()


def research_mbls(logits: Tensor, labels: Tensor) -> Tensor:
    gap = logits.max(1, keepdim=True).values.expand_as(logits) - logits
    return cross_entropy(logits, labels) + 0.1 * F.relu(gap - 10).mean()


def research_crac(logits: Tensor, labels: Tensor) -> Tensor:
    patches = F.unfold(F.pad(labels[:, None].float(), (1, 1, 1, 1), mode="replicate"), 3)
    outer = (patches.amax(1) != patches.amin(1)).view_as(labels)
    multipliers = torch.full((2, CLASSES), 1e-6, device=logits.device)
    rho = torch.full((2, CLASSES), 0.1, device=logits.device)
    h = (proportions(labels, torch.full((3, 3), 1 / 9, device=logits.device)) - logits).abs()
    total = cross_entropy(logits, labels)
    for region, where in enumerate((~outer, outer)):
        here = h.permute(0, 2, 3, 1)[where]
        x = multipliers[region] + rho[region] * here
        total = total + ((x**2 - multipliers[region] ** 2) / (2 * rho[region])).sum() / h.numel()
    return total


def contenders() -> dict[str, Loss]:
    found: dict[str, Loss] = {"torch cross-entropy": cross_entropy}
    for name, cls in losses.LOSSES.items():
        found[name] = cls(CLASSES) if name == "crac" else cls()  # type: ignore[call-arg]
    found["ml1-ace, soft"] = losses.ML1ACE(bins="soft")
    found |= {
        "research svls": research_svls,
        "research mbls": research_mbls,
        "research nacl": research_nacl,
        "research crac": research_crac,
    }
    try:
        from monai.losses import NACLLoss
    except ImportError:
        return found
    return found | {"monai nacl": NACLLoss(CLASSES, 2)}


def step(loss: Loss, logits: Tensor, labels: Tensor) -> None:
    logits.grad = None
    loss(logits, labels).backward()
    if logits.is_cuda:
        torch.cuda.synchronize()


def resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def print_memory(name: str) -> None:
    """Extra MB at the peak of one step; runs in a process of its own."""
    warnings.simplefilter("ignore")
    logits, labels = scene("cpu")
    loss = contenders()[name]
    pair = logits[:: IMAGES // 2].detach().contiguous().requires_grad_()
    step(loss, pair, labels[:: IMAGES // 2])  # loads what the loss needs, compiled loops too
    Path("/proc/self/clear_refs").write_text("5")  # start a new peak
    before = resident("VmRSS")
    step(loss, logits, labels)
    print(json.dumps(resident("VmHWM") - before))


def memory(name: str, device: str, threads: int) -> float:
    if device == "cuda":
        logits, labels = scene(device)
        step(contenders()[name], logits, labels)
        logits.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(contenders()[name], logits, labels)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    command = [sys.executable, __file__, "--memory", name, "--threads", str(threads)]
    return float(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def times(device: str, rounds: int) -> dict[str, float]:
    logits, labels = scene(device)
    best = dict.fromkeys(contenders(), float("inf"))
    for _ in range(rounds):
        for name, loss in contenders().items():
            slow = best[name] > 0.05  # enough rounds for the fast ones, not hours for the slow ones
            for _ in range(1 if slow else 4):
                start = time.perf_counter()
                step(loss, logits, labels)
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory:
        print_memory(options.memory)
        return
    warnings.simplefilter("ignore")
    names = ("segcal", "torch", "monai", "numpy")
    installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names if name in installed]
    print(", ".join([*versions, f"Python {platform.python_version()}", options.device]), end=", ")
    print(f"{torch.get_num_threads()} threads")
    print(f"forward and backward, {IMAGES} x {CLASSES} x {SIDE} x {SIDE}; best of {options.rounds} rounds\n")
    seconds = times(options.device, options.rounds)
    extra = {name: memory(name, options.device, options.threads) for name in seconds}
    one, unit = seconds["torch cross-entropy"], extra["torch cross-entropy"]
    print(f"{'':22s} {'ms':>8s} {'x ce':>6s} {'MB':>8s} {'x ce':>6s}")
    for name in seconds:
        verdict = ""
        if name in LIMITED:
            peers = [peer for peer in (f"research {name}", f"monai {name}") if peer in seconds]
            kept = seconds[name] <= LIMIT * one and extra[name] <= LIMIT * unit
            faster = all(seconds[name] < seconds[peer] for peer in peers)
            verdict = f"  limit {LIMIT}: {'kept' if kept else 'MISSED'}; faster than {', '.join(peers)}: {faster}"
        print(
            f"{name:22s} {seconds[name] * 1e3:8.2f} {seconds[name] / one:6.2f} "
            f"{extra[name]:8.1f} {extra[name] / unit:6.2f}{verdict}"
        )


if __name__ == "__main__":
    main()
