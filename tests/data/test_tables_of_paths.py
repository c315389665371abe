"""CSV and Parquet files that name images by path: columns of any name, relative and absolute paths, splits."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import longtail
from longtail.cli.main import main
from longtail.data.splits import open_splits
from longtail.errors import UserError

KINDS = ("csv", "parquet")
LABELS = ["wren"] * 6 + ["owl"] * 3 + ["robin"]


@pytest.fixture
def photos(tmp_path):
    """Ten pictures in a folder of their own; picture N is grey with value 20 N."""
    (tmp_path / "img").mkdir()
    for place in range(len(LABELS)):
        Image.new("L", (9, 9), 20 * place).save(tmp_path / "img" / f"{place}.png")
    return tmp_path


def written(path, columns):
    """A table of columns in a CSV or a Parquet file."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
    return path


def paths(folder=None):
    return [str(folder / "img" / f"{n}.png") if folder else f"img/{n}.png" for n in range(len(LABELS))]


def values(images):
    return [images.open(place).getpixel((0, 0))[0] for place in range(len(images))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("absolute", [False, True])
def test_a_table_of_paths(photos, kind, absolute):
    table = written(photos / f"birds.{kind}", {"path": paths(photos if absolute else None), "label": LABELS})
    splits = open_splits(str(table))
    assert splits.train.class_names == ("owl", "robin", "wren")
    assert splits.train.class_counts.tolist() == [3, 1, 6]
    assert values(splits.train) == [20 * place for place in range(10)]
    assert splits.summary() == f"birds.{kind}: 3 classes; images: 10 train (birds.{kind}, columns 'path' and 'label')"


@pytest.mark.parametrize("kind", KINDS)
def test_columns_with_names_of_their_own(photos, kind, capsys):
    columns = {"id": list(range(10)), "Photo": paths(), "width": [9] * 10, "Species": LABELS}
    table = str(written(photos / f"birds.{kind}", columns))
    assert main(["distribution", table]) == 2
    assert "--path-column NAME" in capsys.readouterr().err
    assert main(["distribution", table, "--path-column=Photo", "--label-column=Speces"]) == 2
    assert "(did you mean 'Species'?); choose from: id, Photo, width, Species" in capsys.readouterr().err
    assert main(["distribution", table, "--path-column=photo", "--label-column=Species", "--json"]) == 0
    assert [known["name"] for known in json.loads(capsys.readouterr().out)["classes"]] == ["wren", "owl", "robin"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_remembers_its_columns(photos, kind, capsys):
    table = written(photos / f"birds.{kind}", {"id": list(range(10)), "Photo": paths(), "Species": LABELS})
    words = ["train", str(table), "--path-column=Photo", "--label-column=Species", f"--out={photos / 'run'}"]
    assert main([*words, "--iterations=1", "--batch-size=4", "--workers=0", "--device=cpu"]) == 0
    assert f"birds.{kind}, columns 'Photo' and 'Species'" in " ".join(capsys.readouterr().err.split())
    assert main(["evaluate", str(photos / "run"), "--workers=0", "--device=cpu", "--quiet"]) == 0
    assert longtail.Run.open(photos / "run").class_names == ["owl", "robin", "wren"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_splits(photos, kind):
    names = ["Train"] * 7 + ["val", "test", "train"]
    columns = {"path": paths(), "label": [0, 1, 0, 1, 0, 1, 0, 1, 0, 1], "split": names}
    splits = open_splits(str(written(photos / f"train.{kind}", columns)))
    assert [len(splits.split(name)) for name in ("train", "validation", "test")] == [8, 1, 1]
    assert values(splits.test) == [160]
    assert (
        "columns 'path', 'label' and 'split'), 1 validation (column 'split'; no image of 1 class)" in splits.summary()
    )
    written(photos / f"test.{kind}", {"path": paths(), "label": columns["label"]})
    with pytest.raises(UserError, match=rf"has a column 'split', and test.{kind} holds another split"):
        open_splits(str(photos / f"train.{kind}"))


def test_images_in_parquet_files_follow_a_column_of_splits(photos):
    content = [(photos / path).read_bytes() for path in paths()]
    columns = {"image": content, "label": LABELS[:2] * 5, "split": ["train", "test"] * 5}
    splits = open_splits(str(written(photos / "birds.parquet", columns)))
    assert values(splits.test) == [20, 60, 100, 140, 180]
