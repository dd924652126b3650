"""Shell completion: the values of options, and commands whose options are known without importing what they run.

A shell asks for completions at every press of a key, and PyTorch takes seconds to import. So ``completions.json`` has
the options of all commands; ``make completions`` writes it, and a test compares it with the commands.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from segcal.cli.overview import new_app
from segcal.files.atomic import write_text

#: What ``autocompletion`` of an option takes: from what is typed to values with their help.
Complete = Callable[[str], list[tuple[str, str]]]
_FILE = Path(__file__).with_name("completions.json")


def one_of(values: Mapping[str, str]) -> Complete:
    """Completion with one of the values, each with its help.

    Examples:
        >>> one_of({"ts": "Temperature scaling", "trust": "Trust", "vs": "Vector scaling"})("t")
        [('ts', 'Temperature scaling'), ('trust', 'Trust')]
    """
    return lambda incomplete: [(name, text) for name, text in values.items() if name.startswith(incomplete)]


def several(values: Mapping[str, str], alone: Mapping[str, str] | None = None) -> Complete:
    """Completion with comma-separated values, each once, or with one of those that stand ``alone``.

    Examples:
        >>> complete = several({"nll": "NLL", "ece": "ECE"}, alone={"all": "every metric"})
        >>> complete("a"), complete("nll,"), complete("all,")
        ([('all', 'every metric')], [('nll,ece', 'ECE')], [])
    """
    whole = alone or {}

    def complete(incomplete: str) -> list[tuple[str, str]]:
        given, comma, last = incomplete.rpartition(",")
        if not comma:
            return one_of({**whole, **values})(last)
        names = given.split(",")
        left = {} if set(names) & set(whole) else {name: text for name, text in values.items() if name not in names}
        return [(f"{given},{name}", text) for name, text in one_of(left)(last)]

    return complete


def write(app: typer.Typer) -> None:
    """Write ``completions.json`` from the commands."""
    write_text(_FILE, json.dumps(described(app), indent=1) + "\n")


def described(app: typer.Typer) -> dict[str, Any]:
    """The commands of an app as ``completions.json`` has them."""
    group = typer.main.get_command(app)
    found: dict[str, Any] = _described(group, "segcal")["commands"]
    return found


def _described(command: Any, name: str) -> dict[str, Any]:
    if hasattr(command, "commands"):
        own = {name: _described(inner, name) for name, inner in command.commands.items()}
        return {"help": _first_line(command), "commands": own}
    with command.make_context(name, [], resilient_parsing=True) as context:
        options = [_option(own, context) for own in command.params if own.param_type_name == "option"]
    return {"help": _first_line(command), "options": options}


def _option(option: Any, context: Any) -> dict[str, Any]:
    items = [item for item in option.shell_complete(context, "") if item.type == "plain"]
    return {
        "names": "/".join(filter(None, (",".join(option.opts), ",".join(option.secondary_opts)))),
        "flag": option.is_flag,
        "help": option.help,
        "values": {item.value: item.help or "" for item in items},
        "listed": [item.value for item in items if option.shell_complete(context, f"{item.value},")],
    }


def _first_line(command: Any) -> str:
    return str(command.help or "").partition("\n")[0]


def completing_app() -> typer.Typer:
    """The command line as a shell's completion sees it: commands that have options and do nothing."""
    app = new_app()
    _add(app, json.loads(_FILE.read_text()))
    return app


def _add(app: typer.Typer, commands: Mapping[str, Any]) -> None:
    for name, about in commands.items():
        if "commands" in about:
            inner = typer.Typer(help=about["help"])
            _add(inner, about["commands"])
            app.add_typer(inner, name=name)
        else:
            app.command(name, help=about["help"])(_stub(about["options"]))


def _stub(options: list[dict[str, Any]]) -> Callable[..., None]:
    """A function that does nothing, with these options."""

    def stub(**given: Any) -> None:
        pass

    parameters = []
    for number, own in enumerate(options):
        on, _, off = own["names"].partition("/")
        names = [f"{on}/{off}"] if off else on.split(",")
        listed = {name: text for name, text in own["values"].items() if name in own["listed"]}
        alone = {name: text for name, text in own["values"].items() if name not in own["listed"]}
        complete = several(listed, alone) if own["values"] else None
        info = typer.Option(None, *names, help=own["help"], autocompletion=complete)
        kind = bool if own["flag"] else str
        place = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(f"option{number}", place, default=info, annotation=kind))
    stub.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    stub.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return stub
