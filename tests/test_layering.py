"""Dependencies point down the list of DESIGN and never back; siblings do not import each other."""

import ast
from pathlib import Path

import pytest

import segcal

SOURCE = Path(segcal.__file__).parent
LAYERS = [
    {"errors"},
    {"types", "files", "inference", "threads", "workers"},
    {"results", "folders"},
    {"scores"},
    {"cases", "kernels"},
    {"statistics", "regions", "solvers", "synthetic", "sampling", "distributed", "case_scores"},
    {"metrics", "calibrators", "losses", "fusion", "maps"},
    {"plan", "plots", "check"},
    {"case_measures"},
    {"training", "evaluate", "apply", "tuning", "integrations"},
    {"compare"},
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
