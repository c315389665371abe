"""Multi-label calibration against per-label computations of scikit-learn and SciPy, and folded into models."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit, logit
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn

import longtail
from longtail.errors import UserError
from longtail.integrations import Calibration
from longtail.posthoc import MultiLabelCalibration
from longtail.posthoc.gate import FitWarning
from longtail.posthoc.inputs import as_fit_data

PREVALENCE = np.array([0.5, 0.2, 0.05, 0.01])


def drawn(size=3000, seed=0):
    """Logits that are too large and shifted, with labels drawn from the right ones."""
    rng = np.random.default_rng(seed)
    right = logit(PREVALENCE) + 1.5 * rng.normal(size=(size, 4))
    labels = (rng.random(right.shape) < expit(right)).astype(int)
    return [2.0, 0.7, 1.5, 3.0] * right + [1.0, -1.0, 0.0, 4.0], labels


def naive(logits, labels, ridge=1.0, bounds=None):
    """Scale and shift of one label, by a general minimiser."""

    unit = min(logits.std(), 1)

    def loss(x):
        scores, change = x[0] * logits + x[1], (x[0] - 1) * unit
        return (np.logaddexp(0, scores) - labels * scores).sum() + ridge / 2 * (change**2 + x[1] ** 2)

    return minimize(loss, [1.0, 0.0], method="L-BFGS-B", bounds=bounds, options={"ftol": 1e-15, "gtol": 1e-9}).x


def test_each_label_is_a_logistic_regression_on_its_logit():
    logits, labels = drawn()
    method = MultiLabelCalibration(ridge=1e-9).fit(logits, labels)
    for column in range(4):
        alone = LogisticRegression(C=1e9, tol=1e-10, max_iter=1000).fit(logits[:, [column]], labels[:, column])
        assert method.scale_[column] == pytest.approx(alone.coef_.item(), rel=1e-4)
        assert method.shift_[column] == pytest.approx(alone.intercept_.item(), rel=1e-4, abs=1e-4)
    assert method.result_.converged
    assert method.result_.iterations < 15
    np.testing.assert_allclose(method.predict_proba(logits).mean(0), labels.mean(0), rtol=1e-5)
    np.testing.assert_array_equal(method.prevalence_, labels.mean(0))


def test_the_ridge_pulls_towards_the_unchanged_model():
    logits, labels = drawn(300)
    method = MultiLabelCalibration().fit(logits, labels)
    expected = np.stack([naive(logits[:, column], labels[:, column]) for column in range(4)])
    np.testing.assert_allclose(np.stack([method.scale_, method.shift_], 1), expected, atol=1e-4)
    strong = MultiLabelCalibration(ridge=1e9).fit(logits, labels)
    np.testing.assert_allclose(strong.transform(logits), logits, atol=1e-3)


@pytest.mark.parametrize("unit", [1e-3, 1e4])
def test_the_unit_of_the_logits_does_not_matter(unit):
    logits, labels = drawn()
    one, other = (MultiLabelCalibration(ridge=1e-6).fit(values, labels) for values in (logits, unit * logits))
    np.testing.assert_allclose(other.transform(unit * logits), one.transform(logits), atol=1e-3)
    assert other.result_.iterations < 20


def test_the_target_prevalence_moves_the_log_odds():
    logits, labels = drawn()
    as_is = MultiLabelCalibration().fit(logits, labels)
    balanced = MultiLabelCalibration(target_prevalence="balanced").fit(logits, labels)
    np.testing.assert_array_equal(balanced.predict(logits), as_is.predict_proba(logits) > labels.mean(0))
    for target in (0.3, [0.1, 0.2, 0.3, 0.4], torch.tensor([0.1, 0.2, 0.3, 0.4])):
        moved = MultiLabelCalibration(target_prevalence=target).fit(logits, labels)
        np.testing.assert_allclose(moved.shift_ - as_is.shift_, logit(np.asarray(target)) - logit(labels.mean(0)))
        np.testing.assert_array_equal(moved.scale_, as_is.scale_)
    same = MultiLabelCalibration(target_prevalence=labels.mean(0)).fit(logits, labels)
    np.testing.assert_allclose(same.shift_, as_is.shift_, atol=1e-12)


def test_labels_of_one_side_are_named_and_keep_their_scale():
    logits, labels = drawn(200)
    labels[:, 1], labels[:, 3] = 1, 0
    table = pd.DataFrame(logits, columns=["dog", "cat", "sofa", "fox"])
    with pytest.warns(FitWarning, match="^label cat, fox: no positive or no negative sample, so the scale stays 1$"):
        method = MultiLabelCalibration().fit(table, labels)
    assert method.scale_[[1, 3]].tolist() == [1, 1]
    assert method.shift_[[1, 3]].tolist() == [0, 0]
    with pytest.warns(FitWarning, match="cat, fox"):
        method = MultiLabelCalibration(target_prevalence="balanced").fit(table, labels)
    np.testing.assert_allclose(method.shift_[[1, 3]], [-logit(200.5 / 201), -logit(0.5 / 201)])


def test_separated_and_reversed_labels_are_warned_of():
    logits, labels = drawn(400)
    labels[:, 2] = logits[:, 2] > np.quantile(logits[:, 2], 0.9)
    with pytest.warns(FitWarning, match="^label 2: each positive has a higher logit .* fit on held-out samples$"):
        method = MultiLabelCalibration().fit(logits, labels)
    assert 1 < method.scale_[2] < 10
    logits, labels = drawn(400)
    logits[:, 0] *= -1
    with pytest.warns(FitWarning, match="^label 0: positives do not have higher logits than negatives"):
        method = MultiLabelCalibration().fit(logits, labels)
    smallest = 1e-3 / logits[:, 0].std()
    expected = naive(logits[:, 0], labels[:, 0], bounds=[(smallest, None), (None, None)])
    assert method.scale_[0] == pytest.approx(smallest, rel=1e-5)
    assert method.shift_[0] == pytest.approx(expected[1], abs=1e-4)
    with pytest.warns(FitWarning, match="all logits lie between 0 and 1: if they are probabilities"):
        MultiLabelCalibration().fit(expit(drawn(400)[0]), labels)


def test_torch_and_the_tools_of_scikit_learn():
    logits, labels = drawn(600)
    method = MultiLabelCalibration().fit(torch.tensor(logits), torch.tensor(labels))
    given, result = torch.tensor(logits, dtype=torch.float32), method.predict_proba(torch.tensor(logits).float())
    assert isinstance(result, torch.Tensor)
    np.testing.assert_allclose(result, method.predict_proba(logits), atol=1e-5)
    assert torch.equal(method.predict(given), (method.transform(given) > 0).long())
    assert method.score(logits, labels) == (method.predict(logits) == labels).all(1).mean()
    assert clone(method).get_params() == method.get_params()
    assert method.n_parameters_ == 8


@pytest.mark.parametrize(
    ("settings", "labels", "message"),
    [
        ({"target_prevalence": "uniform"}, None, "unknown target_prevalence 'uniform'; choose from: train, balanced"),
        ({"target_prevalence": 0}, None, "target_prevalence must be above 0 and below 1, not 0"),
        ({"target_prevalence": [0.1, 0.2]}, None, r"target_prevalence must have one number per class: shape \(4,\)"),
        ({"target_prevalence": ["a"] * 4}, None, "target_prevalence must be numbers"),
        ({"ridge": 0}, None, "ridge must be a number, above 0, not 0"),
        ({}, np.zeros(50, dtype=int), r"shape \(samples, labels\) and entries 0 and 1, not int64 of shape \(50,\)"),
        ({}, np.zeros((50, 3)), r"logits have shape \(50, 4\), but labels \(50, 3\)"),
        ({}, np.full((50, 4), -1), "label 0 of row 0 is -1, not 0 or 1; leave out samples whose labels are not known"),
        ({}, np.full((50, 4), np.nan), "label 0 of row 0 is nan"),
        ({}, [[0, 1], [1]], "every sample needs K entries of 0 and 1"),
    ],
)
def test_bad_input_is_named(settings, labels, message):
    logits, right = drawn(50)
    with pytest.raises(UserError, match=message):
        MultiLabelCalibration(**settings).fit(logits, right if labels is None else labels)


def test_it_is_not_taken_for_a_method_of_one_class_per_sample():
    logits, labels = drawn(50)
    with pytest.raises(UserError, match="takes logits .* and labels .*, not class_counts"):
        MultiLabelCalibration().fit(logits, labels, class_counts=[1, 2, 3, 4])
    with pytest.raises(UserError, match="takes labels .* of 0 and 1, not one class per sample"):
        MultiLabelCalibration().fit_checked(as_fit_data(logits, np.arange(50) % 4), None)
    with pytest.raises(UserError, match="call longtail.calibrate after the training"):
        Calibration(MultiLabelCalibration())  # of the callbacks


# Real images: which of several questions about a digit are answered with yes.
QUESTIONS = ({0, 2, 4, 6, 8}, {5, 6, 7, 8, 9}, {2, 3, 5, 7}, {0, 6, 8, 9}, {9})


@pytest.fixture(scope="module")
def digits():
    """Inputs and labels of three splits, and a network trained on the first with weights for rare positives."""
    inputs, digit = load_digits(return_X_y=True)
    kept = np.flatnonzero((digit != 9) | (np.arange(len(digit)) % 4 == 0))
    order = np.random.default_rng(0).permutation(kept)
    labels = np.stack([np.isin(digit, list(members)) for members in QUESTIONS], 1)
    splits = [
        (torch.tensor(inputs[rows] / 16, dtype=torch.float32), torch.tensor(labels[rows]))
        for rows in np.split(order, [500, 900])
    ]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5, bias=False))
    loss = nn.BCEWithLogitsLoss(pos_weight=(~splits[0][1]).sum(0) / splits[0][1].sum(0))
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        loss(network(splits[0][0]), splits[0][1].float()).backward()
        optimizer.step()
    return splits, network


@pytest.mark.parametrize("end", [None, nn.Sigmoid()], ids=["logits", "sigmoid"])
def test_it_folds_into_the_last_linear_layer(digits, end):
    splits, network = digits
    inputs, labels = splits[1]
    model = network if end is None else nn.Sequential(network, end)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels.float()), 64)
    calibrated, method = longtail.calibrate(model, loader, MultiLabelCalibration(), device="cpu")
    with torch.no_grad():
        before, after = network(inputs), calibrated(inputs)
        expected = method.transform(before)
        torch.testing.assert_close(after, expected if end is None else expected.sigmoid(), rtol=1e-4, atol=1e-4)
    layers = [layer for layer in calibrated.modules() if isinstance(layer, nn.Linear)]
    assert len(layers) == 2
    assert layers[1].bias.shape == (5,)
    alone = MultiLabelCalibration().fit(before, labels)
    np.testing.assert_allclose(method.scale_, alone.scale_, rtol=1e-4)
    triples = [(inputs, labels, torch.arange(len(labels)))]  # with the index of each sample
    again, _ = longtail.calibrate(model, None, MultiLabelCalibration(), validation=triples, device="cpu")
    torch.testing.assert_close(again(inputs), calibrated(inputs), rtol=1e-4, atol=1e-4)


def test_held_out_samples_make_the_probabilities_of_new_images_right(digits):
    splits, network = digits
    with torch.no_grad():
        logits = [network(inputs) for inputs, _ in splits]
    method = MultiLabelCalibration().fit(logits[1], splits[1][1])
    after, labels = method.transform(logits[2]), splits[2][1].float()
    losses = [nn.functional.binary_cross_entropy_with_logits(values, labels).item() for values in (logits[2], after)]
    assert losses[1] < 0.95 * losses[0]
    gaps = [(values.sigmoid().mean(0) - labels.mean(0)).abs().max() for values in (logits[2], after)]
    assert gaps[1] < gaps[0]


def test_what_cannot_be_calibrated_is_said(digits):
    splits, network = digits
    method, batch = MultiLabelCalibration(), splits[1]
    with pytest.raises(UserError, match="takes neither images_per_class nor class_counts"):
        longtail.calibrate(network, [batch], method, class_counts=[1] * 5, device="cpu")
    drawn_anew = torch.utils.data.WeightedRandomSampler([1.0] * len(batch[0]), 100)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), 64, sampler=drawn_anew)
    with pytest.raises(UserError, match="pass a loader that shows each sample once"):
        longtail.calibrate(network, loader, method, device="cpu")
    with pytest.raises(UserError, match="returns probabilities .* return the logits"):
        longtail.calibrate(nn.Sequential(network, nn.Softmax(1)), [batch], method, device="cpu")
    behind = nn.Sequential(network, nn.Hardtanh(-9, 9))
    with pytest.raises(UserError, match=r"Add the method after the model: method.fit\(logits, labels\); model = long"):
        longtail.calibrate(behind, [batch], method, device="cpu")
    method.fit(behind(batch[0]), batch[1])
    with pytest.raises(UserError, match="the output of a multi-label model could be sigmoids"):
        longtail.attach(behind, method)
    attached = longtail.attach(behind, method, batch=batch)
    torch.testing.assert_close(attached(batch[0]), method.transform(behind(batch[0])), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="returns the sigmoid of the output of"):
        longtail.attach(nn.Sequential(network, nn.Sigmoid()), method, batch=batch)
