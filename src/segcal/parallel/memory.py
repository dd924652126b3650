"""Memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes
from functools import cache


def give_back() -> None:
    """Return what was freed to the system, where the C library can: glibc keeps it below anything still in use.

    Work on large pieces that keeps a little of each would otherwise hold more with every piece.

    Examples:
        >>> give_back()
    """
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> ctypes._NamedFuncPointer | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or no Linux
        return None
