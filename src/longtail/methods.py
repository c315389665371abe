"""Every method of the library by name: the table of contents.

The command line, the comparison and the parametrised tests go through these dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from longtail.networks.classifier import Classifier
from longtail.training.objective import Objective

BuildModel = Callable[[nn.Module, Tensor], nn.Module]
BuildObjective = Callable[[Tensor], nn.Module]


@dataclass(frozen=True)
class TrainMethod:
    """A way to train a network from images (stage one).

    Args:
        title: name as in the literature.
        family: standard, re-sampling, loss, network.
        paper: where it comes from.
        objective: class_counts (K,) → what is minimised.
        model: (backbone, class_counts) → the network.
        samplers: one stream of images each; several streams share the batch.
    """

    title: str
    family: str
    paper: str
    objective: BuildObjective
    model: BuildModel = lambda backbone, class_counts: Classifier(backbone, len(class_counts))
    samplers: tuple[str, ...] = ("instance",)


TRAIN_METHODS: dict[str, TrainMethod] = {
    "softmax": TrainMethod(
        "Softmax",
        "standard",
        "cross-entropy, instance-balanced sampling",
        lambda counts: Objective(nn.CrossEntropyLoss()),
    ),
}
