"""Completion of commands and options: the script that tyro writes, sourced by a fresh bash."""

import shutil
import subprocess

import pytest

from longtail.cli.main import COMMANDS, main

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """`complete(line)`: the words that bash offers for a Tab at the end of the line."""
    script = tmp_path_factory.mktemp("completion") / "longtail.bash"
    assert main(["--tyro-write-completion", "bash", str(script)]) == 0
    asking = r"""
        source "$1"
        read -r -a declared <<< "$(complete -p longtail)"
        for ((at = 0; at < ${#declared[@]}; at++)); do
            [ "${declared[at]}" = -F ] && function="${declared[at + 1]}"
        done
        IFS=' ' read -r -a COMP_WORDS <<< "$2"
        [[ "$2" == *' ' ]] && COMP_WORDS+=("")
        COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
        COMP_LINE="$2" COMP_POINT=${#2}
        "$function"
        printf '%s\n' "${COMPREPLY[@]}"
    """

    def ask(line: str) -> list[str]:
        command = ["bash", "--norc", "-c", asking, "bash", str(script), line]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    return ask


def test_commands(complete):
    assert set(COMMANDS) <= set(complete("longtail "))
    assert set(complete("longtail ex")) == {"extract", "export"}


def test_options_and_choices_of_the_command(complete):
    assert complete("longtail train digits-lt --batch") == ["--batch-size"]
    assert set(complete("longtail export runs/x --o")) == {"--out", "--overwrite"}
    assert "--epochs" not in complete("longtail export --")
    assert complete("longtail export runs/x --format on") == ["onnx"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells_name_every_command(shell, tmp_path):
    script = tmp_path / "script"
    assert main(["--tyro-write-completion", shell, str(script)]) == 0
    assert all(name in script.read_text() for name in COMMANDS)
