"""The command line: parse, call the library, print.

Only ``commands`` imports the library, and with it PyTorch: ``segcal --help`` and a shell's completion need not wait
for that.
"""

from __future__ import annotations

import os
import sys

from segcal.cli.overview import GROUPS, SUMMARIES, new_app


def main() -> None:
    """Run the command line."""
    if "_SEGCAL_COMPLETE" in os.environ:
        from segcal.cli.completion import completing_app

        completing_app()(prog_name="segcal")
    if any(argument in SUMMARIES or argument in GROUPS for argument in sys.argv[1:]):
        from segcal.cli.commands import run

        run()
        return
    overview = new_app()
    for name, summary in (SUMMARIES | GROUPS).items():
        overview.command(name, help=summary)(lambda: None)
    overview(prog_name="segcal")
