"""`longtail.calibrate` on models of the user."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import longtail
from longtail import MARC
from longtail.outputs.extract import find_head
from longtail.posthoc import DisAlign


class Model(nn.Module):
    def __init__(self, bias: bool):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.top = nn.Linear(16, 4, bias=bias)

    def forward(self, x):
        return self.top(self.body(x))


@pytest.fixture
def trained():
    """A small model trained on four overlapping clouds of very different sizes, and test points."""
    torch.manual_seed(0)
    centres = torch.randn(4, 8)
    counts = [400, 100, 30, 8]

    def sample(sizes):
        y = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
        return centres[y] + 1.2 * torch.randn(len(y), 8), y

    def train(bias):
        model = Model(bias)
        x, y = sample(counts)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        for _ in range(150):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return model, (x, y), sample([500] * 4)

    return train


@pytest.mark.parametrize("bias", [True, False])
def test_any_model_is_repaired_and_stays_of_its_class(trained, bias):
    model, (x, y), (test_x, test_y) = trained(bias)
    loader = DataLoader(TensorDataset(x, y), batch_size=64)
    repaired, method = longtail.calibrate(model, loader, MARC(), device="cpu")
    assert type(repaired) is Model
    assert type(repaired.top) is nn.Linear
    assert repaired.top.bias is not None
    with torch.inference_mode():
        before, after = model.eval()(test_x), repaired.eval()(test_x)
    np.testing.assert_allclose(after, method.transform(before), atol=1e-4)

    def tail(logits):
        return float((logits.argmax(1) == test_y)[test_y >= 2].float().mean())

    assert tail(after) > tail(before) + 0.1
    assert method.result_.converged


class TwoNames(Model):
    """The head has two names and stands in a list besides."""

    def __init__(self, bias: bool = True):
        super().__init__(bias)
        self.net = nn.Sequential(self.body, self.top)
        self.steps = [self.body, self.top]


class InSequence(TwoNames):
    def forward(self, x):
        return self.net(x)


class InAList(TwoNames):
    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x


@pytest.mark.parametrize("build", [InSequence, InAList])
def test_a_head_with_several_names_is_replaced_under_all_of_them(trained, build):
    model, train, (test_x, _) = trained(True)
    other = build()
    other.load_state_dict({**other.state_dict(), **model.state_dict()})
    repaired, method = longtail.calibrate(other, [train], device="cpu")
    assert repaired.net[1] is repaired.top
    with torch.no_grad():
        np.testing.assert_allclose(repaired(test_x), method.transform(model(test_x)), atol=1e-4)
        torch.testing.assert_close(other(test_x), model(test_x))
    assert find_head(other, train, name="net.1") == ("top",)


@pytest.mark.parametrize("method", [MARC(), DisAlign(max_iter=3)], ids=["marc", "disalign"])
def test_heads_whose_weight_is_computed(trained, method):
    """Reading the weight of a spectral norm in training mode changes its state."""
    model, train, (test_x, _) = trained(True)
    nn.utils.parametrizations.spectral_norm(model.top)
    model.train()
    model(train[0])
    state = {name: value.clone() for name, value in model.state_dict().items()}
    repaired, fitted = longtail.calibrate(model, [train], method, device="cpu")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        features = model.body(test_x)
        expected = fitted.transform(model.eval()(test_x), features)
    np.testing.assert_allclose(repaired.eval()(test_x).detach(), expected, atol=1e-4)


class Remembers(Model):
    """Keeps a table it made on its first pass."""

    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0.5, 1, 16)
        return self.top(self.body(x) * self.table)


def test_a_model_can_be_trained_on_afterwards(trained):
    _, (x, y), _ = trained(True)
    model = Remembers(True)
    longtail.calibrate(model, [(x, y)], device="cpu")
    nn.functional.cross_entropy(model(x), y).backward()
    assert model.body[0].weight.grad.abs().sum() > 0
