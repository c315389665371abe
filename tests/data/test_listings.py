"""Images in folders, lists, CSV and Parquet files: splits, columns and labels are recognised, mistakes are named."""

from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image

from longtail.config import DataConfig
from longtail.data.augment import build_transform
from longtail.data.listings import paths_in_csv, read_csv, read_folder, read_list
from longtail.data.loading import Sampler, in_order, load
from longtail.data.splits import open_splits
from longtail.data.tables import by_split, held_out_beside, split_of
from longtail.errors import UserError

from .conftest import sizes

ANY = DataConfig()
CLEAN = build_transform(["resized-crop"], (0.5,) * 3, (0.25,) * 3, image_size=24)


def picture(path, size=(8, 8), seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert("L" if seed % 4 == 1 else "RGB").save(path)


def classes(folder, names=("ant", "bee"), images=2):
    for name in names:
        for number in range(images):
            picture(folder / name / f"{number}.png")


def pixels_of(images, transform=CLEAN, *, workers=0, plan=None):
    batches = list(load(images, transform, plan or in_order(len(images), 5), workers=workers))
    return torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])


@pytest.fixture
def photos(tmp_path):
    """Twelve pictures of three classes and several sizes and modes, as folders and as a list; a test split."""
    lines = []
    for split, per_class in (("train", 4), ("test", 2)):
        for label, name in enumerate(("ant", "bee", "cat")):
            for number in range(per_class):
                path = tmp_path / split / name / f"picture {number}.{'jpg' if number else 'png'}"
                picture(path, (40 + 5 * number, 30 + 7 * label), seed=4 * label + number)
                lines += [f"{path.relative_to(tmp_path)} {label}"] if split == "train" else []
    (tmp_path / "list.txt").write_text("\n".join(lines) + "\n\n")
    return tmp_path


def test_list_and_folder_hold_the_same_images(photos):
    tables = read_list(photos / "list.txt", photos, ANY), read_folder(photos / "train", ANY)
    listed, folder = (table.images for table in tables)
    assert folder.class_names == ("ant", "bee", "cat")
    assert listed.class_counts.tolist() == folder.class_counts.tolist() == [4, 4, 4]
    (first, labels), (second, _) = pixels_of(listed), pixels_of(folder)
    assert first.shape == (12, 3, 24, 24)
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    # The folder lists its files by name, the list as they were written.
    assert sorted(first.sum((1, 2, 3)).tolist()) == sorted(second.sum((1, 2, 3)).tolist())


def test_worker_processes_give_the_same_pixels(photos):
    images = read_folder(photos / "train", ANY).images
    transform = build_transform(["resized-crop", "flip", "jitter"], (0.5,) * 3, (0.25,) * 3, image_size=24, seed=4)
    sampler = Sampler(images.labels.numpy(), seed=1)
    plan = [sampler.batch(step, 6) for step in range(4)]
    alone, labels = pixels_of(images, transform, plan=plan)
    assert torch.equal(alone, pixels_of(images, transform, plan=plan, workers=2)[0])
    assert torch.bincount(labels).tolist() == [8, 8, 8]
    one_by_one, _ = pixels_of(images, transform, plan=[sampler.draws(draw, 1) for draw in range(24)])
    torch.testing.assert_close(one_by_one, alone)


def test_broken_and_missing_images_are_named_or_skipped(photos):
    (photos / "train" / "bee" / "picture 2.jpg").write_bytes(b"not a picture")
    (photos / "train" / "cat" / "picture 3.jpg").unlink()
    listed = read_list(photos / "list.txt", photos, ANY).images
    with pytest.raises(UserError, match=r"bee/picture 2.jpg cannot be read.*--skip-broken"):
        pixels_of(listed)
    with pytest.raises(UserError, match=r"cat/picture 3.jpg is missing"):
        pixels_of(listed.subset(np.array([11])))
    skipping = read_list(photos / "list.txt", photos, DataConfig(skip_broken=True)).images
    assert torch.bincount(pixels_of(skipping)[1]).tolist() == [4, 3, 3]
    with pytest.raises(UserError, match="none of the 1 images"):
        pixels_of(skipping.subset(np.array([11])))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a.jpg\n", "line 1: expected a path and the number of its class"),
        ("a.jpg 0\nb.jpg x\n", "line 2: expected a path and the number of its class .*class names .* CSV"),
        ("a.jpg 0\nb.jpg -1\n", "line 2: label -1 is outside"),
        ("a.jpg 7\n", r"line 1: label 7 is outside 0\.\.4"),
        ("\n", "is empty"),
    ],
)
def test_bad_list_files_are_named_with_their_line(tmp_path, content, message):
    (tmp_path / "list.txt").write_text(content)
    with pytest.raises(UserError, match=message):
        read_list(tmp_path / "list.txt", tmp_path, ANY, tuple("01234"))


def test_what_is_missing_is_named(photos):
    listed = {"data": "lists", "root": str(photos), "train_list": str(photos / "list.txt"), "validation": 0}
    with pytest.raises(UserError, match="list file .* does not exist"):
        read_list(photos / "none.txt", photos, ANY)
    with pytest.raises(UserError, match="root folder .* does not exist"):
        read_list(photos / "list.txt", photos / "none", ANY)
    with pytest.raises(UserError, match="no folder per class"):
        read_folder(photos / "train" / "ant", ANY)
    with pytest.raises(UserError, match="no test split here; train with --test-list"):
        open_splits(DataConfig(**listed)).split("test")
    with pytest.raises(UserError, match="needs --train-list"):
        open_splits(DataConfig(data="lists", root=str(photos)))
    with pytest.raises(UserError, match="where are the images.*--data csv needs --root FOLDER or --train-list FILE"):
        open_splits(DataConfig(data="csv"))
    folder = open_splits(DataConfig(data="folder", root=str(photos), validation=0.25))
    assert sizes(folder) == {"train": 9, "validation": 3, "test": 6}
    (photos / "test" / "dog").mkdir()
    with pytest.raises(UserError, match="classes the training set does not: dog"):
        open_splits(DataConfig(data="folder", root=str(photos)))
    (photos / "list.txt").write_text((photos / "list.txt").read_text().replace(" 1\n", " 3\n"))
    with pytest.raises(UserError, match="class 1 of list.txt has no training image"):
        open_splits(DataConfig(**listed))


def test_words_around_the_name_of_a_split_do_not_matter():
    splits = {"Test-Images": "test", "train_set": "train", "Validation data": "validation", "images_val": "validation"}
    splits |= {" val ": "validation", **dict.fromkeys(("dataset", "train station", "testament", ""))}
    assert {name: split_of(name) for name in splits} == splits


@pytest.mark.parametrize(
    ("train", "validation", "test"),
    [("train", "val", "test"), ("TRAINING", "dev", "Testing")],
)
def test_splits_are_recognised_by_their_usual_names(tmp_path, train, validation, test):
    for name, images in ((train, 3), (validation, 1), (test, 2)):
        classes(tmp_path / name, images=images)
    splits = open_splits(str(tmp_path))
    assert sizes(splits) == {"train": 6, "validation": 2, "test": 4}
    places = f"6 train ({train}/), 2 validation ({validation}/), 4 test ({test}/)"
    assert splits.summary() == f"{tmp_path.name}: 2 classes; images: {places}"


def test_a_class_may_be_called_like_a_split(tmp_path):
    classes(tmp_path, ("car", "train", "valid"))  # vehicles: the folder holds images, not classes
    splits = open_splits(str(tmp_path))
    assert splits.train.class_names == ("car", "train", "valid")
    assert sizes(splits) == {"train": 6}


def test_what_is_not_used_is_reported(tmp_path):
    classes(tmp_path / "train")
    classes(tmp_path / "extra")
    picture(tmp_path / "test" / "unlabelled.png")
    (tmp_path / ".cache" / "x").mkdir(parents=True)
    assert open_splits(str(tmp_path)).summary().endswith("not used: extra/, test/ (no folder per class)")


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (("Train", "train"), "has two train splits, Train and train; rename one of them"),
        (("val", "test"), "has test, val but no folder of training images; call it train"),
        (("photos",), "has a single class, photos (its folders may be the classes: try that one)"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(tmp_path, folders, message):
    for name in folders:
        classes(tmp_path / name)
    with pytest.raises(UserError) as error:
        open_splits(str(tmp_path))
    assert message in str(error.value)


def test_folders_that_programs_leave_behind_are_no_classes(tmp_path):
    classes(tmp_path)
    picture(tmp_path / ".ipynb_checkpoints" / "0.png")
    picture(tmp_path / "__MACOSX" / "0.png")
    (tmp_path / "ant" / "._0.png").write_bytes(b"")
    splits = open_splits(str(tmp_path))
    assert splits.train.class_names == ("ant", "bee")
    assert len(splits.train) == 4


def test_lists_beside_the_training_list(tmp_path):
    for name, lines in (("LT_train", "a.png 0\nb.png 1\n"), ("LT_val", "c.png 1\n"), ("LT_test", "d.png 0\n")):
        (tmp_path / f"{name}.txt").write_text(lines)
    (tmp_path / "other_test.txt").write_text("e.png 0\n" * 9)
    splits = open_splits(str(tmp_path / "LT_train.txt"))
    assert sizes(splits) == {"train": 2, "validation": 1, "test": 1}
    assert splits.name == "LT_train.txt"
    for name in ("restrained.txt", "restval.txt", "x-train-2.txt", "x-dev-2.txt", "x-dev-2.csv"):
        (tmp_path / name).touch()
    assert held_out_beside(tmp_path / "restrained.txt") == {}  # the word stands inside another
    assert held_out_beside(tmp_path / "x-train-2.txt") == {"validation": tmp_path / "x-dev-2.txt"}
    with pytest.raises(UserError, match="has two test splits, a and b"):
        by_split([("test", tmp_path / "a"), ("test", tmp_path / "b")], tmp_path)


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
        ('species,photo\nwren,"a, b.png"\nrobin,c.png\n', ("robin", "wren"), [1, 0]),
        ('"a, b.png",10\nc.png,x\n', ("10", "x"), [0, 1]),
        ('id;Label;Image\n7;wren;"a, b.png"\n8;robin;c.png\n', ("robin", "wren"), [1, 0]),
        ("Label, Latin;path;label\n7;a, b.png;wren\n8;c.png;robin\n", ("robin", "wren"), [1, 0]),
        ("path\tlabel\na, b.png\twren\nc.png\trobin\n", ("robin", "wren"), [1, 0]),
    ],
)
def test_headers_delimiters_columns_and_labels(tmp_path, text, names, labels):
    images = read_csv(written(tmp_path, text), tmp_path, ANY).images
    assert images.class_names == names
    assert images.labels.tolist() == labels
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
        ("c.png,32,x\nd.png,33,y\n", "which of its 3 columns hold paths and labels"),
    ],
)
def test_mistakes_in_tables_are_named_with_their_line(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        read_csv(written(tmp_path, text), tmp_path, ANY)


def test_other_splits_use_the_classes_of_training(tmp_path):
    written(tmp_path, "c.png,wren\nd.png,robin\n")
    written(tmp_path, "path,label\ne.jpg,wren\n", "test.csv")
    for given in ({"data": "csv"}, {"data": "lists", "train_list": str(tmp_path / "train.csv")}):
        splits = open_splits(DataConfig(**given, root=str(tmp_path), validation=0))
        assert splits.test.labels.tolist() == [1]
    assert splits.test.class_names == ("robin", "wren")
    written(tmp_path, "path,label\ne.jpg,owl\n", "test.csv")
    with pytest.raises(UserError, match=r"test.csv, line 2: the training set has no class 'owl'"):
        open_splits(DataConfig(data="csv", root=str(tmp_path), validation=0))


@pytest.mark.parametrize(
    "read", [paths_in_csv, lambda path: read_csv(path, path.parent, ANY)], ids=["paths", "labelled"]
)
def test_rows_of_unequal_length_are_read_or_refused(read, tmp_path):
    rows = [",".join(row) for length in (1, 2) for row in product(("a.png", "b", "path"), repeat=length)]
    refused = 0
    for pair in product(rows, repeat=2):
        try:
            read(written(tmp_path, "\n".join(pair)))
        except UserError:
            refused += 1
    assert 0 < refused < len(rows) ** 2


def test_tables_by_path_by_folder_and_by_a_column(tmp_path):
    written(tmp_path, "path,label\na.png,ant\nb.png,bee\n", "Train.csv")
    written(tmp_path, "path,label\nc.png,bee\n", "valid.csv")
    written(tmp_path, "path\nd.png\n", "test.csv")  # as competitions publish it
    for path in (tmp_path, tmp_path / "Train.csv"):
        splits = open_splits(str(path))
        assert sizes(splits) == {"train": 2, "validation": 1}
        found = "1 validation (valid.csv; no image of 1 class); not used: test.csv (it has no labels)"
        assert splits.summary().endswith(found)
    table = "split,path,label\ntrain,a.png,ant\nVAL,b.png,bee\ntest,c.png,bee\ntrain,d.png,bee\n"
    splits = open_splits(str(written(tmp_path, table, "all.csv")))
    assert sizes(splits) == {"train": 2, "validation": 1, "test": 1}
    assert splits.validation.class_names == ("ant", "bee")
    assert splits.validation.labels.tolist() == [1]
    for rows, message in (
        ("train,a.png,ant\n2,b.png,bee\n", "line 3: the split '2' is none of train, validation, test"),
        ("val,a.png,ant\n", "has no row whose split is train"),
    ):
        with pytest.raises(UserError, match=message):
            open_splits(str(written(tmp_path, f"split,path,label\n{rows}", "all.csv")))
