"""What a calibration costs is shown beside what it brings."""

import json

import numpy as np

from longtail import Outputs
from longtail.cli.main import main
from longtail.exports.card import model_card
from longtail.runs.folder import Run


def test_commands_choose_temper_and_go_back_to_the_origin(digits_copy, capsys):
    assert main(["calibrate", str(digits_copy), "--method", "halo", "--then", "temperature", "--json"]) == 0
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    assert "temperature" in printed["chosen"]
    assert "natural" in printed["test"]["after"]
    # What the method inside has fitted, and on what, is recorded too; the model card says it.
    held_out = json.loads((digits_copy / "halo" / "calibration.json").read_text())["method_"]["held_out_"]
    assert held_out.startswith("a mixture of three heads; 36 held-out samples")
    assert f"not seen: {held_out}." in model_card(Run.open(digits_copy / "halo"))
    capsys.readouterr()
    # A calibrated run: the original is calibrated.
    assert main(["calibrate", str(digits_copy / "halo"), "--method", "halo", "--overwrite"]) == 0
    printed = capsys.readouterr()
    assert "is calibrated already (HALO + temperature): calibrating" in printed.err + printed.out
    assert "fitted: a mixture of three heads;" in printed.err + printed.out
    origin = json.loads((digits_copy / "halo" / "run.json").read_text())["calibration"]
    assert origin["run"] == str(digits_copy)
    assert "right for equal classes" not in printed.err + printed.out
    told = ["--method", "halo", "--options", "model-prior", "uniform", "--overwrite"]
    assert main(["calibrate", str(digits_copy), *told]) == 0
    assert "right for equal classes already, so the training prior is added" in capsys.readouterr().err
    assert json.loads((digits_copy / "halo" / "calibration.json").read_text())["model_prior_"] == "uniform"
    # A target prior by class, in either spelling.
    names = json.loads((digits_copy / "run.json").read_text())["data"]["class_names"]
    prior = digits_copy.parent / "prior.csv"
    prior.write_text("class,weight\n" + "".join(f"{name},{0 if name == names[0] else 1}\n" for name in names))
    for spelling in ("target-prior", "target_prior"):
        words = ["calibrate", str(digits_copy), "--method", "halo", "--options", spelling, str(prior), "--overwrite"]
        assert main([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["test"]["after"]["per_class"][0] == 0
    assert (
        main(["calibrate", str(digits_copy), "--method", "halo", "--options", "target-prior", "odd", "--overwrite"])
        == 2
    )
    assert "target_prior must be uniform, train, weights per class or a CSV file, not odd" in capsys.readouterr().err


def test_a_command_names_missing_classes_and_classes_that_fell(tmp_path, capsys):
    rng = np.random.default_rng(0)
    counts, names = np.array([1000, 200, 30, 30]), np.array(["Unknown", "a", "b", "c"])

    def save(name, kept):
        labels = np.repeat(np.arange(4), kept)
        logits = np.eye(4)[labels] + rng.normal(size=(len(labels), 4)) + [0.5, 0, 0, 0]
        np.savez(tmp_path / name, logits=logits, labels=labels, class_counts=counts, class_names=names)

    save("train.npz", counts)
    save("held.npz", [300, 60, 0, 20])
    source, held, out = (str(tmp_path / name) for name in ("train.npz", "held.npz", "out"))
    words = ["calibrate", source, "--test", held, "--out", out, "--method", "logit-adjustment"]
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "test: no samples of class b; the scores are over the others" in printed
    assert "test: recognised less often than before: Unknown (" in printed
    assert Outputs.open(tmp_path / "out" / "test-calibrated.safetensors").class_names == tuple(names)
    assert main([*words, "--overwrite", "--json"]) == 0
    score = json.loads(capsys.readouterr().out)["test"]
    assert score["missing"] == ["b"]
    assert score["fallen"][0]["name"] == "Unknown"
    assert score["fallen"][0]["after"] == score["after"]["per_class"][0]
    assert score["after"]["natural"] < score["before"]["natural"]
    assert main(["calibrate", source, "--validation", held, "--out", f"{out}2", "--method", "vector"]) == 2
    assert "class b has no sample in labels of validation; calibration needs" in capsys.readouterr().err
