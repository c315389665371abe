"""Numbers of fits on fixed data: a change of a constant that results rest on changes one of them."""

import inspect
import warnings

import numpy as np
import pytest

import longtail.posthoc
from longtail.posthoc import (
    CRT,
    HALO,
    LogitAdjustment,
    MatrixScaling,
    PlattScaling,
    PostHoc,
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
PINNED = {
    "crt": [2.94852, 3.21854, -1.25717, -4.90989],
    "tau-norm": [0.33173, 1.38324, -4.64504, -5.65547],
    "logit-adjustment": [1.31001, 4.15477, -1.6565, 0.53098],
    "halo": [1.4404, 2.08716, -1.12774, -1.12423],
    "halo-exact": [1.02914, 0.57752, -3.61735, -4.53195],
    "halo-cross-fit": [0.85586, 1.05531, 0.59818, 0.78655],
    "tempered": [0.45694, 1.43386, -0.80184, -0.05596],
    "temperature": [0.37436, 1.07395, -2.12892, -1.63029],
    "vector": [3.21767, 2.55573, -13.41006, -1.6036],
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
    assert calibrated == pytest.approx(PINNED[name], rel=2e-4, abs=2e-4)


# Defaults of the methods: those of their papers, where results of papers and of `docs/results` rest on them.
DEFAULTS = {
    "CRT": "solver='exact', ridge=0.0005, tolerance=0.0001, max_iter=None, batch_size=512, lr=0.2, seed=0",
    "HALO": "target_prior='uniform', held_out='validation', model_prior='auto', tolerance=0.001, seed=0",
    "LWS": "ridge=0.0005, tolerance=1e-05, max_iter=500",
    "MARC": "gamma=1.2, solver='exact', ridge=0.0005, ridge_centre='identity', tolerance=1e-05, max_iter=None, "
    "batch_size=512, lr=0.05, schedule='paper', divide_by='batch', seed=0",
    "DisAlign": "gamma=1.2, form='paper', max_iter=2000, batch_size=512, lr=0.1, weight_decay=0.0005, "
    "divide_by='batch', seed=0",
    "Limited": "strength='auto', most_loss=None, keep=(), best=None",
    "LogitAdjustment": "tau=1.0",
    "MatrixScaling": "off_diagonal=0.1, intercept=0.1, tolerance=1e-05, max_iter=500",
    "MultiLabelCalibration": "target_prevalence='train', ridge=1.0, max_iter=200",
    "PlattScaling": "ridge=1e-08, tolerance=1e-06, max_iter=500",
    "TauNorm": "tau='auto'",
    "TemperatureScaling": "tolerance=1e-06, max_iter=200",
    "Tempered": "",
    "VectorScaling": "ridge=1e-06, tolerance=1e-05, max_iter=500",
}


def test_defaults_are_those_that_results_rest_on():
    methods = {name: getattr(longtail.posthoc, name) for name in longtail.posthoc.__all__}
    shown = {}
    for name, method in methods.items():
        if isinstance(method, type) and issubclass(method, PostHoc) and name not in ("PostHoc", "AffinePostHoc"):
            given = inspect.signature(method.__init__).parameters.values()
            shown[name] = ", ".join(f"{one.name}={one.default!r}" for one in given if one.default is not one.empty)
    assert shown == DEFAULTS
