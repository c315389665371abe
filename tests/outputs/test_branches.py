"""Models that compute the logits of some samples in another way than those of the first ones, or change them."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import longtail
from longtail import MARC
from longtail.errors import UserError
from longtail.posthoc import LogitAdjustment

from .conftest import made

SIZE, CLASSES = 60, 4


@pytest.fixture
def data():
    """Samples (60, 6) and labels; the first column is above 5 in the last sample alone."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(SIZE) % 10 % CLASSES
    x = torch.randn(SIZE, 6, generator=generator) + torch.eye(6)[labels]
    x[-1, 0] = 9.0
    return x, labels


def net(forward, name="Net"):
    torch.manual_seed(0)
    layers = {"body": nn.Sequential(nn.Linear(6, 8), nn.ReLU()), "early": nn.Linear(6, CLASSES)}
    return made(name, forward, **layers, fc=nn.Linear(8, CLASSES)).eval()


def late(model, x):
    return model.fc(model.body(x))


def early_exit(model, x):
    """The whole batch leaves early if one of its samples says so."""
    return model.early(x) if (x[:, 0] > 5).any() else late(model, x)


def per_sample(model, x):
    return torch.where((x[:, 0] > 5).unsqueeze(1), model.early(x), late(model, x))


def scattered(model, x):
    """Only the samples that go on reach the head."""
    logits, hard = model.early(x), x[:, 0] <= 5
    logits[hard] = late(model, x[hard])
    return logits


def tokens(model, x):
    rows = late(model, torch.stack([x, x.cos(), x.sin()], 1))
    return rows.square().sum(1) if (x[:, 0] > 5).any() else rows.mean(1)


@pytest.mark.parametrize("batch_size", [10, 60])
@pytest.mark.parametrize("forward", [early_exit, per_sample, scattered, tokens])
def test_branches_are_refused_and_can_be_attached(forward, batch_size, data):
    """The last sample is the odd one: in a batch after the first, or after the first samples of the only batch."""
    model, loader = net(forward), DataLoader(TensorDataset(*data), batch_size)
    with pytest.raises(UserError, match=r"cannot be folded into .* Add the method after the model") as refused:
        longtail.calibrate(model, loader, device="cpu")
    assert "\n" not in str(refused.value)
    with pytest.warns(UserWarning, match="features and head of Net are not kept: its output comes from fc"):
        outputs = longtail.extract(model, loader, device="cpu")
    assert outputs.features is None
    assert outputs.head_weight is None
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(outputs.logits), torch.cat([model(x) for x, _ in loader]))
        attached = longtail.attach(model, MARC().fit(outputs))
        torch.testing.assert_close(attached(data[0][:10]), attached.calibration(model(data[0][:10])))


def test_a_softmax_hides_the_logits_of_a_branch(data):
    loader = DataLoader(TensorDataset(*data), 10)
    with pytest.raises(UserError, match="returns the softmax of the output of fc for the first samples, but not for"):
        longtail.extract(net(lambda m, x: early_exit(m, x).softmax(1)), loader, device="cpu")


class Larger(LogitAdjustment):
    """Three times the logits."""

    def _fit(self, data, validation):
        super()._fit(data, validation)
        self.scale_, self.shift_ = 3 * self.scale_, 0 * self.shift_


@pytest.mark.parametrize("row", [15, 59])
def test_the_folded_model_is_verified_on_the_largest_logits(row, data):
    """They are in a later batch, and one of them is clamped once it is calibrated; no logit of the data is."""
    model = made("Clamped", lambda m, x: m.fc(x).clamp(-3.0, 3.0), fc=nn.Linear(6, CLASSES, bias=False))
    x = 0.1 * torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        x[row] *= 2 / float(model(x[row : row + 1]).abs().max())
    loader = DataLoader(TensorDataset(x, data[1]), 10)
    assert np.abs(longtail.extract(model, loader, device="cpu").logits).max() < 3
    with pytest.raises(UserError, match="Larger cannot be folded into fc of Clamped: the new model would not give"):
        longtail.calibrate(model, loader, Larger(), device="cpu")
    repaired, _ = longtail.calibrate(model, loader, LogitAdjustment(tau=0.01), device="cpu")
    assert type(repaired.fc) is nn.Linear


BESIDE = {
    "named": lambda m, x: {"logits": late(m, x), "probabilities": late(m, x).softmax(1)},
    "softmax first": lambda m, x: (late(m, x).softmax(1), late(m, x)),
    "nested": lambda m, x: {"features": m.body(x), "parts": [None, {"logits": late(m, x)}]},
    "log-softmax alone": lambda m, x: late(m, x).log_softmax(1),
}


@pytest.mark.parametrize("name", BESIDE)
def test_logits_beside_their_softmax_or_inside_it(name, data):
    model = net(BESIDE[name])
    repaired, method = longtail.calibrate(model, [data], device="cpu")
    expected = method.transform(late(model, data[0]).detach())
    torch.testing.assert_close(late(repaired, data[0]).detach(), expected, rtol=1e-4, atol=1e-4)


def test_features_are_not_taken_for_logits(data):
    def cosine(model, x):
        features = model.early(x)
        return features, nn.functional.linear(features, nn.functional.normalize(model.fc.weight[:, :4]))[:, :3]

    with pytest.raises(UserError, match=r"the entry '1' of its output is computed from the output of early: which are"):
        longtail.extract(net(cosine), [data], device="cpu")


NO_LAYER = "no linear layer or convolution of Net outputs its logits"
UNIT = "returns numbers between 0 and 1, and no layer outputs their logits; return the logits"
ACTIVATIONS = {
    "tanh": (torch.tanh, NO_LAYER),
    "log-softmax, tempered": (lambda z: (z / 3).log_softmax(1), NO_LAYER),
    "clamp": (lambda z: z.clamp(0, 1), UNIT),
    "sigmoid": (torch.sigmoid, UNIT),
    "softmax, tempered": (lambda z: (z / 3).softmax(1), r"returns probabilities \(each row sums to 1\), and no layer"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_what_comes_after_the_head_is_named(name, data):
    """Logits after an activation can be calibrated by a layer behind; what is no logits is refused everywhere."""
    after, message = ACTIVATIONS[name]
    model = net(lambda m, x: after(late(m, x)))
    with pytest.raises(UserError, match=message) as refused:
        longtail.calibrate(model, [data], device="cpu")
    if "Add the method after the model" in str(refused.value):
        outputs = longtail.extract(model, [data], device="cpu")
        torch.testing.assert_close(torch.from_numpy(outputs.logits), model(data[0]).detach())
        assert longtail.attach(model, MARC().fit(outputs), batch=data)(data[0]).shape == (SIZE, CLASSES)
    else:
        with pytest.raises(UserError, match=message):
            longtail.extract(model, [data], device="cpu")


def test_a_model_of_probabilities_is_not_attached_to_sample_by_sample(data):
    """One row may sum to 1 by chance; two do not."""
    method = MARC().fit(longtail.extract(net(late), [data], device="cpu"))
    attached = longtail.attach(net(lambda m, x: late(m, x).softmax(1)), method)
    attached(data[0][:1])
    with pytest.raises(UserError, match="returns probabilities or their logarithms, but the method takes logits"):
        attached(data[0][1:2])
    centred = net(lambda m, x: late(m, x) - late(m, x).mean(1, keepdim=True) + 1 / CLASSES)
    longtail.attach(centred, method)(data[0])  # its rows sum to 1, but have negative numbers


def test_numbers_that_are_not_finite_are_not_taken_for_a_branch(data):
    x, labels = data
    loader = DataLoader(TensorDataset(torch.cat([x[:-1], torch.full((1, 6), torch.nan)]), labels), 10)
    with pytest.raises(UserError, match="NaN|not finite|nan"):
        longtail.calibrate(net(late), loader, device="cpu")


def test_batches_without_samples_are_left_out(data):
    x, labels = data
    empty = x[:0], labels[:0]
    assert len(longtail.extract(net(late), [empty, data, empty], device="cpu")) == SIZE
    with pytest.raises(UserError, match="the loader gave no batches"):
        longtail.extract(net(late), [empty], device="cpu")
    with pytest.raises(UserError, match=r"a batch or sample must be \(inputs, labels\) or .* not int"):
        longtail.extract(net(late), [1, 2, 3], device="cpu")
