"""Sets whose logits are too many to keep: they are computed from the features, with the same answer."""

import torch

from longtail import MARC
from longtail.runs.folder import Run
from longtail.tasks.calibrate_run import calibrate_run


def test_many_logits_are_left_out_of_the_file(digits_copy, monkeypatch):
    run = Run.open(digits_copy)
    kept = run.outputs("train", views=1)
    calibrate_run(run, MARC(), "marc", out=digits_copy / "kept")
    for path in (digits_copy / "outputs").glob("*.safetensors"):
        path.unlink()
    monkeypatch.setattr("longtail.runs.network.MOST_LOGITS", 1000)
    computed = run.outputs("train", views=1)
    assert kept.logits is not None
    assert computed.logits is None
    calibrate_run(run, MARC(), "marc", out=digits_copy / "computed")
    one, two = (Run.open(digits_copy / name).model().state_dict() for name in ("kept", "computed"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-5, rtol=1e-5)
