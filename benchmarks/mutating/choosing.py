"""Which tests a mutant must stand up to."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from mutating.covering import ROOT, SOURCE, TestMap
from mutating.mutants import Mutant

# Functions, or classes, with what their headers declare.
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def tests_of(mutant: Mutant, known: TestMap) -> list[str]:
    """Those that run its statement; of what is run on import, also those called after its module or that use it."""
    found = known.running([(mutant.file, mutant.first, mutant.last)])
    if imported(mutant, known):
        last = len((ROOT / mutant.file).read_text(encoding="utf-8").splitlines())
        named = known.speaking_of(set(), Path(mutant.file).stem)
        found = named + found + known.running(_uses(mutant)) + known.speaking_of(_names(mutant), "")
        found += known.running([(mutant.file, 1, last)])
    return list(dict.fromkeys(found))


def imported(mutant: Mutant, known: TestMap) -> bool:
    """Whether its statement is run while modules are imported."""
    return any((mutant.file, line) in known.imported for line in range(mutant.first, mutant.last + 1))


def _uses(mutant: Mutant) -> list[tuple[str, int, int]]:
    """The body of the function that is defined, or the lines with the names that are assigned."""
    statement = _statement(mutant)
    if isinstance(statement, _DEFINITIONS):
        return [(mutant.file, statement.body[0].lineno, _last(statement))]
    return [use for name in sorted(_names(mutant)) for use in _lines().get(name, ())]


def _names(mutant: Mutant) -> set[str]:
    """What the statement defines or assigns."""
    statement = _statement(mutant)
    if isinstance(statement, _DEFINITIONS):
        return {statement.name}
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        parts = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        return {node.id for node in parts if isinstance(node.ctx, ast.Store)}
    return set()


def _statement(mutant: Mutant) -> ast.stmt | None:
    """The smallest statement around the mutant."""
    tree = ast.parse((ROOT / mutant.file).read_text(encoding="utf-8"))
    inside = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _around(node, mutant.line)]
    return min(inside, key=lambda node: _last(node) - node.lineno, default=None)


def _around(node: ast.stmt, line: int) -> bool:
    first = min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", ()))])
    return first <= line <= _last(node)


def _last(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


@cache
def _lines() -> dict[str, list[tuple[str, int, int]]]:
    """Where each name occurs in the source."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
            if name is not None:
                found.setdefault(name, []).append((str(path.relative_to(ROOT)), node.lineno, node.lineno))
    return found
