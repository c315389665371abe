"""Fitting a probe from files of embeddings: real digits in every kind of file."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sklearn.datasets import load_digits

from longtail import Probe
from longtail.errors import UserError
from longtail.files.progress import Display
from longtail.outputs.readers import read_embeddings
from longtail.tasks.probe import fit_probe

WORDS = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])


@pytest.fixture(scope="module")
def digits():
    """Digits with 40 images of the 0 down to 4 of the 9, and 400 others to test on."""
    images, labels = load_digits(return_X_y=True)
    counts = np.geomspace(40, 4, 10).round().astype(int)
    rows = np.concatenate([np.flatnonzero(labels == label)[:count] for label, count in enumerate(counts)])
    others = np.setdiff1d(np.arange(len(labels)), rows)[:400]
    images = (images / 16).astype(np.float32)
    return (images[rows], labels[rows]), (images[others], labels[others])


def write_npz(path, features, labels):
    np.savez(path, X=features, y=labels)


def write_safetensors(path, features, labels):
    save_file({"embeddings": features, "labels": labels}, path)


def write_csv(path, features, labels):
    rows = [",".join([str(label), *map(str, row)]) for row, label in zip(features.tolist(), labels, strict=True)]
    path.write_text("\n".join([",".join(["label", *(f"f{i}" for i in range(features.shape[1]))]), *rows]) + "\n")


def write_parquet(path, features, labels):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"id": range(len(labels)), "vector": list(features), "label": labels}), path)


WRITERS = {".npz": write_npz, ".safetensors": write_safetensors, ".csv": write_csv, ".parquet": write_parquet}


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_kind_of_file_gives_the_same_embeddings(suffix, digits, tmp_path):
    features, labels = digits[0]
    path = tmp_path / f"train{suffix}"
    WRITERS[suffix](path, features, labels)
    read = read_embeddings(path)
    np.testing.assert_array_equal(read.features, features)
    np.testing.assert_array_equal(read.labels, labels)
    assert read.labels.dtype.kind == "i"


@pytest.mark.parametrize("suffix", [".npz", ".csv", ".parquet"])
def test_labels_may_be_names(suffix, digits, tmp_path):
    features, labels = digits[0]
    path = tmp_path / f"train{suffix}"
    WRITERS[suffix](path, features, WORDS[labels])
    assert read_embeddings(path).labels.tolist() == WORDS[labels].tolist()


def test_labels_in_a_second_file(digits, tmp_path):
    features, labels = digits[0]
    np.save(tmp_path / "x.npy", features.astype(np.float16))
    np.save(tmp_path / "y.npy", WORDS[labels])
    (tmp_path / "y.txt").write_text("\n".join(map(str, labels)))
    assert read_embeddings(tmp_path / "x.npy").labels is None
    assert read_embeddings(tmp_path / "x.npy", tmp_path / "y.npy").labels.tolist() == WORDS[labels].tolist()
    assert read_embeddings(tmp_path / "x.npy", tmp_path / "y.txt").labels.tolist() == labels.tolist()


def test_the_folder_holds_what_the_estimator_fits(digits, tmp_path):
    (features, labels), (new, truth) = digits
    write_npz(tmp_path / "train.npz", features, labels)
    write_csv(tmp_path / "test.csv", new, truth)
    train, test = read_embeddings(tmp_path / "train.npz"), read_embeddings(tmp_path / "test.csv")
    scores = fit_probe(train, tmp_path / "head", test=test, target_prior=0.5)
    probe = Probe(0.5).fit(features, labels)
    head = load_file(tmp_path / "head" / "head.safetensors")
    np.testing.assert_allclose(head["weight"], probe.head_.weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(head["bias"], probe.head_.bias, rtol=1e-5, atol=1e-6)
    record = json.loads((tmp_path / "head" / "probe.json").read_text())
    assert record["classes"] == list(range(10))
    assert record["class_counts"] == np.bincount(labels).tolist()
    prior = np.sqrt(np.bincount(labels))
    assert record["target_frequencies"] == pytest.approx(prior / prior.sum())
    assert record["result"]["balanced"]["low"] < record["result"]["balanced"]["accuracy"]
    lines = (tmp_path / "head" / "predictions.csv").read_text().splitlines()
    assert lines[0] == "row,label,prediction,probability"
    predicted = np.array([int(line.split(",")[2]) for line in lines[1:]])
    np.testing.assert_array_equal(predicted, probe.predict(new.astype(np.float64)))
    assert scores.test["Probe"].top1 == pytest.approx((predicted == truth).mean())
    assert record["scores"]["Probe"]["top1"] == scores.test["Probe"].top1


def test_classes_that_gain_come_first(digits, tmp_path):
    (features, labels), (new, truth) = digits
    write_npz(tmp_path / "train.npz", features, WORDS[labels])
    write_npz(tmp_path / "test.npz", new, WORDS[truth])
    train, test = read_embeddings(tmp_path / "train.npz"), read_embeddings(tmp_path / "test.npz")
    scores = fit_probe(train, tmp_path / "head", test=test)
    changes = scores.changes
    gains = [new - old for _, _, old, new in changes]
    assert gains == sorted(gains, reverse=True)
    assert changes[0][0] in WORDS[5:]  # a rare class gains most
    assert scores.test["Probe"].balanced > scores.test["logistic regression"].balanced


def test_a_large_logistic_regression_is_left_out(digits, tmp_path, monkeypatch):
    monkeypatch.setattr("longtail.tasks.probe.CHEAP", 1000)
    write_npz(tmp_path / "train.npz", *digits[0])
    train = read_embeddings(tmp_path / "train.npz")
    scores = fit_probe(train, tmp_path / "head", test=train)
    assert list(scores.test) == ["Probe"]
    assert "N * D * K" in scores.left_out


def test_a_test_file_without_labels_is_predicted(digits, tmp_path):
    write_npz(tmp_path / "train.npz", *digits[0])
    np.save(tmp_path / "new.npy", digits[1][0])
    train, new = read_embeddings(tmp_path / "train.npz"), read_embeddings(tmp_path / "new.npy")
    assert fit_probe(train, tmp_path / "head", test=new).test == {}
    lines = (tmp_path / "head" / "predictions.csv").read_text().splitlines()
    assert lines[0] == "row,prediction,probability"
    assert len(lines) == 401


def test_class_names_of_a_file_replace_indices(digits, tmp_path):
    features, labels = digits[0]
    np.savez(tmp_path / "train.npz", features=features, labels=labels, class_names=WORDS)
    assert read_embeddings(tmp_path / "train.npz").labels.tolist() == WORDS[labels].tolist()
    np.savez(tmp_path / "train.npz", features=features, labels=labels, class_names=WORDS[:5])
    with pytest.raises(UserError, match="labels from 0 to 9, but 5 class names"):
        read_embeddings(tmp_path / "train.npz")


def test_lists_of_different_length_are_named(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pa.table({"features": [[1.0, 2.0], [3.0], [4.0, 5.0]], "label": [0, 1, 0]}), tmp_path / "a.parquet"
    )
    with pytest.raises(UserError, match="row 1: an embedding of 1 numbers, the first has 2"):
        read_embeddings(tmp_path / "a.parquet")


def test_a_long_fit_says_how_long_it_takes_and_what_it_does(digits, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("longtail.tasks.probe.LONG", 0.0)
    monkeypatch.setattr("longtail.tasks.probe.LINE_SECONDS", 0.0)
    write_npz(tmp_path / "train.npz", *digits[0])
    fit_probe(read_embeddings(tmp_path / "train.npz"), tmp_path / "head", display=Display())
    printed = capsys.readouterr().err
    assert "fitting takes about" in printed
    assert "fitting a head with ridge 0.1 on" in printed
    assert f"on {len(digits[0][1])} samples" in printed  # the last one is on all samples
