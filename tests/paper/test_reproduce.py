"""Every table and figure of the paper, made on a toy by its command."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import longtail
from longtail.metrics.scores import evaluate
from longtail.paper.__main__ import main
from longtail.paper.figures import accuracy_against_gamma, f1_over_data_sets
from longtail.paper.items import ITEMS, NUMBERS
from longtail.paper.work import released_networks
from longtail.report.figures import drawing

TOY = ["--toy", "--iterations", "4", "--seeds", "0", "--device", "cpu", "--quiet"]
# Fewer recipes or methods where they are many; table-imagenet has all of its own.
SMALLER = {
    "table-cifar": ["--recipes", "cifar10-lt-100", "cifar100-lt-200"],
    "table-boundary": ["--recipes", "cifar10-lt-100", "--methods", "softmax", "marc:gamma=auto", "halo"],
    "table-inaturalist": ["--methods", "softmax", "hybrid-sc", "tau-norm", "marc"],
    "table-places": ["--methods", "softmax", "oltr", "causal-norm", "marc"],
}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder that all items share."""
    return tmp_path_factory.mktemp("paper")


def make(name, out, *more):
    assert main([name, *TOY, *SMALLER.get(name, ()), "--out", str(out), *more]) == 0
    page = (out / name / "README.md").read_text(encoding="utf-8")
    return page, json.loads((out / name / "results.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ITEMS)
def test_every_item_is_made(name, out):
    item = ITEMS[name]
    page, results = make(name, out)
    assert page.startswith(f"# {item.where}: {item.what}\n")
    assert f"- command: {results['command']}" in page
    assert results["numbers"]
    for figure in re.findall(r"!\[.*\]\((.*)\.png\)", page):
        for kind in ("png", "svg", "pdf"):
            assert (out / name / f"{figure}.{kind}").stat().st_size > 3000
        assert np.asarray(Image.open(out / name / f"{figure}.png").convert("L")).std() > 5
    assert set(item.figures) <= set(re.findall(r"!\[(.*)\]", page))
    if item.recipes:
        assert "Made from other data" in page
        assert "data: " in results[item.recipes[0]]  # every setting that is not the recipe's


def test_a_table_shows_our_numbers_beside_the_papers(out):
    page, results = make("table-imagenet", out)
    cell = json.loads((out / "imagenet-lt" / "cells" / "marc-seed0.json").read_text())
    ours = results["numbers"]["imagenet-lt"]["marc"]
    for score in ("many", "medium", "few", "top1", "nll"):
        assert ours[score] == [cell["metrics"][score]]
    assert set(results["numbers"]["imagenet-lt"]) == set(NUMBERS["imagenet-lt"])
    (row,) = (line.split(" | ") for line in page.splitlines() if line.startswith("| MARC |"))
    shown = [f"{100 * cell['metrics'][score]:.1f}" for score in ("many", "medium", "few", "top1")]
    assert row[1::2] == shown
    assert [part.strip(" |") for part in row[2::2]] == ["60.4", "50.3", "36.6", "52.3"]


def test_what_the_paper_does_not_have_is_not_trained(out):
    _, results = make("table-cifar", out)
    assert "bbn" in results["numbers"]["cifar10-lt-100"]
    assert "bbn" not in results["numbers"]["cifar100-lt-200"]
    assert not (out / "cifar100-lt-200" / "runs" / "bbn-seed0").exists()


def test_stage_one_on_other_data_is_what_one_would_compute_by_hand(out):
    _, results = make("table-stage-one", out)
    runs = {
        recipe: longtail.Run.open(out / recipe / "runs" / "softmax-seed0")
        for recipe in ITEMS["table-stage-one"].recipes
    }
    target = runs["cifar100-lt-200"]
    own = longtail.Outputs.open(target.folder / "outputs" / "train-views1.safetensors")
    test = longtail.Outputs.open(target.folder / "outputs" / "test.safetensors")
    after = evaluate(longtail.MARC().fit(own).transform(test), test.labels, target.group_counts).top1
    assert results["numbers"]["cifar100-lt-200"][0][1] == pytest.approx(after)
    for recipe, run in runs.items():
        test = longtail.Outputs.open(run.folder / "outputs" / "test.safetensors")
        before = float(np.mean(test.rows().read(slice(None)).numpy().argmax(1) == test.labels))
        assert results["numbers"][recipe][0][0] == pytest.approx(before)


def test_the_gamma_figure_has_the_papers_gamma_and_none(out):
    _, results = make("figure-gamma", out)
    points = {point["gamma"]: point for point in results["numbers"]}
    assert min(points) == 0
    assert max(points) == 2
    cell = json.loads((out / "cifar100-lt-200" / "cells" / "marc-seed0.json").read_text())
    assert points[1.2]["balanced"] == pytest.approx(cell["metrics"]["balanced"], abs=0.005)


def test_f1_over_data_sets_is_that_of_the_cells(out):
    _, results = make("figure-f1", out)
    for recipe in ITEMS["figure-f1"].recipes:
        for name, method in (("before", "softmax"), ("after", "marc")):
            cell = json.loads((out / recipe / "cells" / f"{method}-seed0.json").read_text())
            assert results["numbers"][recipe][name] == [cell["metrics"]["macro_f1"]]


def test_bars_are_means_and_dots_are_seeds():
    with drawing():
        two, one = {"before": [0.2, 0.4], "after": [0.5, 0.6]}, {"before": [0.1], "after": [0.9]}
        axes = f1_over_data_sets({"one": two, "two": one}).axes[0]
    heights = [[bar.get_height() for bar in group] for group in axes.containers]
    np.testing.assert_allclose(heights, [[30, 10], [55, 90]])
    dots = [dots.get_offsets()[:, 1].tolist() for dots in axes.collections]
    np.testing.assert_allclose(dots, [[20, 40], [50, 60]])
    assert [text.get_text() for text in axes.texts] == ["30.0", "10.0", "55.0", "90.0"]


def test_curves_over_gamma_are_the_scores():
    labels = np.repeat([0, 1, 2], [4, 3, 3])
    scores = {gamma: evaluate(np.eye(3)[(labels * gamma).astype(int)], labels, [200, 50, 5]) for gamma in (0.0, 0.5)}
    with drawing():
        lines = accuracy_against_gamma(scores).axes[0].lines
    for line, name in zip(lines, ("balanced", "many", "medium", "few"), strict=False):
        np.testing.assert_allclose(line.get_xdata(), [0.0, 0.5])
        np.testing.assert_allclose(line.get_ydata(), [100 * getattr(metrics, name) for metrics in scores.values()])


def test_nothing_is_trained_twice(out, monkeypatch):
    make("figure-f1", out)
    monkeypatch.setattr("longtail.tasks.compare.train", None)  # must not be called again
    make("figure-f1", out)
    make("figure-gamma", out)


def test_recipes_and_methods_can_be_chosen(out):
    more = ["--recipes", "cifar100-lt-100", "--methods", "softmax", "marc:gamma=0.5"]
    assert main(["table-parameters", *TOY, "--out", str(out), *more]) == 0
    page = (out / "table-parameters" / "README.md").read_text()
    assert "**On cifar100-lt-100 instead of the paper's cifar100-lt-200, imagenet-lt.**" in page
    assert "| MARC (gamma 0.5) | 2K | 20 |" in page
    assert "| Softmax | network |  |" in page


def test_data_that_is_not_there_is_named_before_any_training(tmp_path, capsys):
    words = ["table-parameters", "--root", str(tmp_path / "empty"), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "table-parameters needs cifar100, imagenet-lt: " in said
    assert "cifar-100-python" in said
    assert "ImageNet_LT_train.txt" in said
    assert not (tmp_path / "out").exists()


def test_a_network_of_other_classes_is_named_before_any_training(tmp_path, cifar_root, capsys):
    words = ["table-stage-one", "--recipes", "cifar100-lt-100", "cifar10-lt-100", "--root", str(cifar_root / "python")]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert "table-stage-one takes recipes of the same classes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["figure-gamma", "--toy"], "name the folder of runs and results: --out FOLDER"),
        (["figure-gamma", "--methods", "marc", "--out", "x"], "figure-gamma compares no other methods"),
        (
            ["figure-gamma", "--recipes", "digits-lt", "cifar10-lt-100", "--out", "x"],
            "shows one data set; give --recipes one",
        ),
        (["table-cifar", "--toy", "--download", "--out", "x"], "--toy needs no data; leave out --download"),
        (["table-cifar", "--toy", "--seed", "3", "--out", "x"], "--seed is for a single run"),
        (["table-cifar", "--toy", "--seeds", "0", "0", "--out", "x"], "a seed is listed twice"),
        (["table-cifar", "--toy", "--methods", "mark", "--out", "x"], "unknown method 'mark'"),
    ],
)
def test_mistakes_are_named(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_list_names_every_item(capsys):
    assert main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(ITEMS)
    assert main([]) == 0
    assert "figure-margins-cifar100" in capsys.readouterr().out


@pytest.fixture
def released(digits_run, tmp_path, monkeypatch):
    """Released networks of two seeds."""
    home = tmp_path / "networks"
    for seed in (0, 4):
        other = tmp_path / f"seed{seed}"
        longtail.train(replace(longtail.RECIPES["digits-lt"], seed=seed, epochs=2, device="cpu"), other, progress=False)
        longtail.export(other, home / f"digits-lt-30-digits-seed{seed}", "safetensors")
    monkeypatch.setenv("LONGTAIL_RELEASED", str(home))
    return home


def test_released_networks_take_the_place_of_training(released, tmp_path, monkeypatch):
    monkeypatch.setattr("longtail.tasks.compare.train", None)  # must not be called
    words = ["--released", "--recipes", "digits-lt", "--out", str(tmp_path / "out"), "--quiet"]
    assert main(["table-boundary", *words]) == 0
    results = json.loads((tmp_path / "out" / "table-boundary" / "results.json").read_text())
    rows = results["numbers"]["digits-lt"]
    assert results["seeds"] == "0, 4"
    assert list(rows)[:2] == ["softmax", "tau-norm"]
    assert {"marc-gamma=auto", "logit-adjustment-tau=auto", "halo"} <= set(rows)
    assert all(row["seeds"] == [0, 4] and all(row["ece"]) for row in rows.values())
    assert main(["figure-disalign", *words]) == 0
    drawn = json.loads((tmp_path / "out" / "figure-disalign" / "results.json").read_text())
    assert list(drawn["numbers"]) == ["before", "DisAlign", "HALO", "MARC"]
    table = (tmp_path / "out" / "digits-lt" / "table.md").read_text()
    assert "2 seeds: mean" in table
    assert "±" not in table.split("\n\n")[1]  # no interval over seeds from two


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "3"], "--released takes the settings of the released networks; leave out epochs"),
        (["--seeds", "1"], "--released takes the seeds of the released networks"),
        (["--methods", "softmax", "cbs+marc"], "cbs.marc would have to be trained"),
        (["--toy"], "--toy needs no released networks"),
        (["--recipes", "cifar10-lt-50"], "there is no released network for cifar10-lt-50: `longtail methods"),
    ],
)
def test_what_released_networks_cannot_do_is_named(released, words, message, tmp_path, capsys):
    given = words if "--recipes" in words else ["--recipes", "digits-lt", *words]
    assert main(["table-boundary", "--released", *given, "--out", str(tmp_path / "out")]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_released_networks_of_different_training_are_not_mixed(released, tmp_path, capsys):
    folder, other = released / "digits-lt-30-digits-seed4", tmp_path / "other"
    changed = replace(longtail.RECIPES["digits-lt"], seed=4, epochs=2, lr=0.3, device="cpu")
    longtail.train(changed, other, progress=False)
    shutil.rmtree(folder)
    longtail.export(other, folder, "safetensors")
    words = ["table-boundary", "--released", "--recipes", "digits-lt", "--out", str(tmp_path / "out")]
    assert main([*words]) == 2
    assert "the released networks of digits-lt were trained differently: lr: 0.1 → 0.3" in capsys.readouterr().err
    # Two seeds of one training are taken; the one network of another training stays out.
    shutil.move(folder, released / "digits-lt-30-digits-other-seed4")
    longtail.export(tmp_path / "seed4", released / "digits-lt-30-digits-long-seed4", "safetensors")
    taken = released_networks(["digits-lt"])["digits-lt"]
    assert {seed: run.folder.name for seed, run in taken.items()} == {
        0: "digits-lt-30-digits-seed0",
        4: "digits-lt-30-digits-long-seed4",
    }
