"""Every method of the library by name: the table of contents.

The command line, the comparison and the parametrised tests go through these dictionaries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from longtail.errors import choose
from longtail.networks.bbn import BBN, BBNObjective
from longtail.networks.causal_norm import CausalNorm
from longtail.networks.classifier import Classifier
from longtail.networks.hybrid_sc import HybridSC, HybridSCObjective
from longtail.networks.oltr import OLTR, OLTRObjective
from longtail.posthoc.base import PostHoc
from longtail.posthoc.marc import MARC
from longtail.training.objective import Objective


def plain_classifier(backbone: nn.Module, class_counts: Tensor) -> nn.Module:
    """A backbone and a linear head."""
    return Classifier(backbone, len(class_counts))


@dataclass(frozen=True)
class TrainMethod:
    """A way to train a network from images (stage one).

    Args:
        title: name as in the literature.
        family: standard, re-sampling, loss or network.
        paper: where it comes from.
        objective: class_counts (K,) and options → what is minimised.
        model: backbone, class_counts (K,) and options → the network.
        samplers: one stream of images each; several streams share the batch. Two streams of one name
            show the same images, augmented differently.
        needs: what it asks for beyond images and labels.
    """

    title: str
    family: str
    paper: str
    objective: Callable[..., nn.Module]
    model: Callable[..., nn.Module] = plain_classifier
    samplers: tuple[str, ...] = ("instance",)
    needs: str = ""

    def build(self, backbone: nn.Module, class_counts: Tensor, options: dict[str, str]) -> tuple[nn.Module, nn.Module]:
        """The network and its objective; each option goes to whichever of the two takes it."""
        parsed = parse_options(options, self.model, self.objective)
        model = self.model(backbone, class_counts, **_taken(parsed, self.model))
        return model, self.objective(class_counts, **_taken(parsed, self.objective))


def of_loss(loss: type[nn.Module]) -> Callable[..., nn.Module]:
    """The objective of a loss `Loss(class_counts, *, …)` on plain batches, with its options."""

    def build(class_counts: Tensor, **options: object) -> nn.Module:
        return Objective(loss(class_counts, **options))

    build.__signature__ = inspect.signature(loss)  # type: ignore[attr-defined]
    return build


def cross_entropy(class_counts: Tensor) -> nn.Module:
    return Objective(nn.CrossEntropyLoss())


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
        "cross-entropy, every image once an epoch",
        cross_entropy,
    ),
    "bbn": TrainMethod(
        "BBN",
        "network",
        "Zhou et al., BBN: Bilateral-Branch Network with Cumulative Learning, CVPR 2020",
        BBNObjective,
        BBN,
        samplers=("instance", "reversed"),
        needs="two branches; half of each batch from the reversed sampler",
    ),
    "hybrid-sc": TrainMethod(
        "Hybrid-SC",
        "network",
        "Wang et al., Contrastive Learning based Hybrid Networks, CVPR 2021",
        HybridSCObjective,
        HybridSC,
        # Two views on both sides: a batch then divides by four, and the branches see as many images.
        samplers=("instance", "instance", "class-balanced", "class-balanced"),
        needs="augmentation; a projection beside the head",
    ),
    "oltr": TrainMethod(
        "OLTR",
        "network",
        "Liu et al., Large-Scale Long-Tailed Recognition in an Open World, CVPR 2019",
        OLTRObjective,
        OLTR,
        samplers=("deferred",),
        needs="attention and a memory beside the backbone",
    ),
    "causal-norm": TrainMethod(
        "Causal Norm (TDE)",
        "network",
        "Tang et al., Keeping the Good and Removing the Bad Momentum Causal Effect, NeurIPS 2020",
        cross_entropy,
        CausalNorm,
        needs="a moving average of the features",
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


def parse_options(options: dict[str, str], *functions: Callable[..., object]) -> dict[str, object]:
    """Options as the values they mean; an error lists the names that the functions take."""
    known = [name for function in functions for name in _names(function)]
    return {choose("option", name, known): _value(text) for name, text in options.items()}


def _names(function: Callable[..., object]) -> list[str]:
    given = ("self", "backbone", "class_counts")
    return [name for name in inspect.signature(function).parameters if name not in given]


def _taken(options: dict[str, object], function: Callable[..., object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if name in _names(function)}


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
