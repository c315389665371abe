"""Folds a scale and a shift per class into a linear layer."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn


def folded_affine(weight: Tensor, bias: Tensor | None, scale: np.ndarray, shift: np.ndarray) -> tuple[Tensor, Tensor]:
    """Weight (K, D) and bias (K,) of the layer that returns `scale * logits + shift`."""
    # On the CPU, because not every device computes in float64.
    factor, offset = torch.as_tensor(scale).double(), torch.as_tensor(shift).double()
    old = torch.zeros(len(weight)) if bias is None else bias.cpu()
    folded = factor.unsqueeze(1) * weight.cpu().double(), factor * old.double() + offset
    return folded[0].to(weight.dtype).to(weight.device), folded[1].to(weight.dtype).to(weight.device)


def is_trained(layer: nn.Module) -> bool:
    """Whether any parameter of a layer requires a gradient."""
    return any(parameter.requires_grad for parameter in layer.parameters())
