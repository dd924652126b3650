"""Constant memory, measured in a process of its own on files that take no space on disk."""

import subprocess
import sys

import numpy as np
import pytest

WALK = """
import re, sys, segcal
from pathlib import Path
def peak():  # VmHWM starts anew with the process, unlike ru_maxrss, which remembers the parent's
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
cases = segcal.open_cases(sys.argv[1])
before, voxels = peak(), 0
for case in cases:
    for chunk in case.chunks():
        voxels += chunk.labels.numel()
print(voxels, peak() - before)
"""


@pytest.mark.parametrize("members", [1, 2])
def test_walking_through_a_huge_case_takes_little_memory(tmp_path, members):
    shape = (19, 24, 512, 512)  # 0.5 GB as float32
    (tmp_path / "labels").mkdir()
    np.lib.format.open_memmap(tmp_path / "labels" / "a.npy", "w+", np.uint8, shape[1:])
    for member in range(members):
        folder = tmp_path / "logits" / (f"m{member}" if members > 1 else "")
        folder.mkdir(parents=True)
        np.lib.format.open_memmap(folder / "a.npy", "w+", np.float16, shape)
    result = subprocess.run([sys.executable, "-c", WALK, tmp_path], capture_output=True, text=True, check=True)
    voxels, grown = result.stdout.split()
    assert int(voxels) == 24 * 512 * 512
    assert float(grown) < 400
