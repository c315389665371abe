"""`longtail probe`: what it prints and writes, and one line for bad input with nothing written."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from longtail.cli.main import main


@dataclass
class Files:
    folder: Path
    features: np.ndarray
    labels: np.ndarray
    train: str = ""
    test: str = ""

    def write(self, name, **arrays):
        np.savez(self.folder / name, **arrays)
        return str(self.folder / name)


@pytest.fixture
def files(tmp_path):
    """Files of long-tailed digits and of others."""
    images, labels = load_digits(return_X_y=True)
    counts = np.geomspace(30, 3, 10).round().astype(int)
    rows = np.concatenate([np.flatnonzero(labels == label)[:count] for label, count in enumerate(counts)])
    others = np.setdiff1d(np.arange(len(labels)), rows)[:200]
    made = Files(tmp_path, images[rows] / 16, labels[rows])
    made.train = made.write("train.npz", features=made.features, labels=made.labels)
    made.test = made.write("test.npz", features=images[others] / 16, labels=labels[others])
    return made


def test_prints_what_was_chosen_and_honest_scores(files, capsys):
    out = files.folder / "head"
    assert main(["probe", files.train, "--test", files.test, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "95 % interval" in printed.out
    assert "logistic regression" in printed.out
    assert "chosen in 3 folds: ridge" in printed.err
    assert "classes that gain most against logistic regression" in printed.err
    assert sorted(path.name for path in out.iterdir()) == ["head.safetensors", "predictions.csv", "probe.json"]


def test_json_is_one_document_and_a_folder_is_replaced_only_if_asked(files, capsys):
    words = ["probe", files.train, "--out", str(files.folder / "head"), "--target-prior", "train"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["folds"] == 3
    before = (files.folder / "head" / "probe.json").read_bytes()
    assert main(words) == 2
    assert "exists already; choose another --out or replace it with --overwrite" in capsys.readouterr().err
    assert (files.folder / "head" / "probe.json").read_bytes() == before
    assert main([*words, "--overwrite", "--quiet"]) == 0


def spoiled(files, kind):
    """Words of a command whose input is spoiled in one way."""
    features, labels = files.features.copy(), files.labels
    if kind == "nan":
        features[7, 3] = np.nan
    if kind == "infinity in test":
        features[5, 0] = np.inf
        return [files.train, "--test", files.write("bad.npz", features=features)]
    if kind == "width":
        return [files.train, "--test", files.write("bad.npz", features=features[:, :60], labels=labels)]
    if kind == "unknown class":
        return [files.train, "--test", files.write("bad.npz", features=features, labels=labels + 1)]
    if kind == "prior":
        return [files.train, "--target-prior", "fair"]
    if kind == "prior of other classes":
        (files.folder / "prior.csv").write_text("cat,1\ndog,2\n")
        return [files.train, "--target-prior", str(files.folder / "prior.csv")]
    if kind == "length":
        labels = labels[:-1]
    if kind == "one class":
        labels = np.zeros_like(labels)
    if kind == "no labels":
        return [files.write("bad.npz", features=features)]
    if kind == "no features":
        return [files.write("bad.npz", logits=features, labels=labels)]
    if kind in ("numbered rows", "text in a column"):
        rows = [f"{row},{label},x" for row, label in enumerate(labels)]
        heading = "id,label,note" if kind == "numbered rows" else "n,label,note"
        (files.folder / "a.csv").write_text("\n".join([heading, *rows]))
        return [str(files.folder / "a.csv")]
    if kind == "ending":
        (files.folder / "a.pickle").write_bytes(b"x")
        return [str(files.folder / "a.pickle")]
    return [files.write("bad.npz", features=features, labels=labels)]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nan", "bad.npz: features of row 7 contain NaN or inf"),
        ("infinity in test", "bad.npz: features of row 5 contain NaN or inf"),
        ("width", "bad.npz has 60 features"),
        ("unknown class", "is of class 10, which"),
        ("prior", "target_prior must be uniform, train"),
        ("prior of other classes", "there is no class cat"),
        ("length", "labels; each row needs one"),
        ("one class", "bad.npz: y has one class only (0)"),
        ("no labels", "bad.npz has no labels called label, labels, y or target: name their column"),
        ("no features", "has no array called features, embeddings or X; it has: logits, labels"),
        ("numbered rows", "the column id names rows and is no feature; leave it out"),
        ("text in a column", "could not convert string to float: 'x' in column note; features are numbers; leave it"),
        ("ending", "cannot read .pickle"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(files, capsys, kind, message):
    words = spoiled(files, kind)
    capsys.readouterr()
    assert main(["probe", *words, "--out", str(files.folder / "head")]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1]
    assert error[-1].startswith("longtail: ")
    assert len(error) == 1
    assert not (files.folder / "head").exists()
    assert not list(files.folder.glob(".head*"))
