"""What can be told of a reward's import path without running anything of its file: whether there is such a file, such a
name in it, and parameters that can be served. A run then stops where its configuration is read, not where it samples.

Names that are made while the file runs (`from x import *`, decorators, a module's `__getattr__`) are left to the worker
that loads the reward.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from inspect import Parameter
from pathlib import Path
from typing import Any

from alignment.errors import UserError
from alignment.rewards.calls import check_parameters

Function = ast.FunctionDef | ast.AsyncFunctionDef


def look_up(path: str) -> None:
    """Raise UserError for an import path behind which no reward can be."""
    module, _, attribute = path.rpartition(".")
    spec = _find(module)
    if spec is None:
        near = get_close_matches(module, (file.stem for file in Path().glob("*.py")), n=1)
        hint = f"did you mean '{near[0]}.{attribute}'?" if near else "your own file lies in the folder you start from"
        raise UserError(f"there is no module '{module}'; {hint}")
    if spec.origin is None or not spec.origin.endswith(".py") or not Path(spec.origin).is_file():
        return
    try:
        body = ast.parse(Path(spec.origin).read_bytes()).body
    except SyntaxError as error:
        raise UserError(f"{spec.origin}, line {error.lineno}: {error.msg}") from error
    names = dict(_names(body))
    if attribute in names:
        _check_definition(names[attribute])
    elif not {"*", "__getattr__"} & names.keys():
        near = get_close_matches(attribute, names, n=1)
        there = ", ".join(n for n, node in names.items() if isinstance(node, Function | ast.ClassDef) and n[0] != "_")
        hint = f"did you mean '{near[0]}'?" if near else f"it has {there or 'nothing that could be one'}"
        raise UserError(f"'{module}' has no '{attribute}'; {hint}")


def _find(module: str) -> ModuleSpec | None:
    """As a worker will find it: by the path alone, whatever this process has imported under that name."""
    importlib.invalidate_caches()
    top, *rest = module.split(".")
    # Another finder is that of a package that is installed in place, or of the interpreter's own.
    spec = PathFinder.find_spec(top) or importlib.util.find_spec(top)
    for depth in range(len(rest)):
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = ".".join([top, *rest[: depth + 1]])
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def _names(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names that statements bind, also inside of `if`, `try`, `with` and loops, with the statement; "*" for unknown
    ones."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
            continue
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                stored = (n for n in ast.walk(part) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
                yield from ((name.id, node) for name in stored)
            elif isinstance(part, ast.stmt):
                yield from _names([part])
            elif isinstance(part, ast.ExceptHandler | ast.match_case):
                yield from _names(part.body)
            elif isinstance(part, ast.withitem) and isinstance(part.optional_vars, ast.Name):
                yield part.optional_vars.id, node


def _check_definition(node: ast.stmt) -> None:
    """Raise UserError for a function, or a class's `__call__`, that cannot be called as a reward."""
    if isinstance(node, ast.ClassDef):
        calls = [n for n in node.body if isinstance(n, Function) and n.name == "__call__"]
        if not calls and not node.bases and not node.keywords and not node.decorator_list:
            raise UserError(f"the class '{node.name}' has no __call__")
        for call in calls:
            _check_function(call, skip=1)
    elif isinstance(node, Function):
        _check_function(node, skip=0)


def _check_function(node: Function, skip: int) -> None:
    if node.decorator_list:
        return
    given = node.args
    parts: list[tuple[Sequence[ast.arg | None], Any]] = [
        (given.posonlyargs, Parameter.POSITIONAL_ONLY),
        (given.args, Parameter.POSITIONAL_OR_KEYWORD),
        ([given.vararg], Parameter.VAR_POSITIONAL),
        (given.kwonlyargs, Parameter.KEYWORD_ONLY),
        ([given.kwarg], Parameter.VAR_KEYWORD),
    ]
    parameters = [Parameter(a.arg, kind) for names, kind in parts for a in names if a is not None]
    check_parameters(parameters[skip:], isinstance(node, ast.AsyncFunctionDef))
