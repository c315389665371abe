"""`longtail completion`: for the Tab key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from longtail.cli.parsing import Output, parse

HELP = """Print a script that completes commands, options, recipes and methods when you press Tab.

Examples:
  longtail completion bash > ~/.local/share/bash-completion/completions/longtail
  longtail completion zsh > ~/.zfunc/_longtail        (a folder in your fpath)
  longtail completion fish > ~/.config/fish/completions/longtail.fish

Run the command again after an upgrade, because the script contains the names.
"""


@dataclass(frozen=True)
class Completion(Output):
    """Which shell."""

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
    """The shell you use."""


def main(arguments: list[str]) -> int:
    options = parse(Completion, arguments, "completion", HELP)
    from longtail.cli.completion import SHELLS

    script = SHELLS[options.shell]()
    if not options.quiet and not options.json:
        print(script, end="")
    options.print_json({"shell": options.shell, "script": script})
    return 0
