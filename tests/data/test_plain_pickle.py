"""Pickles that want more than plain values: each is one line, and nothing is built or run."""

import os
import pickle
import pickletools
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.core.reading import reading
from longtail.data.cifar import CIFARS, _read_names
from longtail.data.pickle_instructions import SMALL_NUMBERS, instructions
from longtail.data.plain_pickle import Machine, load_plain_pickle
from longtail.errors import UserError


class Made:
    """Pickles as a call of `function` with these arguments, and a state."""

    def __init__(self, function, arguments, state=None):
        self.made = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.made


RECONSTRUCT = np.zeros(1, np.uint8).__reduce__()[0]
PLAIN_STATE = (3, "|", None, None, None, -1, -1, 0)


def array(shape, content, kind="u1", type_state=PLAIN_STATE):
    kind = Made(np.dtype, (kind, False, True), type_state)
    return Made(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, shape, kind, False, content))


# Strings of bytes taken for pointers to objects: reading one of them ends the process.
POINTERS = array((10,), b"A" * 80, "O8", (3, "|", None, None, None, 8, 8, 0))
FIELDS = array((2,), b"A" * 16, "V8", (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0))

HOSTILE = {
    "pointers": POINTERS,
    "pointers in fields": FIELDS,
    "an array of numbers": array((1,), b"A" * 8, "f8"),
    "more than there is": array((10**12,), b"A"),
    "a negative shape": array((-1, -1), b"A"),
    "a shape of truth values": array((True,), b"A"),
    "many dimensions": array((1,) * 65, b"A"),
    "a type alone": np.dtype("u1"),
    "an array without a state": Made(RECONSTRUCT, (np.ndarray, (0,), b"b")),
    "a name alone": np.ndarray,
    "an array made by its type": Made(np.ndarray, ((1 << 40,), np.dtype("u1"))),
    "a function": Made(os.mkdir, ("attacked",)),
    "a number of numpy": np.float64(3),
    "a set": {1, 2},
    "an object": Made(object, ()),
    "keys that are numbers": {1: 2},
}


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_but_plain_values_comes_out(tmp_path, monkeypatch, name, protocol):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "batches.meta"
    path.write_bytes(pickle.dumps({"label_names": HOSTILE[name]}, protocol=protocol))
    with pytest.raises(UserError, match="batches.meta is not a CIFAR file"):
        load_plain_pickle(path)
    assert not (tmp_path / "attacked").exists()


def program(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts)


BYTES_OF_TEXT = b"c_codecs\nencode\n"
PROGRAMS = {
    "a memo of 2^31 places": program(b"Nr\xff\xff\xff\x7f."),
    "a frame of 2^60 bytes": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "bytes that are not there": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
    "text used over and over": program(
        b"X\xe8\x03\x00\x00",
        b"a" * 1000,
        b"q\x01X\x06\x00\x00\x00latin1q\x020]",
        (BYTES_OF_TEXT + b"h\x01h\x02\x86Ra") * 99,
    ),
    "an empty stack": program(b"\x85."),
    "a mark in a tuple": program(b"(\x85."),
    "no end": program(b"N"),
    "items of a number": program(b"K\x01K\x02a."),
    "a call of a number": program(b"K\x01)R."),
    "entries without a value": program(b"}(X\x01\x00\x00\x00au."),
    "nothing": b"",
    "a long number": program(b"L" + b"9" * 10_000 + b"L\n."),
    "an extension": program(b"\x82\x01."),
    "a persistent name": program(b"Px\n."),
    "an object by class": program(b"(ios\nsystem\n."),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_no_library_writes(tmp_path, name):
    path = tmp_path / "batches.meta"
    path.write_bytes(PROGRAMS[name])
    harmless = name in ("a memo of 2^31 places", "a frame of 2^60 bytes")
    if harmless:
        assert load_plain_pickle(path) is None
        return
    with pytest.raises(UserError, match="batches.meta is not a CIFAR file"):
        load_plain_pickle(path)


WORDS = st.text(max_size=9) | st.binary(min_size=1, max_size=9)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@given(PLAIN, st.integers(1, 4))
def test_plain_values_are_read_as_the_standard_library_reads_them(value, protocol):
    content = pickle.dumps(value, protocol=protocol)
    assert Machine(content).run() == pickle.loads(content)


@given(PLAIN | st.lists(st.integers(0, 255)), st.integers(0, 4))
def test_instructions_are_those_that_the_standard_library_lists(value, protocol):
    content = pickle.dumps(value, protocol=protocol)
    found = []
    for name, argument in instructions(content):
        found += [("BININT1", number) for number in argument] if name == SMALL_NUMBERS else [(name, argument)]
    assert found == [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(content)]


@pytest.mark.parametrize("content", [b"K", b"K\x01K", b"U", b"U\x02a", b"T\xff\xff\xff\xff", b"\xff"])
def test_instructions_that_are_cut_short_or_unknown_are_refused(content):
    with pytest.raises(ValueError, match="it ends within|unknown instruction|not enough data"):
        list(instructions(content))


@given(st.binary(max_size=300))
def test_whatever_the_bytes_a_value_or_one_error(content):
    with suppress(UserError), reading(Path("file"), "a pickle"):
        Machine(content).run()


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_bytes_are_read(order):
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4, order=order)
    read = Machine(pickle.dumps({"data": pixels}, protocol=2)).run()["data"]
    np.testing.assert_array_equal(read, pixels)
    assert any(op.name == "BUILD" for op, _, _ in pickletools.genops(pickle.dumps(pixels, protocol=2)))


@pytest.mark.parametrize("names", [None, 3, "text", [1, 2], [["a"]], {"a": "b"}])
def test_class_names_must_be_words(tmp_path, names):
    layout = CIFARS["cifar10"].python
    (tmp_path / layout.names).write_bytes(pickle.dumps({layout.names_key: names}, protocol=2))
    with pytest.raises(UserError, match="'label_names' should list the class names"):
        _read_names(CIFARS["cifar10"], tmp_path, layout)
