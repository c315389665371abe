import re
import shutil
import subprocess

import pytest

from longtail.cli import completion as completions
from longtail.cli.main import COMMANDS
from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS
from longtail.recipes import RECIPES

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """`complete(line)`: what a fresh bash answers to a Tab at the end of the line."""
    script = tmp_path_factory.mktemp("completion") / "longtail.bash"
    script.write_text(completions.bash())
    asking = r"""
        source "$1"
        read -r _ _ _ _ function command <<< "$(complete -p longtail)"
        [ "$command" = longtail ] || exit 9
        IFS=' ' read -r -a COMP_WORDS <<< "$2"
        [[ "$2" == *' ' ]] && COMP_WORDS+=("")
        COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
        COMP_LINE="$2" COMP_POINT=${#2}
        "$function"
        printf '%s\n' "${COMPREPLY[@]}"
    """

    def ask(line: str) -> list[str]:
        command = ["bash", "--norc", "-c", asking, "bash", str(script), line]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.split()

    return ask


def test_commands(complete):
    assert complete("longtail ") == [*COMMANDS, "--help", "--version"]
    assert complete("longtail ex") == ["extract", "export"]


def test_options_of_the_command(complete):
    assert complete("longtail train digits-lt --batch") == ["--batch-size"]
    assert complete("longtail export runs/x --o") == ["--out", "--overwrite"]
    assert complete("longtail train --conf") == ["--config"]
    assert "--epochs" not in complete("longtail export --")


def test_recipes_stand_first(complete):
    for command in ("train", "compare", "distribution"):
        assert complete(f"longtail {command} ") == list(RECIPES)
    assert complete("longtail train --out ") == []  # files


def test_names_of_methods_and_choices(complete):
    assert complete("longtail train digits-lt --method ") == list(TRAIN_METHODS)
    assert complete("longtail calibrate runs/x --method mar") == ["marc"]
    assert complete("longtail compare digits-lt --methods softmax dis") == ["disalign"]
    assert set(complete("longtail compare digits-lt --methods ")) == {*TRAIN_METHODS, *POSTHOC_METHODS}
    assert complete("longtail export runs/x --format on") == ["onnx"]
    assert complete("longtail completion ") == ["bash", "zsh", "fish"]
    assert complete("longtail train --backbone resnext") == ["resnext50"]


def test_an_interactive_shell_completes(tmp_path):
    """The Tab key itself, in a bash that reads the script and a terminal of its own."""
    pexpect = pytest.importorskip("pexpect")
    script = tmp_path / "longtail.bash"
    script.write_text(completions.bash())
    shell = pexpect.spawn("bash", ["--norc", "--noprofile"], encoding="utf-8", timeout=600, env={"PS1": "> "})
    shell.sendline(f"source {script}; bind 'set bell-style none'; echo rea''dy")
    shell.expect("ready")
    shell.send("longtail calib\t")
    shell.expect("calibrate ")
    shell.send("x --meth\tta\t")
    shell.expect("--method tau-norm ")
    shell.close(force=True)


def test_scripts_of_other_shells_name_the_same():
    assert completions.zsh().startswith("#compdef longtail\n")
    lines = completions.fish().splitlines()
    assert all(line.startswith("complete -c longtail") for line in lines[1:])
    named = {found[1] for line in lines if (found := re.search(r"__fish_use_subcommand -a (\S+)", line))}
    assert named == set(COMMANDS)
    assert any("from calibrate' -l method -x -a" in line and "tau-norm" in line for line in lines)
