"""Data by path: the usual names of splits are recognised, and what was found is said."""

import pytest
from PIL import Image

from longtail.cli.main import main
from longtail.data.splits import open_splits
from longtail.data.tables import held_out_beside, one_each, split_of
from longtail.errors import UserError


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (90, 80, 70)).save(path)


def classes(folder, names=("ant", "bee"), images=2):
    for name in names:
        for number in range(images):
            picture(folder / name / f"{number}.png")


def sizes(splits):
    found = {name: getattr(splits, name) for name in ("train", "validation", "test")}
    return {name: len(images) for name, images in found.items() if images is not None}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("Test-Images", "test"),
        ("train_set", "train"),
        ("trainset", "train"),
        ("Validation data", "validation"),
        ("images_val", "validation"),
        ("dataset", None),
        ("images", None),
        ("train station", None),
        ("testament", None),
        ("", None),
    ],
)
def test_words_around_the_name_of_a_split_do_not_matter(name, split):
    assert split_of(name) == split


def test_a_kind_without_a_place_asks_for_it(tmp_path, capsys):
    assert main(["train", "--data", "folder", "--out", str(tmp_path / "run")]) == 2
    assert "where are the images? --data folder needs --root FOLDER" in capsys.readouterr().err
    assert main(["train", "--data", "csv", "--out", str(tmp_path / "run")]) == 2
    assert "--data csv needs --root FOLDER or --train-list FILE" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("train", "validation", "test"),
    [
        ("train", "val", "test"),
        ("Train", "valid", "Testing"),
        ("TRAINING", "Validation", "test"),
        ("train", "dev", "Test"),
    ],
)
def test_splits_are_recognised_by_their_usual_names(tmp_path, train, validation, test):
    for name, images in ((train, 3), (validation, 1), (test, 2)):
        classes(tmp_path / name, images=images)
    splits = open_splits(str(tmp_path))
    assert sizes(splits) == {"train": 6, "validation": 2, "test": 4}
    assert splits.train.class_names == ("ant", "bee")
    places = f"6 train ({train}/), 2 validation ({validation}/), 4 test ({test}/)"
    assert splits.summary() == f"{tmp_path.name}: 2 classes; images: {places}"


def test_a_class_may_be_called_like_a_split(tmp_path):
    classes(tmp_path, ("car", "train", "valid"))  # vehicles: the folder holds images, not classes
    splits = open_splits(str(tmp_path))
    assert splits.train.class_names == ("car", "train", "valid")
    assert sizes(splits) == {"train": 6}


def test_what_is_not_used_is_said(tmp_path):
    classes(tmp_path / "train")
    classes(tmp_path / "extra")
    picture(tmp_path / "test" / "unlabelled.png")
    (tmp_path / ".cache" / "x").mkdir(parents=True)
    assert open_splits(str(tmp_path)).summary().endswith("not used: extra/, test/ (no folder per class)")


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (("Train", "train"), "has two train splits, Train and train; rename one of them"),
        (("train", "val", "validation"), "has two validation splits, val and validation"),
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


def test_tables_by_path_by_folder_and_by_a_column(tmp_path):
    (tmp_path / "Train.csv").write_text("path,label\na.png,ant\nb.png,bee\n")
    (tmp_path / "valid.csv").write_text("path,label\nc.png,bee\n")
    (tmp_path / "test.csv").write_text("path\nd.png\n")  # as competitions publish it
    for path in (tmp_path, tmp_path / "Train.csv"):
        splits = open_splits(str(path))
        assert sizes(splits) == {"train": 2, "validation": 1}
        found = "1 validation (valid.csv; no image of 1 class); not used: test.csv (it has no labels)"
        assert splits.summary().endswith(found)
    (tmp_path / "all.csv").write_text(
        "split,path,label\ntrain,a.png,ant\nVAL,b.png,bee\ntest,c.png,bee\ntrain,d.png,bee\n"
    )
    splits = open_splits(str(tmp_path / "all.csv"))
    assert sizes(splits) == {"train": 2, "validation": 1, "test": 1}
    assert splits.validation.class_names == ("ant", "bee")
    assert splits.validation.labels.tolist() == [1]
    (tmp_path / "all.csv").write_text("split,path,label\ntrain,a.png,ant\n2,b.png,bee\n")
    with pytest.raises(UserError, match="line 3: the split '2' is none of train, validation, test"):
        open_splits(str(tmp_path / "all.csv"))
    (tmp_path / "all.csv").write_text("split,path,label\nval,a.png,ant\n")
    with pytest.raises(UserError, match="has no row whose split is train"):
        open_splits(str(tmp_path / "all.csv"))


def test_names_and_siblings(tmp_path):
    assert [split_of(name) for name in ("TRAIN", " val ", "tests", "class")] == ["train", "validation", None, None]
    for name in ("restrained.txt", "restval.txt", "x-train-2.txt", "x-dev-2.txt", "x-dev-2.csv"):
        (tmp_path / name).touch()
    assert held_out_beside(tmp_path / "restrained.txt") == {}  # the word stands inside another
    assert held_out_beside(tmp_path / "x-train-2.txt") == {"validation": tmp_path / "x-dev-2.txt"}
    with pytest.raises(UserError, match="has two test splits, a and b"):
        one_each([("test", tmp_path / "a"), ("test", tmp_path / "b")], tmp_path)


def test_distribution_says_what_was_found(tmp_path, capsys):
    classes(tmp_path / "Train", images=3)
    classes(tmp_path / "Test", images=1)
    (tmp_path / "Train" / "cat").mkdir()
    assert main(["distribution", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    found = f"{tmp_path.name}: 3 classes; images: 6 train (Train/; no image of 1 class), 2 test (Test/; no"
    assert f"{found} image of 1 class)" in " ".join(out.split())
