"""Calibrated logits of fits on fixed data: a change of a formula or of a default changes them."""

import warnings

import numpy as np
import pytest

from longtail.posthoc import (
    CRT,
    HALO,
    LogitAdjustment,
    MatrixScaling,
    PlattScaling,
    TauNorm,
    TemperatureScaling,
    Tempered,
    VectorScaling,
)

COUNTS = np.array([120, 40, 15, 6])


def drawn(counts, seed):
    """Features (N, 5), logits (N, 4) of a head that was trained on few classes, and labels."""
    rng, means = np.random.default_rng(seed), np.random.default_rng(0).normal(size=(4, 5))
    labels = np.repeat(np.arange(4), counts)
    features = (means[labels] + 1.3 * rng.normal(size=(len(labels), 5))).astype(np.float32)
    return features @ means.T.astype(np.float32) + np.log(COUNTS / 60).astype(np.float32), labels, features


FITTED = {
    "crt": CRT(),
    "tau-norm": TauNorm(),
    "logit-adjustment": LogitAdjustment("auto"),
    "halo": HALO(),
    "halo-exact": HALO("train", tolerance=1e-6),
    "halo-cross-fit": HALO(held_out="cross-fit"),
    "tempered": Tempered(LogitAdjustment()),
    "temperature": TemperatureScaling(),
    "vector": VectorScaling(),
    "matrix": MatrixScaling(),
    "platt": PlattScaling(),
}
GOLDEN = {
    "crt": [2.94852, 3.21854, -1.25717, -4.90989],
    "tau-norm": [0.33173, 1.38324, -4.64504, -5.65547],
    "logit-adjustment": [1.31001, 4.15477, -1.6565, 0.53098],
    "halo": [1.4404, 2.08716, -1.12774, -1.12423],
    "halo-exact": [1.02914, 0.57752, -3.61735, -4.53195],
    "halo-cross-fit": [0.89765, 1.09209, 0.63526, 0.83332],
    "tempered": [0.45694, 1.43386, -0.80184, -0.05596],
    "temperature": [0.37436, 1.07395, -2.12892, -1.63029],
    "vector": [1.72219, 1.10363, -3.81999, -2.91595],
    "matrix": [2.4678, 1.64164, -7.79192, -2.36817],
    "platt": [-0.47494, -1.48656, -5.45662, -3.76279],
}


@pytest.mark.parametrize("name", FITTED)
def test_calibrated_logits_of_a_fixed_sample(name):
    method, (logits, labels, features) = FITTED[name], drawn(COUNTS, 1)
    held_logits, held_labels, held_features = drawn(COUNTS // 3, 2)
    norms = np.array([2.0, 1.5, 1.0, 0.7])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if method.fitted_on_unseen:
            method.fit(held_logits, held_labels, class_counts=COUNTS)
        else:
            held_out = (held_logits, held_labels, held_features)
            method.fit(logits, labels, features=features, weight_norms=norms, validation=held_out)
    calibrated = method.transform(logits[:1], features[:1])[0]
    assert calibrated == pytest.approx(GOLDEN[name], rel=2e-4, abs=2e-4)
