"""Files and folders appear whole or not at all; journals lose at most their last line; errors are one line."""

import errno
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from longtail.errors import UserError
from longtail.files.atomic import (
    locked_folder,
    remove_unfinished,
    replacing,
    replacing_folder,
    restore_interrupted,
    write_json,
    write_text,
)
from longtail.files.records import append_line
from longtail.files.tensors import create, read

ANY = ("*",)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fill(folder, words: str) -> None:
    for word in words:
        (folder / word).write_text(word)


def write_folder(path, words: str) -> None:
    with replacing_folder(path, ANY, "a test") as folder:
        fill(folder, words)


def test_a_folder_is_replaced_as_a_whole_and_nothing_stays_beside_it(tmp_path):
    write_folder(tmp_path / "out", "abc")
    write_folder(tmp_path / "out", "cd")
    assert names(tmp_path / "out") == ["c", "d"]
    assert names(tmp_path) == ["out"]


def test_a_folder_behind_a_link_is_replaced_where_it_is(tmp_path):
    write_folder(tmp_path / "real", "a")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_folder(tmp_path / "link", "b")
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "real") == ["b"]


def test_a_failure_leaves_the_old_folder(tmp_path):
    write_folder(tmp_path / "out", "ab")
    with suppress(KeyError), replacing_folder(tmp_path / "out", ANY, "a test") as folder:
        fill(folder, "c")
        raise KeyError
    assert names(tmp_path / "out") == ["a", "b"]
    assert names(tmp_path) == ["out"]


def test_a_replacement_cut_off_between_two_steps_is_undone(tmp_path):
    write_folder(tmp_path / "out", "ab")
    left = tmp_path / ".out.part"
    (left / "new").mkdir(parents=True)
    fill(left / "new", "c")
    (tmp_path / "out").rename(left / "old")
    restore_interrupted(tmp_path / "out")
    assert names(tmp_path / "out") == ["a", "b"]
    assert names(tmp_path) == ["out"]


KILLED = """
import os, signal, sys
from pathlib import Path
from longtail.files.atomic import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("next_writer", [lambda path: write_text(path, "new"), remove_unfinished])
def test_what_a_killed_writer_left_is_removed_by_the_next_one(tmp_path, next_writer):
    path = tmp_path / "a.json"
    write_text(path, "old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / ".a.json.part" / "new" / "a.json").read_text() == "half"
    next_writer(path)
    assert path.read_text() in ("old", "new")
    assert names(tmp_path) == ["a.json"]


def test_what_a_process_writes_now_is_not_removed(tmp_path):
    with replacing(tmp_path / "a.json") as mine:
        mine.write_text("mine")
        remove_unfinished(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == "mine"


@pytest.mark.parametrize("name", [".a.json.part", ".a.json.part/new"])
def test_a_link_in_place_of_the_temporary_folder_is_removed_and_not_followed(tmp_path, name):
    precious = tmp_path / "precious"
    precious.mkdir()
    fill(precious, "ab")
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(precious)
    write_text(run / "a.json", "x")
    assert names(precious) == ["a", "b"]
    assert names(run) == ["a.json"]


def test_a_replacement_that_fails_between_its_two_steps_is_undone(tmp_path):
    write_folder(tmp_path / "out", "ab")
    with pytest.raises(UserError), replacing_folder(tmp_path / "out", ANY, "a test") as folder:
        folder.rmdir()  # so that it cannot be renamed
    assert names(tmp_path / "out") == ["a", "b"]
    assert names(tmp_path) == ["out"]


def test_a_file_is_replaced_with_the_permissions_of_the_user(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


@contextmanager
def small_files():
    """A disk on which a file has room for 1,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_without_space_the_file_and_what_it_needs_are_named(tmp_path):
    write_text(tmp_path / "a.json", "old")
    said = r"cannot write .*a\.json: File too large; .* bytes are free there: make room and run the command again"
    with small_files(), pytest.raises(UserError, match=said):
        write_json(tmp_path / "a.json", {"a": "x" * 1992})
    assert (tmp_path / "a.json").read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_a_mapped_file_takes_its_space_before_it_is_mapped(tmp_path):
    wanted = create(tmp_path / "a.safetensors", {"a": ((1000,), np.dtype(np.int64))}, {})
    with small_files(), pytest.raises(UserError, match=r"File too large \(8,\d\d\d bytes are needed"), wanted:
        pytest.fail("mapped without space")
    assert names(tmp_path) == []


def test_a_disk_that_cannot_reserve_is_written_to_all_the_same(tmp_path, monkeypatch):
    def refuse(*words):
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with create(tmp_path / "a.safetensors", {"a": ((3,), np.dtype(np.int64))}, {}) as arrays:
        arrays["a"][...] = 7
    assert read(tmp_path / "a.safetensors")[0]["a"].tolist() == [7] * 3


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file/a.json", "cannot write .*file/a.json: .*file: (File exists|Not a directory)"),
        ("x" * 300, "cannot write .*xxx: File name too long"),
    ],
)
def test_places_that_cannot_be_written(tmp_path, path, message):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=message):
        write_text(tmp_path / path, "x")
    assert names(tmp_path) == ["file"]


def test_a_folder_without_permission_is_named(tmp_path):
    """In a process of another user: root may write everywhere."""
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == os.getuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    program = f"""
import os
from pathlib import Path
import filelock
from longtail.files.atomic import write_text, replacing_folder
from longtail.errors import UserError
if os.getuid() == 0:
    os.setuid(65534)
folder = Path({str(tmp_path)!r})
new_folder = replacing_folder(folder / "b", "*", "a test")
for action in (lambda: write_text(folder / "a", "x"), new_folder.__enter__):
    try:
        action()
    except UserError as error:
        print(error)
"""
    if os.getuid() != 0:
        tmp_path.chmod(0o555)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    tmp_path.chmod(0o755)
    lines = said.stdout.splitlines()
    assert [line.rsplit(": ", 1)[1] for line in lines] == ["Permission denied"] * 2, said.stderr
    assert all("cannot write" in line for line in lines)


def test_a_folder_with_files_of_others_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with (
        pytest.raises(UserError, match=r"holds files that are not part of a report \(thesis.tex\)"),
        replacing_folder(tmp_path / "out", ("index.html",), "a report"),
    ):
        pytest.fail("replaced")
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"
    monkeypatch.chdir(tmp_path / "out")
    with (
        pytest.raises(UserError, match="is the current folder, which cannot be replaced"),
        replacing_folder(tmp_path / "out", ANY, "a report"),
    ):
        pytest.fail("replaced")
    assert names(tmp_path) == ["out"]


def test_a_pipe_a_device_or_a_folder_is_not_replaced_by_a_file(tmp_path):
    """`--out /dev/null` as root would otherwise remove /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "printed").symlink_to("/proc/self/fd/1")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "null", "printed", "folder"):
        with pytest.raises(UserError, match=rf"{name} is a .*; choose the name of a file"):
            write_text(tmp_path / name, "text")
    assert names(tmp_path) == ["folder", "null", "pipe", "printed"]
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("trap", ["link", "pipe"])
def test_our_files_are_not_written_through_what_a_stranger_put_there(tmp_path, trap):
    """A lock is emptied and a journal grows: behind a link it would be another file of the user's."""
    mine = tmp_path / "mine.txt"
    mine.write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (".lock", "metrics.jsonl"):
        (folder / name).symlink_to(mine) if trap == "link" else os.mkfifo(folder / name)
    with pytest.raises(UserError, match=r"run/.lock is .*remove it"), locked_folder(folder):
        pytest.fail("held")
    with pytest.raises(UserError, match="metrics.jsonl is .*remove it"):
        append_line(folder / "metrics.jsonl", {"step": 1})
    assert mine.read_text() == "precious"


def test_a_number_that_is_not_finite_is_one_line_and_no_file(tmp_path):
    with pytest.raises(UserError, match="a.json: a number in it is not finite"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert names(tmp_path) == []


def test_links_that_lead_in_a_circle_are_one_line(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with (
        pytest.raises(UserError, match="loop is a link that leads nowhere"),
        replacing_folder(tmp_path / "loop", ANY, "a report"),
    ):
        pytest.fail("replaced")
    with pytest.raises(UserError, match="loop: .*links"):
        write_text(tmp_path / "loop", "text")


def test_a_line_without_space_leaves_the_journal_as_it_was(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"text": "x" * 900})
    before = path.read_bytes()
    with small_files(), pytest.raises(UserError, match=r"cannot write .*metrics.jsonl: File too large"):
        append_line(path, {"text": "y" * 900})
    assert path.read_bytes() == before
