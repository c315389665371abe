import pickle
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from longtail.backbones import BACKBONES, build_backbone, folded, num_features
from longtail.backbones.resnet import CifarResNet
from longtail.backbones.weights import load_backbone, read_weights
from longtail.errors import UserError
from longtail.methods import TRAIN_METHODS
from longtail.networks.objective import Classifier
from longtail.outputs.record import fingerprint


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
    x = torch.randn(2, 16, 8, 8)
    shortcut = CifarResNet(8).layer2[0].downsample(x)
    assert shortcut.shape == (2, 32, 4, 4)
    assert torch.equal(shortcut[:, 8:24], x[:, :, ::2, ::2])
    assert shortcut[:, :8].abs().sum() == shortcut[:, 24:].abs().sum() == 0


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


def test_what_is_no_backbone_is_named():
    with pytest.raises(UserError, match="did you mean 'resnet50'.*resnext50"):
        build_backbone("resnet-50")
    with pytest.raises(ValueError, match=r"6n \+ 2 layers"):
        CifarResNet(30)
    with pytest.raises(UserError, match=r"Flatten has no attribute num_features, .*; set Flatten.num_features"):
        Classifier(nn.Flatten(), 10)


# Batch-norm folded into the convolution before it.


def used(network):
    """Batch-norms as training leaves them: no mean 0, no variance 1, no scale 1."""
    generator = torch.Generator().manual_seed(1)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.running_var):
                tensor.data = 0.5 + torch.rand(tensor.shape, generator=generator)
            for tensor in (module.bias, module.running_mean):
                tensor.data = torch.randn(tensor.shape, generator=generator) / 2
    return network


def norms(network):
    return sum(isinstance(module, nn.BatchNorm2d) for module in network.modules())


class NormFirst(nn.Module):
    """Its layers do not run in the order in which they stand."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)

    def forward(self, x):
        return self.conv(self.norm(x))


@pytest.mark.parametrize("name", [*BACKBONES, "softmax", "bbn", "hybrid-sc", "oltr", "causal-norm", NormFirst])
def test_folded_networks_have_the_same_outputs_and_fewer_layers(name):
    torch.manual_seed(0)
    if name is NormFirst:
        network, left = NormFirst(), 1  # an order that is not known is not guessed
    elif name in BACKBONES:
        network, left = build_backbone(name, 1 if name == "digits" else 3), 0
    else:
        network, left = TRAIN_METHODS[name].build(build_backbone("resnet8"), torch.tensor([50, 10, 2]), {})[0], None
    network, before = used(network).train(), fingerprint(network)
    images = torch.randn(2, 1, 8, 8) if name == "digits" else torch.randn(2, 3, 32, 32)
    smaller = folded(network)
    assert (fingerprint(network), network.training) == (before, True)
    assert norms(smaller) == left if left is not None else norms(smaller) < norms(network)
    with torch.no_grad():
        expected = network.eval()(images)
        torch.testing.assert_close(smaller(images), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
