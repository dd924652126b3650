"""A calibrator's graph behind a user's model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from segcal.errors import DataError, check_name, import_extra
from segcal.integrations.onnx.graph import AXES, OPSET, Deployed

# Before the names of a calibrator's graph, which may be those of the model.
_PREFIX = "segcal/"
# ONNX's number of float32.
_FLOAT = 1
# Operations whose results are probabilities.
_PROBABILITIES = ("Softmax", "Sigmoid")


class Model(NamedTuple):
    """A user's model: its content, the names of its logits, and how many spatial axes they have."""

    proto: Any
    logits: tuple[str, ...]
    dims: int | None
    opset: int


def read_model(path: str | Path, logits: Sequence[str], deployed: Deployed) -> Model:
    """Read a model whose outputs of these names go to the calibrator; without names, its only output."""
    onnx, where = import_extra("onnx", "onnx", "merging with a model"), str(path)
    try:
        proto = onnx.load(str(path))
        proto = onnx.shape_inference.infer_shapes(proto)
    except Exception as error:  # protobuf, files that are missing, data beside them
        problem = f"cannot be read ({type(error).__name__}: {error})"
        raise DataError(problem, where=where, expected="an ONNX file") from None
    opset = next((own.version for own in proto.opset_import if own.domain in ("", "ai.onnx")), 0)
    if opset < OPSET:
        raise DataError(
            f"has opset {opset}",
            where=where,
            expected=f"{OPSET} or newer",
            fix=f"export the model with opset_version={OPSET}, or convert it: "
            f"onnx.version_converter.convert_version(model, {OPSET})",
        )
    outputs = {own.name: own for own in proto.graph.output}
    names = _chosen(list(outputs), logits, deployed, where)
    ranks = {_check_logits(outputs[name], proto, deployed, where) for name in names}
    if deployed.output in _all_names(proto.graph):
        raise DataError(
            f"already has a value named '{deployed.output}'",
            where=where,
            expected="another name, as the calibrator's output has it",
            fix="rename it and export the model again",
        )
    return Model(proto, names, next((rank - 2 for rank in ranks if rank is not None), None), opset)


def _chosen(outputs: list[str], asked: Sequence[str], deployed: Deployed, where: str) -> tuple[str, ...]:
    """The names of the outputs that are the logits."""
    wanted = deployed.members or 1
    for name in asked:
        check_name("logits", name, outputs, where=where, error=DataError)
    names = tuple(asked) or tuple(outputs)
    if len(names) != wanted:
        many = f"{wanted}, the members of the ensemble" if wanted > 1 else "one"
        raise DataError(
            f"has the outputs {', '.join(outputs)}" if not asked else f"logits are {', '.join(asked)}",
            where=where,
            expected=f"{many} to calibrate",
            fix="say which by --logits NAME (logits=NAME), once for each",
        )
    return names


def _check_logits(output: Any, proto: Any, deployed: Deployed, where: str) -> int | None:
    """The number of axes of an output, if it is known; raises if it cannot be the logits of the calibrator."""
    name, kind = output.name, output.type.tensor_type
    made_by = next((node.op_type for node in proto.graph.node if name in node.output), None)
    if made_by in _PROBABILITIES:
        raise DataError(
            f"output '{name}' holds probabilities: it comes from {made_by}",
            where=where,
            expected="logits",
            fix=f"export the model without its last {made_by.lower()}",
        )
    if kind.elem_type != _FLOAT:
        raise DataError(f"output '{name}' is not float32", where=where, fix="export the model in float32")
    if not kind.HasField("shape"):
        return None
    sizes = [size.dim_value or None for size in kind.shape.dim]
    if len(sizes) - 2 not in AXES or sizes[1] not in (None, deployed.channels):
        what = "channels" if deployed.multilabel else "classes"
        raise DataError(
            f"output '{name}' has shape ({', '.join(str(size or '?') for size in sizes)})",
            where=where,
            expected=f"(N, {deployed.channels}, *spatial), as the calibrator was fitted to {deployed.channels} {what}",
            fix="check that the calibrator was fitted to this model's logits, or choose another output: --logits NAME",
        )
    return len(sizes)


def _all_names(graph: Any) -> set[str]:
    made = {name for node in graph.node for name in node.output}
    return made | {own.name for own in (*graph.input, *graph.initializer)}


def merged(model: Model, calibrator: Any, deployed: Deployed) -> Any:
    """The model with the calibrator behind it. Its inputs stay, and so do its outputs that are not the logits.

    The image that a calibrator may need is one more input, ``segcal/image``.
    """
    onnx = import_extra("onnx", "onnx", "merging with a model")
    about = list(calibrator.metadata_props)
    del calibrator.graph.value_info[:]
    for value in (*calibrator.graph.input, *calibrator.graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:  # the model may mean another size by this name
                size.dim_param = _PREFIX + size.dim_param
    calibrator.ir_version = model.proto.ir_version
    own = onnx.compose.add_prefix(calibrator, _PREFIX, rename_outputs=False)
    pairs = [(name, _PREFIX + taken) for name, taken in zip(model.logits, deployed.inputs, strict=False)]
    try:
        found = onnx.compose.merge_models(model.proto, own, pairs)
    except ValueError as error:  # versions of operators that differ
        raise DataError(
            f"cannot be put before the calibrator ({error})",
            where="the model",
            expected=f"opset {OPSET}, or a newer one that PyTorch can write",
            fix=f"export the model with opset_version={OPSET}, or run the calibrator after it as a graph of its own",
        ) from None
    del found.metadata_props[:]
    found.metadata_props.extend((*model.proto.metadata_props, *about))
    found.producer_name, found.doc_string = model.proto.producer_name, model.proto.doc_string
    onnx.checker.check_model(found)
    return found
