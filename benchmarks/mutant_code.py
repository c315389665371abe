"""Putting a mutant in its place: in the live functions of a process, or in a module before it is imported."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from mutants import Mutant

Functions = dict[tuple[str, str, int], list[FunctionType]]


def functions_of(folder: str) -> Functions:
    """The functions below a folder that exist now, under whatever decorators, by file, name and line."""
    found: Functions = {}
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename.startswith(folder):
            code = one.__code__
            found.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), []).append(one)
    return found


def swap_code(mutant: Mutant, functions: Functions) -> None:
    """Give the live functions of a file the code and the defaults of the changed file."""
    for code in _codes(mutant.code()):
        for function in functions.get((code.co_filename, code.co_qualname, code.co_firstlineno), ()):
            if len(code.co_freevars) == len(function.__code__.co_freevars):
                function.__code__ = code
    by_line: dict[int, list[FunctionType]] = {}
    for (file, name, line), many in functions.items():
        if file == str(mutant.path) and "<locals>" not in name:
            by_line.setdefault(line, []).extend(many)
    for node in ast.walk(mutant.tree()):
        if isinstance(node, ast.FunctionDef) and (node.args.defaults or node.args.kw_defaults):
            for function in by_line.get(min([node.lineno, *(one.lineno for one in node.decorator_list)]), ()):
                _swap_defaults(function, node.args)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def _swap_defaults(function: FunctionType, given: ast.arguments) -> None:
    def value(expression: ast.expr) -> object:
        return eval(compile(ast.Expression(expression), function.__code__.co_filename, "eval"), function.__globals__)

    function.__defaults__ = tuple(value(one) for one in given.defaults) or None
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    function.__kwdefaults__ = {one.arg: value(default) for one, default in pairs if default is not None} or None


class Changed:
    """An importer that gives one module its changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name: str, path: Any = None, target: object = None) -> Any:
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.origin != str(self.mutant.path):
            return None
        spec.loader.get_code = lambda _: self.mutant.code()  # type: ignore[union-attr,method-assign]
        return spec


def import_changed(mutant: Mutant) -> None:
    """From now on the mutant's module is imported with its change."""
    sys.meta_path.insert(0, Changed(mutant))
