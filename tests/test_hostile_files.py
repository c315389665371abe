"""Files from strangers: each reader answers with one line, runs nothing, and takes little memory."""

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

from longtail.backbones.weights import read_weights
from longtail.config import BOUNDS, DataConfig, TrainConfig, from_dict, read_toml
from longtail.data.listings import read_csv, read_list
from longtail.errors import UserError
from longtail.files.records import read_json
from longtail.files.tensors import write_tensors
from longtail.outputs.readers import read_outputs

pytestmark = pytest.mark.filterwarnings("ignore")


class Code:
    """Writes a file if anybody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def npy_header(shape: str, descr: str = "<f8") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


def zipped(members: dict[str, bytes], *, flags: int = 0) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in members.items():
            archive.writestr(name, value)
    raw = bytearray(content.getvalue())
    if flags:  # the bit "encrypted", in both places that have it
        for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            raw[raw.index(mark) + place] |= flags
    return bytes(raw)


def broken_stream() -> bytes:
    raw = bytearray(zipped({"logits.npy": npy_header("(50, 2)") + np.arange(100.0).tobytes()}))
    raw[60:90] = bytes(30)
    return bytes(raw)


def safetensors(header: object, rest: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + rest


def entry(shape: list, start: int, stop: int, kind: str = "F32") -> dict:
    return {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}


MOST = 1 << 20  # bytes that an archive may unpack to in these tests
BOMB = bytes(2 * MOST)


LOGITS = {
    "deflate.npz": broken_stream,
    "encrypted.npz": lambda: zipped({"logits.npy": npy_header("(1, 2)") + bytes(16)}, flags=1),
    "80-terabytes.npz": lambda: zipped({"logits.npy": npy_header("(10000000000000, 1)")}),
    "bomb.npz": lambda: zipped({"logits.npy": npy_header(f"({len(BOMB) // 8}, 1)") + BOMB}),
    "objects.npz": lambda: zipped({"logits.npy": npy_header("(1,)", "|O") + pickle.dumps([1])}),
    "deep.npz": lambda: zipped({"logits.npy": npy_header("(" * 60 + "1" + ")" * 60)}),
    "huge.npy": lambda: npy_header("(10000000000000, 2)"),
    "negative.npy": lambda: npy_header("(-1, 2)"),
    "objects.npy": lambda: npy_header("(1,)", "|O") + pickle.dumps([1]),
    "words.npy": lambda: npy_header("(2, 2)", "<U4") + bytes(64),
    "latin.csv": lambda: "label,é,b\n0,1,2\n".encode("latin-1"),
    "utf16.csv": lambda: "label,a,b\n0,1,2\n".encode("utf-16"),
    "nul.csv": lambda: b"label,a,b\n0,1,\x00\n",
    "huge-header.safetensors": lambda: safetensors(b"{}", length=90 << 20),
    "overlapping.safetensors": lambda: safetensors(
        {"logits": entry([2, 2], 0, 16), "labels": entry([2], 8, 24, "I64")}, bytes(24)
    ),
    "metadata.safetensors": lambda: safetensors({"__metadata__": {"longtail": "[" * 100_000}}),
}


@pytest.mark.parametrize("name", LOGITS)
def test_saved_logits(tmp_path, monkeypatch, name, refused):
    monkeypatch.setattr("longtail.files.reading.MAX_UNPACKED", MOST)
    path = tmp_path / name
    path.write_bytes(LOGITS[name]())
    refused(read_outputs, path)


WEIGHTS = {
    "text.pth": lambda folder: b"hello",
    "empty.pth": lambda folder: b"",
    "code.pth": lambda folder: pickle.dumps({"a": Code(folder / "ran")}),
    "code-in-zip.pth": lambda folder: zipped(
        {"archive/data.pkl": pickle.dumps({"a": Code(folder / "ran")}), "archive/version": b"3"}
    ),
    "bomb.pth": lambda folder: zipped({"archive/data.pkl": b"\x80\x02}.", "archive/data/0": BOMB}),
    "encrypted.pth": lambda folder: zipped({"archive/data.pkl": b"\x80\x02}."}, flags=1),
    "number.pth": lambda folder: zipped({"archive/data.pkl": b"\x80\x02K\x01.", "archive/version": b"3"}),
    "overlapping.safetensors": lambda folder: LOGITS["overlapping.safetensors"](),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(tmp_path, monkeypatch, name, refused):
    monkeypatch.setattr("longtail.files.reading.MAX_UNPACKED", MOST)
    path = tmp_path / name
    path.write_bytes(WEIGHTS[name](tmp_path))
    refused(read_weights, path)
    assert not (tmp_path / "ran").exists()


LISTS = {
    "latin.txt": "é.png 0\n".encode("latin-1"),
    "utf16.txt": "a.png 0\n".encode("utf-16"),
    "nul.txt": b"a\x00.png 0\n",
    "digits.txt": b"a.png " + b"9" * 5000 + b"\n",
    "large.txt": b"a.png 0\nb.png 100000000\n",
    "negative.txt": b"a.png -1\n",
    "words.txt": b"a.png cat\n",
    "dashes.txt": b"a.png --5\n",
    "alone.txt": b"0\n",
    "latin.csv": "path,label\né.png,0\n".encode("latin-1"),
    "digits.csv": b"path,label\na.png," + b"9" * 5000 + b"\n",
    "large.csv": b"path,label\na.png,0\nb.png,100000000\n",
    "nul.csv": b"path,label\na\x00.png,0\n",
    "field.csv": b'path,label\n"' + b"a" * 200_000 + b'",0\n',
}


@pytest.mark.parametrize("name", LISTS)
def test_lists(tmp_path, name, refused):
    path = tmp_path / name
    path.write_bytes(LISTS[name])
    reader = read_csv if path.suffix == ".csv" else read_list
    refused(lambda file: reader(file, tmp_path, DataConfig()), path)


@pytest.mark.parametrize(
    "content",
    [
        *(b"a = " + b"[" * 5000, b"a = 1\na = 2", b"\xff", b"x = 9999999999999999999-01-01"),
        *(b"epochs = 0x" + b"f" * 9_000, b"seed = " + b"9" * 5_000),  # numbers that cannot be shown
        b"a" + b".a" * 9_000 + b" = 1",  # a name of many parts takes time as the square of its length
        b"# " + b"a" * 70_000,
    ],
    ids=lambda content: content[:9].decode("latin-1"),
)
def test_toml(tmp_path, content, refused):
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    refused(read_toml, path)


@pytest.mark.parametrize(
    "values",
    [
        {"epochs": "long"},
        {"epochs": float("inf")},
        {"epochs": 1, "seed": 10**38},
        {"epochs": 1, "momentum": -1},
        {"epochs": 1, "validation": float("nan")},
        {"epochs": 1, "batch_size": 2.5},
        {"epochs": 1, "augment": 3},
        {"epochs": 1, "options": [1]},
        {"epochs": 1, "root": "a\0b"},
        {"epochs": 1, "compile": "yes"},
        {"epochs": 1, "profile": "steep"},
        {"epochs": True},
    ],
)
def test_settings_of_wrong_types(values):
    with pytest.raises(UserError):
        from_dict({"backbone": "digits", **values})


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b"{", b"[" * 200_000, b"\xff", b'"a"', b"1e999999999"])
def test_json(tmp_path, content, refused):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    refused(read_json, path)


READERS = {
    "a.npz": read_outputs,
    "a.npy": read_outputs,
    "a.csv": read_outputs,
    "a.safetensors": read_outputs,
    "a.pth": read_weights,
    "a.toml": read_toml,
    "run.json": read_json,
}


@pytest.mark.parametrize("name", READERS)
def test_pipes_and_folders_are_no_files(tmp_path, name):
    """Opening a pipe would wait for ever."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=r"does not exist|is not a file"):
        READERS[name](tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=r"does not exist|is not a file"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("name", READERS)
def test_links_in_a_circle_are_no_files(tmp_path, name):
    (tmp_path / name).symlink_to(tmp_path / name)
    with pytest.raises(UserError, match=r"does not exist|is not a file|Too many levels"):
        READERS[name](tmp_path / name)


COMMANDS = [
    ["train", "digits-lt", "--seed", "-1"],
    ["train", "digits-lt", "--seed", "9" * 39],
    ["train", "digits-lt", "--epochs", "inf"],
    ["train", "digits-lt", "--momentum", "-1"],
    ["train", "digits-lt", "--lr", "inf"],
    ["train", "digits-lt", "--root", "a\0b"],
    ["train", "digits-lt", "--out="],
    ["evaluate", ""],
    ["evaluate", "a\0b"],
    ["compare", "digits-lt", "--methods", "softmax", "--seeds", "9" * 39],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_impossible_words_are_one_line(tmp_path, monkeypatch, capfd, words):
    from longtail.cli import main

    monkeypatch.chdir(tmp_path)
    more = ["--out", "run"] if words[0] != "evaluate" and not any(word.startswith("--out") for word in words) else []
    assert main([*words, *more]) == 2
    said = capfd.readouterr().err
    assert len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_header_of_lies_is_refused_by_the_command(tmp_path):
    """The whole path, in a process of its own with bounded memory."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(LOGITS["overlapping.safetensors"]())
    command = [sys.executable, "-m", "longtail", "calibrate", str(path), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("names", [np.array("a"), np.array(["a"]), np.array([[1, 2], [3, 4]])])
def test_class_names_of_saved_logits(tmp_path, names, refused):
    np.savez(tmp_path / "a.npz", logits=np.eye(3), labels=np.arange(3), class_names=names)
    refused(read_outputs, tmp_path / "a.npz")


def test_every_setting_that_is_a_number_has_bounds():
    hints = get_type_hints(TrainConfig)
    numbers = {
        name for name, hint in hints.items() if {int, float} & {hint, *get_args(hint)} and get_origin(hint) is not dict
    }
    assert numbers == BOUNDS.keys()


def test_data_that_are_named_twice_are_one_line(tmp_path, capfd):
    from longtail.cli import main

    (tmp_path / "a.toml").write_text('data = "folder"\n')
    for words in (["--config", str(tmp_path / "a.toml")], ["--data", "folder"]):
        assert main(["train", str(tmp_path), "--out", str(tmp_path / "run"), *words]) == 2
        assert "named twice" in capfd.readouterr().err


def test_stored_bfloat16_logits_are_numbers(tmp_path):
    """Not the whole numbers that their bits would be."""
    path = tmp_path / "a.safetensors"
    logits = torch.tensor([[1.5, -2.0], [0.25, 3.0]], dtype=torch.bfloat16)
    write_tensors(path, {"logits": logits, "labels": torch.tensor([0, 1])}, {})
    np.testing.assert_array_equal(read_outputs(path).logits, logits.float())
