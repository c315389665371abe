"""A few samples of four classes, as outputs, and a check of gradients."""

import numpy as np
import torch
from scipy.optimize import approx_fprime

from longtail import Outputs
from longtail.metrics.scores import evaluate

RNG = np.random.default_rng(7)


LABELS = np.array([0] * 9 + [1] * 5 + [2] * 3 + [3] * 2)


FEATURES = RNG.normal(size=(19, 3)) + np.eye(4)[LABELS][:, :3]


LOGITS = RNG.normal(size=(19, 4)) + np.eye(4)[LABELS]


HEAD = {"head_weight": RNG.normal(size=(4, 3)).astype(np.float32), "head_bias": RNG.normal(size=4).astype(np.float32)}


TARGET = torch.from_numpy(LABELS)


def outputs(split="train", seed=None, **more):
    """The same samples, or others of the same kind."""
    rng = np.random.default_rng(seed)
    features = FEATURES if seed is None else rng.normal(size=(19, 3)) + np.eye(4)[LABELS][:, :3]
    logits = features @ HEAD["head_weight"].T + HEAD["head_bias"]
    given = {"features": features.astype(np.float32), **HEAD, **more}
    return Outputs(LABELS, np.array([90, 50, 30, 20]), logits=logits.astype(np.float32), split=split, **given)


def check_gradient(problem, size, seed=0):
    """The gradient is that of the value, at some point."""
    x = np.random.default_rng(seed).normal(size=size)
    value, gradient = problem.value_and_gradient(x)
    numeric = approx_fprime(x, lambda at: problem.value_and_gradient(at)[0], 1e-6)
    np.testing.assert_allclose(gradient, numeric, atol=2e-5)
    return x, value


def problem_data(seed=0, classes=4, counts=(60, 25, 10, 4)):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(classes), counts)
    logits = rng.normal(size=(len(y), classes)) + 1.5 * np.eye(classes)[y] + np.linspace(1.5, -1.5, classes)
    return logits.astype(np.float32), y, np.array(counts), rng.uniform(0.5, 2, classes)


def balanced(logits, features):
    counts = np.bincount(features["y"])
    per_class = np.array(evaluate(logits, features["test_y"], counts).per_class)
    return 100 * np.array([per_class.mean(), per_class[:3].mean(), per_class[3:7].mean(), per_class[7:].mean()])
