from itertools import product

import numpy as np
import pytest
from PIL import Image

from longtail.config import DataConfig
from longtail.data.augment import clean_transform
from longtail.data.csv_files import paths_of_csv, read_csv
from longtail.data.loading import in_order, load
from longtail.data.splits import open_splits
from longtail.errors import UserError

CLEAN = clean_transform(["resized-crop"], (0.5,) * 3, (0.25,) * 3, image_size=12)


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a, b.png", "c.png", "d.png", "e.jpg"):
        Image.fromarray(rng.integers(0, 256, (20, 16, 3), dtype=np.uint8)).save(tmp_path / name)
    return tmp_path


def written(folder, text, name="train.csv"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "names", "labels"),
    [
        ('"a, b.png",1\nc.png,0\n', ("0", "1"), [1, 0]),
        ('path,label\n"a, b.png",1\n\nc.png,0\n', ("0", "1"), [1, 0]),
        ('\ufeffid,Label,Image\n7,wren,"a, b.png"\n8,robin,c.png\n', ("robin", "wren"), [1, 0]),
        ('picture,species\n"a, b.png",wren\nc.png, robin\n', ("robin", "wren"), [1, 0]),
        ('"a, b.png",wren\nc.png,robin\n', ("robin", "wren"), [1, 0]),
        ('path,species\n"a, b.png",wren\nc.png,robin\n', ("robin", "wren"), [1, 0]),
        ('species,photo\nwren,"a, b.png"\nrobin,c.png\n', ("robin", "wren"), [1, 0]),
        ('"a, b.png",10\nc.png,x\n', ("10", "x"), [0, 1]),
    ],
)
def test_headers_columns_and_labels(photos, text, names, labels):
    images = read_csv(written(photos, text), photos)
    assert images.class_names == names
    assert images.labels.tolist() == labels
    assert images.paths.tolist() == ["a, b.png", "c.png"]
    (batch,) = load(images, CLEAN, in_order(2, 4))
    assert batch.images.shape == (2, 3, 12, 12)


@pytest.mark.parametrize(
    "text",
    [
        'id;Label;Image\n7;wren;"a, b.png"\n8;robin;c.png\n',
        "id;Label;Image\n7;wren;a, b.png\n8;robin;c.png\n",
        "Label, Latin;path;label\n7;a, b.png;wren\n8;c.png;robin\n",
        "path\tlabel\na, b.png\twren\nc.png\trobin\n",
    ],
)
def test_cells_may_be_divided_by_semicolons_and_tabs(photos, text):
    images = read_csv(written(photos, text), photos)
    assert images.class_names == ("robin", "wren")
    assert images.paths.tolist() == ["a, b.png", "c.png"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("path,label\n", "no rows below its header"),
        ("c.png,0\nd.png\n", "line 2: expected a path and a label, found 'd.png'"),
        ("c.png,0\n\nd.png,\n", "line 3: expected a path and a label"),
        ("c.png,0\nd.png,-1\n", r"line 2: label -1 is outside 0\.\."),
        ("path,kind,id\nc.png,0,1\n", r"no column 'label'; say which it is with --label-column NAME \(columns: path"),
        ("id,Photo,Species\n1,c.png,x\n", r"which of its 3 columns hold paths .* first row: id, Photo, Species;"),
        ("Photo,width,Species\nc.png,32,x\n", "which of its 3 columns hold paths and labels"),
        ("c.png,32,x\nd.png,33,y\n", "which of its 3 columns hold paths and labels"),
    ],
)
def test_mistakes_are_named_with_their_line(photos, text, message):
    with pytest.raises(UserError, match=message):
        read_csv(written(photos, text), photos)


def test_other_splits_use_the_classes_of_training(photos):
    written(photos, "c.png,wren\nd.png,robin\n")
    written(photos, "path,label\ne.jpg,wren\n", "test.csv")
    splits = open_splits(DataConfig(data="csv", root=str(photos), validation=0))
    assert splits.test.labels.tolist() == [1]
    assert splits.test.class_names == ("robin", "wren")
    assert splits.validation is None
    written(photos, "path,label\ne.jpg,owl\n", "test.csv")
    with pytest.raises(UserError, match=r"test.csv, line 2: the training set has no class 'owl'"):
        open_splits(DataConfig(data="csv", root=str(photos), validation=0))


def test_a_csv_goes_wherever_a_list_file_goes(photos):
    path = written(photos, "c.png,0\nd.png,1\n", "mine.csv")
    splits = open_splits(DataConfig(data="lists", root=str(photos), train_list=str(path), validation=0))
    assert splits.train.class_counts.tolist() == [1, 1]


@pytest.mark.parametrize("read", [paths_of_csv, lambda path: read_csv(path, path.parent)], ids=["paths", "labelled"])
def test_rows_of_unequal_length_are_read_or_refused(read, tmp_path):
    rows = [",".join(row) for length in (1, 2) for row in product(("a.png", "b", "path"), repeat=length)]
    refused = 0
    for pair in product(rows, repeat=2):
        path = written(tmp_path, "\n".join(pair))
        try:
            read(path)
        except UserError:
            refused += 1
    assert 0 < refused < len(rows) ** 2
