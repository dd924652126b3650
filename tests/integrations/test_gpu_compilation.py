"""Triton's interpreter, in which the kernels are tested without a GPU, takes what its compiler refuses."""

import os
import subprocess
import sys
from pathlib import Path


def test_every_kernel_compiles_for_an_h200(tmp_path):
    script = Path(__file__).with_name("compile_for_gpu.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-W", "error", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 20
