"""The changed source in place of the source: by new code for functions that are there, or when it is imported."""

from __future__ import annotations

import gc
import importlib.machinery
from types import CodeType, FunctionType
from typing import Any

from mutating.covering import SOURCE

# Run at once, where they stand.
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")

#: What names a function's code: its name with those around it, and its first line.
Key = tuple[str, int]


def changed_functions(path: str, before: str, after: str) -> dict[Key, CodeType] | None:
    """The new code of functions, or None if something else has changed: the module must then be imported again."""
    found: dict[Key, CodeType] = {}
    return found if _compare(compile(before, path, "exec"), compile(after, path, "exec"), found, False) else None


def _compare(old: CodeType, new: CodeType, found: dict[Key, CodeType], inside: bool) -> bool:
    """Whether all that differs is inside functions, whose new code is noted."""
    same = _own(old) == _own(new)
    if not inside and not same:
        return False
    differs = not same
    for one, other in zip(_parts(old), _parts(new), strict=False):
        function = bool(one.co_flags & 2) and one.co_name not in _COMPREHENSIONS  # 2: has local variables of its own
        known = len(found)
        if not _compare(one, other, found, inside or function):
            return False
        differs |= len(found) > known
    if inside and differs:
        found[old.co_qualname, old.co_firstlineno] = new
    return True


def _parts(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _own(code: CodeType) -> tuple[Any, ...]:
    """All but the lines and the code of functions inside."""
    constants = [(type(one), None if isinstance(one, CodeType) else _written(one)) for one in code.co_consts]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, constants, names, code.co_exceptiontable, code.co_flags, code.co_argcount


def _written(constant: object) -> str:
    return repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def living_functions() -> dict[tuple[str, Key], list[FunctionType]]:
    """All functions of the source that are there, by file and name."""
    found: dict[tuple[str, Key], list[FunctionType]] = {}
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename.startswith(str(SOURCE)):
            code = one.__code__
            found.setdefault((code.co_filename, (code.co_qualname, code.co_firstlineno)), []).append(one)
    return found


def swap(path: str, changed: dict[Key, CodeType], living: dict[tuple[str, Key], list[FunctionType]]) -> None:
    """Give functions their new code."""
    for key, code in changed.items():
        for function in living.get((path, key), ()):
            function.__code__ = code


def import_changed(path: str, source: str) -> None:
    """Let a file have another source when it is imported."""
    read = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: Any, name: str) -> CodeType | None:
        if loader.path != path:
            return read(loader, name)
        return compile(source, path, "exec", dont_inherit=True)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
