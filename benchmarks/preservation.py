"""Labels changed by calibrators that promise to change none: ``python benchmarks/preservation.py [--voxels 1e9]``.

Fitted maps see random logits, a third of whose classes tie with the winner exactly or are one ulp below it, in
float32, float16 and bfloat16, chunk by chunk. The count of voxels whose argmax differs is printed; so is fiducio's,
where it is installed, on a small part.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import time
from collections.abc import Sequence

import torch
from torch import Tensor

import segcal
from segcal.calibrators import CALIBRATORS, Calibrator, TrustCalibration

METHODS = ("ts", "ets", "cms-ap", "cms-op", "trust")
TYPES = (torch.float32, torch.float16, torch.bfloat16)
CLASSES, SIZE = 5, (512, 1024)
CHUNK = SIZE[0] * SIZE[1]


def hard_logits(generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """``(1, C, *SIZE)`` with exact ties and gaps of one ulp."""
    z = (4 * torch.randn(1, CLASSES, *SIZE, generator=generator)).to(dtype)
    top = z.amax(1, keepdim=True)
    below = torch.nextafter(top, torch.full_like(top, -torch.inf))
    choice = torch.rand(z.shape, generator=generator)
    return torch.where(choice < 0.17, top, torch.where(choice < 0.33, below, z))


def fitted(method: str) -> Calibrator:
    plant = [segcal.synthetic.ClassConditional([1.2, 2.0, 3.0, 1.5, 2.5])]
    scenes = segcal.synthetic.scenes(9 if method == "trust" else 6, size=(128, 160), num_classes=CLASSES, plant=plant)
    calibrator = CALIBRATORS[method]().fit(scenes)
    if isinstance(calibrator, TrustCalibration):  # random logits are strange: the guard would leave them to ts
        calibrator.reach.fill_(1e6)
        calibrator.share.fill_(0.5)
    return calibrator


def count_flips(methods: Sequence[str], voxels: int) -> int:
    calibrators = {method: fitted(method) for method in methods}
    flips = dict.fromkeys(methods, 0)
    generator, seen, started = torch.Generator().manual_seed(0), 0, time.perf_counter()
    while seen < voxels:
        z = hard_logits(generator, TYPES[seen // CHUNK % len(TYPES)])
        winner = z.argmax(1)
        for method, calibrator in calibrators.items():
            flips[method] += int((calibrator(z).argmax(1) != winner).sum())
        seen += CHUNK
    print(f"{seen:,} voxels of {CLASSES} classes through each map, {time.perf_counter() - started:.0f} s")
    for method, count in flips.items():
        print(f"  {method:8} {count} labels changed")
    return sum(flips.values())


def count_peers() -> None:
    try:
        import fiducio
    except ImportError:
        print("fiducio is not installed")
        return
    cases = segcal.synthetic.scenes(6, size=(128, 160), num_classes=CLASSES)
    logits, labels = torch.cat([case.logits for case in cases]), torch.cat([case.labels for case in cases])
    print(f"fiducio {importlib.metadata.version('fiducio')}, {CHUNK:,} voxels for each type")
    for name in ("TS", "CMSAP", "CMSOP"):
        calibrator = getattr(fiducio, name)()
        calibrator.fit(logits, labels)
        shares = []
        for dtype in TYPES:
            z = hard_logits(torch.Generator().manual_seed(1), dtype)
            changed = calibrator.transform(z.float()).to(dtype).argmax(1) != z.argmax(1)
            shares.append(f"{100 * float(changed.float().mean()):.2f}% in {str(dtype).removeprefix('torch.')}")
        print(f"  {name:8} {', '.join(shares)} of the labels changed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--voxels", type=float, default=1e8)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    arguments = parser.parse_args()
    print(f"segcal {segcal.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    flips = count_flips(arguments.methods, int(arguments.voxels))
    count_peers()
    raise SystemExit(f"{flips} labels changed" if flips else 0)


if __name__ == "__main__":
    main()
