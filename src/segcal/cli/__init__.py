"""The command line: parse, call the library, print."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from segcal.cli.compare import compare_command
from segcal.cli.console import show_error, stoppable
from segcal.cli.data import check_command, pack_command, scenes_command
from segcal.cli.demo import demo_command
from segcal.cli.evaluate import evaluate_command
from segcal.cli.fit import apply_command, fit_command
from segcal.cli.plan import plan_command
from segcal.cli.ranks import in_ranks
from segcal.cli.train import convert_command, train_command
from segcal.errors import SegcalError

app = typer.Typer(
    name="segcal",
    help="""Make the confidence of segmentation networks true.

    Start with 'segcal demo', or with 'segcal check DATA' on your own predictions.""",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "check": check_command,
    "plan": plan_command,
    "evaluate": evaluate_command,
    "fit": fit_command,
    "apply": apply_command,
    "compare": compare_command,
    "pack": pack_command,
    "scenes": scenes_command,
    "demo": demo_command,
    "train": train_command,
    "convert": convert_command,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(stoppable(in_ranks(_name, _command)))


def main() -> None:
    """Run the command line; errors segcal knows become a message and exit code 1."""
    try:
        app()
    except SegcalError as error:
        show_error(error)
        sys.exit(1)
