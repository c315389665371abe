import numpy as np
import pytest

from longtail.errors import UserError
from longtail.posthoc import LogitAdjustment


def fitted(case, tau):
    classes = len(case["class_counts"])
    return LogitAdjustment(float(tau)).fit(np.eye(classes) * 2, np.arange(classes), class_counts=case["class_counts"])


def test_logits_agree_with_the_formula_and_the_authors_code(golden):
    for case in golden("logit_adjustment"):
        for number, tau in enumerate(case["taus"]):
            adjusted = fitted(case, tau).transform(case["logits"])
            np.testing.assert_allclose(adjusted, case["posthoc_logits_formula"][number], rtol=1e-9)
            # The released code adds 1e-12 to the prior after the power, which shows for the rarest classes.
            np.testing.assert_allclose(adjusted, case["posthoc_logits"][number], atol=1e-2)
            assert (adjusted.argmax(1) == case["posthoc_preds_formula"][number]).all()


def test_equal_counts_and_tau_zero_change_no_prediction():
    logits = np.random.default_rng(0).normal(size=(40, 4))
    y = np.arange(40) % 4
    assert (LogitAdjustment().fit(logits, y).predict(logits) == logits.argmax(1)).all()
    unequal = LogitAdjustment(0.0).fit(logits, y, class_counts=[1000, 100, 10, 1])
    np.testing.assert_allclose(unequal.transform(logits), logits)


def test_stated_accuracy_on_real_features(cifar_features):
    data = cifar_features
    method = LogitAdjustment().fit(data["clean"], data["y"])
    assert 100 * (method.predict(data["test"]) == data["test_y"]).mean() == pytest.approx(76.84, abs=0.05)


def test_tau_auto_and_bad_tau(cifar_features):
    data = cifar_features
    method = LogitAdjustment("auto").fit(data["clean"], data["y"], validation=(data["test"], data["test_y"]))
    assert 0.5 < method.tau_ <= 2
    with pytest.raises(UserError, match="needs held-out outputs"):
        LogitAdjustment("auto").fit(data["clean"], data["y"])
    with pytest.raises(UserError, match="tau must be a number"):
        LogitAdjustment("high").fit(data["clean"], data["y"])
