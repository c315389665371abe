"""Models that answer some samples in another way than the first ones: never calibrated in silence."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import longtail
from longtail import MARC
from longtail.errors import UserError
from longtail.posthoc import LogitAdjustment

SIZE, CLASSES = 60, 4


@pytest.fixture
def data():
    """Samples (60, 6) and labels; the first column is above 5 in the last sample alone."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(SIZE) % 10 % CLASSES
    x = torch.randn(SIZE, 6, generator=generator) + torch.eye(6)[labels]
    x[-1, 0] = 9.0
    return x, labels


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.early, self.fc = nn.Linear(6, CLASSES), nn.Linear(8, CLASSES)

    def late(self, x):
        return self.fc(self.body(x))


class EarlyExit(Net):
    """The whole batch leaves early if one of its samples says so."""

    def forward(self, x):
        return self.early(x) if (x[:, 0] > 5).any() else self.late(x)


class PerSample(Net):
    def forward(self, x):
        easy = (x[:, 0] > 5).unsqueeze(1)
        return torch.where(easy, self.early(x), self.late(x))


class Scattered(Net):
    """Only the samples that go on reach the head."""

    def forward(self, x):
        answer, hard = self.early(x), x[:, 0] <= 5
        answer[hard] = self.late(x[hard])
        return answer


class Tokens(Net):
    def forward(self, x):
        rows = self.fc(self.body(torch.stack([x, x.cos(), x.sin()], 1)))
        return rows.square().sum(1) if (x[:, 0] > 5).any() else rows.mean(1)


class SomeTokens(Net):
    """A mean over some tokens: what a second run alone can check."""

    def forward(self, x):
        rows = self.fc(self.body(torch.stack([x, x.cos(), x.sin()], 1)))
        share = torch.tensor([0.5, 0.3, 0.2]).view(1, 3, 1)
        return rows.square().sum(1) if (x[:, 0] > 5).any() else (rows * share).sum(1)


@pytest.mark.parametrize("batch_size", [10, 60])
@pytest.mark.parametrize("build", [EarlyExit, PerSample, Scattered, Tokens, SomeTokens])
def test_they_are_refused_and_can_be_attached(build, batch_size, data):
    """The last sample is the odd one: in a batch after the first, or after the first samples of the only batch."""
    model, loader = build().eval(), DataLoader(TensorDataset(*data), batch_size)
    with pytest.raises(UserError, match=r"cannot be folded into .* Add the method after the model") as refused:
        longtail.calibrate(model, loader, device="cpu")
    assert "\n" not in str(refused.value)
    with pytest.warns(
        UserWarning, match=f"features and head of {build.__name__} are not kept: its output comes from fc"
    ):
        outputs = longtail.extract(model, loader, device="cpu")
    assert outputs.features is None
    assert outputs.head_weight is None
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(outputs.logits), torch.cat([model(x) for x, _ in loader]))
        attached = longtail.attach(model, MARC().fit(outputs))
        torch.testing.assert_close(attached(data[0][:10]), attached.calibration(model(data[0][:10])))


class Shares(EarlyExit):
    def forward(self, x):
        return super().forward(x).softmax(1)


def test_a_softmax_hides_the_logits_of_a_branch(data):
    loader = DataLoader(TensorDataset(*data), 10)
    with pytest.raises(UserError, match="returns the softmax of the output of fc for the first samples, but not for"):
        longtail.extract(Shares(), loader, device="cpu")
    shares = Shares()
    shares.early = shares.fc = nn.Linear(6, CLASSES)
    shares.body = nn.Identity()
    outputs = longtail.extract(shares, loader, device="cpu")  # one layer, whatever the branch
    torch.testing.assert_close(torch.from_numpy(outputs.logits), shares.fc(data[0]).detach())


class Clamped(nn.Module):
    """No logit of the data is clamped, but calibrated ones may be."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, CLASSES, bias=False)

    def forward(self, x):
        return self.fc(x).clamp(-3.0, 3.0)


class Larger(LogitAdjustment):
    """Three times the logits."""

    def _fit(self, data, validation):
        super()._fit(data, validation)
        self.scale_, self.shift_ = 3 * self.scale_, 0 * self.shift_


@pytest.mark.parametrize("place", [15, 59])
def test_the_folded_model_is_verified_on_the_largest_logits(place, data):
    """They are in a later batch, and one of them is clamped once it is calibrated."""
    x, labels = data
    model, x = Clamped(), 0.1 * torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        x[place] *= 2 / float(model(x[place : place + 1]).abs().max())
    loader = DataLoader(TensorDataset(x, labels), 10)
    assert np.abs(longtail.extract(model, loader, device="cpu").logits).max() < 3
    with pytest.raises(UserError, match="Larger cannot be folded into fc of Clamped: the new model would not give"):
        longtail.calibrate(model, loader, Larger(), device="cpu")
    repaired, _ = longtail.calibrate(model, loader, LogitAdjustment(tau=0.01), device="cpu")
    assert type(repaired.fc) is nn.Linear


class Kept(Net):
    def forward(self, x):
        return {"logits": self.late(x), "probabilities": self.late(x).softmax(1)}


class Both(Net):
    """Logits and their softmax, without names."""

    def forward(self, x):
        logits = self.late(x)
        return logits.softmax(1), logits


class Inside(Net):
    """Logits that are an entry of an entry, beside features."""

    def forward(self, x):
        return {"features": self.body(x), "parts": [None, {"logits": self.late(x)}]}


@pytest.mark.parametrize("build", [Kept, Both, Inside])
def test_logits_beside_their_softmax(build, data):
    model = build().eval()
    repaired, method = longtail.calibrate(model, [data], device="cpu")
    expected = method.transform(model.late(data[0]).detach())
    torch.testing.assert_close(repaired.late(data[0]).detach(), expected, rtol=1e-4, atol=1e-4)


class Cosine(Net):
    """Features that are a linear layer's, and logits that are not."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)

    def forward(self, x):
        features = self.body(x)
        return features, nn.functional.linear(features, nn.functional.normalize(self.fc.weight))


def test_features_are_not_taken_for_logits(data):
    with pytest.raises(UserError, match=r"the entry '1' of its output is computed from the output of body: which are"):
        longtail.extract(Cosine(), [data], device="cpu")


NO_LAYER = "no linear layer or convolution of After outputs its logits"
UNIT = "returns numbers between 0 and 1, and no layer outputs their logits; return the logits"
ACTIVATIONS = {
    "tanh": (torch.tanh, NO_LAYER),
    "log-softmax, tempered": (lambda z: (z / 3).log_softmax(1), NO_LAYER),
    "clamp": (lambda z: z.clamp(0, 1), UNIT),
    "sigmoid": (torch.sigmoid, UNIT),
    "softmax, tempered": (lambda z: (z / 3).softmax(1), r"returns probabilities \(each row sums to 1\), and no layer"),
}


class After(Net):
    def __init__(self, after):
        super().__init__()
        self.after = after

    def forward(self, x):
        return self.after(self.late(x))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_what_comes_after_the_head_is_named(name, data):
    """Logits after an activation can be calibrated by a layer behind; what is no logits is refused everywhere."""
    after, message = ACTIVATIONS[name]
    model = After(after).eval()
    with pytest.raises(UserError, match=message) as refused:
        longtail.calibrate(model, [data], device="cpu")
    if "Add the method after the model" in str(refused.value):
        outputs = longtail.extract(model, [data], device="cpu")
        torch.testing.assert_close(torch.from_numpy(outputs.logits), model(data[0]).detach())
        attached = longtail.attach(model, MARC().fit(outputs), batch=data)
        assert attached(data[0]).shape == (SIZE, CLASSES)
    else:
        with pytest.raises(UserError, match=message):
            longtail.extract(model, [data], device="cpu")


def test_a_model_of_probabilities_is_not_attached_to_sample_by_sample(data):
    """One row may sum to 1 by chance; two do not."""
    method = MARC().fit(longtail.extract(After(lambda z: z), [data], device="cpu"))
    attached = longtail.attach(After(lambda z: z.softmax(1)), method)
    attached(data[0][:1])
    with pytest.raises(UserError, match="returns probabilities or their logarithms, but the method takes logits"):
        attached(data[0][1:2])
    signed = longtail.attach(After(lambda z: z - z.mean(1, keepdim=True) + 1 / CLASSES), method)
    signed(data[0])  # its rows sum to 1, but have negative numbers


def test_numbers_that_are_not_finite_are_not_taken_for_a_branch(data):
    x, labels = data
    loader = DataLoader(TensorDataset(torch.cat([x[:-1], torch.full((1, 6), torch.nan)]), labels), 10)
    with pytest.raises(UserError, match="NaN|not finite|nan"):
        longtail.calibrate(After(lambda z: z), loader, device="cpu")


def test_batches_without_samples_are_left_out(data):
    x, labels = data
    outputs = longtail.extract(
        After(lambda z: z), [(x[:0], labels[:0]), (x, labels), (x[:0], labels[:0])], device="cpu"
    )
    assert len(outputs) == SIZE
    with pytest.raises(UserError, match="the loader gave no batches"):
        longtail.extract(After(lambda z: z), [(x[:0], labels[:0])], device="cpu")


def test_numbers_are_no_batches():
    with pytest.raises(UserError, match=r"a batch or sample must be \(inputs, labels\) or .* not int"):
        longtail.extract(After(lambda z: z), [1, 2, 3], device="cpu")
