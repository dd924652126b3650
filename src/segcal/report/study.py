"""Read and check the results of ``segcal.compare``."""

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
    where = str(path)
    try:
        study = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError("is not there", where=where, expected=_EXPECTED, fix="run segcal compare first") from None
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror or error})", where=where, expected=_EXPECTED) from None
    except ValueError as error:
        raise DataError(
            f"is not complete JSON ({error})", where=where, expected=_EXPECTED, fix="run segcal compare --resume"
        ) from None
    found = study.get("format") if isinstance(study, dict) else type(study).__name__
    if found != STUDY[0]:
        raise DataError(f"holds {found!r}, not a study", where=where, expected=_EXPECTED)
    if study.get("version") != STUDY[1]:
        raise DataError(
            f"has version {study.get('version')!r}", where=where, expected=f"version {STUDY[1]}", fix="update segcal"
        )
    for names, kind in ((_LISTS, list), (_MAPPINGS, dict)):
        for name in names:
            if not isinstance(study.get(name), kind):
                raise DataError(f"has no {name!r}", where=where, expected=_EXPECTED, fix="run segcal compare again")
    if not study["methods"] or study["methods"][0].get("key") != "uncalibrated":
        raise DataError("does not begin with the method 'uncalibrated'", where=where, expected=_EXPECTED)
    checked: dict[str, Any] = study
    return checked
