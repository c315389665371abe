import json
from dataclasses import replace

import numpy as np
import pytest

import longtail
import longtail.data.images
import longtail.runs.folder
from longtail import MARC, Outputs
from longtail.cli.main import main
from longtail.exports.card import model_card
from longtail.files.tensors import read_tensors
from longtail.runs.folder import Run, write_trained
from longtail.runs.network import outputs_path
from longtail.tasks.calibrate_run import calibrate_run
from longtail.tasks.evaluate import evaluate_run


def test_a_run_becomes_a_calibrated_run(digits_copy):
    run = Run.open(digits_copy)
    folder, scores = calibrate_run(run, MARC(), "marc")
    assert folder == digits_copy / "marc"
    by_split = {score.split: score for score in scores}
    assert set(by_split) == {"validation", "test"}
    test = by_split["test"]
    assert test.after.few > test.before.few + 0.05
    metrics, _, _ = evaluate_run(folder, "test", device="cpu")
    assert metrics.confusion == test.after.confusion
    written = json.loads((folder / "before-after-test.json").read_text())
    assert written["after"]["top1"] == test.after.top1
    described = json.loads((folder / "calibration.json").read_text())
    head = run.model().head
    np.testing.assert_allclose(
        Run.open(folder).model().head.weight.detach(),
        np.array(described["omega_"])[:, None] * head.weight.detach().numpy(),
        rtol=1e-5,
    )
    assert described["result"]["converged"]


def test_outputs_are_computed_once_for_these_weights_and_these_images(digits_copy, monkeypatch):
    run = Run.open(digits_copy)
    first = run.outputs("train", views=1)
    with monkeypatch.context() as patch:
        patch.setattr("longtail.runs.network.Source", None)  # must not be called again
        assert run.outputs("train", views=1) == first
    for other in ({"model": "another"}, {"digest": "another"}, {"views": 2}):
        replace(first, **other).save(outputs_path(run, "train", 1))
        assert run.outputs("train", views=1) == first


def run_command(capsys, *words):
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command_on_a_run(capsys, digits_copy):
    code, out, error = run_command(capsys, "calibrate", digits_copy, "--method", "marc", "--options", "gamma", "auto")
    assert code == 0
    assert "before" in out
    assert "Few" in out
    assert "solved" in error
    assert (digits_copy / "outputs" / "train-views1.safetensors").is_file()
    code, _, error = run_command(capsys, "calibrate", digits_copy, "--method", "marc")
    assert (code, error.count("\n")) == (2, 1)
    assert "exists already; choose another --out or replace it with --overwrite" in error
    code, _, error = run_command(capsys, "calibrate", digits_copy)
    assert code == 0
    assert "HALO was taken because 36 images were held out of training" in " ".join(error.split())
    assert (digits_copy / "halo" / "model.safetensors").is_file()
    code, out, _ = run_command(capsys, "calibrate", digits_copy, "--overwrite", "--json")
    assert json.loads(out)["result"]["converged"]


def test_a_few_images_per_class_are_printed_recorded_and_kept_apart(capsys, digits_copy):
    words = ("calibrate", digits_copy, "--method", "marc", "--images-per-class", "9", "--seed", "4")
    code, _, error = run_command(capsys, *words)
    assert code == 0
    counts = Run.open(digits_copy).class_counts
    taken = int(np.minimum(counts, 9).sum())
    assert f"at most 9 images per class: {taken} of {counts.sum():,}" in error
    fitted_on = json.loads((digits_copy / "marc" / "calibration.json").read_text())["fitted_on"]
    assert (fitted_on["images_per_class"], fitted_on["images_seed"], fitted_on["samples"]) == (9, 4, taken)
    assert (digits_copy / "outputs" / "train-views1-9-per-class-seed4.safetensors").is_file()
    for method, samples in (("marc", counts.sum()), ("logit-adjustment", 10)):
        words = ("calibrate", digits_copy, "--method", method, "--out", digits_copy / "again", "--overwrite")
        code, _, error = run_command(capsys, *words)
        assert code == 0
        assert ("at most 1 image per class: 10 of" in error) == (method == "logit-adjustment")
        fitted_on = json.loads((digits_copy / "again" / "calibration.json").read_text())["fitted_on"]
        assert fitted_on["samples"] == samples  # auto: no class of the digits has more than MARC needs
    for bad in ("0", "some"):
        code, _, error = run_command(capsys, "calibrate", digits_copy, "--images-per-class", bad, "--overwrite")
        assert (code, error.count("\n")) == (2, 1)
    words = ("extract", digits_copy, "--images-per-class", "3", "--seed", "1", "--json")
    code, out, _ = run_command(capsys, *words)
    assert code == 0
    assert len(Outputs.open(json.loads(out)["outputs"])) == np.minimum(counts, 3).sum()
    code, _, error = run_command(capsys, "extract", digits_copy, "--split", "test", "--images-per-class", "3")
    assert (code, "train split alone" in error) == (2, True)


def test_command_on_saved_logits(capsys, tmp_path, cifar_features):
    data = cifar_features
    np.savez(tmp_path / "train.npz", logits=data["views"][0], labels=data["y"], head_weight=data["weight"])
    counts = np.bincount(data["y"])
    np.savez(tmp_path / "test.npz", logits=data["test"], labels=data["test_y"], class_counts=counts)
    words = ["calibrate", tmp_path / "train.npz", "--test", tmp_path / "test.npz", "--out", tmp_path / "out"]
    code, out, _ = run_command(capsys, *words, "--json")
    assert code == 0
    scores = json.loads(out)["test"]
    assert scores["before"]["top1"] == pytest.approx(0.6896, abs=1e-4)
    assert scores["after"]["top1"] == pytest.approx(0.7712, abs=0.003)
    repaired = Outputs.open(tmp_path / "out" / "test-calibrated.safetensors")
    assert (repaired.logits.argmax(1) == repaired.labels).mean() == pytest.approx(scores["after"]["top1"])
    described = json.loads((tmp_path / "out" / "calibration.json").read_text())
    by_formula = np.array(described["scale_"]) * data["test"] + np.array(described["shift_"])
    np.testing.assert_allclose(by_formula, repaired.logits, atol=1e-4)
    head, _ = read_tensors(tmp_path / "out" / "head.safetensors")
    np.testing.assert_allclose(head["weight"], np.array(described["omega_"])[:, None] * data["weight"], rtol=1e-5)
    np.testing.assert_allclose(head["bias"], described["shift_"], rtol=1e-5)  # the file had no bias
    code, _, error = run_command(capsys, *words)
    assert code == 2
    assert "exists already; choose another --out or replace it with --overwrite" in error


def test_class_sizes_of_held_out_logits_are_those_of_training(capsys, tmp_path):
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], [500, 60, 8])
    np.savez(tmp_path / "train.npz", logits=rng.normal(size=(568, 3)) + np.eye(3)[labels], labels=labels)
    held_out = np.arange(600) % 3
    np.savez(tmp_path / "test.npz", logits=rng.normal(size=(600, 3)) + np.eye(3)[held_out], labels=held_out)
    words = ["calibrate", tmp_path / "train.npz", "--out", tmp_path / "out", "--json"]
    code, out, _ = run_command(capsys, *words, "--test", tmp_path / "test.npz")
    assert code == 0
    scores = json.loads(out)["test"]["after"]
    assert [scores[name] is None for name in ("many", "medium", "few")] == [False, False, False]
    assert run_command(capsys, *words, "--overwrite")[0] == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["calibration.json"]  # nothing of the first is left


def test_a_run_is_not_overwritten_by_its_repair(capsys, digits_copy):
    before = (digits_copy / "model.safetensors").read_bytes()
    code, _, error = run_command(capsys, "calibrate", digits_copy, "--out", digits_copy, "--overwrite")
    assert code == 2
    assert "is the run itself; choose another --out" in error
    assert (digits_copy / "model.safetensors").read_bytes() == before


def test_a_calibrated_run_is_not_calibrated_again(capsys, digits_copy):
    assert run_command(capsys, "calibrate", digits_copy, "--method", "disalign", "--quiet")[0] == 0
    code, _, error = run_command(capsys, "calibrate", digits_copy / "disalign", "--method", "marc")
    assert code == 0
    assert f"{digits_copy / 'disalign'} is calibrated already (DisAlign): calibrating {digits_copy}" in error
    assert Run.open(digits_copy / "marc").calibration.model == Run.open(digits_copy).model_identity
    # A run that is there no more, or that is another by now, is not guessed at.
    write_trained(digits_copy, Run.open(digits_copy / "marc").model(), step=1)
    code, _, error = run_command(capsys, "calibrate", digits_copy / "disalign", "--method", "marc", "--overwrite")
    assert (code, error.count("\n")) == (2, 1)
    assert "where it came from, has changed" in error


@pytest.mark.filterwarnings("default:not solved")
def test_a_warning_is_one_line(capsys, tmp_path):
    np.savez(tmp_path / "a.npz", logits=np.random.default_rng(0).normal(size=(20, 2)), labels=np.arange(20) % 2)
    words = ["calibrate", tmp_path / "a.npz", "--out", tmp_path / "o", "--options", "max_iter", "1", "--quiet"]
    code, _, error = run_command(capsys, *words)
    assert code == 0
    assert error.startswith("longtail: warning: not solved: after 1 passes")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{npz}"], "name the folder of the result: --out FOLDER"),
        (["{npz}", "--out", "{tmp}/o", "--method", "mark"], "unknown method 'mark' (did you mean 'marc'?)"),
        (["{npz}", "--out", "{tmp}/o", "--options", "gamma", "auto"], "needs held-out outputs"),
        (["{tmp}"], "is not a run folder"),
        (["{npz}", "--out", "{npz}"], "a.npz is a file; choose another --out"),
        (["{npz}", "--out", "{npz}/o"], "a.npz: File exists"),
        (["{npz}", "--out", "{tmp}/o", "--options", "gamma"], "error parsing --options"),
        (["{npz}", "--out", "{tmp}/o", "--method", "crt"], "an array called features"),
        (["{npz}", "--out", "{tmp}/o", "--views", "3"], "--views applies only to run folders, and"),
        (["{tmp}", "--test", "{npz}"], "--test applies only to saved logits, and"),
    ],
)
def test_mistakes_are_one_line(capsys, tmp_path, words, message):
    np.savez(tmp_path / "a.npz", logits=np.random.default_rng(0).normal(size=(20, 2)), labels=np.arange(20) % 2)
    filled = [word.format(npz=tmp_path / "a.npz", tmp=tmp_path) for word in words]
    code, out, error = run_command(capsys, "calibrate", *filled)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert message in error
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_scores_on_images_that_a_method_was_fitted_on_are_marked(capsys, digits_copy):
    assert main(["calibrate", str(digits_copy), "--method", "marc", "--device", "cpu"]) == 0
    assert "higher than on new images" not in capsys.readouterr().err
    assert main(["calibrate", str(digits_copy), "--method", "halo", "--device", "cpu"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "HALO was fitted or chosen on the validation images: its scores there are higher than on new images" in said
    assert f"longtail diagnose {digits_copy}" in said
    described = json.loads((digits_copy / "halo" / "calibration.json").read_text())
    sizes = longtail.Run.open(digits_copy).split_sizes
    assert described["fitted_on"]["held_out"] == sizes["validation"]
    used = {
        split: json.loads((digits_copy / "halo" / f"before-after-{split}.json").read_text())["used"]
        for split in ("validation", "test")
    }
    assert used == {"validation": True, "test": False}
    text = model_card(longtail.Run.open(digits_copy / "halo"))
    assert f"and {sizes['validation']} validation images, which it has not seen" in text
    assert "fitted or chosen on the validation images" in text
    assert "fitted or chosen" not in model_card(longtail.Run.open(digits_copy / "marc"))
