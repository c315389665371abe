"""Completion scripts for shells; they contain every command, option and name, so that completion is quick."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from longtail.cli.main import COMMANDS
from longtail.cli.option_names import ALWAYS, Word, words_of
from longtail.cli.parsing import Output
from longtail.cli.starting_point import CONFIG
from longtail.data.sources import SOURCES
from longtail.recipes import RECIPES
from longtail.report.paper import ITEMS

# Commands whose first word may be a recipe.
OF_RECIPES = ("train", "compare", "distribution")


@dataclass(frozen=True)
class Command:
    """What can follow a command: its options, its first word, and the values of options with known names."""

    name: str
    summary: str
    options: list[Word]
    first: tuple[str, ...]

    def values(self) -> dict[str, tuple[str, ...]]:
        return {word.name: word.choices for word in self.options if word.choices}


def commands() -> list[Command]:
    """Every command, with the names that its options accept."""
    return [_command(name, summary) for name, summary in COMMANDS.items()]


def _command(name: str, summary: str) -> Command:
    module = importlib.import_module(f"longtail.cli.commands.{name}")
    (kind,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Output) and value.__module__ == module.__name__
    )
    names = _names(name)
    words = [replace(word, choices=word.choices or names.get(word.name, ())) for word in words_of(kind)]
    options = [word for word in words if word.name.startswith("--")]
    if name in ("train", "compare", "reproduce"):
        options.append(CONFIG)
    options += [Word(option, takes_value=False, is_path=False) for option in ALWAYS]
    first = tuple(RECIPES) if name in OF_RECIPES else tuple(ITEMS) if name == "reproduce" else ()
    first += tuple(choice for word in words if not word.name.startswith("--") for choice in word.choices)
    return Command(name, summary, options, first)


def _names(command: str) -> dict[str, tuple[str, ...]]:
    """Option → the names that it accepts."""
    from longtail.backbones import BACKBONES
    from longtail.data.augment import AUGMENTATION_NAMES
    from longtail.data.samplers import SAMPLERS
    from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS

    return {
        "--method": tuple(POSTHOC_METHODS if command == "calibrate" else TRAIN_METHODS),
        "--methods": (*TRAIN_METHODS, *POSTHOC_METHODS),
        "--recipes": tuple(RECIPES),
        "--backbone": tuple(BACKBONES),
        "--data": tuple(SOURCES),
        "--augment": AUGMENTATION_NAMES,
        "--sampler": SAMPLERS,
        "--device": ("auto", "cpu", "cuda", "mps"),
    }


def bash() -> str:
    """For bash: words that begin with the typed letters; files if the value is a path or unknown."""
    lines = [
        "# Completion of longtail for bash.",
        "_longtail() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" at option= words= options= values=',
        "    COMPREPLY=()",
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f'        COMPREPLY=($(compgen -W "{" ".join(COMMANDS)} --help --version" -- "$word"))',
        "        return",
        "    fi",
        "    # The option that the word belongs to: some take several values.",
        "    for ((at = COMP_CWORD - 1; at > 1; at--)); do",
        '        if [[ "${COMP_WORDS[at]}" == --* ]]; then option="${COMP_WORDS[at]}"; break; fi',
        "    done",
        '    case "${COMP_WORDS[1]}" in',
    ]
    for command in commands():
        lines += [
            f"        {command.name})",
            f'            words="{" ".join(command.first)}"',
            f'            options="{" ".join(word.name for word in command.options)}"',
            '            case "$option" in',
            *(f'                {name}) values="{" ".join(names)}" ;;' for name, names in command.values().items()),
            "            esac ;;",
        ]
    lines += [
        "        *) return ;;",
        "    esac",
        '    if [[ "$word" == -* ]]; then values="$options"',
        '    elif [ "$COMP_CWORD" -eq 2 ]; then values="$words"; fi',
        "    # Where nothing is known the shell completes files.",
        '    [ -z "$values" ] || COMPREPLY=($(compgen -W "$values" -- "$word"))',
        "}",
        "complete -o default -F _longtail longtail",
    ]
    return "\n".join(lines) + "\n"


def zsh() -> str:
    """For zsh: the same function, through zsh's `bashcompinit`."""
    return "#compdef longtail\nautoload -U +X bashcompinit && bashcompinit\n" + bash()


def fish() -> str:
    """For fish: one line per command and option."""
    lines = ["# Completion of longtail for fish.", "complete -c longtail -f"]
    for command in commands():
        seen = f"-n '__fish_seen_subcommand_from {command.name}'"
        lines.append(
            f"complete -c longtail -n __fish_use_subcommand -a {command.name} -d {_fish_quoted(command.summary)}"
        )
        if command.first:
            lines.append(f"complete -c longtail {seen} -a {_fish_quoted(' '.join(command.first))}")
        else:
            lines.append(f"complete -c longtail {seen} -F")
        for word in command.options:
            line = f"complete -c longtail {seen} -l {word.name.removeprefix('--')}"
            if word.choices:
                line += f" -x -a {_fish_quoted(' '.join(word.choices))}"
            elif word.takes_value:
                line += " -r -F" if word.is_path else " -x"
            lines.append(line)
    return "\n".join(lines) + "\n"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
