"""Our own files after somebody has changed them: every command answers in one line, or does the work anew."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import longtail
from longtail.cli import main
from longtail.config import TrainConfig
from longtail.files.records import read_json

pytestmark = pytest.mark.filterwarnings("ignore")
# What folders of a stranger may be called.
HOSTILE = ("<script>alert(1)</script>", "=cmd|' C'!A0", "[x](javascript:alert(1))|`*_", "\x1b[2J\x1b]0;owned\x07")


def pictures(root: Path, names=("0", "1", "2")) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for label, name in enumerate(names):
            (root / split / name.replace("/", "∕")).mkdir(parents=True)
            for number in range(8 - 2 * label):
                pixels = rng.integers(0, 255, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).save(root / split / name.replace("/", "∕") / f"{number}.png")


def trained(folder: Path, names=("0", "1", "2")) -> Path:
    pictures(folder / "photos", names)
    config = TrainConfig(
        data="folder", root=str(folder / "photos"), backbone="digits", image_size=8, epochs=2, batch_size=8, workers=0
    )
    longtail.train(config, folder / "run", progress=False)
    assert main(["calibrate", str(folder / "run"), "--method", "marc", "--workers", "0", "--quiet"]) == 0
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of tiny pictures with a calibration, scores and a journal."""
    return trained(tmp_path_factory.mktemp("own"))


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole / "run", tmp_path / "run")
    return tmp_path / "run"


def changed(path: Path, **values) -> None:
    content = read_json(path)
    for place, value in values.items():
        *parents, last = place.split("__")
        target = content
        for name in parents:
            target = target[name]
        target[last] = value
    path.write_text(json.dumps(content))


def refused(words, capfd, named: str) -> None:
    capfd.readouterr()
    assert main([*words, "--quiet"]) == 2
    said = capfd.readouterr().err
    assert len(said.splitlines()) == 1, said
    assert named in said


RUN = {
    "data__channels": (0, 10**6),
    "data__class_counts": ([-1, 4, 4], [1, 2], [10**400, 1, 1], ["8", 6, 4]),
    "data__group_counts": ([8.5, 6, 4],),
    "data__class_names": ([], [1, 2, 3]),
    "data__splits": ({"test": {"images": 3}}, {"train": {"images": -1}}),
    "config": ({}, {"backbone": "digits", "epochs": -1}, []),
    "calibration": (3, {"method": "marc"}),
    "versions": ({"python": 3},),
    "format": (99, "1"),
}


@pytest.mark.parametrize(("place", "value"), [(place, value) for place, values in RUN.items() for value in values])
def test_a_description_that_cannot_be(copy, capfd, place, value):
    changed(copy / "run.json", **{place: value})
    refused(["evaluate", str(copy), "--workers", "0"], capfd, "run.json")


def test_weights_of_another_shape(copy, capfd):
    changed(copy / "run.json", data__class_names=list("abcd"), data__class_counts=[4] * 4, data__group_counts=[4] * 4)
    refused(["export", str(copy), "--format", "safetensors", "--out", str(copy / "out")], capfd, "does not belong")


CALIBRATION = {
    "scale_": ([1, 2], ["a", "b", "c"], [1e400, 1, 1]),
    "shift_": ([True, 1, 2],),
    "chosen": ({"gamma": "x"},),
    "fitted_on": ({}, {"split": 3}),
    "class_names": ([1, 2, 3],),
    "parameters": ("six",),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in CALIBRATION for value in CALIBRATION[name]])
def test_a_calibration_that_cannot_be(copy, capfd, name, value):
    changed(copy / "marc" / "calibration.json", **{name: value})
    refused(
        ["export", str(copy / "marc"), "--format", "json", "--out", str(copy / "a.json")], capfd, "calibration.json"
    )
    assert not (copy / "a.json").exists()


SCORES = {
    "before": ([], {"balanced": "high"}, {"balanced": 1e400}, None),
    "fallen": (3, [{}], [{"name": 1, "before": 0, "after": 1}]),
    "split": (3,),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in SCORES for value in SCORES[name]])
def test_scores_that_cannot_be(copy, capfd, name, value):
    changed(copy / "marc" / "before-after-test.json", **{name: value})
    words = ["export", str(copy / "marc"), "--format", "safetensors", "--out", str(copy / "out")]
    refused(words, capfd, "is damaged")
    assert not (copy / "out").exists()


LINES = ('{"step": "x", "images": 1}', "[]", '{"step": 1}', '{"step": 1, "images": 1, "validation": {"top1": "a"}}')


@pytest.mark.parametrize("line", [*LINES, '{"step": NaN, "images": 1}', '{"step": -1, "images": 1e999}'])
def test_a_journal_that_cannot_be(copy, capfd, line):
    (copy / "metrics.jsonl").write_text(line + "\n")
    words = ["export", str(copy), "--format", "safetensors", "--out", str(copy / "out")]
    refused(words, capfd, "metrics.jsonl")


def test_cells_of_a_comparison_that_cannot_be_are_done_again(whole, tmp_path, capfd):
    words = ["compare", "--data", "folder", "--root", str(whole / "photos"), "--backbone", "digits", "--image-size"]
    words += ["8", "--epochs", "1", "--batch-size", "8", "--workers", "0", "--methods", "softmax", "marc", "--seeds"]
    words += ["0", "--quiet", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    table = (tmp_path / "out" / "results.csv").read_bytes()
    cell = tmp_path / "out" / "cells" / "marc-seed0.json"
    kept = cell.read_text()
    damages = [{"metrics": 3}, {"metrics": {"balanced": "x"}}, {"seed": 7}, {"class_counts": None}, {"identity": []}]
    for damage in (*damages, {"family": "none"}, {"chosen": {"gamma": None}}):
        changed(cell, **damage)
        assert main(words) == 0
        assert (tmp_path / "out" / "results.csv").read_bytes() == table
        cell.write_text(kept)
    for wrong in (np.zeros((2, 2), int), np.zeros(3), np.full(18, 99), np.array(["a"]), np.zeros(0, int)):
        np.savez(cell.with_suffix(".npz"), predictions=wrong, labels=wrong)
        assert main(words) == 0
        assert (tmp_path / "out" / "results.csv").read_bytes() == table
    changed(cell, format=99)
    refused(words[:-3] + words[-2:], capfd, "upgrade longtail")


def test_progress_beside_a_finished_model_is_removed(copy):
    """It is written in place, and a process that is killed leaves it."""
    (copy / "progress.txt").write_text("1")
    assert main(["train", "--out", str(copy), "--resume", "--quiet"]) == 0
    assert not (copy / "progress.txt").exists()


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """A run whose classes are called as an attacker likes."""
    return trained(tmp_path_factory.mktemp("strange"), HOSTILE)


def test_hostile_class_names_are_only_names(strange, tmp_path, capfd):
    run = strange / "run"
    capfd.readouterr()
    assert main(["evaluate", str(run), "--workers", "0"]) == 0
    printed = capfd.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert main(["export", str(run / "marc"), "--format", "safetensors", "--out", str(tmp_path / "model")]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "<script" not in card
    assert r"\[x\](javascript" in card  # the brackets are letters, and make no link
    assert "\x1b" not in card
    words = ["predict", str(run), str(strange / "photos" / "test"), "--out", str(tmp_path / "a.csv"), "--workers", "0"]
    assert main([*words, "--quiet"]) == 0
    cells = [cell for line in (tmp_path / "a.csv").read_text().splitlines()[1:] for cell in line.split(",")]
    assert not any(cell.lstrip('"').startswith(("=", "@", "+", "-")) for cell in cells)
    assert any("'=cmd" in cell for cell in cells)
    assert main(["export", str(run), "--format", "onnx", "--out", str(tmp_path / "a.onnx"), "--quiet"]) == 0
    onnx = pytest.importorskip("onnx")
    notes = {item.key: item.value for item in onnx.load(tmp_path / "a.onnx").metadata_props}
    assert json.loads(notes["class_names"]) == sorted(name.replace("/", "∕") for name in HOSTILE)


def test_class_names_of_any_bytes(tmp_path, capfd):
    """A folder may be called what no text can say."""
    pictures(tmp_path / "photos")
    for split in ("train", "val", "test"):
        (tmp_path / "photos" / split / "2").rename(tmp_path / "photos" / split / os.fsdecode(b"\xff"))
    words = ["train", "--data", "folder", "--root", str(tmp_path / "photos"), "--backbone", "digits", "--image-size"]
    words += ["8", "--epochs", "1", "--batch-size", "8", "--workers", "0", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--workers", "0"]) == 0
    words = ["export", str(tmp_path / "run"), "--format", "safetensors", "--out", str(tmp_path / "model")]
    assert main(words) == 0
    assert "Traceback" not in capfd.readouterr().err
