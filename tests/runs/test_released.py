"""`released:NAME` wherever a run is taken."""

import json
import shutil
from pathlib import Path

import pytest

import longtail
from longtail.cli.main import main
from longtail.errors import UserError
from longtail.runs import record as released

NAME = "digits-lt-30-digits-seed0"


@pytest.fixture
def folder(digits_run, tmp_path, monkeypatch):
    """A folder with one released network, and an empty folder to work in."""
    home, work = tmp_path / "networks", tmp_path / "work"
    longtail.export(digits_run, home / NAME, "safetensors")
    work.mkdir()
    monkeypatch.setenv(released.RELEASED_VARIABLE, str(home))
    monkeypatch.chdir(work)
    return home


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_released_network_predicts_and_nothing_is_written(folder, digits_run):
    before = content(folder)
    images = longtail.data.open_splits("digits-lt").test.pixels[:5, 0].numpy()
    found = longtail.load(f"released:{NAME}").predict(list(images), progress=False)
    assert found.names == longtail.load(digits_run).predict(list(images), progress=False).names
    assert longtail.Run.open(f"released:{NAME}").model_identity == longtail.Run.open(digits_run).model_identity
    assert content(folder) == before
    assert not list(Path().iterdir())


def test_commands_work_on_a_copy(folder, capsys):
    before = content(folder)
    for words in (
        ["evaluate", f"released:{NAME}"],
        ["calibrate", f"released:{NAME}", "--method", "halo"],
        ["diagnose", f"released:{NAME}"],
        ["extract", f"released:{NAME}", "--split", "train"],
        ["report", f"released:{NAME}"],
    ):
        assert main([*words, "--quiet"]) == 0, capsys.readouterr().err
    assert content(folder) == before
    made = {path.name for path in (Path("runs") / NAME).iterdir()}
    assert {"model.safetensors", "run.json", "halo", "metrics-test.json", "report", "outputs"} <= made
    assert longtail.load(Path("runs") / NAME / "halo").run.calibration.method == "halo"


def test_something_else_in_the_place_of_the_copy_is_left_alone(folder, capsys):
    target = Path("runs") / NAME
    target.mkdir(parents=True)
    (target / "thesis.txt").write_text("mine")
    assert main(["evaluate", f"released:{NAME}"]) == 2
    assert "exists already and is not released:" in capsys.readouterr().err
    assert [path.name for path in target.iterdir()] == ["thesis.txt"]


def test_other_weights_under_the_same_name_are_not_taken_for_it(folder):
    copy = released.copy_released(released.find_released(f"released:{NAME}"))
    assert released.copy_released(released.find_released(f"released:{NAME}")) == copy
    (folder / NAME / "model.safetensors").write_bytes(b"another release")
    with pytest.raises(UserError, match="is not released:"):
        released.copy_released(released.find_released(f"released:{NAME}"))


def test_images_that_are_not_those_of_the_network_are_refused(folder):
    """The held-out split is found again from the record alone, or not used."""
    path = folder / NAME / "run.json"
    record = json.loads(path.read_text())
    record["data"]["splits"]["validation"]["digest"] = "0" * 64
    path.write_text(json.dumps(record))
    run = longtail.Run.open(f"released:{NAME}")
    with pytest.raises(UserError, match="held-out images cannot be told from those the network has seen"):
        run.images("validation")


def test_the_list(folder, capsys):
    assert main(["methods", "--released", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["method"], row["seed"]) == (NAME, "softmax", 0)


def test_what_is_missing_is_named(folder, monkeypatch, capsys):
    with pytest.raises(UserError, match="unknown released network 'digits-lt-30-digits-seed1' .did you mean"):
        longtail.load("released:digits-lt-30-digits-seed1")
    shutil.rmtree(folder)
    assert main(["calibrate", f"released:{NAME}"]) == 2
    assert "there are no released networks here: LONGTAIL_RELEASED names" in capsys.readouterr().err
    folder.mkdir()
    with pytest.raises(UserError, match="holds no released network"):
        longtail.load(f"released:{NAME}")
    monkeypatch.delenv(released.RELEASED_VARIABLE)
    monkeypatch.setattr(released, "CLONE", folder / "none")
    with pytest.raises(UserError, match="clone it, or set LONGTAIL_RELEASED"):
        longtail.load(f"released:{NAME}")
    assert not list(Path().iterdir())


HERE = sorted(released.CLONE.glob("*/run.json")) if released.CLONE.is_dir() else []


@pytest.mark.parametrize("record", HERE, ids=lambda path: path.parent.name)
def test_what_the_repository_releases_is_whole(record):
    """Weights load with the identity that was written, are small, and no path of a machine is told."""
    run = longtail.Run.open(record.parent)
    run.model()
    assert (record.parent / "model.safetensors").stat().st_size < 2_000_000
    assert {path.name for path in record.parent.iterdir()} == set(released.RELEASED_FILES)
    assert '"/' not in record.read_text(encoding="utf-8")
    assert all(split.digest for split in run.record.data.splits.values())
    assert run.config.seed == int(record.parent.name.rpartition("-seed")[2])


@pytest.mark.skipif(not HERE, reason="this copy of the source has no released networks")
def test_a_released_network_scores_as_its_card_says(cifar_root, tmp_path, monkeypatch):
    from longtail.tasks.evaluate import evaluate_run

    monkeypatch.chdir(tmp_path)
    copy = released.copy_released(HERE[0].parent)
    metrics, _, _ = evaluate_run(copy, "test", root=str(cifar_root / "python"), device="cpu")
    (row,) = (line for line in (copy / "README.md").read_text().splitlines() if line.startswith("| test |"))
    assert f"{100 * metrics.balanced:.1f}" in row
