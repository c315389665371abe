"""Every method of the library by name: the table of contents.

The command line, the comparison and the parametrised tests go through these dictionaries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from longtail.errors import choose
from longtail.networks.classifier import Classifier
from longtail.posthoc.base import PostHoc
from longtail.posthoc.marc import MARC
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


@dataclass(frozen=True)
class PostHocMethod:
    """A way to repair a trained classifier (stage two).

    Args:
        title: name as in the literature.
        family: decision boundary, calibration.
        paper: where it comes from.
        estimator: its class.
        trains: the numbers it trains, as a formula in p (features) and K (classes).
        needs: what it is fitted on beyond logits and labels.
    """

    title: str
    family: str
    paper: str
    estimator: type[PostHoc]
    trains: str
    needs: str = "logits"


TRAIN_METHODS: dict[str, TrainMethod] = {
    "softmax": TrainMethod(
        "Softmax",
        "standard",
        "cross-entropy, instance-balanced sampling",
        lambda counts: Objective(nn.CrossEntropyLoss()),
    ),
}

POSTHOC_METHODS: dict[str, PostHocMethod] = {
    "marc": PostHocMethod(
        "MARC",
        "decision boundary",
        "Wang et al., Margin Calibration for Long-Tailed Visual Recognition, ACML 2022",
        MARC,
        trains="2K",
        needs="logits, norms of the class vectors",
    ),
}


def build_posthoc(name: str, options: dict[str, str]) -> PostHoc:
    """A post-hoc method by name, with options given as text.

    >>> build_posthoc("marc", {"gamma": "0.9"})
    MARC(gamma=0.9)
    """
    estimator = POSTHOC_METHODS[choose("method", name, POSTHOC_METHODS)].estimator
    return estimator(**parse_options(options, estimator.__init__))


def parse_options(options: dict[str, str], function: Callable[..., object]) -> dict[str, object]:
    """Options as the values they mean; an error lists the names that `function` takes."""
    known = [name for name in inspect.signature(function).parameters if name not in ("self", "class_counts")]
    return {choose("option", name, known): _value(text) for name, text in options.items()}


def _value(text: str) -> object:
    """What a word means: a number, a truth value, nothing, or itself."""
    words: dict[str, object] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
