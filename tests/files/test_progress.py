"""Bars in terminals of any width: nothing that is shown is cut."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from longtail.files import progress
from longtail.files.progress import Display, _columns

NOTE = "epoch 12/90  loss 1.234"


@pytest.mark.parametrize(
    ("width", "bar", "note"), [(40, False, False), (72, True, True), (80, True, True), (200, True, True)]
)
def test_a_bar_fits_the_terminal(width, bar, note):
    screen = io.StringIO()
    console = Console(width=width, file=screen, force_terminal=True, color_system=None)
    shown = Progress(*_columns(width), console=console)
    shown.add_task("training", total=942_016, completed=471_008, speed="429 images/s", note=NOTE)
    console.print(shown.get_renderable())
    (line,) = screen.getvalue().rstrip("\n").split("\n")
    assert "…" not in line
    assert len(line.rstrip()) <= width
    assert "training" in line
    assert "429 images/s" in line
    assert (NOTE in line) == note
    assert ("━" in line) == bar
    assert ("50 %" if width < 100 else "471008/942016") in line


def test_a_notebook_without_widgets_gets_lines(monkeypatch):
    lines = []
    display = Display()
    display.error.is_jupyter = True
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(display, "line", lines.append)
    with display.task("extracting", 10) as task:  # a bar would warn that it cannot be shown
        task.advance(5)
    assert len(lines) == 1
    assert lines[0].startswith("extracting  50 %")
