"""What is trained of a network: the rest stays as it was, and every run is a normal run afterwards."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import longtail
from longtail.cli.main import main
from longtail.data.splits import open_splits
from longtail.distributed import SINGLE_PROCESS
from longtail.exports.card import model_card
from longtail.exports.network import Deployment
from longtail.files.progress import QUIET
from longtail.files.tensors import read_tensors
from longtail.posthoc.probe.estimator import Probe
from longtail.recipes import RECIPES
from longtail.runs.folder import Run, build_posthoc_for
from longtail.training.setup import TrainingSetup, TrainingStep
from longtail.training.tuning import layer_numbers, merged

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

SIDE = 32
BASE = replace(
    RECIPES["digits-lt"], epochs=None, iterations=3, batch_size=16, warmup=0, augment=(), device="cpu",
    optimizer="adamw", lr=1e-3, weight_decay=0.01, image_size=SIDE, evaluate_every=100,
)  # fmt: skip


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Files of weights of small networks: random ones, but the same in every test."""
    folder = tmp_path_factory.mktemp("weights")
    for name in ("test_vit", "test_resnet"):
        torch.manual_seed(1)
        save_file(timm.create_model(name, num_classes=3).state_dict(), folder / f"{name}.safetensors")
    return folder


@pytest.fixture
def config_of(weights):
    def build(name: str, train: str, **settings) -> longtail.TrainConfig:
        path = str(weights / f"{name}.safetensors")
        return replace(BASE, backbone=f"timm:{name}", weights=path, train=train, **settings)

    return build


def stepped(config):
    """The state after two steps, the tensors of the network before, and the names of those that have changed."""
    config = longtail.runs.network.settled(config)
    setup = TrainingSetup(config, open_splits(config), SINGLE_PROCESS, QUIET)
    setup.open_images()
    state = setup.state
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    for batches in setup.batches(0, 2):
        setup.take_step(TrainingStep(state.model, state.objective), state, batches)
    return state, before, {name for name, value in state.model.state_dict().items() if not value.equal(before[name])}


@pytest.mark.parametrize(
    ("name", "train", "first", "frozen"),
    [
        ("test_vit", "last:2", "blocks.4.", ("cls_token", "pos_embed", "patch_embed.", "blocks.0.", "blocks.3.")),
        ("test_resnet", "last:1", "layer4.", ("conv1.", "bn1.", "layer1.", "layer3.")),
    ],
)
def test_the_last_blocks_and_what_follows_are_trained(config_of, name, train, first, frozen):
    changed = stepped(config_of(name, train))[2]
    # Batch-norm of the frozen layers has not counted a batch either.
    assert not [key for key in changed if key.removeprefix("backbone.network.").startswith(frozen)]
    assert any(key.startswith(f"backbone.network.{first}") for key in changed)
    assert any("norm.weight" in key or "bn" in key for key in changed)
    assert "head.weight" in changed


def test_adapters_are_trained_and_merged(config_of, tmp_path, stop_after, same_weights):
    config = config_of("test_vit", "lora", precision="fp16", clip_norm=1.0)
    state, before, changed = stepped(replace(config, precision="fp32"))
    assert changed == {key for key in before if "lora_" in key or key.startswith("head.")}
    images, plain = torch.rand(2, 1, SIDE, SIDE), merged(state.model)
    assert not any("lora_" in key for key in plain.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(images), state.model.eval()(images), rtol=1e-4, atol=1e-5)
    longtail.train(config, tmp_path / "run", progress=False)
    run = Run.open(tmp_path / "run")
    assert run.network(images).shape == (2, 10)
    assert run.config.train == "lora"
    start = read_tensors(Path(config.weights))[0]["blocks.0.attn.qkv.weight"]
    learned = run.network.state_dict()["backbone.network.blocks.0.attn.qkv.weight"] - start
    assert 0 < int(torch.linalg.matrix_rank(learned, rtol=1e-3)) <= 8
    stop_after(config, tmp_path / "parts", 2, progress=False)
    longtail.train(config, tmp_path / "parts", resume=True, progress=False)
    assert same_weights(tmp_path / "run", tmp_path / "parts")


def test_the_head_is_probe_on_the_features(config_of, tmp_path, capsys):
    config = config_of("test_resnet", "head")
    metrics = longtail.train(config, tmp_path / "run", progress=False)
    run = Run.open(tmp_path / "run")
    start = read_tensors(Path(config.weights))[0]
    for name, value in run.network.get_submodule("backbone.network").state_dict().items():
        assert torch.equal(value, start[name]), name
    train, validation = run.outputs("train"), run.outputs("validation")
    probe = Probe(classes=list(range(10))).fit(np.asarray(train.features), train.labels)
    found, expected = validation.rows().read(slice(None)).numpy(), probe.predict_proba(np.asarray(validation.features))
    np.testing.assert_allclose(torch.from_numpy(found).softmax(1), expected, atol=2e-3)
    assert metrics.top1 == pytest.approx((found.argmax(1) == validation.labels).mean())
    # Calibration knows that the features are frozen, and that the logits are balanced.
    method = build_posthoc_for(run, "halo", {})
    assert (method.held_out, method.model_prior) == ("cross-fit", "uniform")
    assert main(["calibrate", str(tmp_path / "run"), "--device", "cpu"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "Probe was taken because the backbone was not trained on these images" in said
    assert "warning" not in said
    assert '"seen": false' in (tmp_path / "run" / "probe" / "calibration.json").read_text()
    assert "its head is Probe" in model_card(run)
    shutil.rmtree(tmp_path / "run" / "probe")
    assert main(["report", str(tmp_path / "run"), "--workers", "0"]) == 0
    assert "fitting Probe for this report (the backbone was not trained on these images)" in " ".join(
        capsys.readouterr().err.split()
    )
    longtail.train(config, tmp_path / "run", resume=True, progress=False)  # finished already


def test_a_run_of_hugging_face_needs_no_hub(tmp_path):
    settings = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**settings, image_size=SIDE, patch_size=8, num_labels=4)
    published = transformers.ViTForImageClassification(config)
    published.save_pretrained(tmp_path / "hub")
    backbone = f"hf:{tmp_path / 'hub'}"
    longtail.train(replace(BASE, backbone=backbone, train="last:1", iterations=1), tmp_path / "run", progress=False)
    shutil.rmtree(tmp_path / "hub")
    longtail.export(tmp_path / "run", tmp_path / "shared", "safetensors")
    model = longtail.load(tmp_path / "shared", device="cpu")
    found = model.predict([np.zeros((20, 30), np.uint8)], progress=False).probabilities
    assert found.shape == (1, 10)
    kept, start = model.network.state_dict(), published.vit.state_dict()
    changed = {name for name in start if not torch.equal(start[name], kept[f"backbone.network.vit.{name}"])}
    assert changed
    assert all(".1." in name or name.startswith("layernorm") for name in changed)


def test_layer_decay(config_of):
    state, _, _ = stepped(config_of("test_vit", "all", layer_decay=0.5))
    groups = {id(value): group for group in state.optimizer.param_groups for value in group["params"]}
    rates = {
        name.removeprefix("backbone.network."): groups[id(value)] for name, value in state.model.named_parameters()
    }
    expected = {"head.weight": 0, "norm.weight": 0, "blocks.5.norm1.weight": 1, "blocks.0.attn.qkv.bias": 6}
    for name, power in {**expected, "cls_token": 7, "patch_embed.proj.weight": 7}.items():
        assert rates[name]["scale"] == 0.5**power
        assert rates[name]["lr"] == pytest.approx(0.5**power * rates["head.weight"]["lr"])


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("resnet18", 4), ("convnext_atto", 4), ("swin_tiny_patch4_window7_224", 4), ("efficientnet_b0", 7)],
)
def test_blocks_are_stages_or_layers(name, blocks):
    with torch.device("meta"):
        count, layers = layer_numbers(timm.create_model(name, num_classes=0))
    assert count == blocks
    order = list(layers.values())
    assert order == sorted(order)
    assert {0, 1, blocks} <= set(order)
    assert layer_numbers(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))[0] == 0


def test_images_are_prepared_as_the_network_was_pretrained(config_of, tmp_path):
    longtail.train(config_of("test_vit", "all"), tmp_path / "run", progress=False)
    run = Run.open(tmp_path / "run")
    clean = run.transforms()[1]
    assert (clean.mean, clean.std, clean.decode.size, clean.decode.interpolation) == ((0.5,), (0.5,), SIDE, "bicubic")
    pixels = run.splits.test.pixels[:4]
    model = longtail.load(tmp_path / "run", device="cpu")
    predicted = model.predict(list(pixels[:, 0].numpy()), progress=False).probabilities
    logits = run.outputs("test").rows().read(slice(0, 4))
    np.testing.assert_allclose(predicted, logits.softmax(1), atol=1e-4)
    assert "subtract the mean (0.5,); divide by (0.5,)" in model_card(run)
    deployment = Deployment.of_run(run, with_preprocessing=True)
    assert deployment.compare(deployment.network, "copy") < 1e-4  # its own resizing equals Pillow's
    details = deployment.details
    assert (details["mean"], details["interpolation"], details["backbone"]) == ((0.5,), "bicubic", "timm:test_vit")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--backbone timm:test_vitt", "timm has no network 'test_vitt'; the nearest names: test_vit"),
        ("--backbone timm:test_vit --train lst:2", "--train must be all, head, lora or last:N"),
        ("--backbone timm:test_vit --train last:9 --weights {vit}", "timm:test_vit has 6 blocks"),
        ("--backbone timm:test_resnet --train lora --weights {resnet}", "no linear layers in its blocks"),
        ("--backbone timm:test_resnet --weights {vit}", "holds weights of another network"),
        ("--backbone timm:test_vit --weights {vit} --image-size 7", "cannot take images of 7 x 7 pixels"),
        ("--backbone timm:test_vit --weights {vit} --train head --mix mixup", "leave out --mix mixup"),
        ("--backbone timm:test_vit --weights {vit} --method ldam --mix mixup", "ldam takes no --mix"),
        ("--backbone timm:test_vit --weights {vit} --method oltr", "needs feature maps"),
        ("--backbone timm:test_vit --weights {vit} --method bbn", "needs the last block"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(words, message, weights, tmp_path, capsys):
    files = {"vit": weights / "test_vit.safetensors", "resnet": weights / "test_resnet.safetensors"}
    given = [word.format(**files) for word in words.split()]
    size = [] if "--image-size" in given else ["--image-size", "32"]
    assert main(["train", "digits-lt", "--out", str(tmp_path / "run"), "--device", "cpu", *given, *size]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_settings_follow_what_is_trained(tmp_path, weights, capsys):
    words = ["train", "digits-lt", "--out", str(tmp_path / "run"), "--device", "cpu", "--iterations", "1"]
    words += ["--backbone", "timm:test_vit", "--image-size", "32"]
    given = ["--weights", str(weights / "test_vit.safetensors")]
    assert main([*words, *given, "--train", "lora"]) == 0
    assert "--train lora: 43,658 of 343,754 parameters of timm:test_vit" in capsys.readouterr().err
    assert Run.open(tmp_path / "run").config.optimizer == "adamw"
    assert main([*words, *given, "--overwrite", "--optimizer", "sgd", "--lr", "0.02"]) == 0
    config = Run.open(tmp_path / "run").config
    assert (config.optimizer, config.lr, config.weight_decay) == ("sgd", 0.02, 5e-4)
    random = replace(BASE, backbone="timm:test_vit", pretrained=False, train="last:1", iterations=1)
    with pytest.warns(UserWarning, match="keeps layers of timm:test_vit at random weights"):
        longtail.train(random, tmp_path / "random", progress=False)
