import numpy as np
import pytest
import torch

from longtail.errors import UserError
from longtail.posthoc import TauNorm


@pytest.mark.filterwarnings("ignore::longtail.posthoc.gate.FitWarning")
def test_weights_and_logits_agree_with_the_authors_code(golden):
    for case in golden("tau_norm"):
        weight, bias = torch.from_numpy(case["fc_weight"]), torch.from_numpy(case["fc_bias"])
        logits = case["features"] @ case["fc_weight"].T + case["fc_bias"]
        y = np.arange(len(logits)) % len(weight)
        for number, tau in enumerate(case["taus"]):
            # The samples of a case do not show every class; tau-norm does not look at the labels.
            method = TauNorm(float(tau))
            padded = np.concatenate([logits, np.eye(len(weight))])
            labels = np.concatenate([y, np.arange(len(weight))])
            method.fit(padded, labels, weight_norms=case["weight_norm"].ravel(), head_bias=case["fc_bias"])
            np.testing.assert_allclose(method.transform(logits), case["logits"][number], rtol=1e-6, atol=1e-9)
            folded, shift = method.fold(weight, bias)
            np.testing.assert_allclose(folded, case["normalized_weight"][number], rtol=1e-6)
            assert shift.abs().max() < 1e-9
            assert (method.predict(logits) == case["preds"][number]).all()


def test_tau_zero_drops_the_bias_and_tau_one_makes_unit_vectors():
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(3, 5)), rng.normal(size=3)
    features = rng.normal(size=(30, 5))
    logits, y = features @ weight.T + bias, np.arange(30) % 3
    known = {"weight_norms": np.linalg.norm(weight, axis=1), "head_bias": bias}
    np.testing.assert_allclose(TauNorm(0.0).fit(logits, y, **known).transform(logits), features @ weight.T, atol=1e-9)
    unit = weight / np.linalg.norm(weight, axis=1, keepdims=True)
    np.testing.assert_allclose(TauNorm(1.0).fit(logits, y, **known).transform(logits), features @ unit.T, atol=1e-9)


def test_stated_accuracy_on_real_features(cifar_features):
    data = cifar_features
    method = TauNorm(1.0).fit(data["clean"], data["y"], weight_norms=data["norms"], head_bias=data["bias"])
    assert 100 * (method.predict(data["test"]) == data["test_y"]).mean() == pytest.approx(73.11, abs=0.05)


def test_tau_is_chosen_on_validation_only(cifar_features):
    data = cifar_features
    known = {"weight_norms": data["norms"], "head_bias": data["bias"]}
    with pytest.raises(UserError, match='tau="auto" needs held-out outputs'):
        TauNorm().fit(data["clean"], data["y"], **known)
    half = np.arange(10_000) % 2 == 0
    method = TauNorm().fit(data["clean"], data["y"], validation=(data["test"][half], data["test_y"][half]), **known)
    scores = {}
    for tau in (round(0.1 * i, 1) for i in range(21)):
        predicted = TauNorm(tau).fit(data["clean"], data["y"], **known).predict(data["test"][half])
        scores[tau] = np.mean([(predicted[data["test_y"][half] == c] == c).mean() for c in range(10)])
    assert scores[method.tau_] == max(scores.values())
    assert method.tau_ > 0.5
