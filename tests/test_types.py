"""What a user's type checker sees at the front door: real types, and mistakes named before anything runs."""

import subprocess
import sys
from pathlib import Path

import longtail

ROOT = Path(__file__).resolve().parent.parent
GOOD = """
import numpy as np
import torch
from typing_extensions import assert_type

import longtail


class Net(torch.nn.Module):
    pass


logits, labels = np.zeros((4, 2)), np.array([0, 1, 0, 1])
marc = longtail.MARC(gamma="auto", solver="sgd").fit(logits, labels)
assert_type(marc, longtail.MARC)
assert_type(marc.transform(torch.zeros(4, 2)), torch.Tensor)
assert_type(marc.predict(logits), np.ndarray)
assert_type(longtail.calibrate(Net(), []), tuple[Net, longtail.MARC])
assert_type(longtail.calibrate(Net(), [], longtail.posthoc.LWS())[1], longtail.posthoc.LWS)
assert_type(longtail.evaluate(logits, labels, [2, 2]), longtail.metrics.Metrics)
assert_type(longtail.data.open_splits("digits-lt"), longtail.data.Splits)
assert_type(longtail.class_counts(labels), torch.Tensor)
longtail.posthoc.MARC, longtail.losses.LDAM, longtail.sklearn.CalibratedLongTail
"""
# Line → what a type checker says of it.
BAD = {
    "longtail.calibrat": '"calibrat"',
    "longtail.MARC(gama=3)": '"gama"',
    'longtail.MARC(solver="exat")': '"solver"',
    'longtail.MARC("auto", max_iter="many")': '"max_iter"',
    "longtail.train(config=3, out='x')": '"config"',
    "longtail.posthoc.MARK": '"MARK"',
}


def test_real_types_are_seen_and_mistakes_are_found(tmp_path):
    """One strict run of mypy over a script without mistakes and one of mistakes alone."""
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text("\n".join(["import longtail", *BAD]) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context"]
    # With the settings of this project mypy knows torch already, from the run over the library itself.
    command += ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    command += ["good.py", "bad.py"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout.splitlines()
    assert [line for line in said if line.startswith("good.py")] == []
    for number, (line, word) in enumerate(BAD.items(), 2):
        assert any(text.startswith(f"bad.py:{number}: error") and word in text for text in said), (line, said)


def test_every_public_name_is_there():
    assert set(longtail.__all__) <= set(dir(longtail))
    for name in longtail.__all__:
        assert getattr(longtail, name) is not None
