"""Solvers know nothing of calibration: of segcal they import its errors and types, and each other."""

import ast
from pathlib import Path

import pytest

import segcal.solvers

FILES = sorted(Path(segcal.solvers.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_solvers_stand_alone(path):
    tree = ast.walk(ast.parse(path.read_text()))
    modules = {node.module or "" for node in tree if isinstance(node, ast.ImportFrom)}
    ours = {module for module in modules if module.startswith("segcal")}
    assert all(module.startswith(("segcal.errors", "segcal.types", "segcal.solvers")) for module in ours)
