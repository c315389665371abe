"""Inference with a frozen network: evaluation mode, and the batch size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from longtail.errors import UserError

BATCH = 64  # larger batches exceed what the allocator keeps, and every layer pays for page faults again


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module returns to its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
    except NotImplementedError as error:
        raise UserError(
            f"{type(model).__name__} cannot be put into evaluation mode ({error}); if it is an exported program, "
            "calibrate the model before it is exported"
        ) from error
    try:
        with torch.no_grad():  # tensors cached in inference mode could not be used in training
            yield
    finally:
        for module, mode in modes:
            module.training = mode
