import json
import shutil

import numpy as np
import pytest
from PIL import Image

import longtail
from longtail.cli.main import main
from longtail.errors import UserError
from longtail.tasks.class_distribution import distribution, gini


@pytest.fixture
def photos(tmp_path):
    """Three classes of 6, 3 and 1 pictures in folders of their own."""
    for name, count in (("ant", 3), ("bee", 1), ("cat", 6)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def test_a_recipe_shows_all_its_training_images_as_evaluation_counts_them(digits_run, capsys):
    assert main(["distribution", "digits-lt", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    run = longtail.Run.open(digits_run)
    assert [row["images"] for row in shown["classes"]] == run.group_counts.tolist()
    assert shown["images"] == run.split_sizes
    assert sum(row["share"] for row in shown["classes"]) == pytest.approx(1)
    assert shown["groups"] == {
        "many": {"classes": 1, "images": 114},
        "medium": {"classes": 4, "images": 192},
        "few": {"classes": 5, "images": 44},
    }
    assert shown["imbalance_factor"] == 38
    assert "38.0 (30 before class sizes are rounded down)" in distribution("digits-lt").imbalance_text


def test_a_folder_of_classes_as_it_is(photos, capsys):
    assert main(["distribution", str(photos), "--plot", str(photos.parent / "classes.png")]) == 0
    out = capsys.readouterr().out
    assert out.index("cat") < out.index("ant") < out.index("bee")
    assert (photos.parent / "classes.png").is_file()


def test_a_folder_with_splits(photos, tmp_path):
    (tmp_path / "set").mkdir()
    photos.rename(tmp_path / "set" / "train")
    assert longtail.distribution(tmp_path / "set").class_counts.tolist() == [3, 1, 6]


def test_test_files_that_are_copies_of_training_files_are_warned_of(photos, tmp_path):
    (tmp_path / "set").mkdir()
    photos.rename(tmp_path / "set" / "train")
    shutil.copytree(tmp_path / "set" / "train", tmp_path / "set" / "test")
    with pytest.warns(UserWarning, match="10 of 10 test images are copies of training images"):
        longtail.distribution(tmp_path / "set")


def test_a_list_needs_no_images_and_may_have_gaps(tmp_path):
    (tmp_path / "list.txt").write_text("a.jpg 0\nb.jpg 2\nc.jpg 2\n")
    found = longtail.distribution(tmp_path / "list.txt")
    assert found.class_counts.tolist() == [1, 0, 2]
    assert found.imbalance is None
    assert found.order.tolist() == [2, 0, 1]


def test_an_unknown_name_is_told_what_there_is(tmp_path):
    with pytest.raises(UserError, match=r"'digits-tl' is not a file, folder or recipe .did you mean 'digits-lt'"):
        longtail.distribution("digits-tl")
    with pytest.raises(UserError, match="has no folder per class"):
        longtail.distribution(tmp_path)


def test_gini_is_the_mean_difference_over_twice_the_mean():
    counts = np.random.default_rng(0).integers(0, 1000, 50)
    differences = np.abs(counts[:, None] - counts[None, :]).mean()
    assert gini(counts) == pytest.approx(differences / (2 * counts.mean()))


def test_files_that_do_not_exist_are_counted(photos, capsys):
    (photos / "list.txt").write_text("ant/0.png 0\nbee/0.png 1\nbee/nowhere.png 1\ncat/nowhere.png 2\n")
    assert main(["distribution", str(photos / "list.txt")]) == 0
    assert "2 of these images do not exist; the first is" in capsys.readouterr().out
    assert longtail.distribution(photos / "list.txt").to_dict()["missing"] == 2
    assert longtail.distribution(photos).missing == 0
