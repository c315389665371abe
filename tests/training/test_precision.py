"""bfloat16: said before training starts where the device emulates it, and chosen by no default."""

import pytest
import torch

from longtail.cli.main import main
from longtail.training import rehearsal

LINE = "--precision bf16 is slow here: this processor has no bfloat16 instructions"
WORDS = ("--iterations=2", "--batch-size=8", "--device=cpu")


@pytest.fixture(params=[True, False], ids=["emulated", "native"])
def emulated(request, monkeypatch):
    """A processor without bfloat16 instructions, and one with them."""
    monkeypatch.setattr(rehearsal, "emulates_bfloat16", lambda device: request.param)
    return request.param


def test_emulated_bfloat16_is_said_once_before_training(emulated, tmp_path, capsys):
    assert main(["train", "digits-lt", f"--out={tmp_path / 'run'}", "--precision=bf16", *WORDS]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said.count(LINE) == emulated
    if emulated:
        assert said.index(LINE) < said.index("steps of 8 images")


def test_a_comparison_says_it_once(emulated, tmp_path, capsys):
    words = ["compare", "digits-lt", "--methods", "softmax", "cbs", "--seeds", "0", f"--out={tmp_path / 'table'}"]
    assert main([*words, "--precision=bf16", *WORDS]) == 0
    assert " ".join(capsys.readouterr().err.split()).count(LINE) == emulated


def test_what_torch_knows_of_this_processor():
    native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert rehearsal.emulates_bfloat16(torch.device("cpu")) is not native
    assert rehearsal.emulates_bfloat16(torch.device("meta")) is False
