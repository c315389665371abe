"""Training in a real terminal: a bar, Ctrl-C, and the command that continues."""

import os
import shlex
import sys

import pexpect

from longtail.cli.main import main


def test_ctrl_c_in_a_terminal_saves_and_says_how_to_continue(tmp_path):
    folder = tmp_path / "my run"
    words = ["train", "digits-lt", "--out", str(folder), "--batch-size", "8", "--device", "cpu"]
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    terminal = pexpect.spawn(
        sys.executable,
        ["-m", "longtail", *words, "--iterations", "1000000"],
        dimensions=(24, 50),
        env={**kept, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
        encoding="utf-8",
        timeout=None,  # a busy machine is no failure
    )
    terminal.expect("images/s")
    shown = terminal.before
    terminal.sendintr()
    terminal.expect(pexpect.EOF)
    terminal.close()
    shown += terminal.before
    assert terminal.exitstatus == 130
    assert "Traceback" not in shown
    assert "…" not in shown  # 50 columns are enough for what is shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is visible again
    last = shown.strip().splitlines()[-1]
    assert "continue with: longtail train --out " in last
    assert shlex.split(last.split("longtail ")[-1]) == ["train", "--out", str(folder), "--resume"]
    # The run can be replaced; a resumed one would take its million steps.
    assert main([*words, "--iterations=2", "--overwrite", "--quiet"]) == 0
