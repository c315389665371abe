"""Networks of timm and Hugging Face by name: features, their own images, weights, and every wrong name or size."""

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from longtail.backbones import build_backbone, library
from longtail.backbones.library import build_library, input_settings
from longtail.errors import UserError

timm = pytest.importorskip("timm")
IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
VIT = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 5}
KINDS = {
    "vit": transformers.ViTConfig(**VIT, image_size=32, patch_size=8),
    "dinov2": transformers.Dinov2Config(**VIT, image_size=32, patch_size=8),
    "resnet": transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=5
    ),
}
PIXELS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 3, "rescale_factor": 1 / 255}
SIZES = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True}


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory):
    """Folders as the Hub has them: a classifier of five classes, and how its images are prepared."""

    def saved(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("hub") / kind
        torch.manual_seed(0)
        model = transformers.AutoModelForImageClassification.from_config(KINDS[kind])
        for value in model.buffers():  # batch-norm statistics that are not those of a new network
            if value.is_floating_point():
                value.uniform_(0.5, 1.5)
        model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps({**PIXELS, **SIZES}))
        return folder

    return saved


def test_timm_names_its_images():
    assert input_settings("timm:test_vit") == {
        "image_size": 160, "mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic",
    }  # fmt: skip
    assert input_settings("timm:resnet50.a1_in1k")["mean"] == (0.485, 0.456, 0.406)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_efficientnet"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_features_are_what_the_classifier_of_timm_sees(name, wrapped, tmp_path):
    torch.manual_seed(0)
    whole = timm.create_model(name, num_classes=7, **({"img_size": 32} if "vit" in name else {})).eval()
    at_home = timm.create_model(name, num_classes=7)
    prefix = "model." if wrapped else ""
    save_file({f"{prefix}{key}": value for key, value in at_home.state_dict().items()}, tmp_path / "w.safetensors")
    network = build_library(f"timm:{name}", 32, {}, tmp_path / "w.safetensors", True).eval()
    if "vit" in name:  # positions are resampled for smaller images
        at_home.set_input_size(img_size=(32, 32))
    whole.load_state_dict(at_home.state_dict())
    with torch.no_grad():
        expected = whole.forward_head(whole.forward_features(IMAGES), pre_logits=True)
        torch.testing.assert_close(network(IMAGES), expected)
        grey = IMAGES[:, :1]
        torch.testing.assert_close(network(grey), network(grey.repeat(1, 3, 1, 1)))
    assert network.num_features == expected.shape[1]


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_what_the_classifier_of_hugging_face_sees(kind, hf_folder, capfd):
    folder = hf_folder(kind)
    capfd.readouterr()
    settings = input_settings(f"hf:{folder}")
    assert (settings["image_size"], settings["interpolation"]) == (32, "bicubic")
    assert settings["mean"] == pytest.approx((0.1, 0.2, 0.3))
    assert settings["std"] == pytest.approx((0.4, 0.5, 0.6))
    architecture = json.loads(json.dumps(settings["architecture"]))
    network = build_library(f"hf:{folder}", 32, architecture, None, True).eval()
    assert capfd.readouterr().err == ""  # no progress bars
    whole = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    seen = []
    classifier = whole.classifier[-1] if kind == "resnet" else whole.classifier
    classifier.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        whole(pixel_values=IMAGES)
        torch.testing.assert_close(network(IMAGES), seen[0])
    assert network.num_features == seen[0].shape[1]
    # The recorded architecture is enough to build it without the folder.
    other = build_library("hf:not/here", 32, architecture, None, False)
    assert {name: value.shape for name, value in other.state_dict().items()} == {
        name: value.shape for name, value in network.state_dict().items()
    }


def test_a_vit_takes_other_sizes(hf_folder):
    folder = hf_folder("vit")
    architecture = input_settings(f"hf:{folder}")["architecture"]
    network = build_library(f"hf:{folder}", 48, architecture, None, True)
    assert network(torch.zeros(1, 3, 48, 48)).shape == (1, 16)


def test_a_network_without_a_classifier_gives_its_pooled_output():
    config = transformers.ViTMSNConfig(**VIT, image_size=32, patch_size=8)
    clip = transformers.CLIPVisionConfig(**VIT, image_size=32, patch_size=8)
    assert build_library("hf:msn", 32, json.loads(config.to_json_string()), None, False).num_features > 0
    network = build_library("hf:clip", 32, json.loads(clip.to_json_string()), None, False).eval()
    with torch.no_grad():
        expected = network.network(IMAGES).pooler_output
        torch.testing.assert_close(network(IMAGES), expected)


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ("timm:vit_tinny_patch16_224", "; the nearest names: vit_tiny_patch"),
        ("timm:", "timm has no network ''"),
        ("timm:test_vit.other", "timm has no weights called 'test_vit.other'; choose from: test_vit.r160_in1k"),
        ("hf:", "hf: cannot be loaded"),
        ("hf:.", "hf:. cannot be loaded .*; give a network of the Hub, or hf:FOLDER with its config.json"),
    ],
)
def test_unknown_names_are_one_line(backbone, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=message) as error:
        input_settings(backbone)
    assert "\n" not in str(error.value)


def test_what_cannot_be_built_is_one_line(tmp_path, monkeypatch):
    save_file({"cls_token": torch.zeros(1, 1, 3)}, tmp_path / "small.safetensors")
    with pytest.raises(UserError, match=r"cls_token has shape \(1, 1, 3\), this backbone needs \(1, 1, 64\)"):
        build_library("timm:test_vit", 32, {}, tmp_path / "small.safetensors", True)
    save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="holds weights of another network"):
        build_library("timm:test_resnet", 32, {}, tmp_path / "other.safetensors", True)
    with pytest.raises(UserError, match="timm:test_vit cannot take images of 4 x 4 pixels"):
        build_library("timm:test_vit", 4, {}, None, False)
    words = transformers.BertConfig(**VIT).to_json_string()
    with pytest.raises(UserError, match="hf:words takes input_ids, not images"):
        build_library("hf:words", 32, json.loads(words), None, False)
    with pytest.raises(UserError, match="unknown backbone 'tim:resnet18'; those of other libraries are timm:NAME"):
        build_backbone("tim:resnet18")
    monkeypatch.setattr(timm, "create_model", _unreachable)
    with pytest.raises(UserError, match="cannot be loaded .*--weights FILE .*--no-pretrained"):
        build_library("timm:test_vit", 160, {}, None, True)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r"needs timm .*: pip install 'longtail\[vision\]'"):
        library._library("timm")


def _unreachable(*arguments, **settings):
    raise OSError("the Hub\ncannot be reached")
