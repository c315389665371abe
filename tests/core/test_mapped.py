"""Files of arrays: a byte that is not what was written is found, and a header that lies is refused."""

import json
import struct
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from safetensors.numpy import save_file as save_plain

from longtail.core import layout as layouts
from longtail.core.mapped import MappedArray, create, read, rewrite
from longtail.core.tensors import read_tensors, write_tensors
from longtail.errors import UserError

CHUNK = 256


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(layouts, "SMALLEST_CHUNK", CHUNK)


def write(path, rows=100, width=7):
    values = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)
    numbers = np.arange(rows)
    shapes = {name: (array.shape, array.dtype) for name, array in (("values", values), ("numbers", numbers))}
    with create(path, {**shapes, "none": ((0, 3), np.dtype(np.float32))}, {"format": 1, "said": "x"}) as arrays:
        arrays["values"][...], arrays["numbers"][...] = values, numbers
    return values, numbers


def header_of(path) -> tuple[dict, bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_with(path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def flip(path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_what_is_written_is_read_by_slices_rows_and_as_a_whole(tmp_path):
    path = tmp_path / "a.safetensors"
    values, numbers = write(path)
    arrays, details = read(path)
    assert details == {"format": 1, "said": "x"}
    found = arrays["values"]
    assert (found.shape, found.dtype, len(found), found.ndim) == ((100, 7), np.float32, 100, 2)
    for key in (slice(None), slice(3, 9), slice(90, 400), slice(5, 2), slice(None, None, 3), 4, -1, (slice(2, 4), 1)):
        np.testing.assert_array_equal(found[key], values[key])
    for rows in (np.array([3, 99, -1, 3]), np.array([], np.int64), numbers % 2 == 0):
        np.testing.assert_array_equal(found[rows], values[rows])
    np.testing.assert_array_equal(np.asarray(found), values)
    np.testing.assert_array_equal(2 * found + found, 3 * values)
    assert found.mean() == values.mean()
    assert arrays["none"][:].shape == (0, 3)
    np.testing.assert_array_equal(load_file(path)["numbers"], numbers)


@given(st.data())
def test_any_flipped_bit_is_found_by_whoever_reads_it(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("flipped") / "a.safetensors"
    values, numbers = write(path)
    place = data.draw(st.integers(0, path.stat().st_size - 1))
    flip(path, place)
    start = path.stat().st_size - values.nbytes - numbers.nbytes
    if place < start:
        with suppress(UserError):
            assert not any(isinstance(array, MappedArray) for array in read(path)[0].values())  # a plain file, then
        return
    arrays, _ = read(path)
    found = {}
    for name, known in (("values", values), ("numbers", numbers)):
        for row in range(len(known)):
            with suppress(UserError):
                np.testing.assert_array_equal(arrays[name][row : row + 1], known[row : row + 1])
                found[name, row] = True
    assert 0 < len(found) < 2 * len(values)


def test_only_the_damaged_chunk_is_refused_and_by_every_way_of_reading(tmp_path):
    path = tmp_path / "a.safetensors"
    values, _ = write(path)
    start = path.stat().st_size - values.nbytes - 800
    flip(path, start + 5 * CHUNK + 3)
    arrays, _ = read(path)
    np.testing.assert_array_equal(arrays["values"][:40], values[:40])
    rows = np.array([0, 99])
    np.testing.assert_array_equal(arrays["values"][rows], values[rows])
    for ask in (slice(40, 60), slice(None, None, -1), np.array([50]), np.ones(100, bool), 50, (slice(None), 0)):
        with pytest.raises(
            UserError, match=r"a.safetensors is damaged: values is not what was written \(near byte 1,280"
        ):
            read(path)[0]["values"][ask]
    for whole in (np.asarray, lambda found: found * 2, lambda found: found.sum(), lambda found: list(found)):
        with pytest.raises(UserError, match="is damaged"):
            whole(read(path)[0]["values"])


def test_rewriting_one_array_keeps_the_file_whole(tmp_path):
    path = tmp_path / "a.safetensors"
    values, numbers = write(path)
    size = path.stat().st_size
    rewrite(path, "numbers", numbers % 3)
    arrays, _ = read(path)
    np.testing.assert_array_equal(arrays["numbers"][:], numbers % 3)
    np.testing.assert_array_equal(arrays["values"][:], values)
    assert path.stat().st_size == size


def test_a_large_array_has_larger_chunks_so_that_its_header_stays_small(monkeypatch):
    monkeypatch.setattr(layouts, "MOST_CHUNKS", 10)
    layout = layouts.Layout.of({"a": ("F32", (1000, 7)), "b": ("U8", (3,))}, {})
    assert layout.digests.chunk == CHUNK * 11
    assert len(layout.digests.arrays["a"]) == 10 * layouts.DIGEST_LETTERS


def changed(**new):
    return lambda header: header["values"].update(new)


LIES = {
    "a negative place": changed(data_offsets=[-2800, 0]),
    "a place of another": changed(data_offsets=[8, 2808]),
    "a place behind the end": changed(data_offsets=[3600, 6400]),
    "a shape too large": changed(shape=[10**12, 7]),
    "a shape that is negative": changed(shape=[-100, -7]),
    "a shape of fractions": changed(shape=[100.0, 7]),
    "a shape of truth values": changed(shape=[True, 700]),
    "more dimensions than there are": changed(shape=[1] * 3000),
    "an unknown type": changed(dtype="F31"),
    "a type that is a list": changed(dtype=["F32"]),
    "no place": lambda header: header["values"].pop("data_offsets"),
    "no array": lambda header: header.update(values=None),
    "a gap": lambda header: header.pop("none") and header.pop("values"),
    "metadata that are a list": lambda header: header.update(__metadata__=[]),
    "metadata that are no text": lambda header: header["__metadata__"].update(longtail=5),
    "metadata that are no object": lambda header: header["__metadata__"].update(longtail="[]"),
    "metadata nested deeply": lambda header: header["__metadata__"].update(longtail="[" * 100_000),
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, name):
    path = tmp_path / "a.safetensors"
    write(path)
    header, data = header_of(path)
    LIES[name](header)
    write_with(path, header, data)
    for reader in (read, read_tensors):
        with pytest.raises(UserError, match="a.safetensors is not a whole safetensors file"):
            reader(path)


def test_headers_that_are_too_long_repeated_or_no_header(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path)
    whole = path.read_bytes()
    entry = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    for content in (
        struct.pack("<Q", 90 << 20) + b" " * 1000,
        struct.pack("<Q", 1 << 63) + whole[8:],
        struct.pack("<Q", 2 * len(entry) + 11) + b'{"a":' + entry + b',"a":' + entry + b"}",
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 3) + b"\xff\xfe{",
        whole + b"x",
        whole[:-1],
        b"",
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match="a.safetensors is not a whole safetensors file"):
            read(path)


def test_what_the_header_says_cannot_be_changed_unnoticed(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path)
    header, data = header_of(path)
    said = json.loads(header["__metadata__"]["longtail"])
    header["__metadata__"]["longtail"] = json.dumps({**said, "said": "y"})
    write_with(path, header, data)
    with pytest.raises(UserError, match="is damaged: its header is not what was written"):
        read(path)


def test_files_of_others_have_no_digests_and_are_read(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    save_plain({"values": values}, tmp_path / "a.safetensors")
    arrays, details = read(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(arrays["values"], values)
    assert details == {}


TENSORS = {
    "half": torch.randn(300, dtype=torch.float32).bfloat16(),
    "number": torch.tensor(3),
    "truth": torch.tensor([True, False]),
    "none": torch.zeros(0, 4),
    "turned": torch.randn(30, 20).T,
}


def test_tensors_come_back_bit_for_bit_and_damage_is_found(tmp_path):
    path = tmp_path / "t.safetensors"
    write_tensors(path, TENSORS, {"step": 3})
    tensors, header = read_tensors(path)
    assert header == {"step": 3}
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor), name
        assert tensors[name].dtype == tensor.dtype
    for place in range(path.stat().st_size - 3000, path.stat().st_size, 333):
        flip(path, place)
        with pytest.raises(UserError, match="is damaged"):
            read_tensors(path)
        flip(path, place)
    header, data = header_of(path)
    del header["none"]
    write_with(path, header, data)
    with pytest.raises(UserError, match="digests are not those of its arrays"):
        read_tensors(path)
