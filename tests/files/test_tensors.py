"""Files of tensors: a byte that is not what was written is detected, and an inconsistent header is refused."""

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from safetensors.numpy import save_file as save_plain

from longtail.errors import UserError
from longtail.files.tensors import create, has_digest, read, read_header, read_tensors, write_tensors


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


def test_what_is_written_is_read_memory_mapped(tmp_path):
    path = tmp_path / "a.safetensors"
    values, numbers = write(path)
    arrays, details = read(path)
    assert details == read_header(path) == {"format": 1, "said": "x"}
    assert isinstance(arrays["values"], np.memmap)
    np.testing.assert_array_equal(arrays["values"], values)
    np.testing.assert_array_equal(arrays["numbers"][np.array([3, 99, -1])], numbers[np.array([3, 99, -1])])
    assert arrays["none"].shape == (0, 3)
    np.testing.assert_array_equal(load_file(path)["numbers"], numbers)
    np.testing.assert_array_equal(read_tensors(path)[0]["values"], values)


def test_arrays_of_every_width_are_aligned(tmp_path):
    path = tmp_path / "a.safetensors"
    shapes = {"pixels": ((3,), np.dtype(np.uint8)), "labels": ((2,), np.dtype(np.int64))}
    with create(path, shapes, {}) as arrays:
        assert list(arrays) == ["pixels", "labels"]
        arrays["pixels"][...], arrays["labels"][...] = 7, 5
    arrays, _ = read(path)
    assert all(array.flags.aligned for array in arrays.values())
    assert arrays["pixels"].tolist() == [7] * 3
    assert arrays["labels"].tolist() == [5] * 2


@given(st.data())
def test_any_flipped_bit_is_detected(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("flipped") / "a.safetensors"
    values, numbers = write(path)
    flip(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    for reader in (read, read_tensors):
        try:
            arrays, _ = reader(path)
        except UserError:
            continue
        # The name of the digest itself was hit: an ordinary file without a digest, whose content is whole.
        assert not has_digest(path)
        np.testing.assert_array_equal(arrays["values"], values)
        np.testing.assert_array_equal(arrays["numbers"], numbers)


def test_damage_is_named_unless_the_digest_is_not_checked(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path)
    flip(path, path.stat().st_size - 5)
    with pytest.raises(UserError, match=r"a.safetensors is damaged: its content is not what was written; delete"):
        read(path)
    assert read(path, check=False)[0]["values"].shape == (100, 7)


def test_files_with_a_digest_per_chunk_are_read(tmp_path):
    """As earlier versions wrote them."""
    header = {
        "__metadata__": {"longtail": json.dumps({"step": 3, "digests": {"chunk": 1 << 20, "arrays": {"a": "0" * 16}}})},
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    }
    write_with(tmp_path / "a.safetensors", header, np.array([1, 2], np.float32).tobytes())
    for reader in (read, read_tensors):
        tensors, details = reader(tmp_path / "a.safetensors")
        assert tensors["a"].tolist() == [1, 2]
        assert details == {"step": 3}
    assert not has_digest(tmp_path / "a.safetensors")


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
    entry = b'{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
    for content in (
        struct.pack("<Q", 90 << 20) + b" " * 1000,
        struct.pack("<Q", 1 << 63) + whole[8:],
        struct.pack("<Q", 2 * len(entry) + 11) + b'{"a":' + entry + b',"a":' + entry + b"}" + bytes(8),
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
    with pytest.raises(UserError, match="is damaged: its content is not what was written"):
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
