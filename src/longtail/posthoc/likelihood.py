"""Log-likelihood of labels under logits at their best temperature."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

TEMPERATURES = (0.05, 20.0)


def log_likelihood(scores: Tensor, codes: Tensor, offset: Tensor, scale: float) -> Tensor:
    """(B,) log-likelihood of scores (B, K) times a scale, at the prior of the offset (K,)."""
    return (scale * scores + offset).log_softmax(1).gather(1, codes.unsqueeze(1)).squeeze(1)


def best_scale(scores: Tensor, codes: Tensor, offset: Tensor, weights: np.ndarray) -> float:
    """The inverse temperature of the greatest likelihood."""
    weight = torch.from_numpy(weights)

    def loss(log_scale: float) -> float:
        return -float(weight @ log_likelihood(scores, codes, offset, float(np.exp(log_scale))))

    cold, hot = TEMPERATURES
    found = minimize_scalar(loss, bounds=(-np.log(hot), -np.log(cold)), method="bounded", options={"xatol": 1e-3})
    return float(np.exp(found.x))
