"""Steps of training on a CUDA device, recorded once and then repeated.

A step of a small network is a hundred kernels of some microseconds, which take longer to launch than to run. A CUDA
graph launches all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

Batch = TypeVar("Batch")

# Batches of a shape before it is recorded, in which libraries choose their kernels and the optimiser makes its state.
_FIRST = 2
# Shapes that are recorded, at most: each keeps the memory of its step.
_SHAPES = 4


class _Graph(NamedTuple):
    """A recorded step, where it reads its batch, and where it leaves its result."""

    graph: Any
    inputs: list[Tensor]
    output: Tensor


class RecordedStep(Generic[Batch]):
    """A step that gives a tensor for a batch (a tensor, or tuples of them), and does not wait for the device.

    What the step reads and writes beside the batch must stay where it is. Call it within ``recordable``.
    """

    def __init__(self, step: Callable[[Batch], Tensor]) -> None:
        self._step = step
        self._seen: dict[Any, int] = {}
        self._graphs: dict[Any, _Graph] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """The step's result for a batch."""
        (leaves, form), shape = tree_flatten(batch), _shape(batch)
        if shape not in self._graphs:
            self._seen[shape] = self._seen.get(shape, 0) + 1
            if self._seen[shape] <= _FIRST or len(self._graphs) == _SHAPES:
                return self._step(batch)
            own = [None if leaf is None else leaf.clone() for leaf in leaves]
            graph = torch.cuda.CUDAGraph()
            # other threads, which read ahead, may go on meanwhile
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                output = self._step(tree_unflatten(own, form))
            self._graphs[shape] = _Graph(graph, [leaf for leaf in own if leaf is not None], output)
        recorded = self._graphs[shape]
        for leaf, new in zip(recorded.inputs, (leaf for leaf in leaves if leaf is not None), strict=True):
            leaf.copy_(new)
        recorded.graph.replay()
        return recorded.output.clone()


def _shape(batch: Any) -> Any:
    """What a recorded step must find again: tuples of shapes and types."""
    if isinstance(batch, tuple):
        return tuple(map(_shape, batch))
    return None if batch is None else (batch.shape, batch.dtype)


@contextmanager
def recordable(device: torch.device) -> Iterator[None]:
    """Work on a stream of its own, as the default one cannot be recorded; nothing on the CPU."""
    if device.type != "cuda":
        yield
        return
    before, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)
