"""Locks: one holder, named to others, and free as soon as it is gone, however it went."""

import errno
import signal
import subprocess
import sys

import pytest

from longtail.errors import UserError
from longtail.files import atomic
from longtail.files.atomic import locked, locked_folder

HOLD = """
import os, sys, time
from pathlib import Path
from longtail.files.atomic import locked_folder
with locked_folder(Path(sys.argv[1])):
    parent = os.getpid()
    if len(sys.argv) > 2 and os.fork() == 0:
        os.close(1)
        while os.getppid() == parent:  # until it is gone, and a little longer
            time.sleep(0.01)
        time.sleep(5)
        os._exit(0)
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Start a process that holds a folder; all of them end with the test."""
    started = []

    def start(*words: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path), *words],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_process_is_told_who_holds_the_folder(tmp_path, holder, monkeypatch):
    process = holder()
    monkeypatch.setattr(atomic, "LOCK_SECONDS", 0)
    with (
        pytest.raises(UserError, match=rf"is in use by process {process.pid} on \S+ \(longtail"),
        locked_folder(tmp_path),
    ):
        pytest.fail("two hold one folder")


@pytest.mark.parametrize("words", [(), ("with a child that lives on",)])
def test_a_killed_holder_holds_nothing(tmp_path, holder, words):
    process = holder(*words)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with locked_folder(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert list(tmp_path.iterdir()) == []


def test_holders_take_turns_and_leave_nothing(tmp_path):
    """Six processes count to 20 each in one file, which only works if never two of them are inside."""
    program = """
import sys
from pathlib import Path
from longtail.files.atomic import locked
path = Path(sys.argv[1]) / "count"
for _ in range(20):
    with locked(path):
        number = int(path.read_text())
        path.write_text("")
        path.write_text(str(number + 1))
"""
    (tmp_path / "count").write_text("0")
    several = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) for _ in range(6)]
    assert [process.wait(600) for process in several] == [0] * 6
    assert (tmp_path / "count").read_text() == "120"
    assert [path.name for path in tmp_path.iterdir()] == ["count"]


def test_a_lock_is_given_back_when_the_block_fails(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path / "a"):
        raise KeyError
    with locked(tmp_path / "a"):
        pass


def test_without_locks_a_warning_says_so(tmp_path, monkeypatch):
    """As on network folders."""

    def refuse(*words):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="cannot be locked here; let only one process write"), locked_folder(tmp_path):
        pass
