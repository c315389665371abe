"""What the tests of losses share: every loss on logits, in its forms, and the comparison with golden numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from longtail.losses import (
    LADE,
    LDAM,
    BalancedSoftmax,
    ClassBalanced,
    Equalization,
    Focal,
    LogitAdjusted,
    Seesaw,
    WeightedCrossEntropy,
)

COUNTS = (1000, 200, 30, 5, 1)
WEIGHTS = tuple(1 / count for count in COUNTS)


def focal(class_counts, **settings):
    return Focal(**settings)


@dataclass(frozen=True)
class Case:
    """One loss in one form.

    Args:
        name: what tests are called by.
        make: class_counts and settings → the loss.
        settings: of this form.
        limit: settings with which it is cross-entropy (of K questions in the sigmoid forms).
        equal: whether that needs equal class counts, too.
        soft: whether it takes soft targets and label smoothing.
        by_weights: whether its mean divides by the sum of the weights.
    """

    name: str
    make: Callable[..., torch.nn.Module]
    settings: dict[str, Any] = field(default_factory=dict)
    limit: dict[str, Any] = field(default_factory=dict)
    equal: bool = False
    soft: bool = False
    by_weights: bool = False

    @property
    def counted(self) -> bool:
        return self.make is not focal

    def __call__(self, counts=COUNTS, **settings):
        return self.make(counts, **(self.settings | settings))

    def at_its_limit(self, **settings):
        return self((40,) * 5 if self.equal else COUNTS, **(self.limit | settings))


CASES = [
    Case("weighted", WeightedCrossEntropy, equal=True, soft=True, by_weights=True),
    Case("weighted, batch", WeightedCrossEntropy, {"divide_by": "batch"}, equal=True, soft=True),
    Case("class-balanced", ClassBalanced, limit={"beta": 0}, soft=True),
    Case("class-balanced, weights", ClassBalanced, {"divide_by": "weights"}, {"beta": 0}, soft=True, by_weights=True),
    Case("class-balanced sigmoid", ClassBalanced, {"form": "sigmoid"}, {"beta": 0}),
    Case("class-balanced focal", ClassBalanced, {"form": "focal", "gamma": 0.5}, {"beta": 0, "gamma": 0}),
    Case("ldam", LDAM, limit={"max_margin": 0, "scale": 1}),
    Case("ldam scaled", LDAM, {"scaled": True}, {"max_margin": 0}),
    Case(
        "ldam, re-weighted",
        LDAM,
        {"class_weights": WEIGHTS},
        {"max_margin": 0, "scale": 1, "class_weights": [1.0] * 5},
        by_weights=True,
    ),
    Case("lade", LADE, limit={"alpha": 0}, equal=True),
    # Every draw spares a rare class: the draws have a test of their own.
    Case("equalization", Equalization, {"threshold": 0.05, "gamma": 1}, {"gamma": 0}),
    Case("balanced softmax", BalancedSoftmax, equal=True, soft=True),
    Case("seesaw", Seesaw, limit={"p": 0, "q": 0}),
    Case("logit-adjusted", LogitAdjusted, limit={"tau": 0}, soft=True),
    Case("focal", focal, limit={"gamma": 0}),
    Case("focal, half", focal, {"gamma": 0.5}, {"gamma": 0}),
    Case("focal sigmoid", focal, {"gamma": 0.5, "form": "sigmoid"}, {"gamma": 0}),
    Case("focal, weighted", focal, {"class_weights": WEIGHTS}, {"gamma": 0, "class_weights": [1.0] * 5}),
]
TABLES = {
    "every": CASES,
    "counted": [case for case in CASES if case.counted],
    "soft": [case for case in CASES if case.soft],
    "hard": [case for case in CASES if not case.soft],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `every`, `counted`, `soft` or `hard` runs for each of those losses."""
    for argument, cases in TABLES.items():
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, cases, ids=[case.name for case in cases])


@pytest.fixture(scope="session")
def losses() -> list[Case]:
    """All of them at once."""
    return CASES


@pytest.fixture(scope="session")
def agree():
    """`agree(loss, input, value, gradient)`: the loss of a float64 input and its gradient are the stored ones."""

    def check(loss: Callable, inputs: np.ndarray, value: np.ndarray, gradient: np.ndarray | None = None) -> None:
        leaf = torch.from_numpy(inputs).requires_grad_()
        result = loss(leaf)
        assert result.shape == ()
        assert result.dtype == torch.float64
        assert result.item() == pytest.approx(float(value), rel=1e-7, abs=1e-12)
        if gradient is not None:
            result.backward()
            np.testing.assert_allclose(leaf.grad, gradient, rtol=0, atol=1e-7 * np.abs(gradient).max())

    return check
