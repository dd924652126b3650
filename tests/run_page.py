"""Run the Python blocks of a documentation page in order, in one namespace: ``python run_page.py PAGE``."""

import re
import sys
from pathlib import Path

import torch


def declare_torchvision() -> None:
    """Let torchvision be imported where its compiled operators cannot be loaded.

    PyPI has only its CUDA build for Linux, whose import fails beside a CPU build of PyTorch: two operators that it
    describes do not exist. Declaring them is enough, as segmentation networks do not call them.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _kept.append(library)  # the operators go with it


_kept: list[torch.library.Library] = []


def run(page: Path) -> None:
    """Run all blocks; a traceback shows the line of the page."""
    text, names = page.read_text(), {"__name__": "page"}
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        lines = text.count("\n", 0, block.start(1))
        exec(compile("\n" * lines + block[1], str(page), "exec"), names)


if __name__ == "__main__":
    torch.set_num_threads(1)
    declare_torchvision()
    run(Path(sys.argv[1]))
