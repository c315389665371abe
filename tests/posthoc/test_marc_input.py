"""What MARC accepts and refuses: arrays, outputs, labels, settings; the interface of scikit-learn."""

import numpy as np
import pytest
import torch

from longtail import MARC, Outputs
from longtail.errors import UserError

from .conftest import problem_data


def test_outputs_and_arrays_give_the_same_answer(cifar_features):
    data = cifar_features
    counts = np.bincount(data["y"])
    outputs = Outputs(
        labels=data["y"], class_counts=counts, logits=data["clean"], head_weight=data["weight"], head_bias=data["bias"]
    )
    first = MARC().fit(outputs)
    second = MARC().fit(data["clean"], data["y"], weight_norms=data["norms"])
    np.testing.assert_allclose(first.omega_, second.omega_, rtol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda z: z.astype(np.float16),
        lambda z: np.round(10 * z).astype(np.int32),
        lambda z: np.asfortranarray(z),
        lambda z: np.repeat(z, 2, axis=0)[::2],
        lambda z: z[:, ::-1][:, ::-1],
        lambda z: z.astype(">f8"),
        lambda z: z.tolist(),
    ],
)
def test_any_kind_of_array_gives_the_answer_of_its_values(change):
    logits, y, _, norms = problem_data()
    changed = change(logits)
    plain = np.array(changed, dtype=np.float32, order="C")
    expected = MARC().fit(plain, y, weight_norms=norms)
    got = MARC().fit(changed, y, weight_norms=norms)
    np.testing.assert_allclose(got.omega_, expected.omega_, atol=1e-5)
    assert got.transform(changed).shape == logits.shape
    read_only = plain.copy()
    read_only.flags.writeable = False
    np.testing.assert_allclose(MARC().fit(read_only, y, weight_norms=norms).omega_, expected.omega_, atol=1e-6)


def bad(change):
    """Arguments of fit with something wrong."""
    logits, y, _, norms = problem_data()
    arguments = {"logits": logits, "y": y, "weight_norms": norms}
    change(arguments)
    return arguments


def spoil(row, column, value):
    def change(arguments):
        arguments["logits"] = arguments["logits"].copy()
        arguments["logits"][row, column] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil(17, 2, np.nan), "row 17 contain NaN or inf"),
        (spoil(98, 0, np.inf), "row 98 contain NaN or inf"),
        (lambda a: a.update(y=np.where(a["y"] == 3, 4, a["y"])), r"labels must be 0\.\.3.*found 0\.\.4"),
        (lambda a: a.update(y=np.where(a["y"] == 3, 9, a["y"]) - 1), r"labels must be 0\.\.3.*found -1\.\.8"),
        (lambda a: a.update(y=np.where(a["y"] == 3, 2, a["y"])), "class 3 has no sample in labels"),
        (lambda a: a.update(class_counts=[5, 5, 0, 5]), "class 2 has no sample in class_counts"),
        (lambda a: a.update(class_counts=[5, 5, 5]), r"class_counts must have one number per class: shape \(4,\)"),
        (lambda a: a.update(y=a["y"][:-1]), "99 rows of logits and 98 labels"),
        (lambda a: a.update(weight_norms=np.ones(3)), r"weight_norms must have one number per class"),
        (lambda a: a.update(weight_norms=[1, 1, 0, 1]), r"weight_norms\[2\] is 0"),
        (lambda a: a.update(weight_norms=[1, np.nan, 1, 1]), r"weight_norms\[1\] is not finite"),
        (lambda a: a.update(logits=a["logits"][:, :1], y=0 * a["y"], weight_norms=[1]), "one class only"),
        (lambda a: a.update(logits=np.zeros((0, 4)), y=np.zeros(0, int)), "no samples"),
        (lambda a: a.update(logits=a["logits"][0]), r"shape \(samples, classes\), not \(4,\)"),
        (lambda a: a.update(logits=a["logits"] + 1j), "Complex data not supported"),
        (lambda a: a.update(logits=a["logits"].astype(str)), "must be numbers"),
        (lambda a: a.update(logits=torch.from_numpy(a["logits"]).softmax(1)), "these are probabilities"),
        (lambda a: a.update(logits=torch.from_numpy(a["logits"]).softmax(1).bfloat16()), "these are probabilities"),
        (
            lambda a: a.update(logits=torch.from_numpy(a["logits"]).softmax(1).numpy().round(2)),
            "these are probabilities",
        ),
        (lambda a: a.update(validation=a["logits"]), r"validation must be Outputs, or \(logits, y\)"),
        (lambda a: a.update(validation=(a["logits"], a["y"], a["y"])), r"features must have shape \(99, D\)"),
        (lambda a: a.update(y=a["y"] + 0.5), "Labels must be classes"),
        (lambda a: a.update(y=None), "requires y"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = bad(change)
    with pytest.raises(ValueError, match=message):
        MARC().fit(arguments.pop("logits"), arguments.pop("y"), **arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"solver": "adam"}, "unknown solver 'adam'; choose from: exact, sgd"),
        ({"gamma": "automatic"}, "gamma must be a number"),
        ({"gamma": float("nan")}, "gamma must be a number"),
        ({"gamma": -0.1}, 'gamma must be a number, at least 0, not -0.1; or "auto"'),
        ({"ridge_centre": "one"}, "unknown ridge_centre 'one'"),
    ],
)
def test_bad_settings_are_named(settings, message):
    logits, y, _, _ = problem_data()
    with pytest.raises(UserError, match=message):
        MARC(**settings).fit(logits, y)


def test_numbers_written_as_text_keep_the_order_of_the_columns():
    rng = np.random.default_rng(0)
    y = np.arange(36) % 12
    logits = rng.normal(size=(36, 12)) + 3 * np.eye(12)[y]
    with pytest.raises(UserError, match=r"numbers written as text, whose alphabetical order \(0, 1, 10, 11, …\)"):
        MARC().fit(logits, y.astype(str))
    digits = y < 10
    few = MARC().fit(logits[digits, :10], y[digits].astype(str))
    assert few.predict(logits[digits, :10]).tolist() == y[digits].astype(str).tolist()


def test_one_row_that_sums_to_one_may_be_logits():
    logits, y, _, _ = problem_data()
    assert MARC().fit(logits, y).transform([[1.0, 0.0, 0.0, 0.0]]).shape == (1, 4)
