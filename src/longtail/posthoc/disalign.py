"""DisAlign: mix each logit with a rescaled and shifted one, by a confidence learnt from the features.

`z' = s(f) (a_j z_j + b_j) + (1 - s(f)) z_j` with `s(f) = sigmoid(v f + c)`; p + 2K + 1 numbers (the
paper counts p + 2K: c is the one more), trained with weights proportional to n^-gamma. It starts
at the identity (a 1, b 0).

The released classification code computes `(1 + s a) z + s b` with a 1 at the start: it begins at
`(1 + s) z`, which is not the identity. `form="release"` does the same; the two agree for
`a_paper = a_release + 1`. The mixture depends on the features, so it does not fold into a linear
head: `head` returns a separate layer.

Paper: Zhang et al., Distribution Alignment: A Unified Framework for Long-tail Visual Recognition,
CVPR 2021.
"""

from __future__ import annotations

import time
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from longtail.errors import UserError, choose, number, whole_number
from longtail.files.tensors import writable
from longtail.heads.kinds import DisAlignHead, align
from longtail.posthoc.affine import check_numbers
from longtail.posthoc.base import PostHoc, is_trained
from longtail.posthoc.inputs import FitData, require_features
from longtail.posthoc.marc import class_weights
from longtail.posthoc.solver import FitResult
from longtail.posthoc.solver.affine import SMALLEST_SCALE
from longtail.posthoc.solver.sgd import train_parameters, weight_decay_beside, weighted_cross_entropy


class DisAlign(PostHoc):
    """Distribution alignment; needs features.

    Args:
        gamma: strength of the class weights.
        form: "paper" starts at the identity, "release" where the released code does.
        max_iter: steps.
        batch_size: samples per step.
        lr: learning rate at the start; falls to 0 along a cosine.
        weight_decay: of all trained numbers, times the mean weight of a sample; the scales are pulled to 1.
        divide_by: what the loss of a batch is divided by: its size, or the sum of its weights (released code).
        seed: random seed of the batches.

    Fitted attributes: `scale_` (K,), `shift_` (K,), `confidence_weight_` (D,), `confidence_bias_`, `result_`.
    """

    needs_features = True
    stage_two: ClassVar[dict[str, str]] = {
        "weight_decay": "weight_decay",
        "batch_size": "batch_size",
        "max_iter": "steps",
    }

    def __init__(
        self,
        gamma: float = 1.2,
        *,
        form: Literal["paper", "release"] = "paper",
        max_iter: int = 2000,
        batch_size: int = 512,
        lr: float = 0.1,
        weight_decay: float = 5e-4,
        divide_by: Literal["batch", "weights"] = "batch",
        seed: int = 0,
    ) -> None:
        self.gamma = gamma
        self.form = form
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.divide_by = divide_by
        self.seed = seed

    def check_settings(self) -> None:
        number("gamma", self.gamma, at_least=0)
        choose("form", self.form, ("paper", "release"))
        choose("divide_by", self.divide_by, ("batch", "weights"))
        whole_number("max_iter", self.max_iter)
        number("weight_decay", self.weight_decay, at_least=0)
        check_numbers(self)

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        began = time.perf_counter()
        features = writable(require_features(data.features, self)).float()
        logits = data.rows.read(slice(None))
        weights = torch.from_numpy(class_weights(data.class_counts, self.gamma) * data.frequency).float()
        # What is trained of the scale is its difference from 1: weight decay pulls to the identity, in both forms.
        change = torch.full((data.num_classes,), float(self.form == "release"), requires_grad=True)
        shift = torch.zeros(data.num_classes, requires_grad=True)
        direction = torch.full((features.shape[1],), 0.1, requires_grad=True)
        offset = torch.zeros((), requires_grad=True)

        def scale() -> Tensor:
            return (1 + change).clamp_min(SMALLEST_SCALE)

        def loss(rows: Tensor) -> Tensor:
            confidence = (features[rows] @ direction + offset).sigmoid().unsqueeze(1)
            aligned = align(logits[rows], confidence, scale(), shift)
            return weighted_cross_entropy(aligned, data.labels[rows], weights, self.divide_by)

        value = train_parameters(
            [change, shift, direction, offset],
            loss,
            data.labels.numpy(),
            steps=self.max_iter,
            batch_size=self.batch_size,
            lr=self.lr,
            weight_decay=weight_decay_beside(self.weight_decay, weights, data.labels, self.divide_by),
            seed=self.seed,
        )
        self.scale_, self.shift_ = scale().detach().numpy(), shift.detach().numpy()
        self.confidence_weight_, self.confidence_bias_ = direction.detach().numpy(), float(offset.detach())
        self.result_ = FitResult(True, self.max_iter, None, time.perf_counter() - began, value)

    def _apply(self, logits: Tensor, features: Tensor | None) -> Tensor:
        inputs = torch.as_tensor(require_features(features, self, len(self.confidence_weight_))).to(logits)
        direction = torch.as_tensor(self.confidence_weight_).to(logits)
        confidence = (inputs @ direction + self.confidence_bias_).sigmoid().unsqueeze(1)
        scale, shift = (torch.as_tensor(v).to(logits) for v in (self.scale_, self.shift_))
        return align(logits, confidence, scale, shift)

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        raise UserError(
            "DisAlign does not fold into a linear head: how much it shifts a logit depends on the features. "
            "Use its head(linear) layer instead"
        )

    def head(self, linear: nn.Linear) -> nn.Module:
        layer = DisAlignHead(linear.in_features, linear.out_features, bias=linear.bias is not None)
        layer = layer.to(linear.weight.device, linear.weight.dtype)
        with torch.no_grad():
            layer.classifier.weight.copy_(linear.weight)
            if linear.bias is not None:
                layer.classifier.bias.copy_(linear.bias)
            layer.scale.copy_(torch.as_tensor(self.scale_))
            layer.shift.copy_(torch.as_tensor(self.shift_))
            layer.confidence_weight.copy_(torch.as_tensor(self.confidence_weight_))
            layer.confidence_bias.fill_(self.confidence_bias_)
        return layer.requires_grad_(is_trained(linear))

    @property
    def n_parameters_(self) -> int:
        return 2 * len(self.scale_) + len(self.confidence_weight_) + 1
