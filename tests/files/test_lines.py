"""Journals: what a killed writer tore is skipped and cut; what was damaged is an error."""

import json

import pytest

from longtail.errors import UserError
from longtail.files.records import append_line, keep_lines, read_lines

ENTRIES = [{"step": 1, "loss": 0.1}, {"step": 2, "text": "é"}, {"step": 3}]


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for entry in ENTRIES:
        append_line(path, entry)
    return path


def test_lines_come_back(journal, tmp_path):
    assert read_lines(journal) == ENTRIES
    assert read_lines(tmp_path / "none") == []


def test_a_line_torn_anywhere_is_skipped_and_cut(journal):
    whole = journal.read_bytes()
    begin = whole.rindex(b"\n", 0, -1) + 1
    for end in range(begin, len(whole)):
        journal.write_bytes(whole[:end])
        assert read_lines(journal) == ENTRIES[:2]
        keep_lines(journal, read_lines(journal))
        append_line(journal, ENTRIES[2])
        assert journal.read_bytes() == whole


def test_what_is_whole_is_not_written_again(journal):
    before = journal.stat().st_ino, journal.stat().st_mtime_ns
    keep_lines(journal, read_lines(journal))
    assert (journal.stat().st_ino, journal.stat().st_mtime_ns) == before


@pytest.mark.parametrize("line", ["{", "[]", "null", "1", "[" * 100_000, "\udcff"])
def test_a_damaged_line_is_named(journal, line):
    lines = journal.read_bytes().splitlines()
    lines[1] = line.encode(errors="surrogateescape")
    journal.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(UserError, match=r"metrics.jsonl is damaged: line 2 is not what was written"):
        read_lines(journal)


def test_a_line_without_place_leaves_the_journal_as_it_was(tmp_path):
    """A limit on the size of files fails as a full disk does, in the middle of a line."""
    import resource
    import signal

    path = tmp_path / "metrics.jsonl"
    append_line(path, ENTRIES[0])
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
        with pytest.raises(UserError, match=r"cannot write .*metrics.jsonl: File too large"):
            append_line(path, ENTRIES[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_bytes() == before
    assert json.loads(before) == ENTRIES[0]
