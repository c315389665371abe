"""Long-tailed digits, and what every calibrated model is checked for."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import longtail
from longtail import MARC

CLASSES = 10


@pytest.fixture(autouse=True)
def same_weights_every_time():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def digits():
    """Long-tailed digits (N, 1, 8, 8), 60 of the 0 down to 3 of the 9, and their labels."""
    images, labels = load_digits(return_X_y=True)
    counts = np.geomspace(60, 3, CLASSES).round().astype(int)
    rows = np.concatenate([np.flatnonzero(labels == label)[:count] for label, count in enumerate(counts)])
    rows = np.random.default_rng(0).permutation(rows)
    return torch.from_numpy(images[rows]).float().div(16).reshape(-1, 1, 8, 8), torch.from_numpy(labels[rows])


def made(name, forward, **layers):
    """A model of a new class of this name, with these layers and this `forward(self, …)`."""
    model = type(name, (nn.Module,), {"forward": forward})()
    for path, layer in layers.items():
        model.add_module(path, layer)
    return model


def logits_of(model, inputs):
    """The logits of a model in evaluation mode, (N, K)."""
    modes = {name: module.training for name, module in model.named_modules()}
    with torch.inference_mode():
        model.eval()
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    for name, module in model.named_modules():
        module.training = modes[name]
    return (output if isinstance(output, torch.Tensor) else output["logits"]).flatten(1)


def state_of(model):
    """What must not change: class, modes, type, device and gradient of each part."""
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return SimpleNamespace(
        kind=type(model),
        modes={name: module.training for name, module in model.named_modules()},
        values={name: value.clone() for name, value in values.items()},
        described={name: (value.dtype, value.device, value.requires_grad) for name, value in values.items()},
    )


def draws():
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()


@pytest.fixture
def calibrated():
    """`calibrated(model, loader, inputs)`: the new model says what the method makes of the old one's logits.

    It is of the same class, in the same modes, of the same types, on the same device; the old model and the
    caller's random numbers are untouched.
    """

    def check(model, loader, inputs, method=None, *, atol=1e-4, **options):
        next(module for module in model.modules() if not list(module.children())).eval()  # a mode of its own
        before, old = state_of(model), logits_of(model, inputs)
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        expected_draws = draws()
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        repaired, fitted = longtail.calibrate(model, loader, method or MARC(), device="cpu", **options)
        assert draws() == expected_draws
        after, new = state_of(model), state_of(repaired)
        assert (after.kind, after.modes, after.described) == (before.kind, before.modes, before.described)
        assert all(torch.equal(after.values[name], value) for name, value in before.values.items())
        assert new.kind is before.kind
        assert {name: new.modes.get(name, mode) for name, mode in before.modes.items()} == before.modes
        assert {name: new.described.get(name, value) for name, value in before.described.items()} == before.described
        result = logits_of(repaired, inputs)
        assert result.dtype == old.dtype
        change = fitted.transform(old) - old
        assert change.abs().max() > 0.05 * old.abs().max()  # a calibration that changes nothing would show nothing
        torch.testing.assert_close(result.float(), fitted.transform(old).float(), rtol=1e-4, atol=atol)
        return repaired, fitted

    return check
