"""The report of a study: ``results.json`` in, a self-contained ``index.html`` out. Needs no torch.

The page is a template, a style sheet and scripts from ``assets/``, with the study embedded as JSON. It loads nothing,
so it opens from disk, from an e-mail or from a server.
"""

from __future__ import annotations

from pathlib import Path

from segcal.files.atomic import write_text
from segcal.files.study import read_study
from segcal.report.page import page, payload

__all__ = ["write_report"]


def write_report(folder: str | Path) -> Path:
    """Write ``index.html`` and ``figures/`` beside the ``results.json`` of a study; returns the path of the page.

    Figures need the extra ``plots``; without it, the page says so and is otherwise complete. Pictures of cases
    (``browser/*.png``) are embedded as long as the page stays small enough to open anywhere.

    Args:
        folder: The output folder of ``segcal.compare``.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_report(folder)
        Traceback (most recent call last):
        segcal.errors.DataError: ...results.json: is not there; expected the results of segcal compare...
    """
    folder = Path(folder)
    study = read_study(folder / "results.json")
    figures, notes = [], []
    try:
        from segcal.report.figures import write_figures  # needs torch, and the page must not

        figures = write_figures(study, folder / "figures")
    except ImportError as error:
        notes.append(f"No figures were written to files: {error}")
    path = folder / "index.html"
    text = page(payload(study, folder, figures=figures, notes=notes), title=str(study["about"]["title"]))
    write_text(path, text)
    return path
