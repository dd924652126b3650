"""From a calibrator to an ONNX graph: what it takes, what it returns, and how it is traced."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from segcal.calibrators import Calibrator, Ensemble, TrustCalibration
from segcal.files.plain import plain
from segcal.files.versions import SEGCAL
from segcal.integrations.onnx.operators import TRANSLATIONS
from segcal.scores import at_least_float32, pool, presence, probabilities
from segcal.types import Kind

Returns = Literal["log-probs", "probs"]

#: The oldest opset that has all that calibrators need, which is also the one that they are written in.
OPSET = 18
#: Names of the axes behind batch and classes, by their number.
AXES: dict[int, tuple[str, ...]] = {0: (), 2: ("height", "width"), 3: ("depth", "height", "width")}
# Their sizes while tracing: all different, and none 1.
_TRACED = {"depth": 5, "height": 12, "width": 11}


class Deployed(nn.Module):
    """A calibrator between the output of a network and what is deployed.

    Takes logits ``(N, C, *spatial)``; of multi-label data sigmoid logits ``(N, K, *spatial)``; of an ensemble one
    tensor for each member. Returns log-probabilities ``(N, C, *spatial)``, of multi-label data ``(N, K, 2, *spatial)``;
    or probabilities ``(N, C, *spatial)``, of multi-label data that each channel is present ``(N, K, *spatial)``.
    """

    def __init__(self, calibrator: Calibrator, returns: Returns) -> None:
        super().__init__()
        self.calibrator, self.returns = calibrator, returns
        one = calibrator.per_channel[0] if calibrator.channels is not None else calibrator
        self.multilabel, self.image_channels = calibrator.channels is not None, one.image_channels
        #: Members of an ensemble that are pooled; 0 if one tensor comes.
        self.members = 0
        self.space: Kind = "logits"
        if isinstance(one, Ensemble | TrustCalibration):
            self.members = int(one.members)
            self.space = one.space if isinstance(one, Ensemble) else "probs" if one.pooled_probs else "logits"

    @property
    def channels(self) -> int:
        """The size of the second axis of the logits."""
        return len(self.calibrator.per_channel) or cast(int, self.calibrator.num_classes)

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs."""
        logits = [f"logits_{member}" for member in range(self.members)] or ["logits"]
        return [*logits, "image"] if self.image_channels else logits

    @property
    def output(self) -> str:
        """The name of the output."""
        return self.returns.replace("-", "_")

    def forward(self, *inputs: Tensor) -> Tensor:
        """Of what ``inputs`` names."""
        image = inputs[-1] if self.image_channels else None
        logits = inputs[:-1] if self.image_channels else inputs
        if not self.multilabel:
            log_probs = self._calibrated(self.calibrator, logits, image)
            return log_probs if self.returns == "log-probs" else probabilities(log_probs, log_probs.dtype)
        found = []
        for index, own in enumerate(self.calibrator.per_channel):
            sides = [torch.stack((torch.zeros_like(z[:, index]), z[:, index]), 1) for z in logits]
            found.append(self._calibrated(own, sides, image))
        parts = found if self.returns == "log-probs" else [presence(own, own.dtype) for own in found]
        return torch.stack(parts, 1)

    def _calibrated(self, one: Calibrator, logits: Sequence[Tensor], image: Tensor | None) -> Tensor:
        if not self.members:
            return one(logits[0], image)  # type: ignore[no-any-return]
        pooled = pool((at_least_float32(z) for z in logits), self.space)
        return one.of_pooled(pooled, logits) if isinstance(one, TrustCalibration) else one(pooled)

    def example(self, batch: int, spatial: Sequence[int], seed: int = 0) -> list[Tensor]:
        """Random inputs of a size."""
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, self.channels, *spatial)
        logits = [4 * torch.randn(shape, generator=generator) for _ in range(self.members or 1)]
        if not self.image_channels:
            return logits
        return [*logits, torch.randn(batch, self.image_channels, *spatial, generator=generator)]


def traced(deployed: Deployed, dims: int, opset: int) -> Any:
    """The ``ModelProto`` of a deployed calibrator, for any batch and any sizes of so many axes."""
    names = AXES[dims]
    example = deployed.example(2, [_TRACED[name] for name in names])
    deployed(*example)  # what does not suit is an error here, with numbers for sizes
    sizes = {0: "batch", **{2 + axis: name for axis, name in enumerate(names)}}
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            deployed,
            tuple(example),
            dynamo=True,
            verbose=False,
            opset_version=opset,
            input_names=deployed.inputs,
            output_names=[deployed.output],
            dynamic_shapes={"inputs": tuple(sizes for _ in example)},
            custom_translation_table=TRANSLATIONS,
        )
    assert program is not None
    model = program.model_proto
    model.producer_name, model.producer_version, model.doc_string = "segcal", SEGCAL, _words(deployed)
    del model.metadata_props[:]
    for key, text in _about(deployed.calibrator).items():
        model.metadata_props.add(key=f"segcal.{key}", value=text)
    graph = model.graph
    for part in (*graph.node, *graph.input, *graph.output, *graph.value_info):
        del part.metadata_props[:]  # where each came from, with paths of this machine
    return model


def _about(calibrator: Calibrator) -> dict[str, str]:
    """What the file says of the calibrator: texts, or JSON."""
    names, channels, report = calibrator.class_names, calibrator.channel_names, calibrator.fit_report
    about = {"version": SEGCAL, "calibrator": calibrator.id, "title": calibrator.title, "map": calibrator.summary()}
    about["keeps"] = calibrator.preserves or "nothing"
    listed = {"class_names": names, "channel_names": channels, "fit": report and asdict(report)}
    return about | {key: json.dumps(plain(value)) for key, value in listed.items() if value is not None}


def _words(deployed: Deployed) -> str:
    return f"{deployed.calibrator.title}, fitted by segcal: from {', '.join(deployed.inputs)} to {deployed.output}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says about packages that are not needed, and its own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
