"""Parquet files and archives from strangers: one line, nothing outside their folder, little memory."""

import io
import os
import resource
import tarfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from longtail.config import DataConfig
from longtail.data import parquet as parquet_images
from longtail.data.cifar import unpack
from longtail.data.listings import read_list
from longtail.data.parquet import read_parquet
from longtail.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")
ANY = DataConfig()


def test_many_classes_of_many_images_and_held_out_lists_are_fine(tmp_path):
    """Only a label far above the number of images is a mistake, and only where it makes the classes."""
    (tmp_path / "few.txt").write_text("a.png 900\n")
    assert read_list(tmp_path / "few.txt", tmp_path, ANY).images.num_classes == 901
    (tmp_path / "held-out.txt").write_text("a.png 99999\n")
    names = tuple(map(str, range(100_000)))
    assert read_list(tmp_path / "held-out.txt", tmp_path, ANY, names).images.num_classes == 100_000


@pytest.mark.parametrize("metadata", [b"[" * 100_000, b"{", b'{"info": 3}', b"\xff"])
def test_parquet_metadata(tmp_path, metadata, refused):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"image": [b"x"], "label": [0]})
    path = tmp_path / "train.parquet"
    parquet.write_table(table.replace_schema_metadata({b"huggingface": metadata}), path)
    refused(lambda file: read_parquet([file], tmp_path, ANY), path)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", b"PAR1\xff\xff\xff\x7fPAR1"])
def test_parquet_bytes(tmp_path, content, refused):
    pytest.importorskip("pyarrow")
    path = tmp_path / "train.parquet"
    path.write_bytes(content)
    refused(lambda file: read_parquet([file], tmp_path, ANY), path)


def test_parquet_of_more_rows_than_it_holds(tmp_path, refused):
    """Ten million equal labels take a few hundred bytes in the file, and far more in memory."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "train.parquet"
    size = 10_000_000
    table = pa.table({"image": pa.nulls(size, pa.binary()), "label": pa.array(np.zeros(size, np.int8))})
    parquet.write_table(table, path)
    assert path.stat().st_size < 100_000
    refused(lambda file: read_parquet([file], tmp_path, ANY), path)


def test_a_parquet_file_of_more_bytes_than_it_holds(tmp_path, monkeypatch, refused):
    """Four million zeros in some hundred bytes."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(parquet_images, "MAX_UNPACKED", 1 << 20)
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"image": [bytes(4_000_000)], "label": [0]}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    refused(lambda file: read_parquet([file], tmp_path, ANY), path)


def test_a_parquet_file_whose_rows_refer_to_one_large_image(tmp_path, monkeypatch, refused):
    """The pages are small: each row is a few bits that mean 100 kB."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(parquet_images, "MAX_UNPACKED", 1 << 20)
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"image": [bytes(100_000)] * 500, "label": [0] * 500}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    refused(lambda file: read_parquet([file], tmp_path, ANY).images.open(0), path)
    assert list((tmp_path / "cache").rglob("*.arrow")) == []


def test_a_record_that_contradicts_itself_does_not_end_the_process(tmp_path):
    """Every byte of the record at the end of a Parquet file, changed: Arrow aborts on some if asked for a column."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"image": ["a.png", "b.png", None], "label": ["x", "y", "y"]}), path)
    content = path.read_bytes()
    size = int.from_bytes(content[-8:-4], "little")
    child = os.fork()
    if child == 0:
        try:
            for place in range(len(content) - 8 - size, len(content) - 8):
                for bit in (1, 2, 64):
                    path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
                    with suppress(UserError):
                        read_parquet([path], tmp_path, ANY).images.class_counts.sum()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_words_of_a_parquet_file_are_kept_once(tmp_path):
    """A long word that stands in every row."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "train.parquet"
    words = pa.DictionaryArray.from_arrays(np.arange(200_000, dtype=np.int32) % 2, ["a" * 100_000, "b"])
    parquet.write_table(pa.table({"image": pa.nulls(200_000, pa.binary()), "label": words}), path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_parquet([path], tmp_path, ANY).images.class_counts.tolist() == [100_000, 100_000]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # kB


@pytest.mark.parametrize("labels", [[{"a": 1}], [[1]], [1.5], [None], [b"x"]])
def test_labels_of_a_parquet_file_that_are_no_classes(tmp_path, labels, refused):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"image": [b"x"], "label": labels}), path)
    refused(lambda file: read_parquet([file], tmp_path, ANY), path)


@pytest.mark.parametrize("name", ["pipe", "missing", "folder", "/dev/zero"])
def test_a_cell_that_names_another_file(tmp_path, monkeypatch, name, refused):
    """Opening a pipe would wait for ever."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    cells = pa.array([{"bytes": None, "path": name}], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"image": cells, "label": [0]}), path)
    refused(lambda file: read_parquet([file], tmp_path, ANY).images.open(0), path)


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
def test_archives_that_are_none(tmp_path, content, refused):
    (tmp_path / "cifar.tar.gz").write_bytes(content)
    refused(lambda path: unpack(path, tmp_path), tmp_path / "cifar.tar.gz")


def test_an_archive_of_terabytes_is_not_unpacked(tmp_path, refused):
    """Only its header says so: what follows is cut off."""
    info = member("a", size=10**13)
    (tmp_path / "cifar.tar.gz").write_bytes(info.tobuf() + bytes(1024))
    refused(lambda path: unpack(path, tmp_path), tmp_path / "cifar.tar.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["cifar.tar.gz"]
