"""The head of Probe in a model and in runs: calibrate, and `longtail probe` on images."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import longtail
from longtail.cli.main import main
from longtail.files.tensors import read_tensors
from longtail.methods import build_posthoc
from longtail.posthoc.gate import FitWarning
from longtail.runs.folder import Run
from longtail.tasks.calibrate_run import calibrate_run


class Network(nn.Module):
    """Frozen features of images, and a head that was never trained but is sure of itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU())
        self.head = nn.Linear(100, 10)
        nn.init.normal_(self.head.weight, std=30)

    def forward(self, images):
        return self.head(self.features(images))


@pytest.fixture(scope="module")
def digits():
    splits = longtail.data.open_splits("digits-lt")
    return [(part.pixels.float() / 255, part.labels) for part in (splits.train, splits.test)]


@pytest.mark.parametrize("method", [longtail.Probe("train"), "probe"], ids=["Probe", "name"])
def test_the_head_of_a_model_is_that_of_the_estimator(digits, method):
    (images, labels), (test, truth) = digits
    network = Network()
    loader = DataLoader(TensorDataset(images, labels), batch_size=50)
    model, fitted = longtail.calibrate(network, loader, method, progress=False)
    assert type(model) is Network
    assert type(model.head) is nn.Linear
    with torch.inference_mode():
        features, logits = network.features(images), model(test)
        expected = longtail.Probe(fitted.target_prior).fit(features, labels)
        np.testing.assert_allclose(logits, expected.to_linear()(network.features(test)), atol=1e-3)
    assert (logits.argmax(1) == truth).float().mean() > 0.7
    if isinstance(method, longtail.Probe):
        assert fitted is method
        assert (fitted.predict(network.features(test).detach()) == logits.argmax(1).numpy()).all()
        assert fitted.result_.natural.accuracy > 0.7


def test_a_class_without_samples_and_names_of_a_target_prior(digits):
    images, labels = digits[0]
    kept = labels != 4
    loader = DataLoader(TensorDataset(images[kept], labels[kept]), batch_size=50)
    prior = {str(label): 0.0 if label == 7 else 1.0 for label in range(10)}
    model, fitted = longtail.calibrate(Network(), loader, longtail.Probe(prior), progress=False)
    assert not {4, 7} & set(model(images).argmax(1).tolist())
    assert fitted.class_counts_[4] == 0


def test_a_network_that_makes_no_errors_is_warned_of(digits):
    labels = digits[0][1]
    oracle = nn.Sequential(nn.Identity(), nn.Linear(10, 10))
    loader = DataLoader(TensorDataset(10 * torch.eye(10)[labels] + torch.randn(len(labels), 10), labels), batch_size=50)
    nn.init.eye_(oracle[1].weight)
    with pytest.warns(UserWarning, match="if its backbone was trained on them, a head fitted on these features is too"):
        longtail.calibrate(oracle, loader, longtail.Probe(), progress=False)


@pytest.fixture(scope="module")
def frozen(digits_run, tmp_path_factory):
    """The folder of `longtail probe` on images, and its words; the weights are those of a short training."""
    out = tmp_path_factory.mktemp("frozen")
    words = ["probe", "digits-lt", "--backbone", "digits", "--weights", str(digits_run / "model.safetensors")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGTAIL_CACHE", str(out / "cache"))
        assert main([*words, "--out", str(out / "run"), "--quiet"]) == 0
        yield out / "run", words


def test_images_give_a_run_that_every_command_takes(frozen, digits_run, tmp_path, capsys):
    folder, _ = frozen
    run, record = Run.open(folder), json.loads((folder / "probe.json").read_text())
    assert run.config.train == "head"
    stored, _ = read_tensors(folder / "model.safetensors")
    backbone, _ = read_tensors(digits_run / "model.safetensors")
    assert all(torch.equal(stored[name], backbone[name]) for name in stored if name.startswith("backbone."))
    features = run.outputs("train").features
    expected = longtail.Probe().fit(features, run.outputs("train").labels)
    np.testing.assert_allclose(run.outputs("test").head_weight, expected.head_.weight, atol=1e-4)
    known = (folder / "outputs" / "test.safetensors").stat().st_mtime_ns
    export = ["export", str(folder), "--format", "safetensors", "--out", str(tmp_path / "model")]
    for words in (["evaluate", str(folder), "--json"], ["report", str(folder)], export):
        assert main(words) == 0
    assert "digits, frozen; its head is Probe" in (tmp_path / "model" / "README.md").read_text()
    scores = json.loads(capsys.readouterr().out.splitlines()[0])
    assert scores["confusion"] == record["scores"]["Probe"]["confusion"]
    assert (folder / "outputs" / "test.safetensors").stat().st_mtime_ns == known  # computed once


def test_another_prior_reads_the_same_embeddings(frozen, tmp_path, monkeypatch):
    folder, words = frozen
    monkeypatch.setattr("longtail.runs.network.Source", None)  # nothing may be computed again
    assert main([*words, "--out", str(tmp_path / "run"), "--target-prior", "train", "--quiet"]) == 0
    balanced, natural = (Run.open(one).outputs("test") for one in (folder, tmp_path / "run"))
    np.testing.assert_array_equal(balanced.head_weight, natural.head_weight)
    counts = balanced.class_counts
    np.testing.assert_allclose(natural.head_bias - balanced.head_bias, np.log(counts / counts.sum()), atol=1e-4)


def test_calibrating_a_frozen_run_gives_the_same_head_and_a_trained_one_is_warned_of(frozen, digits_copy, tmp_path):
    run, method = Run.open(frozen[0]), build_posthoc("probe", {})
    calibrate_run(run, method, out=tmp_path / "probe")
    np.testing.assert_allclose(method.weight_, run.outputs("test").head_weight, atol=1e-4)
    fitted_on = json.loads((tmp_path / "probe" / "calibration.json").read_text())["fitted_on"]
    assert not fitted_on["seen"]
    with pytest.warns(FitWarning, match="was trained on these images, and a head fitted on these features is too sure"):
        calibrate_run(Run.open(digits_copy), build_posthoc("probe", {}), out=tmp_path / "seen")


@pytest.fixture(scope="module")
def small_networks(tmp_path_factory):
    """Backbones of timm and of transformers with random weights, and the words that name them."""
    timm, transformers = pytest.importorskip("timm"), pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("networks")
    torch.manual_seed(1)
    save_file(timm.create_model("test_resnet", num_classes=3).state_dict(), folder / "timm.safetensors")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    vit = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=4)
    transformers.ViTForImageClassification(vit).save_pretrained(folder / "hub")
    return {
        "timm": ["--backbone", "timm:test_resnet", "--weights", str(folder / "timm.safetensors")],
        "hf": ["--backbone", f"hf:{folder / 'hub'}"],
    }


@pytest.mark.parametrize("library", ["timm", "hf"])
def test_a_network_of_a_library_gives_the_run_of_train_head(library, small_networks, tmp_path, capsys):
    words = ["digits-lt", *small_networks[library], "--image-size", "32", "--device", "cpu", "--quiet"]
    assert main(["probe", *words, "--out", str(tmp_path / "probe")]) == 0
    assert main(["train", *words, "--train", "head", "--validation", "0", "--out", str(tmp_path / "train")]) == 0
    probe, trained = (Run.open(tmp_path / name) for name in ("probe", "train"))
    assert probe.config.backbone.startswith(f"{library}:")
    for name, values in trained.network.state_dict().items():
        torch.testing.assert_close(probe.network.state_dict()[name], values, rtol=0, atol=0)
    records = [json.loads((run.folder / "probe.json").read_text()) for run in (probe, trained)]
    assert records[0]["target_frequencies"] == records[1]["target_frequencies"]
    assert records[0]["scores"]["Probe"]["samples"] == probe.split_sizes["test"]
    assert main(["evaluate", str(tmp_path / "train"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["confusion"] == records[0]["scores"]["Probe"]["confusion"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits-lt", "--backbone", "digits"], "--backbone digits has random weights; give pretrained ones"),
        (["digits-lt", "--backbone", "digit", "--weights", "{weights}"], "did you mean 'digits'"),
        (["digits-lt", "--backbone", "digits", "--weights", "none.pth"], "weights file none.pth does not exist"),
        (["digits-lt", "--backbone", "resnet8", "--weights", "{weights}"], "holds weights of another network"),
        (["{folder}"], "is a folder: if it holds images, name the network that embeds them"),
        (["x.npz", "--image-size", "8"], "--image-size applies only to images"),
        (["digits-lt", "--backbone", "digits", "--weights", "{weights}", "--test", "a.npz"], "--test applies only to"),
        (
            ["digits-lt", "--backbone", "digits", "--weights", "{weights}", "--target-prior", "fair"],
            "target_prior must",
        ),
        (
            ["digits-lt", "--backbone", "digits", "--weights", "{weights}", "--target-prior", "{prior}"],
            "there is no class cat",
        ),
    ],
)
def test_bad_words_are_one_line_and_nothing_is_written(words, message, digits_run, tmp_path, capsys):
    (tmp_path / "prior.csv").write_text("cat,1\ndog,2\n")
    known = {"weights": digits_run / "model.safetensors", "folder": tmp_path, "prior": tmp_path / "prior.csv"}
    assert main(["probe", *(word.format(**known) for word in words), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1]
    assert not (tmp_path / "run").exists()
