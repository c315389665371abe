"""Every example runs as it stands, and prints what it promises."""

import ast
import os
import re
import runpy
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`run(script)` gives what it prints; its files go to a folder of the test."""

    def start(script):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with warnings.catch_warnings(), mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"):
            warnings.simplefilter("default")
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    return start


def scores(text):
    """The pairs (title, balanced, tail) that a script printed, in order."""
    found = re.findall(r"^([^:\n]+): balanced ([\d.]+), [a-z -]+ ([\d.]+)$", text, re.MULTILINE)
    return {title: (float(balanced), float(tail)) for title, balanced, tail in found}


def assert_tail_rises(text, before, *after):
    found = scores(text)
    for title in after:
        assert found[title][0] > found[before][0]
        assert found[title][1] > found[before][1] + 5


def test_every_script_says_what_it_shows():
    assert len(SCRIPTS) == 8
    for script in SCRIPTS:
        shown = ast.get_docstring(ast.parse((EXAMPLES / script).read_text(encoding="utf-8")))
        assert f"python examples/{script}" in shown


def test_a_loss_in_a_plain_loop(run):
    assert_tail_rises(run("plain_loop.py"), "CrossEntropyLoss", "BalancedSoftmax")


def test_own_model(run):
    text = run("own_model.py")
    assert_tail_rises(text, "before", "after")
    assert "MyNet with Linear head, 20 numbers learnt" in text


def test_text_and_a_probe(run):
    assert_tail_rises(run("text_probe.py"), "logistic regression", "Probe")


def test_saved_logits(run):
    text = run("saved_logits.py")
    assert_tail_rises(text, "before", "after")
    assert len(re.search(r"scale \[(.*)\]", text)[1].split(",")) == 10


def test_scikit_learn_pipeline(run):
    text = run("sklearn_pipeline.py")
    assert_tail_rises(text, "plain", "calibrated")
    assert re.search(r"chosen \{'method__tau': \d\.\d\}", text)
    (missed, alarms, precision), (missed_after, alarms_after, same) = re.findall(
        r"(\d+) missed, (\d+) false alarms, average precision ([\d.]+)", text
    )
    assert int(missed_after) < int(missed)
    assert int(alarms_after) > int(alarms)
    assert precision == same


def test_trainer_of_transformers(run):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("babel", reason="babel is not installed")
    text = run("transformers_trainer.py")
    assert_tail_rises(text, "cross-entropy", "cross-entropy, then HALO")
    found = scores(text)
    assert found["opened again"] == found["cross-entropy, then HALO"]
    assert found["Balanced Softmax"][0] > found["cross-entropy"][0]


def test_lightning(run):
    pytest.importorskip("lightning", reason="lightning is not installed")
    assert_tail_rises(run("lightning_module.py"), "cross-entropy", "cross-entropy, then MARC", "Balanced Softmax")


def test_mlflow(run):
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    text = run("mlflow_tracking.py")
    assert re.search(r"logged \d\d parameters and 13 metrics", text)
    losses = [float(value) for value in re.findall(r"\d+:(\d+\.\d+)", text)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert re.search(r"balanced accuracy on validation images: \d+\.\d", text)


COMMAND = re.compile(r"^!\{python\} -m longtail (.*)$", re.MULTILINE)


def executed(name, monkeypatch, tmp_path):
    """What the cells of a notebook give: (all outputs, what was printed, messages too)."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(EXAMPLES / name, 4)
    for cell in notebook.cells:  # commands run in the kernel, which has imported everything
        cell.source = COMMAND.sub(r'from longtail.cli import main; assert main(f"\1".split()) == 0', cell.source)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # kept without results, so that changes can be read
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return outputs, "".join(output.get("text") or output.data.get("text/plain", "") for output in outputs)


def test_the_notebook(monkeypatch, tmp_path):
    outputs, text = executed("tour.ipynb", monkeypatch, tmp_path)
    assert_tail_rises(text, "before", "after")
    assert "This classifier is long-tail biased" in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


def test_the_notebook_of_a_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))  # without CIFAR: digits
    _, text = executed("own_folder.ipynb", monkeypatch, tmp_path)
    assert "photos: 10 classes; images: 335 train (train/), 500 test (test/)" in text
    assert "takes images (N, H, W, 3), uint8, RGB, of any height and width" in text
    right = int(re.search(r"(\d+) of 500 images named correctly", text)[1])
    assert right > 250
    assert "500 test samples" in text  # the diagnosis
    assert "run/halo" in text
    assert float(re.search(r"largest difference (\S+)", text)[1]) < 1e-4
    assert "Traceback" not in text


def test_the_notebook_of_transfer_learning(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))  # without CIFAR: digits, and a backbone made there
    _, text = executed("transfer.ipynb", monkeypatch, tmp_path)
    assert "training images of the new classes: [100, 47, 22, 10, 5]" in text
    assert "a small backbone is trained on the old classes" in text
    before, after = re.findall(r"balanced ([\d.]+), smallest class ([\d.]+)", text)
    assert float(after[0]) > float(before[0])
    assert float(after[1]) > float(before[1]) + 10
