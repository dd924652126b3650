"""Dependencies point down the list of DESIGN and never back; siblings do not import each other."""

import ast
from pathlib import Path

import pytest

import segcal

SOURCE = Path(segcal.__file__).parent
LAYERS = [
    {"errors"},
    {"checks", "transfer"},
    {"types", "files", "inference", "parallel"},
    {"scores"},
    {"kernels"},
    {"cases"},
    {"statistics", "regions", "solvers"},
    {"fitting", "metrics", "losses", "fusion", "synthetic"},
    {"calibrators"},
    {"evaluation", "models"},
    {"training", "integrations", "plots"},
    {"study"},
    {"report"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def part(path: Path) -> str:
    """The top-level part of segcal that a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("segcal.")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; spell out segcal.…"
            if node.module == "segcal":
                found |= {name.name for name in node.names}
            elif node.module and node.module.startswith("segcal."):
                found.add(node.module.split(".")[1])
    return found


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path):
    own = part(path)
    assert own in LEVEL, f"{own} has no place in the layering: add it to LAYERS"
    for other in imported_parts(path) - {own}:
        assert other in LEVEL, f"{path.name} imports segcal.{other}, which has no place in the layering"
        assert LEVEL[other] < LEVEL[own], f"{own} must not import {other}"


def test_a_backward_import_would_be_seen(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("from segcal.cli import app\nfrom segcal import report\nimport segcal.metrics.calibration\n")
    assert imported_parts(bad) == {"cli", "report", "metrics"}


def module(path: Path) -> str:
    """The dotted name of a file."""
    return ".".join(("segcal", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def imported_modules(path: Path) -> set[str]:
    """Modules of segcal that a file imports, anywhere in it: at its top, in a function, for types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{name.name}" for name in node.names} & MODULES
            found |= inner or {node.module}
    return (found & MODULES) - {module(path)}


MODULES = {module(path) for path in FILES}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Nodes that are left when those that depend on none of the others are taken away, again and again."""
    left = dict(graph)
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_no_module_imports_itself_by_way_of_others():
    assert cycle({module(path): imported_modules(path) for path in FILES}) == []


def test_a_cycle_would_be_seen():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
