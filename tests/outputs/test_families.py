"""Models of other people by family: whatever stands between the head and the answer, the answer is calibrated."""

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

# The networks are not trained, so their logits have nothing to do with the labels.
pytestmark = pytest.mark.filterwarnings("ignore::longtail.posthoc.gate.FitWarning")
CLASSES = 10


class Body(nn.Module):
    """Images (N, 1, 8, 8) to features (N, 16)."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5))

    def features(self, x):
        return self.body(x)


class TwoHeads(Body):
    """Averages two heads in evaluation, as distilled DeiT and LeViT do."""

    def __init__(self):
        super().__init__()
        self.head, self.head_dist = nn.Linear(16, CLASSES), nn.Linear(16, CLASSES)

    def forward(self, x):
        features = self.features(x)
        one, other = self.head(features), self.head_dist(features.flip(1))
        return (one, other) if self.training else (one + other) / 2


class Weighted(TwoHeads):
    def forward(self, x):
        features = self.features(x)
        return 3 * self.head(features) + 0.7 * self.head_dist(features.cos())


class Scaled(Body):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, CLASSES, bias=False)

    def forward(self, x):
        return self.fc(self.features(x)) / 0.07


class Tokens(Body):
    """Scores every row of the image and averages."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.score(x[:, 0]).mean(1)


class LastToken(Tokens):
    def forward(self, x):
        rows = self.score(x[:, 0].tanh())
        picked = x[:, 0].sum(2).argmax(1)
        return {"loss": None, "logits": rows[torch.arange(len(x)), picked], "hidden": x}


class Crops(Tokens):
    """Two views of each image, in one batch, averaged."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x):
        both = torch.stack([x, x.flip(3)], 1).flatten(0, 1)
        return self.fc(self.features(both)).view(len(x), 2, -1).mean(1)


class Twice(Crops):
    """The same head runs twice, and one of the runs is thrown away."""

    def forward(self, x):
        self.fc(self.features(-x))
        return self.fc(self.features(x))


class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList([Scaled(), Tokens(), Crops()])

    def forward(self, x):
        return torch.stack([member(x) for member in self.members]).mean(0)


class Convolution(nn.Module):
    """A fully convolutional network: features to class maps, averaged over places."""

    def __init__(self, kernel=1, pooled=False, bias=True):
        super().__init__()
        self.pooled = pooled
        self.body = nn.Sequential(nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.ReLU())
        self.final = nn.Conv2d(12, CLASSES, kernel, bias=bias)

    def forward(self, x):
        maps = self.body(x)
        if self.pooled:
            return self.final(maps.mean((2, 3), keepdim=True))
        return self.final(maps).mean((2, 3))


class Noisy(Crops):
    """Draws random numbers in evaluation too."""

    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


class Doubles(Body):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, CLASSES)
        self.double()

    def forward(self, x):
        return self.fc(self.features(x.double()))


FAMILIES = {
    "two heads averaged": (TwoHeads, ("head", "head_dist")),
    "weighted heads": (Weighted, ("head", "head_dist")),
    "a factor": (Scaled, ("fc",)),
    "mean over tokens": (Tokens, ("score",)),
    "a token picked": (LastToken, ("score",)),
    "mean over crops": (Crops, ("fc",)),
    "head run twice": (Twice, ("fc",)),
    "ensemble": (Ensemble, ("members.0.fc", "members.1.score", "members.2.fc")),
    "convolution 1 x 1": (Convolution, ("final",)),
    "convolution 3 x 3": (lambda: Convolution(3, bias=False), ("final",)),
    "pooled convolution": (lambda: Convolution(pooled=True), ("final",)),
    "float64": (Doubles, ("fc",)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_is_calibrated(family, digits, calibrated):
    images, labels = digits
    build, layers = FAMILIES[family]
    batches = [(images[:100], labels[:100]), (images[100:], labels[100:])]
    model = build()
    repaired, _ = calibrated(model, batches, images)
    found = find_head(model, batch=batches[0], device="cpu")
    assert (found.sure, sorted(found.layers)) == (True, sorted(layers))
    for path in layers:
        assert type(repaired.get_submodule(path)) is type(model.get_submodule(path))


@pytest.mark.parametrize("method", [LogitAdjustment(), LWS(), TauNorm(tau=0.5), MatrixScaling(tolerance=0.01)], ids=str)
@pytest.mark.parametrize("family", ["two heads averaged", "mean over crops"])
def test_every_method_that_folds_folds_into_all_of_them(family, method, digits, calibrated):
    images, labels = digits
    held_out = {"validation": [(images.mT, labels)]} if method.needs_validation else {}
    calibrated(FAMILIES[family][0](), [(images, labels)], images, copy.deepcopy(method), **held_out)


@pytest.mark.parametrize("build", [TwoHeads, Weighted, Scaled, lambda: Convolution(pooled=True)])
def test_a_new_classifier_is_cut_for_several_heads(build, digits):
    """cRT learns on the features of all heads side by side; each gets its own columns."""
    images, labels = digits
    model = build().eval()
    repaired, fitted = longtail.calibrate(model, [(images, labels)], CRT(max_iter=2000, ridge=0.1), device="cpu")
    outputs = longtail.extract(model, [(images, labels)], device="cpu")
    np.testing.assert_allclose(
        outputs.logits,
        outputs.features @ outputs.head_weight.T + (0 if outputs.head_bias is None else outputs.head_bias),
        atol=1e-4,
    )
    expected = fitted.transform(torch.from_numpy(outputs.logits), torch.from_numpy(outputs.features))
    torch.testing.assert_close(repaired(images).flatten(1).detach(), expected, rtol=1e-3, atol=1e-3)


def test_half_precision_stays_half_precision(digits, calibrated):
    images, labels = digits
    model = Crops().to(torch.bfloat16)
    images = images.bfloat16()
    repaired, _ = calibrated(model, [(images, labels)], images, atol=0.03)
    assert repaired.fc.weight.dtype == torch.bfloat16


def test_random_numbers_of_the_model_are_its_own(digits, calibrated):
    images, labels = digits
    model = Noisy()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    repaired, fitted = longtail.calibrate(model, [(images, labels)], device="cpu")
    assert torch.equal(torch.rand(3), expected)
    answers = []
    for one in (model.eval(), repaired.eval()):
        torch.manual_seed(5)
        answers.append(one(images).detach())
    torch.testing.assert_close(answers[1], fitted.transform(answers[0]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("head", "does not depend on the output of 'head' alone, so a calibration folded into 'head' would be wrong"),
        ("body", "does not depend on the output of 'body' alone"),
        ("heads", "has no layer called 'heads'; its layers: body.1, head, head_dist"),
    ],
)
def test_a_wrong_head_is_refused_before_anything_is_fitted(head, message, digits):
    images, labels = digits
    shown = []

    def batches():
        for number in range(5):
            shown.append(number)
            yield images, labels

    with pytest.raises(UserError, match=message):
        longtail.calibrate(TwoHeads(), batches(), head=head, device="cpu")
    assert len(shown) <= 1


class Behind(Body):
    """Something that no layer is left to fold into stands behind the head."""

    def __init__(self, after):
        super().__init__()
        self.fc, self.after = nn.Linear(16, CLASSES), after

    def forward(self, x):
        return self.after(20 * self.fc(self.features(x)))


def used_norm():
    norm = nn.BatchNorm1d(CLASSES)
    nn.init.uniform_(norm.weight, 0.5, 2)
    return norm


class Probabilities(TwoHeads):
    def forward(self, x):
        features = self.features(x)
        return (self.head(features).softmax(1) + self.head_dist(features.cos()).softmax(1)).log()


REFUSED = {
    "relu": lambda: Behind(nn.ReLU()),
    "batch norm": lambda: Behind(used_norm()),
    "constant": lambda: Behind(lambda z: z + torch.arange(CLASSES)),
    "mean of probabilities": Probabilities,
}


@pytest.mark.parametrize("method", [MARC(), MatrixScaling(tolerance=0.01)], ids=str)
@pytest.mark.parametrize("family", REFUSED)
def test_what_does_not_fold_is_refused_and_can_be_attached(family, method, digits):
    images, labels = digits
    model = REFUSED[family]()
    with pytest.raises(
        UserError, match=r"a calibration cannot be folded into .* model = longtail.attach\(model, method\)"
    ):
        longtail.calibrate(
            model, [(images, labels)], copy.deepcopy(method), validation=[(images, labels)], device="cpu"
        )
    outputs = longtail.extract(model, [(images, labels)], split="validation", device="cpu")
    assert outputs.head_weight is None
    fitted = copy.deepcopy(method).fit(outputs)
    attached = longtail.attach(model, fitted, batch=(images, labels)).eval()
    torch.testing.assert_close(attached(images).detach(), fitted.transform(model(images).detach()))


def test_methods_with_a_layer_of_their_own_need_one_linear_layer(digits):
    images, labels = digits
    with pytest.raises(UserError, match="replaces one linear layer"):
        longtail.calibrate(TwoHeads(), [(images, labels)], DisAlign(max_iter=2), device="cpu")
    with pytest.raises(UserError, match="DisAlign needs the features .* score of Tokens has another form"):
        longtail.calibrate(Tokens(), [(images, labels)], DisAlign(), device="cpu")


def test_a_folding_that_lies_is_noticed(digits):
    """A method whose head does not give what its formula says."""

    class Wrong(MARC):
        def fold(self, weight, bias):
            weight, bias = super().fold(weight, bias)
            return weight, bias + 1.0 * torch.arange(len(bias))

    images, labels = digits
    with pytest.raises(UserError, match="Wrong cannot be folded into fc of Crops: the new model would not give"):
        longtail.calibrate(Crops(), [(images, labels)], Wrong(), device="cpu")


def test_two_heads_are_both_calibrated(digits):
    """Each by itself, so that training mode, which gives both, is calibrated too."""
    images, labels = digits
    model = TwoHeads().eval()
    repaired, fitted = longtail.calibrate(model, [(images, labels)], device="cpu")
    features = model.features(images).detach()
    for name, inputs in (("head", features), ("head_dist", features.flip(1))):
        expected = fitted.transform(model.get_submodule(name)(inputs).detach())
        torch.testing.assert_close(repaired.get_submodule(name)(inputs).detach(), expected, rtol=1e-4, atol=1e-4)
