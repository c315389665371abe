"""The instructions of a pickle, one after the other, without running any.

The standard library's `pickletools` knows how the argument of each instruction is written. It is slow where there are
many: a file of CIFAR lists ten thousand labels, a number of one byte each, beside one string of 30 MB. Runs of such
numbers come as one instruction here, and long strings are not copied.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Iterator
from typing import Any

SMALL_NUMBERS = "SMALL_NUMBERS"
"""Our name for a run of BININT1; the argument is their bytes, one number each."""
LONG = 1 << 16
"""Strings of as many bytes are views of the content, shorter ones are `bytes`."""

_CODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_RUN = re.compile(rb"(?:K.)++", re.DOTALL)  # possessive: nothing is remembered for each number
_LINE = re.compile(rb"[^\n]*+\n?")
# Code → name, and the bytes of the length that stands before the content.
_STRINGS = {
    b"T": ("BINSTRING", 4),
    b"U": ("SHORT_BINSTRING", 1),
    b"B": ("BINBYTES", 4),
    b"C": ("SHORT_BINBYTES", 1),
    b"\x8e": ("BINBYTES8", 8),
}


class _Stream:
    """A buffer that is read as a file is read, without copying it."""

    def __init__(self, content: bytes) -> None:
        self.content, self.place = memoryview(content), 0

    def take(self, size: int) -> memoryview:
        piece = self.content[self.place : self.place + size]
        self.place += len(piece)
        return piece

    def read(self, size: int) -> bytes:
        return bytes(self.take(size))

    def readline(self) -> bytes:
        return self.matching(_LINE)

    def matching(self, pattern: re.Pattern[bytes]) -> bytes:
        found = pattern.match(self.content, self.place)
        self.place = found.end() if found else self.place
        return found[0] if found else b""

    def string(self, width: int) -> bytes | memoryview:
        """A string whose length stands before it, in so many bytes."""
        length = self.read(width)
        size = int.from_bytes(length, "little")
        found = self.take(size)
        if len(length) != width or len(found) != size:
            raise ValueError("it ends within a string")
        return found if size >= LONG else bytes(found)


def instructions(content: bytes) -> Iterator[tuple[str, Any]]:
    """Name and argument of each instruction, strings of bytes as they are; a `ValueError` if it is cut short.

    >>> list(instructions(b"K\\x01K\\x02U\\x02ab."))
    [('SMALL_NUMBERS', b'\\x01\\x02'), ('SHORT_BINSTRING', b'ab'), ('STOP', None)]
    """
    stream = _Stream(content)
    while True:
        if run := stream.matching(_RUN):
            yield SMALL_NUMBERS, run[1::2]
        code = stream.read(1)
        if not code:
            return
        if code in _STRINGS:
            name, width = _STRINGS[code]
            yield name, stream.string(width)
            continue
        opcode = _CODES.get(code)
        if opcode is None:
            raise ValueError(f"it holds the unknown instruction {code!r}")
        yield opcode.name, opcode.arg.reader(stream) if opcode.arg else None  # type: ignore[arg-type]
