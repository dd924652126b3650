"""What an import brings along: PyTorch takes seconds, and users wait for what they asked for only."""

import json
import subprocess
import sys

# What takes long to import, or is optional.
HEAVY = {
    "torch", "numpy", "scipy", "numba", "triton", "pandas", "matplotlib", "PIL", "tifffile", "safetensors", "nibabel",
    "zarr", "h5py", "fsspec", "s3fs", "torchmetrics", "monai", "lightning", "optuna", "onnx", "rich", "typer",
}  # fmt: skip


def brought_along(script, after=""):
    """The heavy packages that a script imports and ``after`` alone does not."""
    code = f"import json, sys\n{after}\nbefore = set(sys.modules)\n{script}\n"
    code += "print('\\n' + json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return HEAVY & set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_segcal_imports_nothing_heavy():
    assert brought_along("import segcal; dir(segcal)") == set()


def test_all_public_names_cost_little_more_than_torch():
    every = "import segcal\nfor name in segcal.__all__: getattr(segcal, name)"
    assert brought_along(every, after="import torch, scipy.optimize") <= {
        "PIL",
        "tifffile",
        "scipy",
        "safetensors",
        "numpy",
    }


def test_help_version_and_completion_import_no_library():
    ask = "from segcal.cli import main\ntry: main()\nexcept SystemExit: pass"
    for arguments in ('"--help"', '"--version"', '"--show-completion"'):
        found = brought_along(f"sys.argv = ['segcal', {arguments}]\n{ask}")
        assert found <= {"rich", "typer"}, arguments
