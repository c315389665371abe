"""Saved logits as CSV files: labels in a column of any name, as indices or as class names."""

import json

import numpy as np
import pytest

from longtail.cli.main import main

NAMES = ("cat", "dog", "hen")


@pytest.fixture
def table(tmp_path):
    """`table(column, labels)`: a CSV file of 70 logits, with the labels in the second column."""
    truth = np.repeat([0, 1, 2], [40, 20, 10])
    logits = np.eye(3)[truth] + np.random.default_rng(0).normal(size=(70, 3))

    def write(column, names):
        path = tmp_path / f"{column}.csv"
        rows = [f"{a},{names[label]},{b},{c}" for (a, b, c), label in zip(logits.tolist(), truth, strict=True)]
        path.write_text("\n".join([f"cat,{column},dog,hen", *rows]) + "\n")
        return str(path)

    return write


def scores(capsys, path, out, *more):
    assert main(["calibrate", path, "--test", path, "--out", str(out), "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)["test"]


def test_labels_in_another_column_and_as_names(table, tmp_path, capsys):
    expected = scores(capsys, table("label", "012"), tmp_path / "plain")
    named = scores(capsys, table("Species", NAMES), tmp_path / "named", "--label-column", "species")
    assert named == expected


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        (NAMES, [], "if a column holds the labels, name it with --label-column"),
        (NAMES, ["--label-column", "kind"], "has no labels called kind; it has: cat, species, dog"),
        (("cat", "dog", "cow"), ["--label-column", "species"], "could not convert string to float: 'cow'"),
    ],
)
def test_what_is_no_label_is_named(table, tmp_path, capsys, names, more, message):
    assert main(["calibrate", table("species", names), "--out", str(tmp_path / "out"), *more]) == 2
    assert message in capsys.readouterr().err


def test_test_samples_that_the_method_was_fitted_on_are_named(table, tmp_path, capsys):
    path, kept = table("label", "012"), tmp_path / "kept.csv"
    lines = (tmp_path / "label.csv").read_text().splitlines(keepends=True)
    kept.write_text("".join(lines[:1] + lines[1::2]))
    (tmp_path / "new.csv").write_text("".join(lines[:1] + lines[2::2]))
    for test, is_used in ((path, True), (str(tmp_path / "new.csv"), False)):
        assert main(["calibrate", str(kept), "--test", test, "--out", str(tmp_path / "out"), "--overwrite"]) == 0
        assert ("MARC was fitted or chosen on the test images" in capsys.readouterr().err) == is_used
