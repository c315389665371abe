"""Hostile pickles in the place of CIFAR's files: each gives one line, and nothing is built or run."""

import os
import pickle
import resource
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longtail.config import DataConfig
from longtail.data.cifar import read_cifar
from longtail.errors import UserError

CIFAR10 = DataConfig(data="cifar10")
NAMES = [f"class {label}" for label in range(10)]


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
    "a row too short": array((1, 3), b"AAA"),
    "a type alone": np.dtype("u1"),
    "an array without a state": Made(RECONSTRUCT, (np.ndarray, (0,), b"b")),
    "a name alone": np.ndarray,
    "an array made by its type": Made(np.ndarray, ((1 << 40,), np.dtype("u1"))),
    "a function": Made(os.mkdir, ("attacked",)),
    "a number of numpy": np.float64(3),
    "a set": {1, 2},
    "an object": Made(object, ()),
    "nothing": None,
    "text": "text",
}


def write_names(folder, names=NAMES, protocol=2):
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, protocol=protocol))


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_but_images_and_names_comes_out(tmp_path, monkeypatch, name, protocol):
    monkeypatch.chdir(tmp_path)
    write_names(tmp_path)
    batch = {"data": HOSTILE[name], "labels": [0]}
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(batch, protocol=protocol))
    with pytest.raises(UserError, match="data_batch_1 is not a CIFAR") as caught:
        read_cifar(CIFAR10, tmp_path)
    assert "\n" not in str(caught.value)
    for names in (HOSTILE[name], [HOSTILE[name]] * 10):
        write_names(tmp_path, names, protocol)
        with pytest.raises(UserError, match=r"batches.meta (is not a CIFAR file|names \d+ classes)"):
            read_cifar(CIFAR10, tmp_path)
    assert not (tmp_path / "attacked").exists()


def program(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts)


LONG_TEXT = program(b"X", struct.pack("<I", 1 << 20), b"a" * (1 << 20), b"q\x01X\x06\x00\x00\x00latin1q\x020]")
PROGRAMS = {
    "a memo of 2^31 places": program(b"Nr\xff\xff\xff\x7f."),
    "a frame of 2^60 bytes": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "bytes that are not there": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
    "a byte array of a terabyte": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",
    "text encoded over and over": LONG_TEXT + b"c_codecs\nencode\nh\x01h\x02\x86Ra" * 9999 + b".",
    "a long text as arguments": LONG_TEXT + b"c_codecs\nencode\nh\x01Ra" * 999 + b".",
    "a key of a million levels": program(b"})", b"\x85" * 1_000_000, b"Ns."),
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
    "a state of a name": program(b"}(X\x04\x00\x00\x00datac_codecs\nencode\n}X\x01\x00\x00\x00aNsbu0N."),
}


def read_batch(tmp_path, content):
    write_names(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(content)
    read_cifar(CIFAR10, tmp_path)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_no_library_writes(tmp_path, name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="data_batch_1 is not a CIFAR"):
        read_batch(tmp_path, PROGRAMS[name])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300))
def test_whatever_the_bytes_one_error(tmp_path, content):
    with pytest.raises(UserError, match="data_batch_1 is not a CIFAR"):
        read_batch(tmp_path, content)


def test_images_and_names_are_read_as_python_2_writes_them(tmp_path):
    """Names and keys as bytes, rows in Fortran's order; test_cifar.py reads those of Python 3."""
    protocol = 2
    pixels = np.asfortranarray(np.random.default_rng(0).integers(0, 256, (50_000, 3072), dtype=np.uint8))
    write_names(tmp_path, [name.encode() for name in NAMES], protocol)
    for number in range(1, 6):
        batch = {b"data": pixels[number - 1 :: 5], b"labels": [number] * 10_000}
        (tmp_path / f"data_batch_{number}").write_bytes(pickle.dumps(batch, protocol=protocol))
    (tmp_path / "test_batch").write_bytes(pickle.dumps({"data": pixels[:10_000], "labels": [9] * 10_000}, protocol))
    splits = read_cifar(CIFAR10, tmp_path)
    train, test = splits.train, splits.test
    assert train.class_names == tuple(NAMES)
    assert train.class_counts.tolist() == [0, *[10_000] * 5, 0, 0, 0, 0]
    np.testing.assert_array_equal(train.pixels[10_000:20_000].flatten(1).numpy(), pixels[1::5])
    np.testing.assert_array_equal(test.pixels.flatten(1).numpy(), pixels[:10_000])


@pytest.mark.parametrize("names", [None, 3, "text", [1, 2], [["a"]] * 10, {"a": "b"}])
def test_class_names_must_be_ten_words(tmp_path, names):
    write_names(tmp_path, names)
    (tmp_path / "data_batch_1").touch()
    with pytest.raises(UserError, match=r"'label_names' should list the class names|names \d classes where 10"):
        read_cifar(CIFAR10, tmp_path)
