"""All commands, with what they import: PyTorch, and so seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable

from segcal.cli.compare import compare_command
from segcal.cli.console import show_error, stoppable
from segcal.cli.data import check_command, pack_command, scenes_command
from segcal.cli.demo import demo_command
from segcal.cli.evaluate import evaluate_command
from segcal.cli.export import export_command
from segcal.cli.fit import apply_command, fit_command
from segcal.cli.info import doctor_command, show_command
from segcal.cli.nnunet import app as nnunet_app
from segcal.cli.overview import SUMMARIES, new_app
from segcal.cli.plan import plan_command
from segcal.cli.ranks import in_ranks
from segcal.cli.train import convert_command, train_command
from segcal.errors import SegcalError

app = new_app()
_COMMANDS: tuple[Callable[..., None], ...] = (
    check_command,
    plan_command,
    evaluate_command,
    fit_command,
    apply_command,
    export_command,
    compare_command,
    show_command,
    pack_command,
    scenes_command,
    demo_command,
    train_command,
    convert_command,
    doctor_command,
)
for _name, _command in zip(SUMMARIES, _COMMANDS, strict=True):
    app.command(_name)(stoppable(in_ranks(_name, _command)))
app.add_typer(nnunet_app, name="nnunet")


def run() -> None:
    """Run a command; errors segcal knows become a message and exit code 1."""
    try:
        app(prog_name="segcal")
    except SegcalError as error:
        show_error(error)
        sys.exit(1)
