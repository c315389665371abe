import pickle
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from longtail.backbones import BACKBONES, build_backbone, num_features
from longtail.backbones.resnet import CifarResNet
from longtail.backbones.weights import load_backbone, read_weights
from longtail.errors import UserError
from longtail.networks.objective import Classifier


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "classes", "expected"),
    [
        ("resnet32", 10, 464_154),
        ("resnet50", 1000, 25_557_032),
        ("resnext50", 1000, 25_028_904),
        ("resnet101", 1000, 44_549_160),
        ("resnet152", 1000, 60_192_808),
    ],
)
def test_parameter_counts_are_the_published_ones(name, classes, expected):
    with torch.device("meta"):
        model = Classifier(build_backbone(name), classes)
    assert count(model) == expected


@pytest.mark.parametrize("name", BACKBONES)
def test_features_and_their_map(name):
    channels, size = (1, 8) if name == "digits" else (3, 32)
    backbone = build_backbone(name, channels).eval()
    images = torch.randn(2, channels, size, size)
    with torch.inference_mode():
        features, feature_map = backbone(images), backbone.feature_map(images)
        again = backbone.last_block(backbone.early_map(images))
    assert features.shape == (2, num_features(backbone))
    torch.testing.assert_close(feature_map.mean((2, 3)), features)
    torch.testing.assert_close(again, feature_map)


def test_names_are_those_of_torchvision():
    names = set(build_backbone("resnet50").state_dict())
    for name in ("conv1.weight", "bn1.running_mean", "layer1.0.downsample.0.weight", "layer4.2.bn3.bias"):
        assert name in names
    pattern = r"(conv1|bn1)\..*|layer[1-4]\.\d+\.((conv|bn)[123]|downsample\.[01])\..*"
    assert all(re.fullmatch(pattern, name) for name in names)


def test_shortcut_of_the_cifar_resnet_has_no_parameters():
    block = CifarResNet(8).layer2[0]
    x = torch.randn(2, 16, 8, 8)
    shortcut = block.shortcut(x)
    assert shortcut.shape == (2, 32, 4, 4)
    assert torch.equal(shortcut[:, 8:24], x[:, :, ::2, ::2])
    assert shortcut[:, :8].abs().sum() == shortcut[:, 24:].abs().sum() == 0
    with pytest.raises(ValueError, match=r"6n \+ 2 layers"):
        CifarResNet(30)


@pytest.mark.parametrize("prefix", ["", "module.", "module.backbone."])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_published_weights_load_under_any_prefix(tmp_path, prefix, suffix):
    source = Classifier(build_backbone("resnet10"), 7)
    tensors = {prefix + name: value for name, value in source.backbone.state_dict().items()}
    tensors |= {"fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save({"state_dict": tensors, "epoch": 90}, path)
    else:
        save_file(tensors, path)
    target = build_backbone("resnet10")
    load_backbone(target, path)
    for name, value in source.backbone.state_dict().items():
        assert torch.equal(value, target.state_dict()[name])


class Attack:
    def __reduce__(self):
        return exec, ("raise SystemExit('code ran')",)


def test_bad_weight_files_are_named(tmp_path):
    path = tmp_path / "w.pth"
    with pytest.raises(UserError, match="does not exist"):
        read_weights(path)
    torch.save({"x": Attack()}, path)
    with pytest.raises(UserError, match="no code"):
        read_weights(path)
    path.write_bytes(pickle.dumps([1, 2], protocol=2))
    with pytest.raises(UserError):
        read_weights(path)
    torch.save({"epoch": 3}, path)
    with pytest.raises(UserError, match="holds no named tensors"):
        read_weights(path)
    torch.save(build_backbone("resnet8").state_dict(), path)
    with pytest.raises(UserError, match="conv1.weight has shape"):
        load_backbone(build_backbone("resnet10"), path)
    torch.save({k: v for k, v in build_backbone("resnet10").state_dict().items() if "layer4" not in k}, path)
    with pytest.raises(UserError, match=r"lacks \d+ of the backbone's \d+ tensors, first layer4"):
        load_backbone(build_backbone("resnet10"), path)
    with pytest.raises(UserError, match="another network"):
        load_backbone(build_backbone("digits", 1), path)
    torch.save(torch.nn.Linear(2, 2).state_dict(), path)
    (tmp_path / "w.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="not a whole safetensors file"):
        read_weights(tmp_path / "w.safetensors")


def test_unknown_backbone_lists_the_known_ones():
    with pytest.raises(UserError, match="did you mean 'resnet50'.*resnext50"):
        build_backbone("resnet-50")


def test_a_backbone_must_say_how_wide_its_features_are():
    with pytest.raises(UserError, match=r"Flatten has no attribute num_features, .*; set Flatten.num_features"):
        Classifier(nn.Flatten(), 10)
