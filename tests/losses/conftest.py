"""What the tests of losses share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch


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
