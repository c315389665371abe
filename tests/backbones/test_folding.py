"""Folded networks: the same answers, fewer layers, the original untouched."""

import pytest
import torch
from torch import nn

from longtail.backbones import BACKBONES, build_backbone
from longtail.backbones.inference import folded
from longtail.heads.layers import fingerprint
from longtail.methods import TRAIN_METHODS

CHANNELS, SIZE = {"digits": 1}, {"digits": 8}


def lived_in(network: nn.Module) -> nn.Module:
    """Batch-norms as training leaves them: no mean 0, no variance 1, no scale 1."""
    generator = torch.Generator().manual_seed(1)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.running_var):
                tensor.data = 0.5 + torch.rand(tensor.shape, generator=generator)
            for tensor in (module.bias, module.running_mean):
                tensor.data = torch.randn(tensor.shape, generator=generator) / 2
    return network


def norms(network: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in network.modules())


def assert_same_answers(network: nn.Module, images: torch.Tensor) -> None:
    with torch.no_grad():
        expected, answer = network.eval()(images), folded(network)(images)
    torch.testing.assert_close(answer, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("name", BACKBONES)
def test_backbones_answer_as_before_without_a_batch_norm(name: str) -> None:
    torch.manual_seed(0)
    network = lived_in(build_backbone(name, CHANNELS.get(name, 3)))
    assert norms(network) > 0
    assert norms(folded(network)) == 0
    assert_same_answers(network, torch.randn(2, CHANNELS.get(name, 3), *[SIZE.get(name, 32)] * 2))


@pytest.mark.parametrize("method", ["softmax", "bbn", "hybrid-sc", "oltr", "causal-norm"])
def test_networks_answer_as_before(method: str) -> None:
    torch.manual_seed(0)
    network, _ = TRAIN_METHODS[method].build(build_backbone("resnet8"), torch.tensor([50, 10, 2]), {})
    lived_in(network)
    assert norms(folded(network)) < norms(network)
    assert_same_answers(network, torch.randn(2, 3, 32, 32))


def test_the_network_itself_stays_as_it_is() -> None:
    network = lived_in(build_backbone("resnet8")).train()
    before = fingerprint(network)
    folded(network)
    assert fingerprint(network) == before
    assert network.training
    assert norms(network) == 7


def test_an_order_that_is_not_known_is_not_guessed() -> None:
    class NormFirst(nn.Module):
        """Its layers do not run in the order in which they stand."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3)
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(self.norm(x))

    network = lived_in(NormFirst())
    assert norms(folded(network)) == 1
    assert_same_answers(network, torch.randn(2, 3, 8, 8))
