"""The words of a command line before they are parsed: `--option value` and `--option=value` alike."""

from __future__ import annotations

from collections.abc import Sequence

from longtail.cli.option_names import Word
from longtail.errors import UserError


def dashed(words: Sequence[str]) -> list[str]:
    """Options spelled with dashes.

    >>> dashed(["--batch_size=4", "my_folder"])
    ['--batch-size=4', 'my_folder']
    """
    parts = [word.partition("=") if word.startswith("--") else (word, "", "") for word in words]
    return [(name.replace("_", "-") if name.startswith("--") else name) + sign + rest for name, sign, rest in parts]


def given(words: Sequence[str], option: str) -> bool:
    """Whether an option is among the words."""
    return any(word.partition("=")[0] == option for word in words)


def value_of(words: Sequence[str], option: str) -> str | None:
    """The value of an option, None if it is not given; the last one counts.

    >>> value_of(["--out=a", "--config", "f"], "--config"), value_of(["--out=a"], "--out")
    ('f', 'a')
    """
    found = None
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name != option:
            continue
        if not equals and (place + 1 == len(words) or words[place + 1].startswith("--")):
            raise UserError(f"{option} needs a value")
        found = value if equals else words[place + 1]
    return found


def without(words: Sequence[str], option: str) -> list[str]:
    """The words without an option and its value."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word.partition("=")[0] == option:
            skip = "=" not in word
        else:
            kept.append(word)
    return kept


def take_free_word(words: Sequence[str], known: Sequence[Word]) -> tuple[str | None, list[str]]:
    """The first word that belongs to no option, and the other words."""
    options = {word.name: word for word in known}
    place = 0
    while place < len(words):
        word = words[place]
        if not word.startswith("-"):
            return word, [*words[:place], *words[place + 1 :]]
        option = None if "=" in word else options.get(word)
        place += 1
        if option is None or not option.takes_value:
            continue
        place += 1
        while option.several and place < len(words) and not words[place].startswith("--"):
            place += 1
    return None, list(words)
