"""Every loss and sampler as a method of `longtail train`, briefly."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import longtail
from longtail.cli.main import main
from longtail.files.tensors import read_tensors
from longtail.runs.folder import Run

SHORT = replace(longtail.RECIPES["digits-lt"], epochs=3, lr=0.2, warmup=0, device="cpu")

METHODS = [
    ("cbw", {"divide_by": "batch"}),
    ("class-balanced", {"form": "sigmoid", "beta": "0.99"}),
    ("class-balanced", {"form": "focal", "gamma": "1"}),
    ("focal", {"form": "sigmoid"}),
    ("ldam", {"max_margin": "0.3", "scale": "20", "start": "0.5"}),
    ("lade", {"alpha": "0.05", "remine_lambda": "0.5"}),
    ("equalization", {"threshold": "0.1"}),
    ("seesaw", {"p": "0.5", "q": "1"}),
    ("logit-adjusted", {"tau": "0.5", "label_smoothing": "0.1"}),
]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_tensors(folder / "model.safetensors")[0]


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_a_short_training_learns_something(tmp_path, method, options):
    metrics = longtail.train(replace(SHORT, method=method, options=options, epochs=10), tmp_path / "run")
    assert metrics.top1 > 0.5
    model = Run.open(tmp_path / "run").model()
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_samplers_take_the_place_of_class_balanced_sampling(tmp_path):
    results = []
    for sampler in (None, "oversample", "undersample"):
        folder = tmp_path / str(sampler)
        longtail.train(replace(SHORT, method="cbs", sampler=sampler), folder)
        results.append(weights(folder)["head.weight"])
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2])


def test_options_on_the_command_line(tmp_path, capsys):
    words = ["train", "digits-lt", "--epochs", "1", "--quiet", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main([*words, "--method", "ldam", "--options", "max_margin", "0.3", "scale", "20"]) == 0
    run = Run.open(tmp_path / "run")
    assert run.config.options == {"max_margin": "0.3", "scale": "20"}
    assert run.model().head.linear.weight.norm(dim=1).tolist() == pytest.approx([20.0] * 10, rel=1e-5)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("ldam", ["margin", "0.3"], "did you mean 'max_margin'?); choose from: scale, max_margin, beta, start, div"),
        ("focal", ["gamma", "two"], "gamma must be a number, at least 0, not 'two'"),
        ("class-balanced", ["form", "sigmoids"], "unknown form 'sigmoids' (did you mean 'sigmoid'?)"),
        ("balanced-softmax", ["tau", "1"], "unknown option 'tau'"),
        ("seesaw", ["p", "none"], "p must be a number, at least 0, not None"),
        ("lade", ["label_smoothing", "0.1"], "LADE takes no label_smoothing: its regulariser takes means over"),
        ("cbw", ["reduction", "sum"], "unknown option 'reduction'; choose from: divide_by, label_smoothing"),
        ("cbw", ["ignore_index", "3"], "unknown option 'ignore_index'"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_two(tmp_path, capsys, method, options, message):
    words = ["train", "digits-lt", "--out", str(tmp_path / "run"), "--method", method, "--options", *options]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
