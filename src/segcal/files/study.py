"""Read and check ``results.json`` of ``segcal compare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from segcal.errors import DataError
from segcal.files.versions import STUDY

_EXPECTED = "the results of segcal compare"
_LISTS = ("metrics", "methods", "splits", "cases", "summary", "differences", "ranks", "flips", "reliability", "bands")
_MAPPINGS = ("about", "diagnosis", "recommendation")


def read_study(path: Path) -> dict[str, Any]:
    """The document in ``path``; the parts that a report needs are checked.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "results.json"
        ...     _ = path.write_text('{"format": "segcal.Results"}')
        ...     read_study(path)
        Traceback (most recent call last):
        segcal.errors.DataError: ...: holds 'segcal.Results', not a study; expected the results of segcal compare...
    """

    def unfit(problem: str, fix: str | None = None, expected: str = _EXPECTED) -> DataError:
        return DataError(problem, where=str(path), expected=expected, fix=fix)

    try:
        study = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise unfit("is not there", "run segcal compare first") from None
    except OSError as error:
        raise unfit(f"cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise unfit(f"is not complete JSON ({error})", "run segcal compare --resume") from None
    found = study.get("format") if isinstance(study, dict) else type(study).__name__
    if found != STUDY[0]:
        raise unfit(f"holds {found!r}, not a study")
    if study.get("version") != STUDY[1]:
        raise unfit(f"has version {study.get('version')!r}", "update segcal", f"version {STUDY[1]}")
    for name, kind in (*((name, list) for name in _LISTS), *((name, dict) for name in _MAPPINGS)):
        if not isinstance(study.get(name), kind):
            raise unfit(f"has no {name!r}", "run segcal compare again")
    if not study["methods"] or study["methods"][0].get("key") != "uncalibrated":
        raise unfit("does not begin with the method 'uncalibrated'")
    checked: dict[str, Any] = study
    return checked
