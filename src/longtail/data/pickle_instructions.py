"""The instructions of a pickle, one after the other, without running any.

The standard library's `pickletools` knows how the argument of each instruction is written. It is slow where there are
many: a file of CIFAR lists ten thousand labels, a number of one byte each, beside one string of 30 MB. Runs of such
numbers come as one instruction here, and strings of bytes are taken as they are.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Iterator
from io import BytesIO
from typing import Any

SMALL_NUMBERS = "SMALL_NUMBERS"
"""Our name for a run of BININT1; the argument is their bytes, one number each."""

_CODES = {opcode.code: opcode for opcode in pickletools.opcodes}
_SMALL = b"K"
_RUN = re.compile(rb"(?:K.)++", re.DOTALL)  # possessive: nothing is remembered for each number
# Code → name, and the bytes of the length that stands before the content.
_STRINGS = {
    b"T": ("BINSTRING", 4),
    b"U": ("SHORT_BINSTRING", 1),
    b"B": ("BINBYTES", 4),
    b"C": ("SHORT_BINBYTES", 1),
    b"\x8e": ("BINBYTES8", 8),
}


def instructions(content: bytes) -> Iterator[tuple[str, Any]]:
    """Name and argument of each instruction, strings of bytes as `bytes`; a `ValueError` if it is cut short.

    >>> list(instructions(b"K\\x01K\\x02U\\x02ab."))
    [('SMALL_NUMBERS', b'\\x01\\x02'), ('SHORT_BINSTRING', b'ab'), ('STOP', None)]
    """
    stream = BytesIO(content)
    while code := stream.read(1):
        if code == _SMALL:
            run = _RUN.match(content, stream.tell() - 1)
            if run is None:
                raise ValueError("it ends within a number")
            stream.seek(run.end())
            yield SMALL_NUMBERS, run[0][1::2]
        elif code in _STRINGS:
            name, width = _STRINGS[code]
            length = stream.read(width)
            size = int.from_bytes(length, "little")
            found = stream.read(size)
            if len(length) != width or len(found) != size:
                raise ValueError("it ends within a string")
            yield name, found
        else:
            opcode = _CODES.get(code.decode("latin-1"))
            if opcode is None:
                raise ValueError(f"it holds the unknown instruction {code!r}")
            yield opcode.name, opcode.arg.reader(stream) if opcode.arg else None
