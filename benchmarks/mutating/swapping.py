"""The changed source in place of the source: by new code for functions that are there, or when it is imported."""

from __future__ import annotations

import ast
import functools
import gc
import importlib.machinery
import sys
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from _pytest.assertion.rewrite import AssertionRewritingHook

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


def swap(path: str, before: str, after: str, living: dict[tuple[str, Key], list[FunctionType]]) -> None:
    """Give functions their new code, or their new defaults, and constants their new values."""
    changed = changed_functions(path, before, after)
    if changed is not None:
        for key, code in changed.items():
            for function in living.get((path, key), ()):
                function.__code__ = code
        return
    statement = changed_statement(before, after)
    module = next((one for one in list(sys.modules.values()) if getattr(one, "__file__", None) == path), None)
    if statement is None or module is None:
        return
    if isinstance(statement.new, ast.FunctionDef):
        for function in living.get((path, statement.key), ()):
            _swap_defaults(function, statement.new.args, module.__dict__, statement.changed)
        return
    names = dict(module.__dict__)
    exec(compile(ast.Module([statement.new], []), path, "exec"), names)
    for name in statement.names:
        if statement.classes:
            setattr(functools.reduce(getattr, statement.classes, module), name, names[name])
            continue
        old = module.__dict__[name]
        for other in list(sys.modules.values()):
            if getattr(other, "__dict__", {}).get(name, other) is old:
                setattr(other, name, names[name])


@dataclass
class Statement:
    """A changed statement outside functions: other defaults, or other constants."""

    new: ast.stmt
    classes: list[str]
    changed: set[int]
    names: list[str]

    @property
    def key(self) -> Key:
        """Of the function that is defined."""
        assert isinstance(self.new, ast.FunctionDef)
        line = min([self.new.lineno, *(part.lineno for part in self.new.decorator_list)])
        return ".".join([*self.classes, self.new.name]), line


def changed_statement(before: str, after: str) -> Statement | None:
    """None if more has changed, or if something else is made of the constants on import."""
    classes: list[str] = []
    old, new = ast.parse(before).body, ast.parse(after).body
    while True:
        pairs = [(one, other) for one, other in zip(old, new, strict=False) if ast.dump(one) != ast.dump(other)]
        if len(old) != len(new) or len(pairs) != 1:
            return None
        ((one, other),) = pairs
        if not isinstance(one, ast.ClassDef) or not isinstance(other, ast.ClassDef):
            break
        if [ast.dump(part) for part in one.decorator_list] != [ast.dump(part) for part in other.decorator_list]:
            return None
        classes.append(one.name)
        old, new = one.body, other.body
    if isinstance(one, ast.FunctionDef) and isinstance(other, ast.FunctionDef):
        first, second = _defaults(one.args), _defaults(other.args)
        changed = {index for index, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]}
        bodies = [ast.dump(ast.Module([*part.body, *part.decorator_list], [])) for part in (one, other)]  # type: ignore[list-item]
        return Statement(other, classes, changed, []) if bodies[0] == bodies[1] and changed else None
    if not isinstance(other, ast.Assign) and not (isinstance(other, ast.AnnAssign) and not classes):
        return None
    targets = other.targets if isinstance(other, ast.Assign) else [other.target]
    stored = [part for target in targets for part in ast.walk(target) if not isinstance(part, (ast.Tuple, ast.Store))]
    names = [part.id for part in stored if isinstance(part, ast.Name)]
    if len(names) < len(stored) or any(name in _loaded_on_import() or name.startswith("__") for name in names):
        return None
    return Statement(other, classes, set(), names)


def _defaults(arguments: ast.arguments) -> list[str]:
    return [ast.dump(part) if part else "" for part in (*arguments.defaults, *arguments.kw_defaults)]


def _swap_defaults(function: FunctionType, arguments: ast.arguments, names: dict[str, Any], changed: set[int]) -> None:
    positional = list(function.__defaults__ or ())
    for index in changed:
        inside = index < len(arguments.defaults)
        part = arguments.defaults[index] if inside else arguments.kw_defaults[index - len(arguments.defaults)]
        assert part is not None
        value = eval(compile(ast.Expression(part), "<default>", "eval"), names)
        if inside:
            positional[index] = value
        else:
            name = arguments.kwonlyargs[index - len(arguments.defaults)].arg
            function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), name: value}
    function.__defaults__ = tuple(positional) or None


@functools.cache
def _loaded_on_import() -> set[str]:
    """Names that the source uses outside the bodies of functions."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        for part in ast.iter_child_nodes(node):
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and part in node.body
            if not inside:
                visit(part)

    for path in SOURCE.rglob("*.py"):
        visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def can_be_swapped(path: str, before: str, after: str) -> bool:
    """Whether ``swap`` can do it without importing again."""
    return changed_functions(path, before, after) is not None or changed_statement(before, after) is not None


def import_changed(path: str, source: str) -> None:
    """Let a file have another source when it is imported."""
    read = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: Any, name: str) -> CodeType | None:
        if loader.path != path:
            return read(loader, name)
        return compile(source, path, "exec", dont_inherit=True)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    rewrites = AssertionRewritingHook._should_rewrite

    def should_rewrite(hook: Any, name: str, file: str, state: Any) -> bool:
        # pytest reads files with examples itself if they are on its command line
        return file != path and rewrites(hook, name, file, state)

    AssertionRewritingHook._should_rewrite = should_rewrite  # type: ignore[method-assign]
