"""Class frequencies that logits are right for: the target prior of a calibration, and the prior of a model's logits.

A target prior is "uniform" (balanced recognition), "train" (as in training), a power t of the training
prior (1 is "train", 0 is "uniform", below 0 the tail is expected more often than the head), weights or
counts (K,), or a CSV file with one line `class,weight` per class. A class of weight 0 is never predicted.

The model prior: cross-entropy on images as they come gives logits eta = log p(x | y) + log pi, right for the training
prior pi; balanced softmax and its relatives give log p(x | y), right for equal classes. The log-likelihoods of the
training outputs under a eta and under a eta + log pi, each with its best a, tell the two apart. Trained models have an
a near 1 or above on their training images; with another one (not trained to the end, or another unit) "train" stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from longtail.data.tables import DELIMITERS, csv_reader
from longtail.errors import UserError, number
from longtail.files.reading import read_text, reading

if TYPE_CHECKING:
    from longtail.posthoc.inputs import FitData

WORDS = ("uniform", "train")
NEVER = -1e4  # logit of a class with target prior 0: finite in every floating type, float16 too
MODEL_PRIOR_LOGITS = 1 << 20  # of training samples, from which the model prior is detected
STRONG_EVIDENCE = 3.0  # nats by which equal classes must explain the labels better: a Bayes factor of 20
TRAINED_SCALES = (0.75, 10.0)  # smallest and largest a of a trained model
TEMPERATURES = (0.05, 20.0)
USUAL_SPREAD = (0.1, 100.0)  # standard deviation of the logits of a sample

ModelPrior = Literal["train", "uniform"]


def check_target_prior(target_prior: Any) -> None:
    """Refuse what is no target prior for any classes."""
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
    if isinstance(target_prior, Real) and not isinstance(target_prior, bool):  # NumPy numbers too
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
    """Weights (K,) of a CSV file with lines `class,weight`; a first line that is a heading is skipped."""
    with reading(path, "a target prior (lines class,weight)"):
        text = read_text(path, "a target prior").splitlines(keepends=True)
        reader = csv_reader(text, path)
        lines = [(reader.line_num, row) for row in reader if any(row)]
    rows = [(line, row[0] if row[0] in class_names else row[0].strip(), _number(row), row) for line, row in lines]
    # A class may be called like the heading.
    if rows and rows[0][2] is None and (rows[0][1] not in class_names or rows[0][1] in [row[1] for row in rows[1:]]):
        rows = rows[1:]
    weights: dict[str, float] = {}
    for line, name, weight, row in rows:
        if weight is None:
            raise UserError(f"{path}, line {line}: expected class,weight, found {','.join(row)}")
        if name not in class_names:
            raise UserError(f"{path}, line {line}: there is no class {name}; the first is {class_names[0]}")
        if not 0 <= weight < np.inf:
            raise UserError(f"{path}, line {line}: class {name} has weight {weight:g}; weights are finite, at least 0")
        if name in weights:
            raise UserError(f"{path}, line {line}: class {name} has a weight already")
        weights[name] = weight
    missing = [name for name in class_names if name not in weights]
    if missing:
        raise UserError(f"{path} has no weight for class {missing[0]}; write 0 for a class that never occurs")
    return np.array([weights[name] for name in class_names])


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


def detect_model_prior(data: FitData) -> ModelPrior:
    """The prior that training outputs are right for; "train" where the evidence is weak, as without any errors."""
    number = min(len(data.labels), max(MODEL_PRIOR_LOGITS // data.num_classes, 1))
    chosen = np.linspace(0, len(data.labels) - 1, number).astype(int)
    logits, labels = data.rows.read(chosen).double(), data.labels[torch.from_numpy(chosen)]
    weights = to_effective_number(data.frequency[labels.numpy()])
    log_prior = torch.from_numpy(np.log(data.class_counts / data.class_counts.sum()))

    def evidence(offset: Tensor) -> tuple[float, float]:
        scale = best_scale(logits, labels, offset, weights)
        return float(torch.from_numpy(weights) @ log_likelihood(logits, labels, offset, scale)), scale

    (if_uniform, scale), (if_train, _) = evidence(log_prior), evidence(torch.zeros_like(log_prior))
    is_trained = TRAINED_SCALES[0] < scale < TRAINED_SCALES[1]
    uniform = torch.tensor([float(if_uniform > if_train + STRONG_EVIDENCE and is_trained)])
    data.world.broadcast([uniform])  # rounding must not let processes decide differently
    return "uniform" if float(uniform) else "train"


def sample_weights(labels: np.ndarray, class_counts: np.ndarray) -> np.ndarray:
    """(M,) weights of held-out samples, summing to their effective number.

    They make the fit a posterior at the prior pi^(1/2), half-way between the training set and balance: w is
    proportional to n^(1/2) / m with m the held-out samples per class.
    """
    held_out_counts = np.bincount(labels, minlength=len(class_counts))
    return to_effective_number((np.sqrt(class_counts) / np.maximum(held_out_counts, 1))[labels])


def to_effective_number(weights: np.ndarray) -> np.ndarray:
    """(M,) weights scaled to sum to their effective sample size.

    >>> to_effective_number(np.array([2.0, 2.0])).tolist()
    [1.0, 1.0]
    """
    return np.asarray(weights * (weights.sum() / np.square(weights).sum()))


def like_training(held_out_counts: np.ndarray, class_counts: np.ndarray) -> bool:
    """Whether counts look like a draw from training images: no class is off by more than chance and rounding.

    >>> counts = np.array([200, 80, 5])
    >>> like_training(np.array([20, 8, 1]), counts), like_training(np.full(3, 9), counts)
    (True, False)
    """
    present = held_out_counts > 0
    expected = class_counts[present] * held_out_counts.sum() / class_counts[present].sum()
    # A split that leaves every class at least one image is off by up to one image per class.
    off = np.maximum(np.abs(held_out_counts[present] - expected) - 1, 0)
    return bool((np.square(off) / expected).sum() <= 3 * present.sum())


def log_likelihood(scores: Tensor, codes: Tensor, offset: Tensor, scale: float) -> Tensor:
    """(B,) log-likelihood of scores (B, K) times a scale, at the prior of the offset (K,)."""
    return (scale * scores + offset).log_softmax(1).gather(1, codes.unsqueeze(1)).squeeze(1)


def best_scale(scores: Tensor, codes: Tensor, offset: Tensor, weights: np.ndarray) -> float:
    """The inverse temperature of greatest likelihood; its bounds are relative to the spread of unusual logits."""
    weight = torch.from_numpy(weights)
    spread = float((scores - scores.mean(1, keepdim=True)).double().std(correction=0))
    size = 1.0 if spread == 0 or USUAL_SPREAD[0] <= spread <= USUAL_SPREAD[1] else spread

    def loss(log_scale: float) -> float:
        return -float(weight @ log_likelihood(scores, codes, offset, float(np.exp(log_scale))))

    cold, hot = (size * temperature for temperature in TEMPERATURES)
    solved = minimize_scalar(loss, bounds=(-np.log(hot), -np.log(cold)), method="bounded", options={"xatol": 1e-3})
    return float(np.exp(solved.x))
