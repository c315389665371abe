"""Files from strangers: each reader answers with one line, runs nothing, and takes little memory."""

import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from longtail.backbones.weights import read_weights
from longtail.config import DataConfig, from_dict, read_toml
from longtail.core.reading import MOST_UNPACKED
from longtail.core.records import read_json
from longtail.core.tensors import write_tensors
from longtail.data.csv_files import read_csv
from longtail.data.download import unpack
from longtail.data.images import FileImages
from longtail.data.list_files import read_list
from longtail.data.parquet_files import read_parquet
from longtail.errors import UserError
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


BOMB = bytes(MOST_UNPACKED + (1 << 20))
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
    "huge-length.safetensors": lambda: safetensors(b"{}", length=2**63),
    "deep.safetensors": lambda: safetensors(b"[" * 100_000),
    "negative.safetensors": lambda: safetensors({"logits": entry([2, 2], -16, 0)}, bytes(16)),
    "overlapping.safetensors": lambda: safetensors(
        {"logits": entry([2, 2], 0, 16), "labels": entry([2], 8, 24, "I64")}, bytes(24)
    ),
    "gap.safetensors": lambda: safetensors({"logits": entry([2, 2], 8, 24)}, bytes(24)),
    "short.safetensors": lambda: safetensors({"logits": entry([2, 2], 0, 16)}, bytes(15)),
    "long.safetensors": lambda: safetensors({"logits": entry([2, 2], 0, 16)}, bytes(17)),
    "terabytes.safetensors": lambda: safetensors({"logits": entry([10**12, 2], 0, 8 * 10**12)}, bytes(16)),
    "fraction.safetensors": lambda: safetensors({"logits": entry([1.5, 2], 0, 12)}, bytes(12)),
    "type.safetensors": lambda: safetensors({"logits": entry([2, 2], 0, 16, "PICKLE")}, bytes(16)),
    "list.safetensors": lambda: safetensors([1]),
    "null.safetensors": lambda: safetensors({"logits": None}),
    "twice.safetensors": lambda: safetensors(
        b'{"logits": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}, "logits": '
        b'{"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}',
        bytes(8),
    ),
    "metadata.safetensors": lambda: safetensors({"__metadata__": {"longtail": "[" * 100_000}}),
}


def refused(read, path: Path) -> None:
    """One line that names the file, and no more memory than a small part of what there is."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as error:
        read(path)
    said = str(error.value)
    assert path.name in said
    assert len(said.splitlines()) == 1
    assert len(said) < 600
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # kB: 1 GB


@pytest.mark.parametrize("name", LOGITS)
def test_saved_logits(tmp_path, name):
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
def test_weights(tmp_path, name):
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
def test_lists(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(LISTS[name])
    reader = read_csv if path.suffix == ".csv" else read_list
    refused(lambda file: reader(file, tmp_path), path)


def test_many_classes_of_many_images_and_held_out_lists_are_fine(tmp_path):
    """Only a label far above the number of images is a mistake, and only where it makes the classes."""
    (tmp_path / "few.txt").write_text("a.png 900\n")
    assert read_list(tmp_path / "few.txt", tmp_path).num_classes == 901
    (tmp_path / "held-out.txt").write_text("a.png 99999\n")
    assert read_list(tmp_path / "held-out.txt", tmp_path, num_classes=100_000).num_classes == 100_000


@pytest.mark.parametrize("metadata", [b"[" * 100_000, b"{", b'{"info": 3}', b"\xff"])
def test_parquet_metadata(tmp_path, metadata):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"image": [b"x"], "label": [0]})
    path = tmp_path / "train.parquet"
    parquet.write_table(table.replace_schema_metadata({b"huggingface": metadata}), path)
    refused(lambda file: read_parquet([file]), path)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", b"PAR1\xff\xff\xff\x7fPAR1"])
def test_parquet_bytes(tmp_path, content):
    pytest.importorskip("pyarrow")
    path = tmp_path / "train.parquet"
    path.write_bytes(content)
    refused(lambda file: read_parquet([file]), path)


@pytest.mark.parametrize("content", [b"a = " + b"[" * 5000, b"a = 1\na = 2", b"\xff", b"x = 9999999999999999999-01-01"])
def test_toml(tmp_path, content):
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    refused(read_toml, path)


@pytest.mark.parametrize(
    "values",
    [
        {"epochs": "long"},
        {"epochs": [1]},
        {"epochs": float("inf")},
        {"epochs": float("nan")},
        {"epochs": 1, "seed": -1},
        {"epochs": 1, "seed": 10**38},
        {"epochs": 1, "momentum": -1},
        {"epochs": 1, "batch_size": 2.5},
        {"epochs": 1, "augment": 3},
        {"epochs": 1, "options": [1]},
        {"epochs": 1, "root": 5},
        {"epochs": 1, "root": "a\0b"},
        {"epochs": 1, "compile": "yes"},
        {"epochs": 1, "profile": "steep"},
        {"epochs": True},
    ],
)
def test_settings_of_wrong_types(values):
    with pytest.raises(UserError):
        from_dict({"backbone": "digits", **values})


def test_the_share_held_out_is_a_number():
    with pytest.raises(UserError, match="--validation must be a number"):
        DataConfig(validation=float("nan"))


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b"{", b"[" * 200_000, b"\xff", b'"a"', b"1e999999999"])
def test_json(tmp_path, content):
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


COMMANDS = [
    ["train", "digits-lt", "--seed", "-1"],
    ["train", "digits-lt", "--seed", "9" * 39],
    ["train", "digits-lt", "--epochs", "inf"],
    ["train", "digits-lt", "--epochs", "nan"],
    ["train", "digits-lt", "--momentum", "-1"],
    ["train", "digits-lt", "--validation", "nan"],
    ["train", "digits-lt", "--lr", "inf"],
    ["train", "digits-lt", "--root", "a\0b"],
    ["train", "digits-lt", "--out", ""],
    ["train", "digits-lt", "--out="],
    ["evaluate", ""],
    ["evaluate", "a\0b"],
    ["compare", "digits-lt", "--methods", "softmax", "--seeds", "-1"],
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


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(ran) (w) file closefile\nshowpage\n"


def flat_png(width: int, height: int) -> bytes:
    """A PNG of one bit per pixel: a few kB, whatever its size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1 + -(-width // 8)) * min(height, 100), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


PICTURES = {
    "postscript.png": lambda: POSTSCRIPT,  # Pillow would give it to Ghostscript
    "large.png": lambda: flat_png(20_000, 20_000),
    "wide.png": lambda: flat_png(2**31 - 1, 1),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(PICTURES[name]())
    program = tmp_path / "gs"  # stands for every program that a picture might be given to
    program.write_text(f"#!/bin/sh\necho ran > {tmp_path / 'ran'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    images = FileImages(labels=torch.zeros(1).long(), class_names=("a",), root=tmp_path, paths=np.array([name]))
    images.header(0)
    refused(lambda path: images.open(0), tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_parquet_of_more_rows_than_it_holds(tmp_path):
    """Ten million equal labels take a few hundred bytes in the file, and far more in memory."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "train.parquet"
    size = 10_000_000
    table = pa.table({"image": pa.nulls(size, pa.binary()), "label": pa.array(np.zeros(size, np.int8))})
    parquet.write_table(table, path)
    assert path.stat().st_size < 100_000
    refused(lambda file: read_parquet([file]), path)


def test_words_of_a_parquet_file_are_kept_once(tmp_path):
    """A long word that stands in every row."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "train.parquet"
    words = pa.DictionaryArray.from_arrays(np.arange(200_000, dtype=np.int32) % 2, ["a" * 100_000, "b"])
    parquet.write_table(pa.table({"image": pa.nulls(200_000, pa.binary()), "label": words}), path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_parquet([path]).class_counts.tolist() == [100_000, 100_000]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # kB


@pytest.mark.parametrize("labels", [[{"a": 1}], [[1]], [1.5], [None], [b"x"]])
def test_labels_of_a_parquet_file_that_are_no_classes(tmp_path, labels):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"image": [b"x"], "label": labels}), path)
    refused(lambda file: read_parquet([file]), path)


def archive(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as file:
        for member in members:
            file.addfile(member, io.BytesIO(bytes(member.size)) if member.isreg() else None)
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 3) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.size = kind, target, size if kind == tarfile.REGTYPE else 0
    return found


ESCAPES = {
    "above": (member("../escaped"),),
    "absolute": (member("/tmp/longtail-escaped"),),
    "link": (member("a", tarfile.SYMTYPE, "../.."), member("a/escaped")),
    "hard link": (member("a", tarfile.LNKTYPE, "../../etc/passwd"),),
    "device": (member("a", tarfile.CHRTYPE),),
    "pipe": (member("a", tarfile.FIFOTYPE),),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_archives_stay_in_their_folder(tmp_path, name):
    folder = tmp_path / "inner" / "data"
    folder.mkdir(parents=True)
    path = archive(tmp_path / "cifar.tar.gz", *ESCAPES[name])
    before = set(tmp_path.rglob("*"))
    with suppress(UserError):
        unpack(path, folder)
    outside = set(tmp_path.rglob("*")) - before
    assert all(found.resolve().is_relative_to(folder) and found.is_relative_to(folder) for found in outside)
    assert not Path("/tmp/longtail-escaped").exists()
    assert not any(found.is_fifo() or found.is_symlink() for found in outside)


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b", b"hello" * 100])
def test_archives_that_are_none(tmp_path, content):
    (tmp_path / "cifar.tar.gz").write_bytes(content)
    refused(lambda path: unpack(path, tmp_path), tmp_path / "cifar.tar.gz")


def test_an_archive_of_terabytes_is_not_unpacked(tmp_path):
    """Only its header says so: what follows is cut off."""
    info = member("a", size=10**13)
    (tmp_path / "cifar.tar.gz").write_bytes(info.tobuf() + bytes(1024))
    refused(lambda path: unpack(path, tmp_path), tmp_path / "cifar.tar.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["cifar.tar.gz"]


@pytest.mark.parametrize("names", [np.array("a"), np.array(["a"]), np.array([[1, 2], [3, 4]])])
def test_class_names_of_saved_logits(tmp_path, names):
    np.savez(tmp_path / "a.npz", logits=np.eye(3), labels=np.arange(3), class_names=names)
    refused(read_outputs, tmp_path / "a.npz")


def test_bfloat16_logits_of_ours_are_numbers(tmp_path):
    """Not the whole numbers that their bits would be."""
    path = tmp_path / "a.safetensors"
    logits = torch.tensor([[1.5, -2.0], [0.25, 3.0]], dtype=torch.bfloat16)
    write_tensors(path, {"logits": logits, "labels": torch.tensor([0, 1])}, {})
    np.testing.assert_array_equal(read_outputs(path).logits, logits.float())
