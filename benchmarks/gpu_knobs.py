"""Other constants of the CUDA loops, and what they cost: ``python benchmarks/gpu_knobs.py [--images 50]``.

Milliseconds that the device works in one call, and in brackets the median of whole calls; the data are those of
``gpu.py``. Results must not depend on the constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import segcal
from gpu import CLASSES, begin, on_device, seconds
from segcal.kernels import cuda, cuda_tally

# Voxels of a block, registers, programs; 65536 / 32 / registers warps fit a processor, and at most 32.
_TALLY = {
    True: [(32, 64, 132 * 32), (32, 80, 132 * 25), (32, 128, 132 * 16), (32, None, 132 * 13), (64, 128, 132 * 16)],
    False: [(32, None, 132 * 32), (32, 56, 132 * 32), (64, None, 132 * 22), (64, 64, 132 * 32)],
}
_ALONE = [{"size": size, "warps": warps, "programs": 2**16} for size, warps in ((64, 1), (64, 2), (256, 4), (256, 8))]
_TOGETHER = [
    {"size": 32, "programs": programs, "maxnreg": registers}
    for registers, programs in ((None, 2**16), (80, 2**16), (96, 132 * 21), (112, 2**16))
]


def main() -> None:
    assert __doc__ is not None
    logits, labels, _ = begin(__doc__)

    def show(name: str, call: Callable[[], Any]) -> Any:
        found = call()
        print(f"  {name:70} {on_device(call) * 1e3:7.3f} ({seconds(call, 10) * 1e3:7.3f}) ms", flush=True)
        return found

    for classwise in (True, False):
        print(f"statistics, {'everything' if classwise else 'top label'}: block, registers, programs; copies")

        def update(classwise: bool = classwise) -> segcal.VoxelStatistics:
            return segcal.VoxelStatistics(CLASSES, classwise=classwise).update(logits, labels)

        usual, copies = cuda_tally._FEW[classwise], cuda_tally._COPIES
        expected = show(f"{usual}, {copies}: as it is", update).tensors()
        for knobs, number in [(own, copies) for own in _TALLY[classwise]] + [(usual, own) for own in (16, 128)]:
            cuda_tally._FEW[classwise], cuda_tally._COPIES = knobs, number
            for name, found in show(f"{knobs}, {number}", update).tensors().items():
                np.testing.assert_allclose(found, expected[name], rtol=1e-6, atol=1e-9, err_msg=name)
        cuda_tally._FEW[classwise], cuda_tally._COPIES = usual, copies

    for method, usual, others in (
        ("ts", cuda._ALONE, _ALONE),
        ("dc", cuda._ALONE, _ALONE),
        ("cms-op", cuda._TOGETHER, _TOGETHER),
    ):
        calibrator = segcal.CALIBRATORS[method]().fit(logits[:2], labels[:2])
        print(f"apply of {method}")
        kept = dict(usual)
        expected = show(f"{kept}: as it is", lambda c=calibrator: c(logits))
        for knobs in others:
            usual.update(knobs)
            assert torch.allclose(show(f"{knobs}", lambda c=calibrator: c(logits)), expected, rtol=1e-6, atol=1e-6)
        usual.update(kept)


if __name__ == "__main__":
    main()
