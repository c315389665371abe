"""A run folder: what it says of itself is checked once, and its images are recognised."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import longtail
from longtail.errors import UserError
from longtail.files.tensors import read_tensors, write_tensors
from longtail.runs.folder import Run, write_trained
from longtail.tasks.calibrate_run import calibrate_run
from longtail.tasks.evaluate import evaluate_run


def rewrite(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def unbind(folder):
    """Remove what binds weights and `run.json`, as in folders written before they were bound."""
    tensors, header = read_tensors(folder / "model.safetensors")
    write_tensors(folder / "model.safetensors", tensors, {name: header[name] for name in header if name != "run"})
    rewrite(folder / "run.json", lambda values: values.pop("model", None))


def test_format_identity_and_digests_are_written(digits_run):
    values = json.loads((digits_run / "run.json").read_text())
    assert values["format"] == 1
    splits = longtail.data.open_splits("digits-lt")
    for name in ("train", "validation", "test"):
        images = splits.split(name)
        assert values["data"]["splits"][name] == {"images": len(images), "digest": images.digest}
    _, header = read_tensors(digits_run / "model.safetensors")
    assert header["format"] == 1
    assert header["model"] == Run.open(digits_run).model_identity


def test_every_file_of_a_calibration_carries_the_identity_of_its_model(digits_copy):
    folder, _ = calibrate_run(Run.open(digits_copy), longtail.MARC())
    evaluate_run(folder, device="cpu")
    identity = Run.open(folder).model_identity
    assert identity != Run.open(digits_copy).model_identity
    names = ("calibration.json", "before-after-test.json", "before-after-validation.json", "metrics-test.json")
    for name in names:
        values = json.loads((folder / name).read_text())
        assert (values["model"], values["format"]) == (identity, 1), name
    outputs = Run.open(digits_copy).outputs("test")
    assert outputs.model == Run.open(digits_copy).model_identity


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(format=2), "has format 2, this longtail reads up to 1; upgrade longtail"),
        (lambda v: v.pop("format"), "run.json was written by an older longtail; train the run again"),
        (lambda v: v.update(format="one"), "its format is 'one', not a number"),
        (lambda v: v.pop("data"), "it has no data"),
        (lambda v: v["data"].update(class_counts="many"), "data.class_counts is"),
        (lambda v: v["data"]["class_counts"].append(3), "class names and class counts differ in number"),
        (lambda v: v["data"].update(channels=True), "data.channels is true, not of type int"),
        (lambda v: v["config"].update(colour=3), "unknown setting 'colour'"),
    ],
)
def test_a_damaged_description_is_named(digits_copy, change, message):
    unbind(digits_copy)
    rewrite(digits_copy / "run.json", change)
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        Run.open(digits_copy).config  # noqa: B018


@pytest.mark.parametrize("text", ["", "null", "[1]", "{", "[" * 100_000, '"x"'])
def test_what_is_no_description_at_all(digits_copy, text):
    (digits_copy / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json is damaged"):
        Run.open(digits_copy)


@pytest.mark.parametrize("with_digests", [True, False])
def test_weights_that_were_changed_are_noticed(digits_copy, with_digests):
    path = digits_copy / "model.safetensors"
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        said = json.loads(file.metadata()["longtail"])
    if not with_digests:  # as it was written before there were any
        del said["xxh3_128"]
    save_file(tensors, path, {"longtail": json.dumps(said)})
    if not with_digests:
        Run.open(digits_copy).model()
    tensors["head.bias"][3] += 1e-6
    save_file(tensors, path, {"longtail": json.dumps(said)})
    with pytest.raises(UserError, match="model.safetensors is damaged: .* (is|are) not (what|those that)"):
        Run.open(digits_copy).model()


def test_weights_of_another_network_are_named(digits_copy):
    unbind(digits_copy)
    write_tensors(digits_copy / "model.safetensors", {"x": torch.zeros(2)}, {"format": 1, "model": "x"})
    with pytest.raises(UserError, match="does not fit the network of .*run.json: .*Missing key"):
        Run.open(digits_copy).model()


@pytest.fixture
def folder_run(tmp_path):
    """A run on a folder of images, trained for a moment, and the folder."""
    rng = np.random.default_rng(0)
    for split, sizes in (("train", {"ant": 30, "bee": 12, "cat": 4}), ("test", {"ant": 3, "bee": 3, "cat": 3})):
        for label, (name, size) in enumerate(sizes.items()):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for number in range(size):
                pixels = rng.integers(0, 80, (9, 8, 3)) + 60 * label
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "photos" / split / name / f"{number}.png")
    data = {"data": "folder", "root": str(tmp_path / "photos"), "image_size": 8, "validation": 0.2, "workers": 0}
    config = longtail.TrainConfig(**data, backbone="digits", iterations=2, device="cpu")
    longtail.train(config, tmp_path / "run")
    return Run.open(tmp_path / "run"), tmp_path / "photos"


def test_held_out_images_do_not_mix_with_training_images(folder_run):
    """After one file is renamed the same seed would hold out other images, most of which the network has seen."""
    run, photos = folder_run
    first = run.outputs("validation")
    (photos / "train" / "ant" / "0.png").rename(photos / "train" / "ant" / "zebra.png")
    for split in ("validation", "train"):
        with pytest.raises(UserError, match="have changed since it was trained .*cannot be told from those"):
            Run.open(run.folder).outputs(split)
    (photos / "train" / "ant" / "zebra.png").rename(photos / "train" / "ant" / "0.png")
    assert run.outputs("validation") == first


def test_outputs_of_changed_test_images_are_computed_again(folder_run):
    run, photos = folder_run
    first = run.outputs("test")
    Image.fromarray(np.full((30, 8, 3), 250, np.uint8)).save(photos / "test" / "ant" / "1.png")
    second = Run.open(run.folder).outputs("test")
    changed = (first.logits != second.logits).any(1)
    assert changed.tolist() == [False, True, *[False] * 7]
    assert second.digest != first.digest


def test_groups_go_by_the_counts_before_images_were_held_out(tmp_path):
    config = replace(longtail.RECIPES["digits-lt"], epochs=1, validation=0.2, device="cpu")
    longtail.train(config, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert run.group_counts[0] == 114
    assert run.class_counts[0] == 91  # many-shot all the same
    metrics, _, _ = evaluate_run(run.folder, device="cpu")
    assert metrics.many == metrics.per_class[0]
    outputs = run.outputs("test")
    assert outputs.counts_for_groups.tolist() == run.group_counts.tolist()
    assert outputs.class_counts.tolist() == run.class_counts.tolist()


def other_run(folder, digits_copy):
    """A copy of a run with other weights, as another seed gives them, and its own `run.json`."""
    shutil.copytree(digits_copy, folder)
    run = Run.open(folder)
    rewrite(folder / "run.json", lambda values: values["config"].update(lr=0.7))
    model = run.model()
    with torch.no_grad():
        model.head.bias += 1
    write_trained(folder, model, step=3)
    return folder


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("name", ["run.json", "model.safetensors"])
def test_files_of_two_runs_are_not_mixed(name, calibrated, digits_copy, tmp_path):
    folders = [digits_copy, other_run(tmp_path / "other", digits_copy)]
    if calibrated:
        folders = [calibrate_run(Run.open(folder), longtail.MARC())[0] for folder in folders]
    for folder in folders:
        Run.open(folder).model()
    shutil.copyfile(folders[1] / name, folders[0] / name)
    for call in (Run.open, longtail.load, evaluate_run):
        with pytest.raises(UserError, match=r"model\.safetensors does not belong to .*run\.json") as refused:
            call(folders[0])
        assert "\n" not in str(refused.value)


def test_one_seed_more_or_other_class_names_are_noticed_by_the_weights(digits_copy):
    """Weights are of the classes and the configuration they were trained with."""
    for change in (
        lambda values: values["data"]["class_names"].reverse(),
        lambda values: values["data"]["class_counts"].reverse(),
        lambda values: values["config"].update(backbone="resnet32"),
    ):
        before = (digits_copy / "run.json").read_text()
        rewrite(digits_copy / "run.json", change)
        with pytest.raises(UserError, match="other classes, class counts or another configuration"):
            Run.open(digits_copy)
        (digits_copy / "run.json").write_text(before)
    rewrite(digits_copy / "run.json", lambda values: values["config"].update(root="elsewhere", workers=7))
    Run.open(digits_copy)


def test_folders_written_before_files_were_bound_still_open(digits_copy, tmp_path):
    folder, _ = calibrate_run(Run.open(digits_copy), longtail.MARC())
    other = other_run(tmp_path / "other", digits_copy)
    for one in (digits_copy, folder, other):
        unbind(one)
        Run.open(one).model()
    shutil.copyfile(other / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(UserError, match=r"does not belong to .*calibration\.json: it holds the weights of another"):
        Run.open(folder)


def test_a_run_whose_weights_are_written_last_opens(digits_copy):
    """Training that is killed between its two last files."""
    rewrite(digits_copy / "run.json", lambda values: values.pop("model"))
    assert Run.open(digits_copy).model_identity
