"""The paper's tables and figures by name: what each shows, on which data, and the numbers in the paper.

`python -m longtail.paper NAME` makes them. This file imports nothing heavy: help texts and completion read it.

Paper: Wang et al., Margin Calibration for Long-Tailed Visual Recognition, ACML 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from longtail.config import TrainConfig
from longtail.recipes import RECIPES


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper.

    Args:
        where: its number in the paper.
        what: what it shows.
        kind: how it is made.
        recipes: the training runs it needs; none if it needs no data.
        methods: what is compared; empty for all that the paper compares on the data.
        figures: drawings of `longtail.report.figures` and `longtail.paper.figures` that it consists of.
    """

    where: str
    what: str
    kind: Literal["formulas", "accuracy", "parameters", "stage-one", "f1", "drawing", "gamma"]
    recipes: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()


CIFAR = ("cifar10-lt-100", "cifar10-lt-200", "cifar100-lt-100", "cifar100-lt-200")
BOUNDARY = (
    "softmax",
    "tau-norm",
    "crt",
    "lws",
    "disalign",
    "logit-adjustment",
    "logit-adjustment:tau=auto",
    "marc",
    "marc:solver=sgd",
    "marc:gamma=auto",
    "halo",
)
LEARNABLE = ("crt", "lws", "disalign", "marc")

ITEMS: dict[str, Item] = {
    "table-formulas": Item("Table 1", "what each decision-boundary method does to a logit", "formulas"),
    "table-cifar": Item("Table 2", "accuracy on CIFAR-10-LT and CIFAR-100-LT", "accuracy", CIFAR),
    "table-boundary": Item(
        "Table 2, decision boundary",
        "decision-boundary methods and their variants on CIFAR",
        "accuracy",
        CIFAR,
        BOUNDARY,
    ),
    "table-inaturalist": Item("Table 3", "accuracy on iNaturalist 2018", "accuracy", ("inaturalist18",)),
    "table-imagenet": Item("Table 4", "many, medium, few and all of ImageNet-LT", "accuracy", ("imagenet-lt",)),
    "table-places": Item("Table 5", "many, medium, few and all of Places-LT", "accuracy", ("places-lt",)),
    "table-parameters": Item(
        "Table 6", "trained numbers beside accuracy", "parameters", ("cifar100-lt-200", "imagenet-lt"), LEARNABLE
    ),
    "table-stage-one": Item(
        "Table 7",
        "MARC on CIFAR-100-LT 200 after stage one on less and less imbalanced data",
        "stage-one",
        ("cifar100-lt-200", "cifar100-lt-100", "cifar100-lt-50"),
        ("softmax",),
    ),
    "figure-margins": Item(
        "Figure 1",
        "logits, margins and class-wise accuracy on CIFAR-10-LT 200",
        "drawing",
        ("cifar10-lt-200",),
        figures=("class-means", "class-accuracy"),
    ),
    "figure-margins-cifar100": Item(
        "Figure 3 (a, b)",
        "logits and margins on CIFAR-100-LT 200",
        "drawing",
        ("cifar100-lt-200",),
        figures=("class-means",),
    ),
    "figure-confusion": Item(
        "Figure 3 (c, d)",
        "confusion matrices on CIFAR-10-LT 200",
        "drawing",
        ("cifar10-lt-200",),
        figures=("confusion",),
    ),
    "figure-disalign": Item(
        "Figure 4",
        "margins and logits of DisAlign beside MARC (and HALO) on ImageNet-LT",
        "drawing",
        ("imagenet-lt",),
        figures=("disalign-beside-marc",),
    ),
    "figure-accuracy": Item(
        "Figure 5 (a)",
        "class-wise accuracy on CIFAR-100-LT 200",
        "drawing",
        ("cifar100-lt-200",),
        figures=("class-accuracy",),
    ),
    "figure-f1": Item("Figure 5 (b)", "F1 on CIFAR-10-LT and CIFAR-100-LT", "f1", CIFAR, ("softmax", "marc")),
    "figure-gamma": Item(
        "Figure 6",
        "accuracy on CIFAR-100-LT 200 against gamma",
        "gamma",
        ("cifar100-lt-200",),
        figures=("accuracy-against-gamma",),
    ),
}

# Table 1: method → what it does to logit j. eta logits, W class vectors, z features; omega, beta, b, v, c are trained.
FORMULAS: dict[str, str] = {
    "crt": "W'_j z + b'_j, both trained anew",
    "lws": "omega_j eta_j (the paper writes it as a power of ‖W_j‖)",
    "disalign": "s (omega_j eta_j + beta_j) + (1 - s) eta_j with s = sigmoid(v z + c)",
    "marc": "omega_j eta_j + beta_j ‖W_j‖, which is ‖W_j‖ (omega_j d_j + beta_j)",
}

# What the numbers of a data set below are, by how many there are.
SCORES_SHOWN: dict[int, tuple[str, ...]] = {1: ("top1",), 4: ("many", "medium", "few", "top1")}

# Table 2: method → per cent on the four recipes of `CIFAR`; None where the paper has no number.
CIFAR_NUMBERS: dict[str, tuple[float | None, ...]] = {
    "softmax": (78.7, 74.4, 45.3, 41.0),
    "cbs": (77.8, 68.3, 42.6, 37.8),
    "cbw": (78.6, 72.5, 42.3, 36.7),
    "class-balanced": (78.2, 72.6, 44.6, 39.9),
    "focal": (77.1, 71.8, 43.8, 40.2),
    "lade": (81.8, 76.9, 45.4, 43.6),
    "ldam": (78.9, 73.6, 46.1, 41.3),
    "equalization": (78.5, 74.6, 47.4, 43.3),
    "balanced-softmax": (83.1, 79.0, 50.3, 45.9),
    "disalign": (78.0, 71.2, 49.1, 43.6),
    "crt": (82.0, 76.6, 50.0, 44.5),
    "lws": (83.7, 78.1, 50.5, 45.3),
    "marc": (85.3, 81.1, 50.8, 47.4),
    "bbn": (79.8, None, 42.6, None),
    "hybrid-sc": (81.4, None, 46.7, None),
}

# Recipe → method → per cent in the paper's tables 2 to 5: top-1, or many, medium, few and top-1.
_CIFAR: dict[str, dict[str, tuple[float, ...]]] = {
    recipe: {method: (number,) for method, numbers in CIFAR_NUMBERS.items() if (number := numbers[column]) is not None}
    for column, recipe in enumerate(CIFAR)
}
NUMBERS = _CIFAR | {
    "inaturalist18": {
        "softmax": (65.0,),
        "class-balanced": (61.1,),
        "ldam": (64.6,),
        "balanced-softmax": (69.8,),
        "lade": (70.0,),
        "tau-norm": (69.3,),
        "lws": (69.5,),
        "disalign": (70.3,),
        "marc": (70.4,),
        "causal-norm": (63.9,),
        "hybrid-sc": (68.1,),
    },
    "imagenet-lt": {
        "softmax": (65.1, 35.7, 6.6, 43.1),
        "focal": (64.3, 37.1, 8.2, 43.7),
        "seesaw": (67.1, 45.2, 21.4, 50.4),
        "balanced-softmax": (62.2, 48.8, 29.8, 51.4),
        "lade": (62.3, 49.3, 31.2, 51.9),
        "tau-norm": (59.1, 46.9, 30.7, 49.4),
        "crt": (61.8, 46.2, 27.4, 49.6),
        "lws": (60.2, 47.2, 30.3, 49.9),
        "disalign": (60.8, 50.4, 34.7, 52.2),
        "marc": (60.4, 50.3, 36.6, 52.3),
        "oltr": (51.0, 40.8, 20.8, 41.9),
        "causal-norm": (62.7, 48.8, 31.6, 51.8),
    },
    "places-lt": {
        "softmax": (46.4, 27.9, 12.5, 31.5),
        "focal": (41.1, 34.8, 22.4, 34.6),
        "balanced-softmax": (42.0, 38.0, 17.2, 35.4),
        "lade": (42.8, 39.0, 31.2, 38.8),
        "lws": (40.6, 39.1, 28.6, 37.6),
        "tau-norm": (37.8, 40.7, 31.8, 37.9),
        "disalign": (40.0, 39.6, 32.3, 38.3),
        "marc": (39.9, 39.8, 32.6, 38.4),
        "oltr": (44.7, 37.0, 25.3, 35.9),
        "causal-norm": (23.8, 35.8, 40.4, 32.4),
    },
}

# Table 7: recipe of stage one → per cent of MARC on CIFAR-100-LT 200.
AFTER_STAGE_ONE = {"cifar100-lt-200": 47.1, "cifar100-lt-100": 50.7, "cifar100-lt-50": 54.5}


def toy_of(config: TrainConfig) -> TrainConfig:
    """Long-tailed digits and a few training steps instead of a recipe, for a quick look at an item."""
    digits = RECIPES["digits-lt"]
    imbalance = digits.imbalance if config.profile == "none" else round(config.imbalance / 7)
    return replace(digits, imbalance=imbalance, epochs=None, iterations=60)
