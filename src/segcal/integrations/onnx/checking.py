"""Whether onnxruntime gives what PyTorch gives: on random logits, ties, impossible classes and huge values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.errors import OutputError
from segcal.integrations.onnx.graph import Deployed

#: Largest difference of a probability, beyond what rounding the logits explains.
TOLERANCE = 1e-5
# Logits are changed by this share: rounding moves a voxel as far, and so across the step of a map that has steps.
_ROUNDING = 1e-6
# Batch and spatial sizes by the number of axes; none is the traced one, and some are smaller than any neighbourhood.
_SIZES: dict[int, tuple[tuple[int, tuple[int, ...]], ...]] = {
    0: ((1, ()), (500, ())),
    2: ((1, (1, 2)), (3, (21, 34))),
    3: ((1, (1, 1, 2)), (2, (4, 9, 17))),
}


def session(content: bytes) -> Any:
    """An onnxruntime session of a model, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors alone
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def check(content: bytes, deployed: Deployed, dims: int) -> float:
    """The largest difference of a probability; raises if it is too large, or if a decision that is kept changes."""
    runtime, worst = session(content), 0.0
    for inputs in _inputs(deployed, dims):
        named = {name: tensor.numpy() for name, tensor in zip(deployed.inputs, inputs, strict=True)}
        found = torch.from_numpy(runtime.run(None, named)[0])
        worst = max(worst, compare(deployed, inputs, found))
    return worst


def check_merged(content: bytes, model: bytes, logits: Sequence[str], deployed: Deployed) -> bool:
    """Raise unless a merged model gives what PyTorch makes of the logits of the model alone.

    Returns False if the model cannot be run on random numbers of the sizes that it declares (64 where it leaves them
    open, 1 for the batch): then only the calibrator's own graph is checked.
    """
    alone, whole = session(model), session(content)
    random = np.random.default_rng(0)
    given: dict[str, NDArray[np.float32]] = {}
    for own in whole.get_inputs():
        shape = [n if isinstance(n, int) else 64 if axis else 1 for axis, n in enumerate(own.shape)]
        if own.type != "tensor(float)" or own.name not in {one.name for one in alone.get_inputs()}:
            return False
        given[own.name] = random.standard_normal(shape, np.float32)
    try:
        found = alone.run(list(logits), given)
    except Exception:  # onnxruntime's errors have no common class; the model wants other sizes
        return False
    calibrated = whole.run([deployed.output], given)[0]
    compare(deployed, [torch.from_numpy(z) for z in found], torch.from_numpy(calibrated))
    return True


def compare(deployed: Deployed, inputs: Sequence[Tensor], found: Tensor) -> float:
    """``check`` for what a runtime found for these inputs."""
    with torch.no_grad():
        expected = deployed(*inputs)
        nearby = [deployed(*_scaled(deployed, inputs, scale)) for scale in (1 - _ROUNDING, 1 + _ROUNDING)]
        exact = deployed(*(own.double() for own in inputs))
    around = torch.stack([expected, *nearby])
    logarithms = deployed.returns == "log-probs"
    if found.shape != expected.shape or not torch.equal(found.isneginf(), expected.isneginf()):
        raise _differs(f"shape {tuple(found.shape)} or impossible classes differ from those of PyTorch")
    p, around = (found.exp(), around.exp()) if logarithms else (found, around)
    # A steep map turns rounding into more, in onnxruntime as in PyTorch.
    lost = (around[0] - (exact.exp() if logarithms else exact)).abs().max().float()
    beyond = torch.maximum(around.amin(0) - p, p - around.amax(0)) - lost
    difference = float(beyond.nan_to_num(nan=torch.inf).max())
    if difference > TOLERANCE:
        raise _differs(f"a probability differs by {difference:.2g}", f"at most {TOLERANCE:g}")
    if deployed.calibrator.preserves and not deployed.members:
        changed = int((_decisions(deployed, found) != _deployed_decisions(deployed, inputs[0])).sum())
        if changed:
            raise _differs(f"{changed} labels change", "none, as the calibrator keeps them")
    return max(0.0, difference)


def _differs(problem: str, expected: str = "those of PyTorch") -> OutputError:
    return OutputError(
        f"onnxruntime and PyTorch disagree: {problem}",
        where="the exported graph",
        expected=expected,
        fix="nothing was written; try other versions of torch, onnxscript and onnxruntime, and please report this",
    )


def _scaled(deployed: Deployed, inputs: Sequence[Tensor], scale: float) -> list[Tensor]:
    logits = [z * scale for z in inputs[: deployed.members or 1]]
    return [*logits, *inputs[len(logits) :]]


def _decisions(deployed: Deployed, found: Tensor) -> Tensor:
    """Labels ``(N, *spatial)``, or of multi-label data whether each channel is present ``(N, K, *spatial)``."""
    if not deployed.multilabel:
        return found.argmax(1)
    return found > 0.5 if deployed.returns == "probs" else found.argmax(2) == 1


def _deployed_decisions(deployed: Deployed, logits: Tensor) -> Tensor:
    """Those of the network."""
    return logits > 0 if deployed.multilabel else logits.argmax(1)


def _inputs(deployed: Deployed, dims: int) -> Iterator[list[Tensor]]:
    for seed, (batch, spatial) in enumerate(_SIZES[dims]):
        for change in (_as_is, _ties, _impossible, _huge):
            inputs = deployed.example(batch, spatial, seed)
            for index in range(deployed.members or 1):
                inputs[index] = change(inputs[index])
            yield inputs


def _as_is(z: Tensor) -> Tensor:
    return z


def _ties(z: Tensor) -> Tensor:
    return (z / 4).round()


def _impossible(z: Tensor) -> Tensor:
    return torch.cat((torch.full_like(z[:, :1], -torch.inf), z[:, 1:]), 1)


def _huge(z: Tensor) -> Tensor:
    return 2500 * z
