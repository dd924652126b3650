"""``segcal nnunet``: the commands on nnU-Net's own folders, and trainers with segcal's losses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from rich.markup import escape
from typer import Argument, Option, Typer

from segcal.cli.console import new_table, out, show_table, stoppable
from segcal.cli.evaluate import evaluate_command
from segcal.cli.fit import apply_command, fit_command
from segcal.cli.overview import GROUPS
from segcal.cli.ranks import in_ranks
from segcal.files.remote import as_path
from segcal.integrations.nnunet_trainers import install_trainers, remove_trainers, trainer_names

Results = Annotated[
    list[Path],
    Argument(
        parser=as_path,
        metavar="RESULTS",
        help="The folder of a trained model (nnUNet_results/DATASET/TRAINER__PLANS__CONFIGURATION, validated with "
        "--npz), or of predictions (nnUNetv2_predict --save_probabilities). Several are an ensemble.",
    ),
]

app = Typer(help=GROUPS["nnunet"], no_args_is_help=True)


def _on_results(command: Callable[..., None], help: str) -> Callable[..., None]:
    """A command of segcal on nnU-Net's folders: it takes several, and knows their layout. Its options are the same."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [
        own.replace(annotation=Results) if own.name == "data" else own
        for own in signature.parameters.values()
        if own.name != "layout"
    ]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        command(layout="nnunet", **arguments)

    del run.__wrapped__  # The parameters are these:
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {own.name: own.annotation for own in parameters}
    run.__doc__ = help
    return run


fit_results = _on_results(
    fit_command,
    """Fit one calibrator to a trained model, and compare metrics before and after on held-out cases.

    Of a trained model, every training case is read from the fold that held it out. Its labels are found if nnUNet_raw
    or nnUNet_preprocessed is set; those of predictions are in --labels.

    Example: segcal nnunet fit nnUNetTrainer__nnUNetPlans__2d -o cal.safetensors
    """,
)
apply_results = _on_results(
    apply_command,
    """Write calibrated probabilities that nnU-Net's own tools read. Needs no labels.

    Writes what nnUNetv2_predict writes: npz files, sidecars and segmentations. nnUNetv2_ensemble takes the folder.

    Example: segcal nnunet apply cal.safetensors predictions/ -o calibrated/ --nifti
    """,
)
evaluate_results = _on_results(
    evaluate_command,
    """Measure the calibration and segmentation of a trained model, or of predictions with --labels.

    Example: segcal nnunet evaluate predictions/ --labels labelsTs/ --calibrator cal.safetensors
    """,
)


def install_trainers_command(
    folder: Annotated[
        Path | None,
        Argument(help="A folder that nnUNet_extTrainer names; by default nnU-Net's own folder of trainers."),
    ] = None,
    remove: Annotated[bool, Option("--remove", help="Remove the trainers again.")] = False,
) -> None:
    """Give nnU-Net a trainer for each of segcal's losses: nnUNetv2_train ... -tr nnUNetTrainer_segcal_NACL.

    Writes one file, segcal_trainers.py; --remove deletes it. If segcal is uninstalled, nnU-Net ignores it.

    Example: segcal nnunet install-trainers
    """
    if remove:
        path = remove_trainers(folder)
        out.print(f"removed [bold]{escape(str(path))}[/]" if path else "no trainers were installed")
        return
    path = install_trainers(folder)
    table = new_table("loss", "trainer", left=("loss", "trainer"))
    for loss, name in trainer_names().items():
        table.add_row(loss, name)
    show_table(table)
    out.print(f"written to [bold]{escape(str(path))}[/]")
    if folder is not None:
        out.print(f"nnU-Net finds them with nnUNet_extTrainer={escape(str(path.parent))}", soft_wrap=True)


for _name, _command in {"fit": fit_results, "apply": apply_results, "evaluate": evaluate_results}.items():
    app.command(_name)(stoppable(in_ranks(_name, _command)))
app.command("install-trainers")(stoppable(in_ranks("install-trainers", install_trainers_command)))
