"""What every post-hoc method promises, over the table of methods."""

import json
import pickle
from contextlib import suppress

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from torch import nn

from longtail import MARC, Outputs
from longtail.errors import UserError
from longtail.methods import POSTHOC_METHODS, build_posthoc
from longtail.metrics.margins import margins
from longtail.metrics.scores import evaluate
from longtail.posthoc import CRT, LWS, DisAlign, LogitAdjustment
from longtail.posthoc.inputs import fit_outputs

TAIL = ("crt", "lws", "tau-norm", "disalign", "logit-adjustment", "marc")


def outputs_of(data, part: str) -> Outputs:
    counts = np.bincount(data["y"])
    known = {"head_weight": data["weight"], "head_bias": data["bias"]}
    if part == "train":
        return Outputs(data["y"], counts, logits=data["views"][0], features=data["view_features"][0], **known)
    rows = slice(0, None, 2) if part == "validation" else slice(1, None, 2)
    logits, features = data["test"][rows], data["test_features"][rows]
    return Outputs(data["test_y"][rows], counts, logits=logits, features=features, split=part, **known)


@pytest.fixture(scope="module", params=POSTHOC_METHODS)
def fitted(request, cifar_features):
    method = build_posthoc(request.param, {})
    fit_outputs(method, outputs_of(cifar_features, "train"), outputs_of(cifar_features, "validation"))
    return request.param, method


@pytest.fixture
def test_outputs(cifar_features):
    return outputs_of(cifar_features, "test")


def test_tail_methods_raise_the_tail_of_a_real_network(fitted, test_outputs):
    name, method = fitted
    truth = test_outputs.labels, test_outputs.class_counts
    before = np.array(evaluate(test_outputs.logits, *truth).per_class)
    after = np.array(evaluate(method.transform(test_outputs), *truth).per_class)
    if name in TAIL:
        assert after[7:].mean() > before[7:].mean() + 0.08
        assert after.mean() > before.mean() + 0.03
    assert np.isfinite(after).all()


def test_the_head_gives_the_repaired_logits(fitted, test_outputs):
    name, method = fitted
    linear = nn.Linear(64, 10)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(test_outputs.head_weight))
        linear.bias.copy_(torch.from_numpy(test_outputs.head_bias))
    layer = method.head(linear.eval())
    with torch.inference_mode():
        logits = layer(torch.from_numpy(test_outputs.features))
    np.testing.assert_allclose(logits, method.transform(test_outputs), atol=2e-4)
    if name in ("disalign", "platt"):
        with pytest.raises(UserError, match="does not fold"):
            method.fold(linear.weight, linear.bias)
    else:
        assert type(layer) is nn.Linear
        weight, bias = method.fold(linear.weight.double(), linear.bias.double())
        np.testing.assert_allclose(layer.weight.detach(), weight.detach(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(layer.bias.detach(), bias.detach(), rtol=1e-5, atol=1e-5)


def test_a_head_without_bias_is_calibrated_too(fitted, cifar_features):
    name, method = fitted
    linear = nn.Linear(64, 10, bias=False)
    layer = method.head(linear)
    features = torch.randn(5, 64)
    with torch.inference_mode():
        direct, expected = layer(features), method._apply(linear(features), features)
    np.testing.assert_allclose(direct, expected, atol=1e-4)
    assert layer.bias is not None if isinstance(layer, nn.Linear) else name in ("disalign", "platt")


def test_parameters_are_counted_as_the_table_says(fitted):
    name, method = fitted
    formula = POSTHOC_METHODS[name].trains.replace("pK", "p*K").replace("2K", "2*K").replace("^", "**")
    assert method.n_parameters_ == eval(formula, {"p": 64, "K": 10})


def test_scikit_learn_shape(fitted, test_outputs):
    _, method = fitted
    fresh = clone(method)
    with pytest.raises(NotFittedError):
        fresh.transform(test_outputs.logits)
    json.dumps(method.get_params())
    again = pickle.loads(pickle.dumps(method))
    np.testing.assert_array_equal(again.transform(test_outputs), method.transform(test_outputs))
    arguments = test_outputs.logits, test_outputs.features
    shares = method.predict_proba(*arguments)
    assert shares.sum(1) == pytest.approx(1, abs=1e-5)
    assert (method.predict(*arguments) == method.transform(*arguments).argmax(1)).all()
    assert (shares.argmax(1) == method.predict(*arguments)).mean() > 0.999


def test_torch_in_torch_out(fitted, test_outputs):
    _, method = fitted
    arguments = torch.from_numpy(test_outputs.logits), torch.from_numpy(test_outputs.features)
    for function in (method.transform, method.predict_proba, method.predict):
        assert isinstance(function(*arguments), torch.Tensor)
    np.testing.assert_array_equal(
        method.transform(*arguments).numpy(), method.transform(test_outputs.logits, test_outputs.features)
    )


def test_fitting_twice_gives_the_same(fitted, cifar_features, test_outputs):
    _, method = fitted
    again = clone(method)
    fit_outputs(again, outputs_of(cifar_features, "train"), outputs_of(cifar_features, "validation"))
    np.testing.assert_array_equal(again.transform(test_outputs), method.transform(test_outputs))


@pytest.mark.parametrize("name", POSTHOC_METHODS)
def test_bad_input_is_named_by_every_method(name):
    method = build_posthoc(name, {})
    logits = np.random.default_rng(0).normal(size=(20, 4))
    y = np.arange(20) % 4
    spoiled = logits.copy()
    spoiled[3, 1] = np.nan
    with pytest.raises(UserError, match="row 3 contain NaN"):
        method.fit(spoiled, y)
    with pytest.raises(UserError, match=r"labels must be 0\.\.3"):
        method.fit(logits, y + 1)
    missing = np.arange(20) % 3
    if name in ("temperature", "tau-norm"):  # they need neither samples nor counts of a class
        method = build_posthoc(name, {"tau": "1"} if name == "tau-norm" else {})
        assert np.isfinite(method.fit(logits, missing).scale_).all()
        return
    if name == "probe":  # never predicted, and named in a note
        method.fit(logits, missing, features=logits)
        assert (method.predict_proba(logits, logits)[:, 3] == 0).all()
        assert method.notes()[-1] == "no samples of class 3: never predicted"
        return
    with pytest.raises(UserError, match="class 3 has no sample"):
        method.fit(logits, missing)


@pytest.mark.parametrize("name", ["temperature", "vector", "matrix", "platt"])
def test_confidence_is_not_fitted_on_training_outputs(name, cifar_features):
    train = outputs_of(cifar_features, "train")
    with pytest.raises(UserError, match="must be fitted on images that the network has not seen"):
        build_posthoc(name, {}).fit(train)
    with pytest.raises(UserError, match="has not seen, but there are none"):
        fit_outputs(build_posthoc(name, {}), train, None)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (MARC(ridge=-1), "ridge must be a number, at least 0, not -1"),
        (MARC(ridge=float("nan")), "ridge must be a number"),
        (MARC(solver="sgd", batch_size=-1), "batch_size must be a whole number of at least 1"),
        (MARC(solver="sgd", lr=1e30, max_iter=20), "training diverged at lr 1e"),
        (DisAlign(gamma=float("nan")), "gamma must be a number"),
        (DisAlign(batch_size=0), "batch_size must be a whole number"),
        (LWS(max_iter=0), "max_iter must be a whole number"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_named(method, message):
    rng = np.random.default_rng(0)
    with pytest.raises(UserError, match=message):
        method.fit(rng.normal(size=(20, 4)), np.arange(20) % 4, features=rng.normal(size=(20, 3)))


def test_what_outputs_hold_is_not_said_twice():
    outputs = Outputs(np.arange(20) % 4, np.full(4, 5), logits=np.random.default_rng(0).normal(size=(20, 4)))
    with pytest.raises(UserError, match="Outputs hold their own class_counts"):
        LogitAdjustment().fit(outputs, class_counts=[1, 1, 1, 1])
    with pytest.raises(UserError, match="Outputs hold their own y"):
        MARC().fit(outputs, np.arange(20) % 4)
    with pytest.raises(UserError, match="Outputs hold their own weight_norms"):
        margins(outputs, weight_norms=[2, 2, 2, 2])


def test_repairing_outputs_of_other_classes_or_spoiled_ones_is_refused():
    rng = np.random.default_rng(0)
    marc = MARC().fit(rng.normal(size=(20, 4)), np.arange(20) % 4)
    with pytest.raises(UserError, match="X has 3 features"):
        marc.transform(Outputs(np.arange(3), np.ones(3, int), logits=rng.normal(size=(3, 3))))
    with pytest.raises(UserError, match="row 1 contain NaN"):
        marc.transform(Outputs(np.zeros(2), np.ones(4, int), logits=np.array([[1.0, 2, 3, 4], [np.nan, 0, 0, 0]])))
    crt = CRT().fit(rng.normal(size=(20, 4)), np.arange(20) % 4, features=rng.normal(size=(20, 3)))
    with pytest.raises(UserError, match="fitted on 3 features per sample, not 5"):
        crt.transform(rng.normal(size=(2, 4)), rng.normal(size=(2, 5)))


def test_names_of_classes_go_through():
    rng = np.random.default_rng(0)
    y = np.arange(40) % 4
    names = np.array(["ant", "bee", "cat", "dog"])
    logits = rng.normal(size=(40, 4)) + np.eye(4)[y]
    held_out = logits[:30][y[:30] < 3], y[:30][y[:30] < 3]  # without a dog
    by_number = MARC(gamma="auto").fit(logits, y, validation=held_out)
    by_name = MARC(gamma="auto").fit(logits, names[y], validation=(held_out[0], names[held_out[1]]))
    assert by_name.gamma_ == by_number.gamma_
    assert by_name.predict(torch.from_numpy(logits)).tolist() == names[by_number.predict(logits)].tolist()
    with pytest.raises(UserError, match="'eel' is not among the classes of the fit"):
        MARC(gamma="auto").fit(logits, names[y], validation=(logits[:1], ["eel"]))


@pytest.mark.filterwarnings("ignore:CRT lowers the AUC")  # after three steps from random weights
def test_bfloat16_is_worked_on_in_float32():
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(40, 4))).bfloat16()
    features, y = logits[:, :3].clone(), np.arange(40) % 4
    for method in (MARC(), DisAlign(max_iter=3), CRT("sgd", max_iter=3)):
        repaired = method.fit(logits, y, features=features).transform(logits, features)
        assert repaired.dtype == torch.float32
        expected = method.transform(logits.float(), features.float())
        torch.testing.assert_close(repaired, expected)


@pytest.mark.parametrize("name", POSTHOC_METHODS)
@pytest.mark.filterwarnings("ignore:not solved")  # nothing but a ridge moves such logits; it is said
def test_extreme_logits_and_one_sample_per_class_stay_finite(name):
    rng = np.random.default_rng(0)
    logits = (1e4 * rng.choice([-1, 1], size=(4, 4))).astype(np.float32)
    features = rng.normal(size=(4, 6)).astype(np.float32)
    options = {"tau-norm": {"tau": "1"}, "disalign": {"max_iter": "200"}}.get(name, {})
    unseen = {"validation": (-logits, np.arange(4), features + 1)} if name == "halo" else {}
    method = build_posthoc(name, options).fit(logits, np.arange(4), features=features, **unseen)
    assert np.isfinite(method.transform(logits, features)).all()
    assert np.isfinite(method.predict_proba(logits, features)).all()


@pytest.mark.parametrize("name", ["marc", "logit-adjustment", "tau-norm", "lws"])
@pytest.mark.filterwarnings("ignore")
def test_numbers_too_large_to_compute_with_are_no_answer(name):
    """Whatever the counts and logits: an error, or finite numbers."""
    rng, fitted = np.random.default_rng(0), []
    y = np.repeat([0, 1, 2], [6, 3, 1])
    for size in (1, 1e30, 1e200, 1e308):
        logits = rng.normal(size=(10, 3)) * size
        for counts in (None, [1e308, 1e308, 1], [1e-308, 1, 1]):
            with suppress(UserError):
                fitted.append(build_posthoc(name, {}).fit(logits, y, class_counts=counts, weight_norms=[1e9, 1, 1e-9]))
    assert all(np.isfinite(getattr(method, key)).all() for method in fitted for key in ("scale_", "shift_"))


def test_a_fit_that_is_not_finite_is_an_error():
    class Broken(LogitAdjustment):
        def _fit(self, data, validation) -> None:
            super()._fit(data, validation)
            self.shift_ = self.shift_ * np.inf

    with pytest.raises(UserError, match=r"the fit of Broken gave numbers that are not finite \(shift_\)"):
        Broken().fit(3 * np.eye(2), [0, 1])
