"""Tables of paths in CSV and Parquet files: columns, splits, images inside the file."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import longtail
from longtail.cli.main import main
from longtail.data.images import as_paths
from longtail.data.splits import open_splits
from longtail.errors import UserError

from .conftest import sizes

KINDS = ("csv", "parquet")
LABELS = ["wren"] * 6 + ["owl"] * 3 + ["robin"]


@pytest.fixture
def birds(tmp_path):
    """Ten pictures in a folder of their own; picture N is grey with value 20 N."""
    (tmp_path / "img").mkdir()
    for number in range(len(LABELS)):
        Image.new("L", (9, 9), 20 * number).save(tmp_path / "img" / f"{number}.png")
    return tmp_path


def table_of(path, columns):
    """A table of columns in a CSV or a Parquet file."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([[*columns], *zip(*columns.values(), strict=True)])
    return str(path)


def paths(folder=None):
    return [str(folder / "img" / f"{n}.png") if folder else f"img/{n}.png" for n in range(len(LABELS))]


def values(images):
    return [images.open(number).getpixel((0, 0))[0] for number in range(len(images))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("absolute", [False, True])
def test_a_table_of_paths(birds, kind, absolute):
    splits = open_splits(table_of(birds / f"b.{kind}", {"path": paths(birds if absolute else None), "label": LABELS}))
    assert splits.train.class_names == ("owl", "robin", "wren")
    assert splits.train.class_counts.tolist() == [3, 1, 6]
    assert values(splits.train) == [20 * number for number in range(10)]
    assert splits.summary() == f"b.{kind}: 3 classes; images: 10 train (b.{kind}, columns 'path' and 'label')"


@pytest.mark.parametrize("kind", KINDS)
def test_columns_with_names_of_their_own_are_remembered_by_a_run(birds, kind, capsys):
    columns = {"id": list(range(10)), "Photo": paths(), "width": [9] * 10, "Species": LABELS}
    table, run = table_of(birds / f"birds.{kind}", columns), str(birds / "run")
    assert main(["distribution", table]) == 2
    assert "--path-column NAME" in capsys.readouterr().err
    assert main(["distribution", table, "--path-column=Photo", "--label-column=Speces"]) == 2
    assert "(did you mean 'Species'?); choose from: id, Photo, width, Species" in capsys.readouterr().err
    assert main(["distribution", table, "--path-column=photo", "--label-column=Species", "--json"]) == 0
    assert [known["name"] for known in json.loads(capsys.readouterr().out)["classes"]] == ["wren", "owl", "robin"]
    words = ["train", table, "--path-column=Photo", "--label-column=Species", "--out", run, "--iterations=1"]
    assert main([*words, "--batch-size=4", "--workers=0", "--device=cpu"]) == 0
    assert f"birds.{kind}, columns 'Photo' and 'Species'" in " ".join(capsys.readouterr().err.split())
    assert main(["evaluate", run, "--workers=0", "--device=cpu", "--quiet"]) == 0
    assert longtail.Run.open(run).class_names == ["owl", "robin", "wren"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_splits(birds, kind):
    columns = {"path": paths(), "label": [0, 1] * 5, "split": ["Train"] * 7 + ["val", "test", "train"]}
    splits = open_splits(table_of(birds / f"train.{kind}", columns))
    assert sizes(splits) == {"train": 8, "validation": 1, "test": 1}
    assert values(splits.test) == [160]
    found = "columns 'path', 'label' and 'split'), 1 validation (column 'split'; no image of 1 class)"
    assert found in splits.summary()
    table_of(birds / f"test.{kind}", {"path": paths(), "label": columns["label"]})
    with pytest.raises(UserError, match=rf"has a column 'split', and test.{kind} holds another split"):
        open_splits(str(birds / f"train.{kind}"))


def test_images_in_parquet_files_follow_a_column_of_splits(birds):
    content = [(birds / path).read_bytes() for path in paths()]
    columns = {"image": content, "label": LABELS[:2] * 5, "split": ["train", "test"] * 5}
    assert values(open_splits(table_of(birds / "birds.parquet", columns)).test) == [20, 60, 100, 140, 180]


@pytest.mark.parametrize("names", [["a" * 5_000, "b"], ["a\0b", "b"], ["a\0"]])
def test_names_that_are_no_paths(names):
    with pytest.raises(UserError, match="cannot be a path") as error:
        as_paths(names)
    assert len(str(error.value)) < 200


def test_one_long_path_does_not_make_all_paths_long():
    """An array of text would take 2 GB."""
    paths = as_paths(["a" * 4_000, *["b"] * 130_000])
    assert paths.dtype == object
    assert paths[[0, 1]].tolist() == ["a" * 4_000, "b"]
    assert as_paths(["a", "bc"]).dtype.kind == "U"
