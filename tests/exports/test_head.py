import json
import shutil

import numpy as np
import pytest

import longtail
from longtail.errors import UserError
from longtail.methods import build_posthoc
from longtail.runs.folder import Run
from longtail.tasks.calibrate_run import calibrate_files, calibrate_run


@pytest.fixture(scope="module")
def fitted(digits_run, tmp_path_factory):
    """Folders of repaired runs, and the outputs of the run before."""
    out = tmp_path_factory.mktemp("heads")
    run = Run.open(shutil.copytree(digits_run, out / "run"))
    for name, options in (("marc", {}), ("disalign", {"max_iter": "50"}), ("crt", {}), ("platt", {})):
        calibrate_run(run, build_posthoc(name, options), name, out=out / name)
    return out, run.outputs("test")


def features_and_logits(folder, outputs):
    """Features of the run before, and the logits of the repaired one on the same images."""
    after = Run.open(folder).outputs("test")
    return np.asarray(outputs.features), np.asarray(after.logits)


def by_formula(lines, numbers):
    """The file's own formula, executed as it stands."""
    names = {name: np.asarray(value) for name, value in numbers.items()}
    names |= {"exp": np.exp, "log": np.log, "argmax": lambda x: x.argmax(-1), "sum": lambda x: x.sum(-1, keepdims=True)}
    for line in lines:
        exec(line, names)
    return names


@pytest.mark.parametrize("name", ["marc", "crt"])
def test_the_formula_of_a_linear_head_gives_the_repaired_logits(name, fitted, tmp_path):
    folder, outputs = fitted
    features, expected = features_and_logits(folder / name, outputs)
    longtail.export(folder / name, tmp_path / "head.npz", "npz")
    with np.load(tmp_path / "head.npz", allow_pickle=False) as file:
        numbers = {key: file[key] for key in file.files}
    assert len(numbers["formula"]) == 3
    result = by_formula([str(line) for line in numbers["formula"]], {**numbers, "features": features})
    np.testing.assert_allclose(result["logits"], expected, atol=1e-3)
    np.testing.assert_allclose(result["probabilities"].sum(1), 1, rtol=1e-5)
    assert result["predicted"].tolist() == [str(label) for label in expected.argmax(1)]
    assert numbers["class_counts"].tolist() == outputs.class_counts.tolist()


def test_scale_and_shift_repair_the_logits_before(fitted, tmp_path):
    folder, outputs = fitted
    _, expected = features_and_logits(folder / "marc", outputs)
    longtail.export(folder / "marc", tmp_path / "head.json", "json")
    numbers = json.loads((tmp_path / "head.json").read_text())
    result = by_formula(numbers["formula_on_old_logits"], {**numbers, "old_logits": outputs.logits})
    np.testing.assert_allclose(result["logits"], expected, atol=1e-3)


def test_the_formula_of_disalign(fitted, tmp_path):
    folder, outputs = fitted
    features = np.asarray(outputs.features)
    longtail.export(folder / "disalign", tmp_path / "head.json", "json")
    numbers = json.loads((tmp_path / "head.json").read_text())
    numbers["confidence_weight"] = np.array(numbers["confidence_weight"])[:, None]
    result = by_formula(numbers["formula"], {**numbers, "features": features})
    run = Run.open(folder / "disalign")
    splits = run.splits
    _, clean = run.transforms()
    expected = run.model()(clean.normalise(splits.test.pixels)).detach()
    np.testing.assert_allclose(result["logits"], expected, atol=1e-3)


def test_platt_makes_its_probabilities_of_sigmoids(fitted, tmp_path):
    folder, outputs = fitted
    longtail.export(folder / "platt", tmp_path / "head.json", "json")
    numbers = json.loads((tmp_path / "head.json").read_text())
    features = np.asarray(outputs.features)
    result = by_formula(numbers["formula"], {**numbers, "features": features})
    described = json.loads((folder / "platt" / "calibration.json").read_text())
    sigmoids = 1 / (1 + np.exp(-(np.array(described["scale_"]) * outputs.logits + np.array(described["shift_"]))))
    np.testing.assert_allclose(result["probabilities"], sigmoids / sigmoids.sum(1, keepdims=True), atol=1e-5)


def test_a_repair_of_saved_logits_has_scale_and_shift_only(fitted, tmp_path):
    _, outputs = fitted
    calibrate_files(outputs, longtail.MARC(), tmp_path / "marc", {})
    longtail.export(tmp_path / "marc", tmp_path / "head.json", "json")
    numbers = json.loads((tmp_path / "head.json").read_text())
    assert set(numbers) == {"formula", "class_names", "method", "scale", "shift"}
    calibrate_files(outputs, longtail.posthoc.CRT(), tmp_path / "crt", {})
    with pytest.raises(UserError, match="crt in .* is not a scale and a shift per class"):
        longtail.export(tmp_path / "crt", tmp_path / "crt.json", "json")
    with pytest.raises(UserError, match="is not a run folder"):
        longtail.export(tmp_path / "marc", tmp_path / "model.onnx")
