"""Files of tensors: a byte that is not what was written is detected, and an inconsistent header is refused."""

import json
import os
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from safetensors.numpy import save_file as save_plain

from longtail.errors import UserError
from longtail.files.tensors import DIGEST, create, read, read_details, read_tensors, write_tensors


def write(path, rows=100, width=7):
    values = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)
    numbers = np.arange(rows)
    shapes = {name: (array.shape, array.dtype) for name, array in (("values", values), ("numbers", numbers))}
    shapes |= {"pixels": ((3,), np.dtype(np.uint8)), "none": ((0, 3), np.dtype(np.float32))}
    with create(path, shapes, {"format": 1, "said": "x"}) as arrays:
        arrays["values"][...], arrays["numbers"][...], arrays["pixels"][...] = values, numbers, 7
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


def test_arrays_of_every_width_are_read_aligned_and_changes_do_not_reach_the_file(tmp_path):
    path = tmp_path / "a.safetensors"
    values, numbers = write(path)
    arrays, details = read(path)
    assert details == {"format": 1, "said": "x"}
    assert all(array.flags.aligned for array in arrays.values())
    np.testing.assert_array_equal(arrays["numbers"][np.array([3, 99, -1])], numbers[np.array([3, 99, -1])])
    assert arrays["pixels"].tolist() == [7] * 3
    assert arrays["none"].shape == (0, 3)
    np.testing.assert_array_equal(load_file(path)["numbers"], numbers)
    arrays["values"][0] = 0
    np.testing.assert_array_equal(read(path)[0]["values"], values)


def test_a_file_may_be_larger_than_memory(tmp_path):
    size = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    path, text = (
        tmp_path / "a.safetensors",
        json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}),
    )
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text.encode())
        try:
            file.truncate(8 + len(text) + size)  # no blocks are written
        except OSError:
            pytest.skip("this file system has no sparse files")
    array = read(path)[0]["a"]
    assert array[-1] == 0
    array[-1] = 5
    assert read(path)[0]["a"][-1] == 0


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
        assert DIGEST not in read_details(path)
        np.testing.assert_array_equal(arrays["values"], values)
        np.testing.assert_array_equal(arrays["numbers"], numbers)


def test_damage_is_named_unless_the_digest_is_not_checked(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path)
    flip(path, path.stat().st_size - 5)
    with pytest.raises(UserError, match=r"a.safetensors is damaged: its content is not what was written; delete"):
        read(path)
    assert read(path, check=False)[0]["values"].shape == (100, 7)


def changed(**new):
    return lambda header: header["values"].update(new)


LIES = {
    "a negative offset": changed(data_offsets=[-2800, 0]),
    "offsets of another array": changed(data_offsets=[8, 2808]),
    "a shape too large": changed(shape=[10**12, 7]),
    "an unknown type": changed(dtype="F31"),
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


def test_files_that_are_too_long_too_short_or_have_no_header(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path)
    whole = path.read_bytes()
    for content in (struct.pack("<Q", 90 << 20) + b" " * 1000, whole + b"x", whole[:-1], b""):
        path.write_bytes(content)
        with pytest.raises(UserError, match="a.safetensors is not a whole safetensors file"):
            read(path)


def test_files_of_others_have_no_digest_and_are_read(tmp_path):
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


def test_tensors_come_back_bit_for_bit(tmp_path):
    path = tmp_path / "t.safetensors"
    write_tensors(path, TENSORS, {"step": 3})
    tensors, header = read_tensors(path)
    assert header == {"step": 3}
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor), name
        assert tensors[name].dtype == tensor.dtype
