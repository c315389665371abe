"""Small mistakes: every place of a source file where one operator, comparison, constant or condition can be changed."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

SWAPS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True)
class Mutant:
    """One changed place.

    `function` is the outermost function or method around it, as its code object is named; "" outside of functions.
    `number` counts the places of the file.
    """

    path: Path
    function: str
    line: int
    before: str
    after: str
    number: int

    def code(self) -> CodeType:
        """The whole file with this one change."""
        return compile(self.tree(), str(self.path), "exec")

    def tree(self) -> ast.Module:
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        place = next(place for number, place in enumerate(_places(tree)) if number == self.number)
        place.put(place.change(copy.deepcopy(place.node)))
        return ast.fix_missing_locations(tree)


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for number, place in enumerate(_places(tree)):
        before, after = ast.unparse(place.node), ast.unparse(place.change(copy.deepcopy(place.node)))
        found.append(Mutant(path, place.function, place.node.lineno, before, after, number))
    return found


@dataclass(frozen=True)
class _Place:
    node: ast.expr
    change: Callable[[ast.expr], ast.expr]
    function: str
    put: Callable[[ast.expr], None]


def _places(node: ast.AST, names: tuple[str, ...] = (), function: str = "") -> Iterator[_Place]:
    """Expressions that can be changed, in the order of the file; annotations are left alone."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_params"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST):
                continue
            change = _change(child)
            if change is not None:
                yield _Place(child, change, function, _putter(node, field, index))
            yield from _places(child, *_inside(child, names, function))


def _inside(node: ast.AST, names: tuple[str, ...], function: str) -> tuple[tuple[str, ...], str]:
    if isinstance(node, ast.ClassDef) and not function:
        return (*names, node.name), ""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not function:
        return names, ".".join((*names, node.name))
    return names, function


def _putter(parent: ast.AST, field: str, index: int | None) -> Callable[[ast.expr], None]:
    def put(new: ast.expr) -> None:
        if index is None:
            setattr(parent, field, new)
        else:
            getattr(parent, field)[index] = new

    return put


def _change(node: ast.AST) -> Callable[[ast.expr], ast.expr] | None:
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not _is_text(node):
        return _swap_operator
    if isinstance(node, ast.BoolOp):
        return _swap_operator
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        return _swap_comparison
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        return lambda one: one.operand  # type: ignore[attr-defined]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return lambda one: ast.Constant(not one.value)  # type: ignore[attr-defined]
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return lambda one: ast.Constant(one.value + 1)  # type: ignore[attr-defined]
    return None


def _is_text(node: ast.BinOp) -> bool:
    parts = (node.left, node.right)
    return any(isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", None), str) for part in parts)


def _swap_operator(node):  # type: ignore[no-untyped-def]
    node.op = SWAPS[type(node.op)]()
    return node


def _swap_comparison(node):  # type: ignore[no-untyped-def]
    node.ops[0] = SWAPS[type(node.ops[0])]()
    return node
