"""Calibrators as ONNX graphs, alone or behind a user's model."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from segcal.calibrators import Calibrator
from segcal.errors import InputError, OutputError, SegcalError, check_name, import_extra
from segcal.files.atomic import atomic_path, check_writable

__all__ = ["Exported", "export"]

Returns = Literal["log-probs", "probs"]
# What one ONNX file can hold.
_LARGEST = 2**31 - 1


class Exported(NamedTuple):
    """What ``export`` wrote.

    Attributes:
        inputs: The names of the inputs.
        outputs: The names of the outputs.
        opset: The version of ONNX's operators.
        difference: The largest difference of a probability between onnxruntime and PyTorch, beyond what rounding the
            logits explains; None if onnxruntime is not installed.
        model_checked: Whether a merged model was run, and gave what PyTorch makes of the model's logits.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opset: int
    difference: float | None
    model_checked: bool = False


def export(
    calibrator: Calibrator,
    path: str | Path,
    *,
    dims: int | None = None,
    returns: Returns = "log-probs",
    model: str | Path | None = None,
    logits: str | Sequence[str] = (),
) -> Exported:
    """Write a fitted calibrator as an ONNX file, for any batch and image size (extra ``onnx``).

    Its input is ``logits (N, C, *spatial)`` float32, or ``logits_0``, ``logits_1``, ... for the members of an ensemble.
    Calibrators that were fitted to images also take ``image (N, channels, *spatial)``. Its output is ``log_probs`` or
    ``probs``, of the same shape. For a calibrator of multi-label data, the logits are the sigmoid logits
    ``(N, K, *spatial)`` of the channels, ``probs (N, K, *spatial)`` says how probable it is that each is present, and
    ``log_probs (N, K, 2, *spatial)`` has absent and present.

    If onnxruntime is installed, it must give what PyTorch gives, or nothing is written: probabilities to 1e-5 (or as
    far as changing the logits in the seventh digit moves them), and exactly the labels of the logits for calibrators
    that keep them, ties included.

    Args:
        calibrator: A fitted calibrator.
        path: The file to write.
        dims: Spatial axes: 2, 3, or 0 for logits ``(N, C)``; by default those of the model, or 2.
        returns: ``"log-probs"`` or ``"probs"``.
        model: An ONNX file of a network. The calibrator is put behind it; its inputs, and outputs other than the
            logits, stay.
        logits: The model's output that is calibrated, if it has several; one for each member of an ensemble.

    Examples:
        >>> import segcal
        >>> calibrator = segcal.calibrators.TemperatureScaling().fit(segcal.synthetic.scenes(4, size=(32, 40)))
        >>> export(calibrator, "cal.onnx").inputs  # doctest: +SKIP
        ('logits',)
    """
    for name in ("onnx", "onnxscript"):
        import_extra(name, "onnx", "exporting to ONNX")
    # These import them.
    from segcal.integrations.onnx.checking import check, check_merged
    from segcal.integrations.onnx.graph import AXES, OPSET, Deployed, traced
    from segcal.integrations.onnx.models import merged, read_model

    check_name("returns", returns, ("log-probs", "probs"))
    if dims is not None and dims not in AXES:
        raise InputError(f"dims is {dims!r}", expected="2 or 3 spatial axes, or 0 for logits (N, C)")
    if calibrator.num_classes is None:
        raise SegcalError("the calibrator has not been fitted", fix="call fit, or segcal.load a fitted one")
    if model is None and logits:
        raise InputError(f"logits is {logits!r}", expected="nothing, as no model came", fix="name a model, too")
    check_writable(path)
    deployed = Deployed(copy.deepcopy(calibrator).cpu(), returns)
    network = None
    if model is not None:
        network = read_model(model, [logits] if isinstance(logits, str) else logits, deployed)
        if dims is not None and network.dims is not None and dims != network.dims:
            raise InputError(f"dims is {dims}", expected=f"{network.dims}, as the logits of the model have")
        dims = network.dims if dims is None else dims
    dims = 2 if dims is None else dims
    graph = traced(deployed, dims, OPSET if network is None else network.opset)
    content, opset = graph.SerializeToString(), _opset(graph)
    there = importlib.util.find_spec("onnxruntime") is not None
    difference, model_checked = check(content, deployed, dims) if there else None, False
    if network is not None:
        graph = merged(network, graph, deployed)
        if graph.ByteSize() > _LARGEST:
            raise OutputError(
                f"the merged model has {graph.ByteSize():,} bytes",
                where=str(path),
                expected="at most 2 GB, which one ONNX file can hold",
                fix="export the calibrator alone, and run it after the model",
            )
        content = graph.SerializeToString()
        if there:
            model_checked = check_merged(content, network.proto.SerializeToString(), network.logits, deployed)
    with atomic_path(Path(path)) as temporary:
        temporary.write_bytes(content)
    names = [tuple(value.name for value in values) for values in (graph.graph.input, graph.graph.output)]
    return Exported(names[0], names[1], opset, difference, model_checked)


def _opset(graph: Any) -> int:
    return next(int(own.version) for own in graph.opset_import if own.domain == "")
