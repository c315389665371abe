import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import longtail
from longtail.cli.main import main
from longtail.errors import UserError
from longtail.exports.network import Deployment
from longtail.methods import TRAIN_METHODS, build_posthoc
from longtail.runs.folder import Run
from longtail.tasks.calibrate_run import calibrate_run


def trained(folder: Path, method: str) -> Path:
    config = replace(longtail.RECIPES["digits-lt"], method=method, epochs=2, device="cpu", evaluate_every=100)
    longtail.train(config, folder)
    return folder


@pytest.fixture(scope="module")
def calibrated(digits_run, tmp_path_factory):
    """The run of long-tailed digits repaired with MARC and with DisAlign, which does not fold."""
    out = tmp_path_factory.mktemp("calibrated")
    run = Run.open(shutil.copytree(digits_run, out / "run"))
    for name, options in (("marc", {}), ("disalign", {"max_iter": "50"}), ("platt", {})):
        calibrate_run(run, build_posthoc(name, options), name, out=out / name)
    return out


def logits_of(folder: Path, images: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return Deployment.of_run(Run.open(folder)).network(images).numpy()


def test_onnx_of_a_calibrated_run_takes_any_number_of_images(calibrated, tmp_path, capsys):
    out = tmp_path / "digits.onnx"
    assert main(["export", str(calibrated / "marc"), "--format", "onnx", "--out", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert captured.err == ""
    assert result["checked"]
    assert result["largest_difference"] < 1e-4
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    for count in (1, 17):
        images = torch.rand(count, 1, 8, 8)
        (logits,) = session.run(None, {"images": images.numpy()})
        np.testing.assert_allclose(logits, logits_of(calibrated / "marc", images), atol=1e-4)
    described = session.get_modelmeta().custom_metadata_map
    assert json.loads(described["class_names"]) == [str(digit) for digit in range(10)]
    assert described["calibration"] == "marc"


# A memory with distances, a normalised head: what a converter may not know.
@pytest.mark.parametrize("method", ["oltr", "causal-norm"])
def test_onnx_of_other_networks_after_their_calibration(method, tmp_path):
    run = trained(tmp_path / "run", method)
    folder, _ = calibrate_run(Run.open(run), longtail.MARC(), "marc", out=tmp_path / "marc")
    assert longtail.export(folder, tmp_path / "model.onnx").largest_difference < 1e-4


def test_onnx_of_a_head_that_does_not_fold(calibrated, tmp_path):
    assert longtail.export(calibrated / "disalign", tmp_path / "model.onnx").largest_difference < 1e-4


NETWORKS = {method.model: name for name, method in TRAIN_METHODS.items()}


@pytest.mark.parametrize("method", NETWORKS.values())
def test_every_network_becomes_a_torch_program(method, tmp_path):
    config = replace(longtail.RECIPES["digits-lt"], method=method, iterations=2, epochs=None, warmup=0, batch_size=8)
    longtail.train(replace(config, device="cpu", evaluate_every=100), tmp_path / "run")
    written = longtail.export(tmp_path / "run", tmp_path / "model.pt2", "torch-export")
    assert written.largest_difference < 1e-4


def test_a_torch_program_runs_and_knows_its_classes(calibrated, tmp_path):
    out = tmp_path / "digits.pt2"
    longtail.export(calibrated / "marc", out, "torch-export")
    notes = {"longtail.json": ""}
    program = torch.export.load(out, extra_files=notes)
    images = torch.rand(9, 1, 8, 8)
    np.testing.assert_allclose(program.module()(images).detach(), logits_of(calibrated / "marc", images), atol=1e-4)
    assert json.loads(notes["longtail.json"])["class_names"][3] == "3"
    with pytest.raises(UserError, match=r"choose --out model.pt2"):
        longtail.export(calibrated / "marc", tmp_path / "model", "torch-export")


def test_without_onnxruntime_the_file_is_written_and_said_to_be_unchecked(calibrated, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    out = tmp_path / "digits.onnx"
    assert main(["export", str(calibrated / "marc"), "--format", "onnx", "--out", str(out)]) == 0
    error = capsys.readouterr().err
    assert "not checked" in error
    assert "pip install 'longtail[export]'" in error
    assert out.is_file()


def test_without_the_extra_one_line_says_what_to_install(calibrated, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main(["export", str(calibrated / "marc"), "--format", "onnx", "--out", str(tmp_path / "x.onnx")]) == 2
    assert capsys.readouterr().err == "longtail: ONNX needs onnxscript: pip install 'longtail[export]'\n"
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_gives_other_logits_is_refused(calibrated):
    deployment = Deployment.of_run(Run.open(calibrated / "marc"))
    with pytest.raises(UserError, match="the copy gives other logits than torch for 1 images"):
        deployment.compare(lambda images: deployment.network(images) + 0.1, "copy")


def test_nothing_is_replaced_unasked(calibrated, tmp_path):
    out = tmp_path / "head.json"
    out.write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        longtail.export(calibrated / "marc", out, "json")
    assert out.read_text() == "mine"
    longtail.export(calibrated / "marc", out, "json", overwrite=True)
    assert json.loads(out.read_text())["method"] == "marc"
    copy = shutil.copytree(calibrated / "marc", tmp_path / "copy")
    with pytest.raises(UserError, match="is the run itself"):
        longtail.export(copy, copy, "safetensors", overwrite=True)
    with pytest.raises(UserError, match="the format npz is a file and"):
        longtail.export(calibrated / "marc", copy, "npz", overwrite=True)
    with pytest.raises(UserError, match="unknown format 'onx'"):
        longtail.export(calibrated / "marc", tmp_path / "x", "onx")
