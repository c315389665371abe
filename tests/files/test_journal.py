"""Journals lose at most their last line, and damage is named."""

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


def test_a_journal_line_torn_anywhere_is_skipped_and_cut(journal, tmp_path):
    assert read_lines(tmp_path / "none") == []
    whole = journal.read_bytes()
    begin = whole.rindex(b"\n", 0, -1) + 1
    for end in range(begin, len(whole)):
        journal.write_bytes(whole[:end])
        assert read_lines(journal) == ENTRIES[:2]
        keep_lines(journal, read_lines(journal))
        append_line(journal, ENTRIES[2])
        assert journal.read_bytes() == whole


@pytest.mark.parametrize("line", ["{", "null", "[" * 100_000, "\udcff"])
def test_a_damaged_journal_line_is_named(journal, line):
    lines = journal.read_bytes().splitlines()
    lines[1] = line.encode(errors="surrogateescape")
    journal.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(UserError, match=r"metrics.jsonl is damaged: line 2 is not what was written"):
        read_lines(journal)
