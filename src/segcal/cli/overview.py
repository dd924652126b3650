"""What ``segcal --help`` shows: the names of the commands, without what they import."""

from __future__ import annotations

import typer

import segcal

# What ``segcal --help`` says of each command: the first line of its docstring.
SUMMARIES = {
    "check": "Validate a dataset and show what it holds.",
    "plan": "Say what a study will cost before it starts: time, memory and disk of every command.",
    "evaluate": "Measure calibration and segmentation: metrics x regions, per image and pooled, with 95% intervals.",
    "fit": "Fit one calibrator, and compare metrics before and after on held-out cases.",
    "apply": "Write calibrated probabilities in the format and geometry of the input. Needs no labels.",
    "export": "Write a calibrator as an ONNX graph, alone or behind your model.",
    "compare": "Compare calibrators on your data, and recommend one to deploy.",
    "show": "Show what is in a calibrator: its method, its map, and how the fit went.",
    "pack": "Convert any dataset to the fast layout: one uncompressed, memory-mapped array per case.",
    "scenes": "Write synthetic scenes as a dataset: images, labels, overconfident logits, and the true posterior.",
    "demo": "Run segcal on synthetic scenes: write, check and evaluate them, and compare ten calibrators.",
    "train": "Train a network with any of segcal's losses.",
    "convert": "Unpack an image dataset for training.",
    "doctor": "Show what segcal finds on this machine: versions, processors, compiled kernels, optional packages.",
}
# Groups of commands, likewise.
GROUPS = {
    "nnunet": "The commands fit, apply and evaluate on nnU-Net's own folders; trainers with segcal's losses.",
}


def new_app() -> typer.Typer:
    """The command line without commands."""
    app = typer.Typer(
        name="segcal",
        help="""Make the confidence of segmentation networks true.

        Start with 'segcal demo', or with 'segcal check DATA' on your own predictions.""",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="rich",
    )

    @app.callback()
    def options(
        version: bool = typer.Option(False, "--version", help="Show the version.", callback=_show, is_eager=True),
    ) -> None:
        pass

    return app


def _show(version: bool) -> None:
    if version:
        print(f"segcal {segcal.__version__}")
        raise typer.Exit
