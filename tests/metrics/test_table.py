"""One table of scores: a line added to it is shown everywhere, and says which way is better."""

import pytest

from longtail.metrics.scores import evaluate_predictions
from longtail.metrics.table import MAIN_SCORES, SCORES, SHOTS

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
