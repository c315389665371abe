"""Reads pickles of byte arrays and plain values; it never calls a function that the pickle names.

A pickle is a small program for a stack machine. The standard library trusts it: it calls the functions that the
program names, with the arguments that it gives. This reader runs only the few instructions that plain values need.
It records the names that NumPy writes and never calls them; an array is built here from its shape and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from longtail.core.reading import read_bytes, reading
from longtail.data.pickle_instructions import SMALL_NUMBERS, instructions

MOST_BYTES = 1 << 29  # the largest file of CIFAR has 155 MB
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
WORDS = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
OLD_WORDS = ("BINSTRING", "SHORT_BINSTRING")  # of Python 2, whose strings are bytes
PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
GETS = ("GET", "BINGET", "LONG_BINGET")
NAMES = {
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
    "numpy ndarray": "array type",
    "numpy dtype": "type",
    "_codecs encode": "bytes",
}
MARK = object()


class Named:
    """One of the names that are allowed in the pickle."""

    def __init__(self, what: str) -> None:
        self.what = what


class Noted:
    """An object that a pickle asks for: its name, its arguments and its state."""

    def __init__(self, what: str, arguments: tuple[Any, ...]) -> None:
        self.what = what
        self.arguments = arguments
        self.value: np.ndarray | None = None


class Machine:
    """Runs the instructions of one pickle; every other instruction raises a `ValueError`."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.encoded = 0  # bytes that were made of text

    def run(self) -> Any:
        for name, argument in instructions(self.content):
            if name == SMALL_NUMBERS:
                self.stack.extend(argument)
            elif name in CONSTANTS:
                self.stack.append(CONSTANTS[name])
            elif name in NUMBERS or name in WORDS or name in OLD_WORDS:
                self.stack.append(argument)
            elif name == "STRING":  # as Python 2 prints it, with escapes
                self.stack.append(argument.encode("latin-1"))
            elif name in PUTS or name == "MEMOIZE":
                self.memo[len(self.memo) if name == "MEMOIZE" else int(argument)] = self._top()
            elif name in GETS:
                if int(argument) not in self.memo:
                    raise ValueError("it uses what it has not stored")
                self.stack.append(self.memo[int(argument)])
            elif name == "STOP":
                return _value(self.stack.pop())
            elif name in STEPS:
                STEPS[name](self, argument)
            elif name not in ("PROTO", "FRAME"):
                raise ValueError(f"it holds the instruction {name}")
        raise ValueError("it does not end")

    def _top(self) -> Any:
        if not self.stack or self.stack[-1] is MARK:
            raise ValueError("it takes from an empty stack")
        return self.stack[-1]

    def pop(self) -> Any:
        self._top()
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        found = []
        while (item := self.stack.pop()) is not MARK:
            found.append(item)
        return found[::-1]

    def name(self, words: str) -> None:
        if words not in NAMES:
            raise ValueError(f"it asks for {words.replace(' ', '.')}")
        self.stack.append(Named(NAMES[words]))

    def global_of_stack(self) -> None:
        name, module = self.pop(), self.pop()
        self.name(f"{module} {name}" if isinstance(module, str) and isinstance(name, str) else "")

    def extend(self, items: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, list):
            raise ValueError("it adds items to what is no list")
        target.extend(items if UNUSUAL.isdisjoint(map(type, items)) else map(_value, items))

    def set_items(self, items: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("it adds entries to what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | bytes):
                raise ValueError("a dictionary has keys that are not text")
            target[key] = _value(value)

    def reduce(self) -> None:
        arguments, called = self.pop(), self.pop()
        if not isinstance(called, Named) or not isinstance(arguments, tuple):
            raise ValueError("it calls what is no function")
        made: Any = Noted(called.what, arguments)
        if called.what == "bytes":
            made = self._bytes(arguments)
        self.stack.append(made)

    def _bytes(self, arguments: tuple[Any, ...]) -> bytes:
        """Bytes as Python 3 writes them for older readers: text with one character per byte."""
        match arguments:
            case (str() as text, "latin1" | "latin-1"):
                self.encoded += len(text)
                if self.encoded > len(self.content):  # each text is used once
                    raise ValueError("it makes bytes over and over of the same text")
                return text.encode("latin-1")
        raise ValueError("it encodes what is no text")

    def build(self) -> None:
        state, target = self.pop(), self._top()
        if not isinstance(target, Noted) or not isinstance(state, tuple):
            raise ValueError("it sets the state of what is no array")
        if target.what == "array":
            target.value = _array(state)
        elif target.what != "type":
            raise ValueError(f"it sets the state of a {target.what}")


def _array(state: tuple[Any, ...]) -> np.ndarray:
    """An array of bytes from the state that NumPy stores: version, shape, type, order, content."""
    match state:
        case (1, tuple() as shape, Noted(what="type") as kind, (0 | 1) as order, bytes() | memoryview() as content):
            if kind.arguments[:1] not in (("u1",), (b"u1",)):
                raise ValueError(f"an array is of type {kind.arguments[:1]}, not u1")
            if not all(type(extent) is int and extent >= 0 for extent in shape) or len(shape) > 4:
                raise ValueError("an array has an impossible shape")
            if math.prod(shape) != len(content):
                raise ValueError(f"an array of shape {shape} has {len(content)} bytes")
            return np.frombuffer(content, np.uint8).reshape(shape, order="F" if order else "C")
    raise ValueError("an array is not one of bytes")


def _value(item: Any) -> Any:
    """A value for a list, a dictionary or the result; anything that is not plain raises an error."""
    if isinstance(item, Noted) and item.value is not None:
        return item.value
    if isinstance(item, Noted | Named) or item is MARK:
        raise ValueError("it holds something that is no plain value")
    return item


UNUSUAL = {Noted, Named, type(MARK)}  # types of what a list cannot hold as it is

STEPS: dict[str, Callable[[Machine, Any], None]] = {
    "MARK": lambda machine, _: machine.stack.append(MARK),
    "GLOBAL": Machine.name,
    "STACK_GLOBAL": lambda machine, _: machine.global_of_stack(),
    "REDUCE": lambda machine, _: machine.reduce(),
    "BUILD": lambda machine, _: machine.build(),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "LIST": lambda machine, _: machine.stack.append([_value(item) for item in machine.since_mark()]),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.stack.append((machine.pop(),)),
    "TUPLE2": lambda machine, _: machine.stack.append((machine.pop(), machine.pop())[::-1]),
    "TUPLE3": lambda machine, _: machine.stack.append((machine.pop(), machine.pop(), machine.pop())[::-1]),
    "APPEND": lambda machine, _: machine.extend([machine.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
}


def load_plain_pickle(path: Path) -> Any:
    """Read a pickle of byte arrays and plain values without running or building anything it names."""
    kind = "a CIFAR file, or is cut short or altered"
    content = read_bytes(path, kind, most=MOST_BYTES)
    with reading(path, kind):
        return Machine(content).run()
