"""Methods that fit a new linear head on the features, whatever the model's own head says."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.errors import UserError
from longtail.outputs.checks import Array
from longtail.posthoc.base import PostHoc


class NewHead(PostHoc):
    """A linear head on the features that replaces the model's own.

    Fitted attributes: `weight_` (K, D), `bias_` (K,), `result_`.
    """

    needs_features = True
    weight_: np.ndarray
    bias_: np.ndarray

    def _apply(self, logits: Tensor, features: Tensor | None) -> Tensor:
        inputs = torch.as_tensor(require_features(features, self, self.weight_.shape[1]))
        weight, bias = (torch.as_tensor(v).to(inputs) for v in (self.weight_, self.bias_))
        return F.linear(inputs, weight, bias)

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.as_tensor(self.weight_).to(weight), torch.as_tensor(self.bias_).to(weight)

    @property
    def n_parameters_(self) -> int:
        return self.weight_.size + self.bias_.size


def require_features(features: Array | None, method: PostHoc, width: int | None = None) -> Array:
    """The features, as many per sample as in the fit, or an error that explains how to give them."""
    if features is None:
        raise UserError(
            f"{type(method).__name__} needs features (N, D): pass Outputs that have them, or features=…; "
            "in a file of saved logits, an array called features"
        )
    if width is not None and features.shape[1] != width:
        raise UserError(f"{type(method).__name__} was fitted on {width} features per sample, not {features.shape[1]}")
    return features
