"""Writes all tables of the recipes to pages of the documentation: ``python reproduce/pages.py``."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reproduce import claims
from reproduce.acdc import table as acdc
from reproduce.camvid import table as camvid
from reproduce.hippocampus import table as hippocampus
from segcal.files.atomic import write_text

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reproduction"
# Of each page: its title, and the module that prints its tables and describes them.
PAGES = {
    "acdc": ("ACDC: NACL and CRaC", acdc),
    "camvid": ("CamVid: LTS, selective scaling, invariance", camvid),
    "hippocampus": ("Hippocampus: calibrators in 3D", hippocampus),
    "claims": ("Claims", claims),
}


def main() -> None:
    """Write all pages."""
    for name, (title, module) in PAGES.items():
        printed = io.StringIO()
        with redirect_stdout(printed):
            module.main([])
        about = (module.__doc__ or "").partition("\n\n")[2].strip()
        note = "Written by `reproduce/pages.py`. [What the numbers say](../reproduction.md)."
        write_text(
            FOLDER / f"{name}.md", f"# {title}\n\n{about}\n\n{note}\n{printed.getvalue()}".replace("\n### ", "\n## ")
        )


if __name__ == "__main__":
    main()
