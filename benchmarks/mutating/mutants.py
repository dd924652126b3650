"""Small changes of the source: where cosmic-ray's operators can make them, and a sample of those places."""

from __future__ import annotations

import ast
import copy
import difflib
import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from mutating.covering import ROOT

try:
    import parso
    from cosmic_ray.ast import ast_nodes
    from cosmic_ray.operators.provider import OperatorProvider
except ImportError as error:
    raise SystemExit("mutation testing takes its changes from cosmic-ray: pip install cosmic-ray coverage") from error

# What is mutated, by the names of the table.
MODULES = {
    "metrics": "metrics",
    "calibrators": "calibrators",
    "losses": "losses",
    "scores": "scores.py",
    "statistics": "statistics.py",
    "kernels/reference": "kernels/reference.py",
    "inference": "inference",
    "solvers": "solvers",
}
# An operator is replaced by one of its own kind: others mostly raise a TypeError at once, which is no test of a test.
_KINDS = (
    {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"},
    {"BitOr", "BitAnd", "BitXor"},
    {"LShift", "RShift"},
    {"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"},
    {"Is", "IsNot"},
    {"UAdd", "USub"},
    {"Invert", "Delete"},
    {"USub", "Delete"},
    {"Not", "Delete"},
)
# These only speak to the type checker.
_TYPING = {"overload", "override", "runtime_checkable", "final"}
# No fewer than this of each row of the table, as far as it has as many.
_LEAST = 90


@dataclass(frozen=True)
class Mutant:
    """A change of one place, whose statement has the lines from ``first`` to ``last``."""

    group: str
    file: str
    operator: str
    line: int
    first: int
    last: int
    before: str
    after: str
    code: str

    @property
    def key(self) -> str:
        """Names the change, until the source of the file changes."""
        return f"{self.file} {self.operator} {hashlib.sha256(self.code.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Change:
    """What an operator can do to a node of the tree of a file."""

    group: str
    file: str
    operator: str
    node: Any
    index: int
    line: int
    first: int
    last: int

    def mutant(self) -> Mutant | None:
        """The changed source, or None where it cannot be compiled or means the same."""
        source = _source(self.file)
        part = copy.deepcopy(self.node, {id(self.node.parent): self.node.parent})
        changed = _operators()[self.operator].mutate(part, self.index)
        start, end = (_offset(self.file, place) for place in (self.node.get_start_pos_of_prefix(), self.node.end_pos))
        code = source[:start] + ("" if changed is None else changed.get_code()) + source[end:]
        try:
            tree = ast.parse(code)
            compile(tree, self.file, "exec")
        except SyntaxError:
            return None
        if ast.dump(tree) == _dump(self.file):
            return None
        lines = list(difflib.unified_diff(source.splitlines(), code.splitlines(), n=0))[3:]
        before, after = (" / ".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+")
        place = self.line, self.first, self.last
        return Mutant(self.group, self.file, self.operator, *place, before, after, code)


@cache
def _source(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@cache
def _dump(file: str) -> str:
    return ast.dump(ast.parse(_source(file)))


@cache
def _starts(file: str) -> list[int]:
    return [0, *accumulate(map(len, _source(file).splitlines(keepends=True)))]


def _offset(file: str, place: tuple[int, int]) -> int:
    return _starts(file)[place[0] - 1] + place[1]


def sample(count: int, seed: int, only: list[str]) -> list[Mutant]:
    """Places at random, of each group in proportion to its size but no fewer than the least; one change at each place.

    A larger sample holds a smaller one.
    """
    places = {group: _places(group) for group in MODULES}
    total = sum(map(len, places.values()))
    small = [group for group, found in places.items() if count * len(found) / total < _LEAST]
    rest = sum(len(found) for group, found in places.items() if group not in small)
    chosen: list[Mutant] = []
    for group, found in places.items():
        if group in only:
            random_ = random.Random(f"{seed}/{group}")
            random_.shuffle(found)
            share = math.ceil((count - _LEAST * len(small)) * len(found) / rest)
            wanted = _LEAST if group in small else share
            chosen += _mutants(found, wanted, random_)
    return chosen


def _mutants(places: list[list[Change]], wanted: int, random_: random.Random) -> list[Mutant]:
    found: list[Mutant] = []
    for place in places:
        if len(found) == wanted:
            break
        random_.shuffle(place)
        mutant = next(filter(None, (change.mutant() for change in place)), None)
        if mutant is not None:
            found.append(mutant)
    return found


def _places(group: str) -> list[list[Change]]:
    path = ROOT / "src" / "segcal" / MODULES[group]
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [changes for file in files for changes in _places_of(group, file)]


def _places_of(group: str, path: Path) -> list[list[Change]]:
    file = str(path.relative_to(ROOT))
    source = _source(file)
    tree = ast.parse(source)
    silent = list(_silent(tree, source.splitlines()))
    statements = _statements(tree)
    nodes = list(ast_nodes(parso.parse(source)))
    found: dict[Any, list[Change]] = {}
    for name, operator in _operators().items():
        for node in nodes:
            for index, (start, end) in enumerate(operator.mutation_positions(node)):
                declares = node.type == "operator" and node.parent.type in ("parameters", "lambdef", "dictorsetmaker")
                if declares or any(first <= start and end <= last for first, last in silent):
                    continue
                first, last = statements.get(start[0], (start[0], start[0]))
                change = Change(group, file, name, node, index, start[0], first, last)
                found.setdefault((start, end), []).append(change)
    return [found[place] for place in sorted(found)]


@cache
def _operators() -> dict[str, Any]:
    provider = OperatorProvider()
    return {name: provider[name]() for name in provider if _wanted(name)}


def _wanted(name: str) -> bool:
    if name.startswith("Variable"):  # need the names of variables
        return False
    _, *parts = name.split("_")
    return not parts or any(set(parts) <= known for known in _KINDS)


def _silent(tree: ast.Module, lines: list[str]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Ranges that cannot matter: annotations, ``__all__``, what is only for type checkers, words of errors."""
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts = [node.returns]
        elif isinstance(node, ast.arg):
            parts = [node.annotation]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
            parts += [node] if ast.unparse(node.annotation).endswith("TypeAlias") else []
        elif isinstance(node, ast.Assign):
            parts = [node for target in node.targets if ast.unparse(target) == "__all__"]
        elif isinstance(node, ast.If):
            parts = [node] if ast.unparse(node.test).endswith("TYPE_CHECKING") else []
        elif isinstance(node, ast.Raise):
            parts = [part for part in ast.walk(node) if isinstance(part, ast.JoinedStr)]
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for part in node.decorator_list:
                if ast.unparse(part).split(".")[-1] in _TYPING:
                    yield (part.lineno, 0), (part.lineno + 1, 0)
        for part in parts:
            if part is not None:
                yield _range(part, lines)


def _range(node: Any, lines: list[str]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Lines and columns in characters; those of ast are in bytes."""

    def column(line: int, offset: int) -> int:
        return len(lines[line - 1].encode()[:offset].decode())

    first, last = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return (first[0], column(*first)), (last[0], column(*last))


def _statements(tree: ast.Module) -> dict[int, tuple[int, int]]:
    """The lines of the smallest statement around each line; of a statement with a body, those before its body."""
    found: dict[int, tuple[int, int]] = {}
    for node in ast.walk(tree):  # statements come before those in their bodies
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            body = getattr(node, "body", None)
            decorators = [part.lineno for part in getattr(node, "decorator_list", ())]
            first = min([node.lineno, *decorators])
            last = max(first, body[0].lineno - 1) if body else node.end_lineno
            assert last is not None
            for line in range(first, last + 1):
                found[line] = first, last
    return found
