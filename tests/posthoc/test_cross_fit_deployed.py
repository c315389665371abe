"""HALO(held_out="cross-fit") deploys the heads that its coefficients were fitted for."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import balanced_accuracy_score
from torch import nn

from longtail.outputs.record import Outputs
from longtail.posthoc.halo import HALO
from longtail.posthoc.halo.heads import stack_heads
from longtail.posthoc.halo.unseen import head_of_loss, mean_loss
from longtail.posthoc.inputs import from_outputs
from longtail.posthoc.solver.linear import class_statistics

COUNTS = np.geomspace(120, 4, 10).round().astype(int)


def probed_digits(seed):
    """Long-tailed digits and all others, with a head that was trained too long from large weights."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    rows = np.concatenate([np.flatnonzero(labels == label)[:count] for label, count in enumerate(COUNTS)])
    others = np.setdiff1d(np.arange(len(labels)), rows)
    torch.manual_seed(0)
    linear = nn.Linear(64, 10)
    nn.init.normal_(linear.weight)
    optimizer = torch.optim.Adam(linear.parameters(), lr=0.1)
    inputs, targets = torch.from_numpy(images[rows]), torch.from_numpy(labels[rows])
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(linear(inputs), targets).backward()
        optimizer.step()
    weight, bias = linear.weight.detach().numpy(), linear.bias.detach().numpy()

    def outputs(which, split):
        head = {"class_counts": COUNTS, "head_weight": weight, "head_bias": bias}
        logits = images[which] @ weight.T + bias
        return Outputs(labels[which], logits=logits, features=images[which], split=split, **head)

    return outputs(rows, "train"), outputs(others, "test")


@pytest.fixture(scope="module")
def draws():
    fitted = []
    for seed in range(3):
        train, test = probed_digits(seed)
        fitted.append((HALO(held_out="cross-fit").fit(train), train, test))
    return fitted


def mixed(halo, logits, heads, features):
    """HALO's formula for logits (N, K) of a model and a stack of heads; the digits' model prior is that of training."""
    numbers, inputs = halo.numbers_, torch.from_numpy(features).double()
    total = (numbers["model"] - numbers["lda"] - numbers["balanced"]) * logits
    total = total + sum(numbers[name] * head.scores(inputs).numpy() for name, head in heads.items())
    classes = (numbers["prior"] - 0.5) * halo.log_prior_ + numbers["norms"] * halo.log_norms_
    return total + classes + halo.log_target_


def test_the_deployed_head_is_fitted_on_all_samples_as_in_the_folds(draws):
    halo, train, test = draws[0]
    assert halo.model_prior_ == "train"
    data = from_outputs(train)
    statistics = class_statistics(train.features, data.labels, 10)
    head = head_of_loss(train.features, data.labels, statistics, mean_loss(data))
    np.testing.assert_array_equal(halo.model_head_.weight, head.weight)
    np.testing.assert_array_equal(halo.model_head_.bias, head.bias)
    logits = test.features.astype(np.float64) @ head.weight.T + head.bias
    np.testing.assert_allclose(halo.transform(test), mixed(halo, logits, halo.heads_, test.features), atol=1e-3)


def test_the_given_head_counts_only_for_the_loss_that_it_reached(draws):
    """Both ways of use, on logits and in a layer, depend on the features alone."""
    halo, _, test = draws[0]
    other = np.random.default_rng(0).normal(size=test.logits.shape).astype(np.float32)
    np.testing.assert_array_equal(halo.transform(other, test.features), halo.transform(test))
    weight, bias = halo.fold(torch.zeros(10, 64), None)
    np.testing.assert_allclose(test.features @ weight.numpy().T + bias.numpy(), halo.transform(test), atol=1e-3)
    assert halo.n_parameters_ == len(halo.numbers_) + 2 * (64 * 10 + 10)


def test_it_recognises_more_than_the_same_numbers_on_the_given_head(draws):
    scores = []
    for halo, train, test in draws:
        data = from_outputs(train)
        statistics = class_statistics(train.features, data.labels, 10)
        heads = stack_heads(data, train.features, statistics, halo.tolerance)
        given = mixed(halo, test.logits, heads, test.features).argmax(1)
        deployed = np.asarray(halo.transform(test)).argmax(1)
        scores.append([balanced_accuracy_score(test.labels, predicted) for predicted in (deployed, given)])
    deployed, given = np.mean(scores, axis=0)
    assert deployed > given


def test_with_held_out_samples_the_models_head_stays():
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 4
    logits = 2 * np.eye(4)[labels] + rng.normal(size=(40, 4))
    halo = HALO().fit(logits[:20], labels[:20], validation=(logits[20:], labels[20:]))
    assert halo.model_head_ is None
