"""Log-likelihood of labels under logits at their best temperature."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

TEMPERATURES = (0.05, 20.0)
USUAL_SPREAD = (0.1, 100.0)  # standard deviation of the logits of a sample


def log_likelihood(scores: Tensor, codes: Tensor, offset: Tensor, scale: float) -> Tensor:
    """(B,) log-likelihood of scores (B, K) times a scale, at the prior of the offset (K,)."""
    return (scale * scores + offset).log_softmax(1).gather(1, codes.unsqueeze(1)).squeeze(1)


def best_scale(scores: Tensor, codes: Tensor, offset: Tensor, weights: np.ndarray) -> float:
    """The inverse temperature of the greatest likelihood; of logits of an odd size, relative to that size."""
    weight = torch.from_numpy(weights)
    spread = float((scores - scores.mean(1, keepdim=True)).double().std(correction=0))
    size = 1.0 if spread == 0 or USUAL_SPREAD[0] <= spread <= USUAL_SPREAD[1] else spread

    def loss(log_scale: float) -> float:
        return -float(weight @ log_likelihood(scores, codes, offset, float(np.exp(log_scale))))

    cold, hot = (size * temperature for temperature in TEMPERATURES)
    found = minimize_scalar(loss, bounds=(-np.log(hot), -np.log(cold)), method="bounded", options={"xatol": 1e-3})
    return float(np.exp(found.x))
