"""Which class frequencies a model's own logits are right for: those of its training set, or equal ones.

Cross-entropy on images as they come gives logits eta = log p(x | y) + log pi: right for the training
prior pi. Balanced softmax and its relatives give log p(x | y): right for equal classes. The training
images tell the two apart, whatever temperature the logits have: their log-likelihood under a eta is
compared with that under a eta + log pi, each with its own best a. A trained model has an a near 1 or
above on its training images; logits with another one are not what training ends with (or are in a unit
of their own), and tell nothing.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from longtail.posthoc.held import to_effective_number
from longtail.posthoc.inputs import FitData
from longtail.posthoc.likelihood import best_scale, log_likelihood

LOOKED_AT = 1 << 20  # logits of training samples
CLEAR = 3.0  # nats by which equal classes must be the better explanation: a Bayes factor of 20, strong evidence
TRAINED = (0.75, 10.0)  # smallest and largest a of a trained model

ModelPrior = Literal["train", "uniform"]


def find_model_prior(data: FitData) -> ModelPrior:
    """The prior that training outputs are right for; "train" where they do not tell, as all of them are known."""
    number = min(len(data.labels), max(LOOKED_AT // data.num_classes, 1))
    chosen = np.linspace(0, len(data.labels) - 1, number).astype(int)
    logits = data.rows.read(chosen).double()
    labels = data.labels[torch.from_numpy(chosen)]
    weights = to_effective_number(data.frequency[labels.numpy()])
    log_prior = torch.from_numpy(np.log(data.class_counts / data.class_counts.sum()))

    def explained(offset: torch.Tensor) -> tuple[float, float]:
        scale = best_scale(logits, labels, offset, weights)
        return float(torch.from_numpy(weights) @ log_likelihood(logits, labels, offset, scale)), scale

    (as_equal, scale), (as_trained, _) = explained(log_prior), explained(torch.zeros_like(log_prior))
    equal = torch.tensor([float(as_equal > as_trained + CLEAR and TRAINED[0] < scale < TRAINED[1])])
    data.world.broadcast([equal])  # rounding must not let processes decide differently
    return "uniform" if float(equal) else "train"
