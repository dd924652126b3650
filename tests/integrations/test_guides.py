"""The guides run as they stand, each in a process of its own, as their reader would run them.

torchvision, and what needs it, may lie in ``.vision`` beside ``src``: where PyTorch is a CPU build, the torchvision of
PyPI breaks whatever tries to import it, such as torchmetrics.
"""

import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = {
    "deploy": ("onnx", "onnxscript", "onnxruntime"),
    "lightning": ("lightning", "torchmetrics"),
    "monai": ("monai", "ignite"),
    "recipes": ("transformers", "torchvision", "segmentation_models_pytorch"),
}


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_runs(guide, tmp_path):
    vision = [str(ROOT / ".vision")] if guide == "recipes" else []
    missing = [name for name in GUIDES[guide] if PathFinder.find_spec(name, [*vision, *sys.path]) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    path = os.pathsep.join([str(ROOT / "src"), *vision])
    page = ROOT / "docs" / f"{guide}.md"
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "run_page.py", page],
        env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
