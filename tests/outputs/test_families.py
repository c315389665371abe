"""Models of other people by family: whatever follows the head, the logits of the model are calibrated."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import longtail
from longtail import MARC
from longtail.errors import UserError
from longtail.outputs.extract import find_head
from longtail.posthoc import CRT, LWS, DisAlign, LogitAdjustment, MatrixScaling, TauNorm

from .conftest import CLASSES, made

# The networks are not trained, so their logits have nothing to do with the labels.
pytestmark = pytest.mark.filterwarnings("ignore::longtail.posthoc.gate.FitWarning")


def body():
    """Images (N, 1, 8, 8) to features (N, 16)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5))


def head(width=16, **options):
    return nn.Linear(width, CLASSES, **options)


def averaged(self, x):
    """Two heads, averaged in evaluation, as in distilled DeiT and LeViT."""
    features = self.body(x)
    one, other = self.head(features), self.head_dist(features.flip(1))
    return (one, other) if self.training else (one + other) / 2


def two_heads():
    return made("TwoHeads", averaged, body=body(), head=head(), head_dist=head())


def weighted():
    def forward(self, x):
        features = self.body(x)
        return 3 * self.head(features) + 0.7 * self.head_dist(features.cos())

    return made("Weighted", forward, body=body(), head=head(), head_dist=head())


def scaled():
    return made("Scaled", lambda self, x: self.fc(self.body(x)) / 0.07, body=body(), fc=head(bias=False))


def tokens(forward=lambda self, x: self.score(x[:, 0]).mean(1)):
    """Scores every row of the image; the mean over them by default."""
    return made("Tokens", forward, body=body(), score=head(8))


def last_token(self, x):
    rows = self.score(x[:, 0].tanh())
    picked = x[:, 0].sum(2).argmax(1)
    return {"loss": None, "logits": rows[torch.arange(len(x)), picked], "hidden": x}


def crops(noise=0.0):
    """Two views of each image in one batch, averaged; the noise is drawn in evaluation too."""

    def forward(self, x):
        both = torch.stack([x, x.flip(3)], 1).flatten(0, 1)
        return self.fc(self.body(both + noise * torch.randn_like(both) if noise else both)).view(len(x), 2, -1).mean(1)

    return made("Crops", forward, body=body(), fc=head())


def twice(self, x):
    self.fc(self.body(-x))
    return self.fc(self.body(x))


def ensemble():
    def forward(self, x):
        return torch.stack([member(x) for member in self.members]).mean(0)

    return made("Ensemble", forward, members=nn.ModuleList([scaled(), tokens(), crops()]))


def convolution(kernel=1, pooled=False, bias=True):
    """Features to class maps, averaged over positions before or after the last layer."""

    def forward(self, x):
        maps = self.body(x)
        return self.final(maps.mean((2, 3), keepdim=True)) if pooled else self.final(maps).mean((2, 3))

    layers = nn.Sequential(nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.ReLU())
    return made("Convolution", forward, body=layers, final=nn.Conv2d(12, CLASSES, kernel, bias=bias))


def plain(**layers):
    return made("Plain", lambda self, x: self.fc(self.body(x)), **{"fc": head(), "body": body(), **layers})


def misleading():
    """What is called head comes before the classifier, and is as wide."""
    layers = {"head": head(), "body": body(), "verdict": head(CLASSES)}
    return made("Misleading", lambda self, x: self.verdict(self.head(self.body(x)).relu()), **layers)


FAMILIES = {
    "two heads averaged": (two_heads, ("head", "head_dist")),
    "weighted heads": (weighted, ("head", "head_dist")),
    "a factor": (scaled, ("fc",)),
    "mean over tokens": (tokens, ("score",)),
    "a token picked": (lambda: tokens(last_token), ("score",)),
    "mean over crops": (crops, ("fc",)),
    "head run twice": (lambda: made("Twice", twice, body=body(), fc=head()), ("fc",)),
    "ensemble": (ensemble, ("members.0.fc", "members.1.score", "members.2.fc")),
    "convolution 1 x 1": (convolution, ("final",)),
    "convolution 3 x 3": (lambda: convolution(3, bias=False), ("final",)),
    "pooled convolution": (lambda: convolution(pooled=True), ("final",)),
    "float64": (lambda: made("D", lambda m, x: m.fc(m.body(x.double())), body=body(), fc=head()).double(), ("fc",)),
    "no bias, registered first": (lambda: plain(fc=head(bias=False)), ("fc",)),
    "a layer called head before it": (misleading, ("verdict",)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_calibrated(family, digits, calibrated):
    images, labels = digits
    build, layers = FAMILIES[family]
    batches = [(images[:100], labels[:100]), (images[100:], labels[100:])]
    model = build()
    repaired, _ = calibrated(model, batches, images)
    assert sorted(find_head(model.train(), batches[0], device="cpu")) == sorted(layers)
    assert model.training
    for path in layers:
        assert type(repaired.get_submodule(path)) is type(model.get_submodule(path))


@pytest.mark.parametrize("method", [LogitAdjustment(), LWS(), TauNorm(tau=0.5), MatrixScaling(tolerance=0.01)], ids=str)
@pytest.mark.parametrize("family", ["two heads averaged", "mean over crops"])
def test_every_method_that_folds_folds_into_all_of_them(family, method, digits, calibrated):
    images, labels = digits
    held_out = {"validation": [(images.mT, labels)]} if method.needs_validation else {}
    calibrated(FAMILIES[family][0](), [(images, labels)], images, copy.deepcopy(method), **held_out)


@pytest.mark.parametrize("family", ["two heads averaged", "weighted heads", "a factor", "pooled convolution"])
def test_a_new_classifier_is_cut_for_several_heads(family, digits):
    """cRT learns on the features of all heads side by side; each gets its own columns."""
    images, labels = digits
    model = FAMILIES[family][0]().eval()
    repaired, fitted = longtail.calibrate(model, [(images, labels)], CRT(max_iter=2000, ridge=0.1), device="cpu")
    outputs = longtail.extract(model, [(images, labels)], device="cpu")
    bias = 0 if outputs.head_bias is None else outputs.head_bias
    np.testing.assert_allclose(outputs.logits, outputs.features @ outputs.head_weight.T + bias, atol=1e-4)
    expected = fitted.transform(torch.from_numpy(outputs.logits), torch.from_numpy(outputs.features))
    torch.testing.assert_close(repaired(images).flatten(1).detach(), expected, rtol=1e-3, atol=1e-3)


def test_half_precision_stays_half_precision(digits, calibrated):
    images, labels = digits
    images = images.bfloat16()
    repaired, _ = calibrated(crops().to(torch.bfloat16), [(images, labels)], images, atol=0.03)
    assert repaired.fc.weight.dtype == torch.bfloat16


def test_random_numbers_of_the_model_are_its_own(digits):
    images, labels = digits
    model = crops(noise=0.1)
    repaired, fitted = longtail.calibrate(model, [(images, labels)], device="cpu")
    logits = []
    for one in (model.eval(), repaired.eval()):
        torch.manual_seed(5)
        logits.append(one(images).detach())
    torch.testing.assert_close(logits[1], fitted.transform(logits[0]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("head", "does not depend on the output of 'head' alone, so a calibration folded into 'head' would be wrong"),
        ("body", "does not depend on the output of 'body' alone"),
        ("heads", "has no layer called 'heads'; its layers: body.1, head, head_dist"),
    ],
)
def test_a_wrong_head_is_refused_before_anything_is_fitted(name, message, digits):
    read = []
    batches = (read.append(number) or digits for number in range(5))
    with pytest.raises(UserError, match=message):
        longtail.calibrate(two_heads(), batches, head=name, device="cpu")
    assert len(read) <= 1
    assert find_head(plain(), digits, name="fc", device="cpu") == ("fc",)


class Adapted(nn.Linear):
    """As an adapter library makes it: the layer, and two small ones beside it."""

    def __init__(self):
        super().__init__(16, CLASSES)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(16, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, CLASSES, bias=False)})

    def forward(self, x):
        return super().forward(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_are_not_taken_for_the_head(digits):
    with pytest.raises(UserError, match=r"no head to fold into: fc \(Adapted\) does not compute weight times input"):
        find_head(plain(fc=Adapted()), digits, device="cpu")


def used_norm():
    norm = nn.BatchNorm1d(CLASSES)
    nn.init.uniform_(norm.weight, 0.5, 2)
    return norm


def probabilities(self, x):
    features = self.body(x)
    return (self.head(features).softmax(1) + self.head_dist(features.cos()).softmax(1)).log()


def weighted_tokens(self, x):
    return (self.score(x[:, 0]) * torch.linspace(0.2, 0.05, 8).view(1, 8, 1)).sum(1)


def followed_by(after):
    return made("Behind", lambda self, x: self.after(20 * self.fc(self.body(x))), body=body(), fc=head(), after=after)


REFUSED = {
    "relu": lambda: followed_by(nn.ReLU()),
    "batch norm": lambda: followed_by(used_norm()),
    "mean of probabilities": lambda: made("P", probabilities, body=body(), head=head(), head_dist=head()),
    "weighted mean over tokens": lambda: tokens(weighted_tokens),
}


@pytest.mark.parametrize("method", [MARC(), MatrixScaling(tolerance=0.01)], ids=str)
@pytest.mark.parametrize("family", REFUSED)
def test_what_does_not_fold_is_refused_and_can_be_attached(family, method, digits):
    model, loader, fitted = REFUSED[family](), [digits], copy.deepcopy(method)
    with pytest.raises(UserError, match=r"a calibration cannot be folded into .* = longtail.attach\(model, method\)"):
        longtail.calibrate(model, loader, copy.deepcopy(method), validation=loader, device="cpu")
    outputs = longtail.extract(model, loader, split="validation", device="cpu")
    assert outputs.head_weight is None
    fitted.fit(outputs)
    attached = longtail.attach(model, fitted, batch=digits).eval()
    torch.testing.assert_close(attached(digits[0]).detach(), fitted.transform(model(digits[0]).detach()))


def test_methods_with_a_layer_of_their_own_need_one_linear_layer(digits):
    with pytest.raises(UserError, match="replaces one linear layer"):
        longtail.calibrate(two_heads(), [digits], DisAlign(max_iter=2), device="cpu")
    with pytest.raises(UserError, match="DisAlign needs the features .* score of Tokens has another form"):
        longtail.calibrate(tokens(), [digits], DisAlign(), device="cpu")


def test_a_method_whose_head_does_not_give_its_formula_is_refused(digits):
    class Wrong(MARC):
        def fold(self, weight, bias):
            weight, bias = super().fold(weight, bias)
            return weight, bias + 1.0 * torch.arange(len(bias))

    with pytest.raises(UserError, match="Wrong cannot be folded into fc of Crops: the new model would not give"):
        longtail.calibrate(crops(), [digits], Wrong(), device="cpu")


def test_two_heads_are_both_calibrated(digits):
    """Each by itself, so that training mode, which gives both, is calibrated too."""
    model = two_heads().eval()
    repaired, fitted = longtail.calibrate(model, [digits], device="cpu")
    features = model.body(digits[0]).detach()
    for name, inputs in (("head", features), ("head_dist", features.flip(1))):
        expected = fitted.transform(model.get_submodule(name)(inputs).detach())
        torch.testing.assert_close(repaired.get_submodule(name)(inputs).detach(), expected, rtol=1e-4, atol=1e-4)
