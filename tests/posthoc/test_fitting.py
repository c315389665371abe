"""Fitting methods on stored outputs: numbers, time, folded head, and which images are used."""

import math
import time
import warnings

import numpy as np
import pytest
import torch

from longtail import HALO, MARC, Outputs
from longtail.errors import UserError
from longtail.posthoc import (
    CRT,
    LWS,
    DisAlign,
    LogitAdjustment,
    MatrixScaling,
    PlattScaling,
    TauNorm,
    TemperatureScaling,
    Tempered,
    VectorScaling,
)
from longtail.posthoc.inputs import chosen_images, fit_outputs, warn_if_no_errors

from .conftest import HEAD, LABELS, LOGITS, outputs

FITTED = {
    "crt": (CRT(max_iter=2000), 4 * 3 + 4),
    "crt sgd": (CRT("sgd", max_iter=3), 4 * 3 + 4),
    "disalign": (DisAlign(max_iter=3), 3 + 2 * 4 + 1),
    "marc": (MARC(), 2 * 4),
    "marc sgd": (MARC(solver="sgd", max_iter=3), 2 * 4),
    "lws": (LWS(), 4),
    "tau-norm": (TauNorm(tau=0.5), 0),
    "logit adjustment": (LogitAdjustment(), 0),
    "halo": (HALO(), 5 + 4 * 3 + 4),
    "temperature": (TemperatureScaling(), 1),
    "vector": (VectorScaling(), 2 * 4),
    "matrix": (MatrixScaling(), 4 * 4 + 4),
    "platt": (PlattScaling(), 2 * 4),
}


@pytest.mark.parametrize("name", FITTED)
def test_numbers_seconds_and_the_folded_head(name):
    method, numbers = FITTED[name]
    train, held_out = outputs(), outputs("validation", seed=3)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of so few samples nothing is asked but the numbers
        fit_outputs(method, train, held_out)
    assert 0 <= method.result_.seconds <= time.perf_counter() - began
    assert method.n_parameters_ == numbers
    linear = torch.nn.Linear(3, 4)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(HEAD["head_weight"]))
        linear.bias.copy_(torch.from_numpy(HEAD["head_bias"]))
    features = torch.from_numpy(outputs(seed=5).features)
    expected = method.transform(linear(features).detach(), features)
    torch.testing.assert_close(method.head(linear)(features).detach(), expected, rtol=1e-4, atol=1e-4)


def test_marc_shifts_by_beta_times_the_norms():
    marc = MARC().fit(LOGITS, LABELS, weight_norms=[0.5, 1.0, 2.0, 3.0])
    np.testing.assert_allclose(marc.shift_, marc.beta_ * [0.5, 1.0, 2.0, 3.0])
    np.testing.assert_allclose(marc.scale_, marc.omega_)
    np.testing.assert_allclose(marc.transform(LOGITS), LOGITS * marc.omega_ + marc.shift_, rtol=1e-5)


def test_which_images_a_method_is_fitted_on():
    counts = np.array([1000, 300, 60])
    assert MARC().enough_images(4) == 400
    assert MARC().enough_images(1000) == 50
    assert MARC(solver="sgd").enough_images(4) is None
    assert chosen_images("all", MARC(), counts) is None
    assert chosen_images("auto", CRT(), counts) is None
    assert chosen_images("auto", VectorScaling(), counts).most == 1  # it uses held-out images alone
    assert Tempered(MARC()).enough_images(4) == 400
    assert Tempered(CRT()).enough_images(4) is None
    assert chosen_images("auto", MARC(), counts).most == math.ceil(800 / math.sqrt(3))
    few = chosen_images(7, CRT(), counts, seed=3)
    assert (few.most, few.seed) == (7, 3)
    assert chosen_images(7, CRT(), counts).seed == 0
    assert chosen_images(999, CRT(), counts).most == 999
    assert chosen_images(1000, CRT(), counts) is None  # no class has more
    with pytest.raises(UserError, match="images_per_class"):
        chosen_images("many", CRT(), counts)


def test_a_model_that_knows_its_training_images_is_told():
    labels = np.arange(200) % 2
    logits = np.eye(2)[labels]

    def told(wrong, method, split="train"):
        made = logits.copy()
        made[:wrong] = made[:wrong, ::-1]
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            warn_if_no_errors(method, Outputs(labels, np.array([100, 100]), logits=made, split=split))
        return [str(one.message) for one in found]

    assert told(2, MARC())[0].startswith("the model has a balanced accuracy of 99.0 % on the training images, so MARC")
    assert told(0, MARC())[0].startswith("the model has a balanced accuracy of 100.0 %")
    assert told(1, MARC())[0].startswith(
        "the model has a balanced accuracy of 99.5 %"
    )  # the first sample is looked at, too
    assert told(3, MARC()) == []
    assert told(0, MARC(), split="test") == []
    assert told(0, LogitAdjustment()) == []
    assert told(0, VectorScaling()) == []  # fitted on others
    warn_if_no_errors(MARC(), None)
