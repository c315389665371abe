import copy

import pytest
import torch
from torch import nn

from longtail.errors import UserError
from longtail.heads.layers import fingerprint, head_of, layer_of_zeros, unwrap, with_head
from longtail.outputs.extract import find_head


class Named(nn.Module):
    """Features 4, hidden 6, three classes; the classifier is called whatever one likes, not last."""

    def __init__(self, name: str, bias: bool = True):
        super().__init__()
        self.name = name
        setattr(self, name, nn.Linear(6, 3, bias=bias))
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU())

    def forward(self, x):
        return getattr(self, self.name)(self.body(x))


class Getter(Named):
    def get_classifier(self):
        return getattr(self, self.name)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.classifier = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 3))
        self.auxiliary = nn.Linear(4, 7)


@pytest.mark.parametrize("name", ["fc", "classifier", "head", "linear", "output"])
def test_usual_names_are_found_wherever_they_stand(name):
    assert find_head(Named(name)) == name


def test_own_names_nested_heads_and_the_last_layer_are_found():
    assert find_head(Getter("zzz")) == "zzz"
    assert find_head(Nested()) == "classifier.3"
    assert find_head(nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2)))) == "1.0"
    assert find_head(Nested(), "auxiliary") == "auxiliary"
    assert find_head(Nested(), "classifier") == "classifier.3"
    assert find_head(nn.Linear(2, 3)) == ""


def test_what_cannot_be_found_is_explained():
    with pytest.raises(UserError, match=r"Conv2d has no nn.Linear to calibrate .* find_head\(model, batch=batch\)"):
        find_head(nn.Conv2d(3, 4, 1))
    with pytest.raises(UserError, match=r"no nn.Linear called 'top'; its linear layers: fc, body.0"):
        find_head(Named("fc"), "top")


def test_wrapped_models_are_unwrapped():
    model = Named("fc")
    assert unwrap(nn.DataParallel(model)) is model
    assert unwrap(torch.compile(model)) is model
    assert find_head(torch.compile(model)) == "fc"


@pytest.mark.parametrize("bias", [True, False])
def test_a_copy_gets_the_new_head_and_the_model_keeps_its_own(bias):
    model = Named("fc", bias=bias)
    before = copy.deepcopy(model.state_dict())
    head = nn.Linear(6, 3)
    repaired = with_head(model, head)
    assert type(repaired) is Named
    assert repaired.fc is head
    x = torch.randn(5, 4)
    torch.testing.assert_close(repaired(x), head(model.body(x)))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_bare_linear_layer_is_its_own_head():
    head = nn.Linear(4, 3)
    assert with_head(nn.Linear(4, 3), head) is head


def test_fingerprints_tell_weights_apart():
    model = Named("fc")
    same = copy.deepcopy(model)
    assert fingerprint(model) == fingerprint(same) == fingerprint(torch.compile(same))
    with torch.no_grad():
        head_of(same).weight[0, 0] += 1e-6
    assert fingerprint(model) != fingerprint(same)


@pytest.mark.parametrize(("kind", "sizes"), [(nn.Linear, (3, 2)), (nn.Conv2d, (3, 2, 1))])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_of_zeros_draws_no_random_numbers(kind, sizes, bias):
    before = torch.get_rng_state()
    layer = layer_of_zeros(kind, *sizes, bias=bias, dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), before)
    assert (layer.bias is not None) == bias
    for parameter in layer.parameters():
        assert (parameter.device.type, parameter.dtype, parameter.requires_grad) == ("cpu", torch.float64, True)
        assert not parameter.any()
    beside = kind(*sizes, bias=bias, dtype=torch.float64)
    assert {n: p.shape for n, p in layer.named_parameters()} == {n: p.shape for n, p in beside.named_parameters()}
