"""Messages, environment variables and home folders."""

import pytest

from longtail.errors import UserError
from longtail.files.atomic import (
    cache_folder,
)
from longtail.files.reading import expanded
from longtail.launch import env_number


def test_a_message_keeps_both_ends_whatever_it_quotes():
    said = str(UserError(f"prior.csv, line 3: found {'x' * 10_000}; write class,weight"))
    assert len(said) == 1203
    assert said.startswith("prior.csv, line 3: found xxx")
    assert said.endswith("xxx; write class,weight")


def test_numbers_of_processes_that_cannot_be(monkeypatch):
    for text in ("-1", "\u00b2", "9" * 5000, "abc", "0"):
        monkeypatch.setenv("WORLD_SIZE", text)
        with pytest.raises(UserError, match="WORLD_SIZE is .*set a whole number"):
            env_number("WORLD_SIZE", 1)


@pytest.mark.parametrize("find", [cache_folder, lambda: expanded("~/photos"), lambda: expanded("~no-such-user/a")])
def test_a_user_without_a_home_is_told_what_to_do(monkeypatch, find):
    """As in containers that run under a number of no user."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("LONGTAIL_CACHE", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    with pytest.raises(UserError, match=r"set LONGTAIL_CACHE|give the whole path"):
        find()
