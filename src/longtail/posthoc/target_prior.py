"""The class frequencies that a calibrated classifier is to be right for.

A target prior is "uniform" (balanced recognition), "train" (as in training), a power t of the training
prior (1 is "train", 0 is "uniform", below 0 the tail is expected more often than the head), weights or
counts (K,), or a CSV file with one line `class,weight` per class. A class of weight 0 is never predicted.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longtail.core.reading import read_text, reading
from longtail.data.file_names import DELIMITERS, delimiter_of
from longtail.errors import UserError, number

WORDS = ("uniform", "train")
NEVER = -1e4  # logit of a class with target prior 0: finite in every floating type, float16 too


def check_target_prior(target_prior: Any) -> None:
    """Refuse what can be no target prior, whatever the classes are."""
    if isinstance(target_prior, str | Path) and str(target_prior) not in WORDS and not Path(target_prior).is_file():
        if Path(target_prior).suffix.lower() in DELIMITERS:
            raise UserError(f"target_prior: {target_prior} does not exist")
        raise UserError(f"target_prior must be uniform, train, weights per class or a CSV file, not {target_prior}")


def log_target(target_prior: Any, log_prior: np.ndarray, class_names: Sequence[str]) -> np.ndarray:
    """Logarithm of a target prior (K,), -inf for a class of weight 0; up to a constant."""
    if isinstance(target_prior, str | Path):
        if str(target_prior) in WORDS:
            return np.zeros(len(log_prior)) if str(target_prior) == "uniform" else log_prior
        target_prior = read_weights(Path(target_prior), class_names)
    if isinstance(target_prior, Real) and not isinstance(target_prior, bool):  # a number of NumPy is one, too
        return number("target_prior", target_prior, at_least=-10, at_most=10) * log_prior
    try:
        weights = np.asarray(target_prior, dtype=np.float64)
    except (TypeError, ValueError):
        raise UserError(f"target_prior must be uniform, train, weights per class or a CSV file, not {target_prior!r}")  # noqa: B904
    if weights.shape != log_prior.shape:
        raise UserError(f"target_prior must have one weight per class: shape {log_prior.shape}, not {weights.shape}")
    if not np.isfinite(weights).all() or (weights < 0).any():
        wrong = int(np.argmax(~np.isfinite(weights) | (weights < 0)))
        raise UserError(f"target_prior[{wrong}] is {weights[wrong]:g}; weights are finite and at least 0")
    if not weights.any():
        raise UserError("target_prior is 0 for every class; at least one must be expected")
    with np.errstate(divide="ignore"):
        return np.log(weights / weights.sum())


def read_weights(path: Path, class_names: Sequence[str]) -> np.ndarray:
    """Weights (K,) of a CSV file with lines `class,weight`; a first line that is a heading is passed over."""
    with reading(path, "a target prior (lines class,weight)"):
        text = read_text(path, "a target prior").splitlines(keepends=True)
        reader = csv.reader(text, delimiter=delimiter_of(text, DELIMITERS.get(path.suffix.lower(), ",")))
        lines = [(reader.line_num, row) for row in reader if any(row)]
    rows = [(line, row[0] if row[0] in class_names else row[0].strip(), _number(row), row) for line, row in lines]
    # A class may be called like the heading.
    if rows and rows[0][2] is None and (rows[0][1] not in class_names or rows[0][1] in [row[1] for row in rows[1:]]):
        rows = rows[1:]
    found: dict[str, float] = {}
    for line, name, weight, row in rows:
        if weight is None:
            raise UserError(f"{path}, line {line}: expected class,weight, found {','.join(row)}")
        if name not in class_names:
            raise UserError(f"{path}, line {line}: there is no class {name}; the first is {class_names[0]}")
        if not 0 <= weight < np.inf:
            raise UserError(f"{path}, line {line}: class {name} has weight {weight:g}; weights are finite, at least 0")
        if name in found:
            raise UserError(f"{path}, line {line}: class {name} has a weight already")
        found[name] = weight
    missing = [name for name in class_names if name not in found]
    if missing:
        raise UserError(f"{path} has no weight for class {missing[0]}; write 0 for a class that never occurs")
    return np.array([found[name] for name in class_names])


def _number(row: list[str]) -> float | None:
    try:
        return float(row[1]) if len(row) == 2 else None
    except ValueError:
        return None


def shifted(logits: Tensor, shift: np.ndarray) -> Tensor:
    """Logits (N, K) plus a shift (K,); where that is -inf, a finite logit below the best of every row."""
    moved = logits + torch.from_numpy(shift).to(logits)
    never = torch.from_numpy(np.isneginf(shift)).to(logits.device)
    if not never.any():
        return moved
    if bool((moved[:, ~never].amax(1) <= NEVER).any()):
        raise UserError(f"logits below {NEVER:g}: a class of target prior 0 would be predicted; scale the logits")
    return moved.masked_fill(never, NEVER)


def shifted_head(weight: Tensor, bias: Tensor, shift: np.ndarray) -> tuple[Tensor, Tensor]:
    """Weight (K, D) and bias (K,) of the layer that gives shifted logits."""
    never = torch.from_numpy(np.isneginf(shift)).to(weight.device)
    moved = bias + torch.from_numpy(shift).to(bias)
    return weight.masked_fill(never.unsqueeze(1), 0.0), moved.masked_fill(never, NEVER)
