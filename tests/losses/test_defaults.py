"""Every default of a loss, in one table: those of its authors, and torch's own for what `cross_entropy` has too."""

import inspect

import pytest

import longtail.losses

TORCH = {"reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0}
DEFAULTS = {
    "WeightedCrossEntropy": {**TORCH, "divide_by": "weights"},
    "BalancedSoftmax": TORCH,
    # Cui et al. 2019.
    "ClassBalanced": {**TORCH, "form": "softmax", "beta": 0.9999, "gamma": 2.0, "divide_by": "batch"},
    # Lin et al. 2017.
    "Focal": {**TORCH, "gamma": 2.0, "form": "softmax", "class_weights": None},
    # Cao et al. 2019.
    "LDAM": {
        **TORCH,
        "max_margin": 0.5,
        "scale": 30.0,
        "class_weights": None,
        "divide_by": "weights",
        "scaled": False,
    },
    # Hong et al. 2021.
    "LADE": {**TORCH, "alpha": 0.1, "remine_lambda": 0.1},
    # Tan et al. 2020, on CIFAR.
    "Equalization": {**TORCH, "gamma": 0.9, "threshold": 5e-3},
    # Wang et al. 2021.
    "Seesaw": {**TORCH, "p": 0.8, "q": 2.0, "eps": 0.01},
    # Menon et al. 2021.
    "LogitAdjusted": {**TORCH, "tau": 1.0},
    # Wang et al. 2021, for images of long-tailed data.
    "SupCon": {
        "temperature": 0.1,
        "base_temperature": None,
        "anchors": "all",
        "reduction": "mean",
        "ignore_index": -100,
    },
}


@pytest.mark.parametrize("name", [name for name in longtail.losses.__all__ if name[0].isupper()])
def test_defaults_are_the_authors(name):
    parameters = inspect.signature(getattr(longtail.losses, name).__init__).parameters.values()
    assert {one.name: one.default for one in parameters if one.default is not one.empty} == DEFAULTS[name]
