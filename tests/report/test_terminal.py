"""Tables of predictions at the width of a terminal."""

import numpy as np
import pytest
from rich.console import Console

from longtail.report.terminal import prediction_table
from longtail.runs.prediction import Predicted

NAMES = ["great spotted woodpecker", "[bold]wren", *(f"bird {number}" for number in range(40))]


@pytest.mark.parametrize("width", [50, 80, 200])
@pytest.mark.parametrize("sets", [False, True])
def test_every_image_has_one_line_that_fits(width, sets):
    rng = np.random.default_rng(0)
    paths = [f"photos/2025/a long way/down/to the images/IMG_{number:04}.JPG" for number in range(9)]
    probabilities = rng.dirichlet(np.full(len(NAMES), 0.1), size=len(paths))
    predicted = Predicted(paths, NAMES, probabilities, sets=probabilities > 0.001 if sets else None)
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(prediction_table(predicted, 3, width))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if ".JPG" in line]
    assert len(rows) == len(paths)
    for row, path, best, members in zip(rows, paths, predicted.top(1), predicted.set_names() or paths, strict=True):
        (name, share) = best[0]
        assert path[-12:] in row
        assert f"{100 * share:.1f}" in row
        assert name[:10] in row
        assert not sets or width < 80 or f" {len(members)}: {name[:8]}" in row
