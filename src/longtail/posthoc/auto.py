"""Chooses a post-hoc method on held-out samples: see `candidates`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from longtail.errors import whole_number
from longtail.posthoc.base import PostHoc
from longtail.posthoc.candidates import Trial, try_candidates
from longtail.posthoc.inputs import FitData
from longtail.posthoc.target_prior import check_target_prior, shifted, shifted_head


class Auto(PostHoc):
    """Chooses Softmax (the unchanged model), logit adjustment, MARC, cRT or HALO on held-out samples.

    The choice uses the cross-validated log-likelihood at the target prior. The model stays unchanged unless a method
    is better by two standard errors; of those, it takes the simplest within one standard error of the best.

    Args:
        target_prior: expected class frequencies: "uniform", "train", weights or counts (K,), or a CSV file.
        seed: random seed of the folds.

    Fitted attributes: `choice_` (name of the method), `method_` (the fitted method), `trial_` (all candidates),
    `target_shift_` (K,), `result_`.

    >>> rng = np.random.default_rng(0)
    >>> y = np.repeat([0, 1], [900, 100])
    >>> logits = 2 * np.eye(2)[y] + rng.normal(size=(1000, 2)) + [2.2, 0.0]
    >>> Auto().fit(logits[::2], y[::2], validation=(logits[1::2], y[1::2])).choice_
    'logit-adjustment'
    """

    learns_from_seen = False

    def __init__(self, target_prior: Any = "uniform", *, seed: int = 0) -> None:
        self.target_prior = target_prior
        self.seed = seed

    def check_settings(self) -> None:
        check_target_prior(self.target_prior)
        whole_number("seed", self.seed, at_least=0)

    @property
    def needs_validation(self) -> bool:
        return True

    def _fit(self, data: FitData, validation: FitData | None) -> None:
        self.trial_: Trial = try_candidates(data, validation, self.target_prior, self.seed)
        chosen = self.trial_.chosen
        if data.world.size > 1:  # rounding must not let processes choose differently
            number = torch.tensor([float(self.trial_.candidates.index(chosen))])
            data.world.broadcast([number])
            chosen = self.trial_.candidates[int(number)]
        self.choice_, self.method_, self.target_shift_ = chosen.name, chosen.method, chosen.target_shift
        self.log_target_ = self.target_shift_
        self.result_ = self.method_.result_

    def _apply(self, logits: Tensor, features: Tensor | None) -> Tensor:
        return shifted(self.method_.transform(logits, features), self.target_shift_)

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        check_is_fitted(self)
        folded, offset = self.method_.fold(weight, bias)
        return shifted_head(folded, offset, np.asarray(self.target_shift_))

    @property
    def n_parameters_(self) -> int:
        return self.method_.n_parameters_
