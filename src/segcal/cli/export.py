"""``segcal export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.markup import escape
from typer import Argument, Option

from segcal.calibrators import load
from segcal.cli.console import out, show_notes, waiting
from segcal.integrations.onnx import Exported, Returns, export


def export_command(
    calibrator: Annotated[Path, Argument(metavar="CALIBRATOR", help="A file of segcal fit or compare.")],
    output: Annotated[Path, Option("--output", "-o", help="File for the graph, such as cal.onnx.")],
    dims: Annotated[
        int | None,
        Option(metavar="2|3|0", help="Spatial axes; 0 for logits (N, C). By default those of the model, or 2."),
    ] = None,
    returns: Annotated[Returns, Option(help="What the graph returns.")] = "log-probs",
    model: Annotated[Path | None, Option(help="An ONNX file of the network: the calibrator is put behind it.")] = None,
    logits: Annotated[
        list[str] | None, Option(help="The model's output to calibrate, if it has several.", metavar="NAME")
    ] = None,
) -> None:
    """Write a calibrator as an ONNX graph, alone or behind your model.

    Example: segcal export cal.safetensors --model net.onnx -o calibrated.onnx
    """
    fitted = load(calibrator)
    with waiting("exporting"):
        written = export(fitted, output, dims=dims, returns=returns, model=model, logits=logits or ())
    given, returned = ", ".join(written.inputs), ", ".join(written.outputs)
    out.print(escape(f"{fitted.id}: from {given} to {returned}, opset {written.opset}"))
    show_notes(_checks(written, fitted.preserves is not None, model is not None))
    out.print(f"written to [bold]{escape(str(output))}[/]")


def _checks(written: Exported, keeps: bool, merged: bool) -> list[str]:
    """What was checked, in words."""
    if written.difference is None:
        return ["not checked, as onnxruntime is not installed: pip install onnxruntime, and export again"]
    labels = ", and every label" if keeps else ""
    said = [f"checked with onnxruntime: the probabilities of PyTorch to {max(written.difference, 1e-9):.0e}{labels}"]
    if merged and not written.model_checked:
        said.append("the model itself was not run: random numbers of the sizes that it declares do not suit it")
    return said
