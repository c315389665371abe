"""One table of scores: a line added to it is shown everywhere, and says which way is better."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from longtail.exports.card import _row
from longtail.metrics.scores import Metrics, evaluate_predictions
from longtail.metrics.table import MAIN_SCORES, SCORES, SHOTS, Score
from longtail.report.page import _scores
from longtail.report.terminal import comparison_table
from longtail.tasks.tables import ranks
from longtail.training.journal import Journal
from longtail.training.plan import Plan

FOUND = evaluate_predictions([0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [50, 5])


def test_every_score_of_the_table():
    lower = {name for name, score in SCORES.items() if score.lower_is_better}
    assert lower == {"nll", "brier", "ece"}
    assert {name for name, score in SCORES.items() if not score.in_percent} == {"nll", "brier"}
    assert {name: score.name for name, score in SCORES.items()} == {name: name for name in SCORES}
    assert SHOTS == ("many", "medium", "few")
    assert list(MAIN_SCORES) == [*SHOTS, "balanced", "top1"]
    assert all(hasattr(FOUND, name) for name in SCORES)


@pytest.mark.parametrize(
    ("name", "value", "scaled", "digits", "shown"),
    [("top1", 0.5, 50.0, 1, "50.0"), ("nll", 0.61234, 0.61234, 3, "0.612"), ("brier", None, None, 3, "none")],
)
def test_how_a_score_is_printed(name, value, scaled, digits, shown):
    score = SCORES[name]
    assert (score.digits, score.show(value)) == (digits, shown)
    if value is not None:
        assert score.scaled(value) == scaled


def test_a_new_score_is_a_line_of_the_table_and_a_field(monkeypatch, tmp_path):
    """Terminal, page, card, journal and ranks read the same table."""
    monkeypatch.setitem(SCORES, "worst", Score("worst", "Worst class", lower_is_better=True))
    monkeypatch.setattr(Metrics, "worst", property(lambda self: min(self.per_class)), raising=False)
    shown = f"{100 * 2 / 3:.1f}"
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(comparison_table("", {"": FOUND}))
    assert any("Worst class" in line and shown in line for line in console.export_text().splitlines())
    assert _scores(FOUND)["worst"] == 66.7
    assert _row("test", "x", {"worst": 2 / 3}).endswith(f"| {shown} |")
    rows = [SimpleNamespace(method=str(value), scores={"worst": SimpleNamespace(value=value)}) for value in (0.3, 0.2)]
    assert ranks(rows, SCORES["worst"]) == {"0.2": 0, "0.3": 1}
    world = SimpleNamespace(is_main=True, size=1, rank=0, device=torch.device("cpu"))
    heard = []
    tracker = SimpleNamespace(log=lambda step, values: heard.append(values))
    journal = Journal(tmp_path, None, None, world, [tracker])
    journal.record(Plan(5, 1, 1, 0.1), SimpleNamespace(step=1), 0.5, FOUND, 1.0)
    assert heard[0]["validation/worst"] == pytest.approx(2 / 3)
    assert "nll" not in {name.partition("/")[2] for name in heard[0]}  # unknown without probabilities: not logged
    assert np.isclose(heard[0]["train/loss"], 0.5)
