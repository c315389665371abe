"""What every command does alike: --json is one document, --quiet is silent, a mistake is one line and exit code 2."""

import json
import os
import pty
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from longtail.cli.main import COMMANDS, main
from longtail.config import DataConfig
from longtail.data.splits import open_splits
from longtail.errors import UserError

# Command → words that succeed, in a folder with a finished run called `run`.
GOOD = {
    "distribution": ["digits-lt"],
    "train": ["digits-lt", "--iterations", "2", "--device", "cpu", "--out", "new"],
    "extract": ["run", "--split", "validation", "--device", "cpu", "--out", "outputs.safetensors"],
    "calibrate": ["run", "--device", "cpu"],
    "probe": ["embeddings.npz", "--out", "head"],
    "compare": [
        *("digits-lt", "--iterations", "2", "--device", "cpu", "--methods", "softmax", "marc"),
        *("--seeds", "0", "--out", "compared"),
    ],
    "diagnose": ["run"],
    "report": ["run"],
    "export": ["run", "--format", "json", "--out", "head.json"],
    "methods": [],
    "evaluate": ["run", "--device", "cpu"],
    "predict": ["run", "photo.png", "--device", "cpu"],
}
# Command → words that a user can correct, and what is said.
BAD = {
    "distribution": (["nowhere"], "'nowhere' is not a file, folder or recipe"),
    "train": (["digits-lt"], "missing from longtail train: --out PATH"),
    "extract": (
        ["run", "--split", "holdout"],
        "invalid choice 'holdout' for argument '--split'. Expected one of ('train'",
    ),
    "calibrate": (
        ["run", "--method", "marc", "--options", "gama", "1"],
        "unknown option 'gama' (did you mean 'gamma'?)",
    ),
    "probe": (["nowhere.npz", "--out", "head"], "nowhere.npz"),
    "compare": (["digits-lt", "--out", "x"], "missing from longtail compare: --methods"),
    "diagnose": (["nowhere.npz"], "nowhere.npz"),
    "report": (["nowhere"], "nowhere is not a run folder"),
    "export": (["nowhere", "--format", "json", "--out", "x.json"], "nowhere is not a run folder"),
    "methods": (["--jsn"], "unrecognized options: --jsn; perhaps you meant: --json"),
    "evaluate": (["run", "--workers", "two"], "--workers"),
    "predict": (["run", "nowhere.png"], "nowhere.png"),
}


def test_the_tables_above_know_every_command():
    assert set(GOOD) == set(BAD) == set(COMMANDS)


@pytest.fixture
def folder(digits_copy, monkeypatch):
    """A working folder with a finished run called `run`."""
    digits_copy.rename(digits_copy.with_name("run"))
    monkeypatch.chdir(digits_copy.parent)
    monkeypatch.setenv("LONGTAIL_RELEASED", str(digits_copy.parent))
    Image.new("L", (8, 8), 100).save("photo.png")
    labels = np.arange(60) % 3
    np.savez(
        "embeddings.npz", features=np.eye(3)[labels] + np.random.default_rng(0).normal(size=(60, 3)), labels=labels
    )
    return digits_copy.parent


# A report takes half a minute: its JSON is tested beside it.
@pytest.mark.parametrize("name", [name for name in GOOD if name != "report"])
def test_json_is_one_document_and_nothing_else(name, folder, capsys):
    assert main([name, *GOOD[name], "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) is not None
    assert captured.out.count("\n") == 1
    assert captured.err == ""


@pytest.mark.parametrize("name", ["distribution", "train", "extract", "calibrate", "export", "methods", "evaluate"])
def test_quiet_prints_nothing(name, folder, capsys):
    assert main([name, *GOOD[name], "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line_and_exit_code_two(name, folder, capsys):
    words, message = BAD[name]
    assert main([name, *words, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("longtail: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_and_exit_codes(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert not stop.value.code
    shown = capsys.readouterr().out
    assert not re.search(rf"longtail {name} .*longtail {name} ", shown)  # a line shows one command
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", shown).split())
    assert f"Examples: longtail {name}" in text
    assert "Exit codes: 0 done, 2 invalid input, 130 interrupted, 143 terminated." in text
    assert "--json" in text
    assert "--quiet" in text


def on_a_terminal(words: list[str], **environment: str) -> str:
    """What the program writes when its output is a terminal."""
    controller, terminal = pty.openpty()
    given = {**os.environ, "TERM": "xterm-256color", **environment}
    process = subprocess.Popen([sys.executable, "-m", "longtail", *words], stdout=terminal, stderr=terminal, env=given)
    os.close(terminal)
    written = b""
    try:
        while part := os.read(controller, 65536):
            written += part
    except OSError:  # how a terminal says that nobody writes any more
        pass
    process.wait()
    os.close(controller)
    return written.decode()


COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]|\x1b\[[0-9;]*9[0-7]m")


def test_no_color_is_honoured(monkeypatch):
    assert not COLOUR.search(on_a_terminal(["train", "--help"], NO_COLOR="1"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert COLOUR.search(on_a_terminal(["train", "--help"]))


def test_data_sets_are_looked_for_in_the_cache_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "elsewhere"))
    assert main(["distribution", "cifar10-lt-100"]) == 2
    assert f"not found in {tmp_path / 'elsewhere'}" in capsys.readouterr().err
    # What else is kept there, such as decoded images, is never taken for somebody's classes.
    (tmp_path / "elsewhere" / "ant").mkdir(parents=True)
    with pytest.raises(UserError, match="where are the images"):
        open_splits(DataConfig(data="folder", validation=0))


@pytest.mark.parametrize(
    ("shell", "code"),
    [
        ("{} --help | true", 0),
        ("{} evaluate nowhere 2>&-", 2),
        ("{} methods <&- >&- 2>&-", 0),
    ],
)
def test_streams_that_nobody_reads_change_no_exit_code(shell, code):
    command = "set -o pipefail; " + shell.format(f"'{sys.executable}' -m longtail")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) <= 1


def test_a_closed_stream_is_not_given_to_a_file(tmp_path):
    """Otherwise what is printed would go into the next file that is opened."""
    program = "import os, sys; from longtail.cli import main; sys.argv = ['longtail', 'methods']; main()"
    program += f"; handle = os.open({str(tmp_path / 'file')!r}, os.O_CREAT | os.O_WRONLY); os._exit(handle)"
    done = subprocess.run(["bash", "-c", f"'{sys.executable}' -c \"{program}\" <&- >&- 2>&-"], timeout=600)
    assert done.returncode > 2


ALLOCATIONS = {
    "Python": lambda: bytearray(10**18),
    "numpy": lambda: np.empty(10**17),
    "torch": lambda: torch.empty(10**17),
}


@pytest.mark.parametrize("library", ALLOCATIONS)
def test_too_little_memory_is_one_line(library, monkeypatch, capsys):
    monkeypatch.setattr("longtail.cli.commands.methods.main", lambda words: ALLOCATIONS[library]())
    assert main(["methods"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("longtail: there is not enough memory")
    assert said.count("\n") == 1


def test_other_errors_of_a_library_are_not_called_memory(monkeypatch):
    monkeypatch.setattr("longtail.cli.commands.methods.main", lambda words: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError):
        main(["methods"])


LEAVING = """
import atexit, sys, time
from concurrent.futures import ThreadPoolExecutor
from longtail.cli import main

class Rest:
    def __del__(self):
        print("taken apart")

rest = Rest()
atexit.register(print, "handlers ran")
ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.2), print("thread ended")))
sys.argv = ["longtail", "--version"]
sys.exit(main())
"""


@pytest.mark.parametrize(("size", "apart"), [("1", True), ("2", False)])
def test_one_of_several_processes_exits_without_taking_the_interpreter_apart(size, apart):
    """Threads of Gloo that are still there would abort it; what is printed, threads and exit handlers are not lost."""
    environment = {**os.environ, "WORLD_SIZE": size, "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", LEAVING], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("longtail ")
    assert lines[1:3] == ["thread ended", "handlers ran"]
    assert ("taken apart" in lines) == apart
