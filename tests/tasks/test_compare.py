import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import longtail
from longtail.cli.main import main
from longtail.errors import UserError
from longtail.metrics.scores import evaluate
from longtail.tasks.cells import Cell, Entry
from longtail.tasks.compare import images_to_see
from longtail.tasks.tables import summarise

SHORT = replace(longtail.RECIPES["digits-lt"], epochs=4, device="cpu")
METHODS = ["softmax", "marc", "marc:gamma=0.5"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("compare")
    return out, longtail.compare(SHORT, METHODS, out, seeds=(0, 1))


def test_every_cell_has_its_result_and_predictions(compared):
    out, results = compared
    assert [(r["method"], r["seed"]) for r in results] == [
        (label, seed) for seed in (0, 1) for label in ("softmax", "marc", "marc-gamma=0.5")
    ]
    assert sorted(path.name for path in (out / "runs").iterdir()) == ["softmax-seed0", "softmax-seed1"]
    assert len(list((out / "cells").glob("*.npz"))) == 6
    marc = results[1]
    assert marc["parameters"] == 20
    assert marc["title"] == "MARC"
    assert results[2]["title"] == "MARC (gamma 0.5)"


def test_a_cell_is_what_one_would_compute_by_hand(compared):
    out, results = compared
    run = longtail.Run.open(out / "runs" / "softmax-seed1")
    train = longtail.Outputs.open(run.folder / "outputs" / "train-views1.safetensors")
    test = longtail.Outputs.open(run.folder / "outputs" / "test.safetensors")
    by_hand = evaluate(longtail.MARC().fit(train).transform(test), test.labels, run.class_counts)
    assert results[4]["metrics"]["per_class"] == by_hand.per_class


def test_what_is_done_is_not_done_again_and_new_methods_reuse_the_model(compared, monkeypatch):
    out, results = compared
    monkeypatch.setattr("longtail.tasks.compare.train", None)  # must not be called again
    again = longtail.compare(SHORT, [*METHODS, "lws"], out, seeds=(0, 1))
    assert [r for r in again if r["method"] != "lws"] == results
    assert len(again) == 8


def test_another_configuration_is_refused(compared):
    out, _ = compared
    with pytest.raises(UserError, match=r"holds another comparison \(lr: 0.1 → 0.2\)"):
        longtail.compare(replace(SHORT, lr=0.2), METHODS, out, seeds=(0,))
    with pytest.raises(UserError, match=r"views: 1 → 3"):
        longtail.compare(SHORT, METHODS, out, seeds=(0,), views=3)


def test_parallel_cells_give_the_serial_results(compared, tmp_path):
    _, results = compared
    parallel = longtail.compare(SHORT, METHODS, tmp_path, seeds=(0, 1), jobs=2)
    for ours, theirs in zip(parallel, results, strict=True):
        assert ours["metrics"] == theirs["metrics"]


def test_an_interrupted_comparison_goes_on(tmp_path, monkeypatch):
    from longtail.tasks import compare as comparison

    original = comparison.run_cell

    def fail_at_marc(cell):
        if cell.entry.name == "marc":
            raise KeyboardInterrupt
        return original(cell)

    monkeypatch.setattr(comparison, "run_cell", fail_at_marc)
    with pytest.raises(KeyboardInterrupt):
        longtail.compare(SHORT, ["softmax", "marc"], tmp_path, seeds=(0,))
    monkeypatch.undo()
    monkeypatch.setattr("longtail.tasks.compare.train", None)
    assert len(longtail.compare(SHORT, ["softmax", "marc"], tmp_path, seeds=(0,))) == 2


@pytest.mark.parametrize(
    ("methods", "given", "message"),
    [
        (["softmx"], {}, "unknown method 'softmx' .did you mean 'softmax'"),
        (["marc:gama=1"], {}, "unknown option 'gama' .did you mean 'gamma'"),
        (["marc:gamma"], {}, "written name=value, not 'gamma'"),
        (["softmax", "marc:gamma=abc"], {}, "gamma must be a number"),
        (["focal:gamma=-1"], {}, "gamma"),
        (["cbs+marc+halo"], {}, "must be a stage-one method, a plus sign and a post-hoc method: cbs.marc"),
        (["cbs+focal"], {}, "focal trains a network, so it cannot be applied to that of cbs"),
        (["marc", "softmax+marc"], {}, "marc is listed twice"),
        ([], {}, "at least one method"),
        (METHODS, {"jobs": 0}, "jobs must be a whole number of at least 1"),
        (METHODS, {"seeds": (-1,)}, "a seed must be a whole number of at least 0"),
        (METHODS, {"views": -1}, "views must be a whole number of at least 0"),
        (METHODS, {"seeds": ()}, "at least one seed"),
        (["softmax", "tau-norm"], {"validation": 0}, "has no validation split here; train with --validation"),
    ],
)
def test_mistakes_are_found_before_any_training(tmp_path, methods, given, message):
    config = replace(SHORT, validation=given.get("validation", SHORT.validation))
    options = {name: value for name, value in given.items() if name != "validation"}
    with pytest.raises(UserError, match=message):
        longtail.compare(config, methods, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["half a file", "{}", "no predictions", "half of the predictions"])
def test_a_damaged_cell_is_done_again(compared, monkeypatch, damage):
    out, results = compared
    path = out / "cells" / "marc-seed0.json"
    predictions = path.with_suffix(".npz")
    if damage == "no predictions":
        predictions.unlink()
    elif damage == "half of the predictions":
        predictions.write_bytes(predictions.read_bytes()[:200])
    else:
        path.write_text("{}" if damage == "{}" else path.read_text()[:200])
    monkeypatch.setattr("longtail.tasks.compare.train", None)  # the model is there
    again = longtail.compare(SHORT, METHODS, out, seeds=(0, 1))
    assert [cell["metrics"] for cell in again] == [cell["metrics"] for cell in results]
    assert predictions.is_file()


def test_what_a_killed_run_left_beside_its_model_goes_with_the_next_comparison(compared):
    out, _ = compared
    run = out / "runs" / "softmax-seed0"
    left = [run / "checkpoint.safetensors", run / "progress.txt"]
    for path in left:
        path.write_text("1")
    (out / "cells" / "softmax-seed0.json").unlink()  # the kill came before the cell was written
    longtail.compare(SHORT, METHODS, out, seeds=(0, 1))
    assert not any(path.exists() for path in left)


def test_progress_of_training_is_read_from_the_runs(compared):
    out, _ = compared
    cell = Cell(Entry.of("softmax"), 0, SHORT, 1, out)
    assert cell.images_seen() == images_to_see(SHORT, [cell.entry], [cell])
    assert replace(cell, seed=7).images_seen() == 0


def test_every_kind_of_stage_one_network_is_calibrated_as_by_hand(tmp_path):
    """All our networks end in a linear layer, so nothing is left out: the cell is what the folded network says."""
    from longtail.heads.fold import head_of
    from longtail.methods import TRAIN_METHODS

    config = replace(SHORT, epochs=None, iterations=30)
    kinds = {(method.model, method.balances): name for name, method in reversed(TRAIN_METHODS.items())}.values()
    methods = [name for first in kinds for name in (first, f"{first}+marc", f"{first}+halo")]
    found = {result["method"]: result for result in longtail.compare(config, methods, tmp_path, seeds=(0,))}
    assert len(found) == 3 * len(kinds)
    for first in kinds:
        run = longtail.Run.open(tmp_path / "runs" / f"{first}-seed0")
        train, validation, test = (
            run.outputs(split, views=views) for split, views in (("train", 1), ("validation", 0), ("test", 0))
        )
        prior = "uniform" if TRAIN_METHODS[first].balances else "auto"
        for name, method in (("marc", longtail.MARC()), ("halo", longtail.HALO(model_prior=prior))):
            layer = method.fit(train, validation=validation).head(head_of(run.model()))
            logits = layer(torch.from_numpy(np.array(test.features))).detach().numpy()
            label = name if first == "softmax" else f"{first}+{name}"
            cell = found[label]
            assert (cell["stage_one"], cell["model"]) == (first, run.model_identity)
            by_hand = evaluate(logits, test.labels, run.group_counts)
            assert cell["metrics"]["nll"] == pytest.approx(by_hand.nll, rel=1e-3)
            assert cell["metrics"]["balanced"] == pytest.approx(by_hand.balanced, abs=0.01)


def test_a_network_that_nobody_asked_to_compare_is_trained_first(tmp_path):
    (result,) = longtail.compare(replace(SHORT, epochs=1), ["cbs+logit-adjustment:tau=1e+0"], tmp_path, seeds=(0,))
    assert result["method"] == "cbs+logit-adjustment-tau=1e+0"
    assert result["title"] == "Class-balanced sampling + Logit adjustment (tau 1e+0)"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["cbs-seed0"]


def test_cells_without_their_runs_are_enough_for_a_table(compared, tmp_path, monkeypatch):
    out, results = compared
    shutil.copytree(out / "cells", tmp_path / "cells")
    monkeypatch.setattr("longtail.tasks.compare.train", None)
    elsewhere = replace(SHORT, root="/somewhere/else", workers=7)
    again = longtail.compare(elsewhere, METHODS, tmp_path, seeds=(0, 1))
    assert [cell["metrics"] for cell in again] == [cell["metrics"] for cell in results]
    assert not any("/" in str(result["identity"]) for result in results)  # no path of a machine


def save_images(folder, number):
    """As many 16 x 16 images of each of two classes."""
    rng = np.random.default_rng(number)
    for name, shade in (("bright", 200), ("dark", 20)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for place in range(number):
            pixels = np.clip(shade + 30 * rng.normal(size=(16, 16, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{place}.png")


def test_one_table_never_shows_results_on_different_images(tmp_path, capsys):
    save_images(tmp_path / "photos" / "train", 12)
    save_images(tmp_path / "photos" / "test", 4)
    config = longtail.TrainConfig(
        data="folder", root=str(tmp_path / "photos"), backbone="resnet8", image_size=16, iterations=2, batch_size=8,
        validation=0, workers=0, device="cpu",
    )  # fmt: skip
    out = tmp_path / "out"
    (old,) = longtail.compare(config, ["softmax"], out, seeds=(0,))
    assert set(old["identity"]["images"]) == {"train", "test"}
    save_images(tmp_path / "photos" / "test", 5)
    capsys.readouterr()
    results = longtail.compare(config, ["softmax", "logit-adjustment"], out, seeds=(0,))
    assert "1 of them are computed again: they are incomplete, or made on other images" in capsys.readouterr().err
    assert [len(np.load(out / "cells" / f"{r['method']}-seed0.npz")["labels"]) for r in results] == [10, 10]
    assert results[0]["identity"]["images"] == results[1]["identity"]["images"] != old["identity"]["images"]
    with pytest.raises(UserError, match="softmax and logit-adjustment of seed 0 were made on different test images"):
        summarise([old, results[1]], out / "cells")
    # A cell of an earlier version has no digests: it is taken, and that is printed.
    path = out / "cells" / "softmax-seed0.json"
    values = json.loads(path.read_text())
    del values["identity"]["images"]
    path.write_text(json.dumps(values))
    again = longtail.compare(config, ["softmax", "logit-adjustment"], out, seeds=(0,))
    assert "1 of them could not be checked to be of the same images" in capsys.readouterr().err
    assert summarise(again, out / "cells")
    # Without the images, finished cells still give a table.
    (tmp_path / "photos").rename(tmp_path / "elsewhere")
    assert len(longtail.compare(config, ["softmax", "logit-adjustment"], out, seeds=(0,))) == 2
    assert "2 of them could not be checked" in capsys.readouterr().err
    # A network that was trained on other images is refused.
    (tmp_path / "elsewhere").rename(tmp_path / "photos")
    save_images(tmp_path / "photos" / "train", 13)
    with pytest.raises(UserError, match="made with other training images; choose another --out"):
        longtail.compare(config, ["logit-adjustment"], out, seeds=(0,))
    with pytest.raises(UserError, match="was trained on other images; choose another --out"):
        longtail.compare(config, ["marc"], out, seeds=(0,))


def test_settings_of_a_single_run_are_refused(capsys, tmp_path):
    words = ["compare", "digits-lt", "--methods", "softmax", "--out", str(tmp_path / "o")]
    assert main([*words, "--method", "cbs"]) == 2
    assert "--method is for a single run; a comparison takes --methods" in capsys.readouterr().err


def test_command(capsys, tmp_path):
    words = ["compare", "digits-lt", "--epochs=3", "--device=cpu", "--methods", "softmax", "marc", "--seeds", "0", "1"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "MARC" in captured.out
    assert "2 of 2  softmax, seed 1" in captured.err
    assert "2 of 2  marc, seed 1" in captured.err
    assert json.loads((tmp_path / "results.json").read_text())["rows"][0]["method"] == "softmax"
    assert main([*words, "--out", str(tmp_path), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"softmax", "marc"}


def test_how_long_it_will_take_is_said_before_it_starts(tmp_path, capsys, monkeypatch):
    tried = []
    monkeypatch.setattr("longtail.tasks.compare.seconds_of", lambda config, _: tried.append(config.method) or 60.0)
    monkeypatch.setattr("longtail.tasks.compare._do", lambda *_: None)  # nothing is trained
    longtail.compare(SHORT, ["softmax", "cbs", "marc"], tmp_path / "out", seeds=(0, 1), jobs=2)
    assert tried == ["softmax", "cbs"]  # a trial for each method, not for each seed
    assert "training 4 networks: about 2 min 00 s here; then 2 calibrations" in capsys.readouterr().err
    assert not (tmp_path / "out" / "runs").exists()
