"""What mistakes cost: a table (K, K) of costs, the true class in the row and the predicted class in the column.

The mean cost per image counts classes as often as in training, as top-1 at the training prior does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longtail.data.tables import csv_reader
from longtail.errors import UserError
from longtail.files.reading import read_text, reading
from longtail.metrics.intervals import Interval, paired_difference

LAYOUT = "a first line of predicted classes, then a line per true class with its name and the costs"


def read_costs(costs: Any, class_names: Sequence[str]) -> np.ndarray:
    """Costs (K, K), rows and columns in the order of `class_names`; from an array in that order, or a CSV file."""
    where = "costs"
    if isinstance(costs, str | Path):
        where = str(costs)
        rows, columns, cells = _read_table(Path(costs))
        places = {}
        for kind, names in (("row", rows), ("column", columns)):
            for name in names:
                if name not in class_names:
                    raise UserError(f"{where}: there is no class {name}; the first is {class_names[0]}")
            missing = [name for name in class_names if name not in names]
            if missing or len(names) > len(class_names):
                twice = next((name for name in names if names.count(name) > 1), None)
                fault = f"two {kind}s for class {twice}" if twice is not None else f"no {kind} for class {missing[0]}"
                raise UserError(f"{where} has {fault}; it needs {LAYOUT}")
            places[kind] = [names.index(name) for name in class_names]
        costs = [[_cost(cells[i][j], where, rows[i], columns[j]) for j in places["column"]] for i in places["row"]]
    try:
        table = np.asarray(costs, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"costs must be numbers (K, K) or a CSV file, not {costs!r:.60}") from error
    if table.shape != (len(class_names), len(class_names)):
        raise UserError(f"{where} must have a row and a column per class, {len(class_names)} each, not {table.shape}")
    if not np.isfinite(table).all() or (table < 0).any():
        i, j = np.argwhere(~np.isfinite(table) | (table < 0))[0]
        pair = f"{class_names[i]} taken for {class_names[j]}"
        raise UserError(f"{where}: {pair} costs {table[i, j]:g}; costs are finite and at least 0")
    free = np.flatnonzero(table.min(1) < np.diag(table))
    if len(free):
        raise UserError(
            f"{where}: class {class_names[free[0]]} costs more if it is recognised than if it is not; rows are true "
            "classes, and the diagonal is usually 0"
        )
    if not (table > np.diag(table)[:, None]).any():
        raise UserError(f"{where}: no mistake costs anything, so there is nothing to choose by")
    return table


def _read_table(path: Path) -> tuple[list[str], list[str], list[list[str]]]:
    """True classes, predicted classes, and the cells between them."""
    with reading(path, f"a table of costs ({LAYOUT})"):
        text = read_text(path, "a table of costs").splitlines(keepends=True)
        lines = [[cell.strip() for cell in row] for row in csv_reader(text, path) if any(row)]
    if len(lines) < 2:
        raise UserError(f"{path} has no costs; it needs {LAYOUT}")
    (_, *columns), *body = lines
    for row in body:
        if len(row) != len(columns) + 1:
            raise UserError(f"{path}: class {row[0]} has {len(row) - 1} costs for {len(columns)} predicted classes")
    return [row[0] for row in body], columns, [row[1:] for row in body]


def _cost(cell: str, where: str, truth: str, predicted: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise UserError(f"{where}: {truth} taken for {predicted} costs {cell!r}, which is not a number") from None


def mean_cost(costs: np.ndarray, predicted: np.ndarray, labels: np.ndarray, class_counts: np.ndarray) -> float:
    """Mean cost per image at the training prior, over the classes that have images.

    >>> costs = np.array([[0.0, 1.0], [20.0, 0.0]])
    >>> mean_cost(costs, np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1]), np.array([90, 10]))
    1.45
    """
    per_class = [float(costs[label, predicted[labels == label]].mean()) for label in np.unique(labels)]
    weights = class_counts[np.unique(labels)].astype(np.float64)
    return float(np.average(per_class, weights=weights if weights.any() else None))


def prior_of_costs(costs: np.ndarray, class_counts: np.ndarray) -> np.ndarray:
    """(K,) target prior at which the class of least expected cost is predicted, exact for a cost per true class.

    Expected costs are the same if a class is as many times as frequent as its errors are dear.

    >>> prior_of_costs(np.array([[0.0, 1.0], [20.0, 0.0]]), np.array([90, 10])).round(3).tolist()
    [0.31, 0.69]
    """
    more = costs - np.diag(costs)[:, None]
    weights = class_counts * more.sum(1)
    return np.asarray(weights / weights.sum())


def cost_change(
    costs: np.ndarray, after: np.ndarray, before: np.ndarray, labels: np.ndarray, class_counts: np.ndarray
) -> Interval:
    """Mean cost per image with predictions `after` (N,) minus that with `before`, with its 95 % interval."""
    # In units of the largest cost of the true class, so that one class does not lend its variance to another.
    largest = np.maximum(costs.max(1), np.finfo(float).tiny)
    shares = largest * (class_counts if class_counts.any() else 1)
    scaled = costs / largest[:, None]
    change = paired_difference(scaled[labels, after], scaled[labels, before], labels, shares)
    present = np.unique(labels)
    unit = float(shares[present].sum() / np.sum(shares[present] / largest[present]))
    low, high = (None if bound is None else unit * bound for bound in (change.low, change.high))
    return Interval(unit * change.value, low, high)


def cost_text(cost: float, change: Interval) -> str:
    """A mean cost and its change, in words.

    >>> cost_text(1.2, Interval(-0.7, -0.9, -0.5))
    'cost per image 1.9 → 1.2 (-0.7 [-0.9, -0.5], classes as frequent as in training)'
    """
    interval = "" if change.low is None or change.high is None else f" [{change.low:+.3g}, {change.high:+.3g}]"
    values = f"{cost - change.value:.3g} → {cost:.3g} ({change.value:+.3g}{interval}"
    return f"cost per image {values}, classes as frequent as in training)"
