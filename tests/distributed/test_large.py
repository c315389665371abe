"""Sets whose logits are too many to keep: they are computed from the features, with the same answer."""

from dataclasses import replace

import numpy as np
import torch

from longtail import MARC, Outputs
from longtail.outputs import rows as logit_rows
from longtail.runs.folder import Run
from longtail.tasks.calibrate_run import calibrate_run


def outputs(samples: int = 400, classes: int = 12, width: int = 6) -> Outputs:
    rng = np.random.default_rng(0)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, samples - classes)])
    weight = rng.normal(size=(classes, width)).astype(np.float32)
    features = (weight[labels] + rng.normal(size=(samples, width))).astype(np.float32)
    bias = rng.normal(size=classes).astype(np.float32)
    counts = np.bincount(labels, minlength=classes)
    return Outputs(labels, counts, features=features, head_weight=weight, head_bias=bias)


def test_the_answer_from_features_is_that_from_logits(monkeypatch):
    computed = outputs()
    stored = replace(computed, logits=computed.rows().read(slice(None)).numpy())
    monkeypatch.setattr(logit_rows, "COMPUTED_NUMBERS", 84)  # 7 rows at a time
    monkeypatch.setattr(logit_rows, "STEP_ROWS", 7)
    assert computed.rows().chunk_rows == 7
    one, two = MARC().fit(stored), MARC().fit(computed)
    np.testing.assert_allclose(two.omega_, one.omega_, atol=1e-6)
    np.testing.assert_allclose(two.beta_, one.beta_, atol=1e-6)


def test_many_logits_are_left_out_of_the_file(digits_copy, monkeypatch):
    run = Run.open(digits_copy)
    kept = run.outputs("train", views=1)
    calibrate_run(run, MARC(), "marc", out=digits_copy / "kept")
    for path in (digits_copy / "outputs").glob("*.safetensors"):
        path.unlink()
    monkeypatch.setattr("longtail.runs.outputs.MOST_LOGITS", 1000)
    computed = run.outputs("train", views=1)
    assert kept.logits is not None
    assert computed.logits is None
    calibrate_run(run, MARC(), "marc", out=digits_copy / "computed")
    one, two = (Run.open(digits_copy / name).model().state_dict() for name in ("kept", "computed"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-5, rtol=1e-5)
