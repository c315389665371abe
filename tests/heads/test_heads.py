"""Heads: unit vectors, cosine heads, and heads that replace another."""

import copy
import math
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck

from longtail.backbones import build_backbone
from longtail.heads.fold import head_of, head_path, linear_layer, unwrap, with_head
from longtail.heads.kinds import CosineHead, UnitRows, lengths, unit, unit_head
from longtail.networks.objective import classifier_of_form, cosine_classifier
from longtail.outputs.record import fingerprint


def vectors(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_lengths_and_directions_are_the_plain_ones():
    x = 5 * vectors(4, 3, 7)
    torch.testing.assert_close(lengths(x), x.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(unit(x), x / x.norm(dim=-1, keepdim=True))


def test_gradients_are_derivatives():
    x = (3 * vectors(4, 6)).requires_grad_()
    assert gradcheck(lengths, x)
    assert gradcheck(unit, x)
    assert gradcheck(UnitRows(16.0, blocks=2, gamma=0.1), x)
    assert gradcheck(UnitRows(16.0), x)


def test_extreme_vectors_stay_finite_with_their_gradients():
    for size in (0.0, 1e-30, 1e4, 1e30):
        x = (size * vectors(3, 8).float()).requires_grad_()
        total = unit(x).sum() + lengths(x).sum() + UnitRows(16.0)(x).sum()
        total.backward()
        assert total.isfinite()
        assert x.grad.isfinite().all()
        if size >= 1e-30:
            assert unit(x).norm(dim=1).max() < 1.001
    assert torch.equal(unit(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_a_unit_head_is_an_ordinary_linear_head_to_others():
    head = unit_head(6, 3, scale=16)
    assert isinstance(head, torch.nn.Linear)
    torch.testing.assert_close(head.weight.norm(dim=1), torch.full((3,), 16.0))
    assert head.parametrizations.weight.original.abs().max() <= 6**-0.5  # as the authors start
    model = torch.nn.Sequential(OrderedDict(head=head))
    fresh = torch.nn.Linear(6, 3, bias=False)
    with torch.no_grad():
        fresh.weight.copy_(head.weight)
    plain = with_head(model, fresh)
    x = torch.randn(5, 6)
    torch.testing.assert_close(plain(x), model(x))
    assert type(plain.head) is torch.nn.Linear


COUNTS = torch.tensor([50, 20, 5])


def test_logits_are_scaled_cosines():
    head, features = CosineHead(4, 3, scale=16.0), torch.randn(6, 4)
    vectors = head.linear.parametrizations.weight.original
    expected = 16 * F.cosine_similarity(features.unsqueeze(1), vectors.unsqueeze(0), dim=2)
    torch.testing.assert_close(head(features), expected)
    torch.testing.assert_close(head(100 * features), expected)


def test_gradients_of_cosines_are_derivatives():
    assert gradcheck(CosineHead(4, 3).double(), torch.randn(5, 4, dtype=torch.float64, requires_grad=True))


def test_state_goes_from_one_cosine_head_to_another():
    first, second = (cosine_classifier(build_backbone("digits", in_channels=1), COUNTS) for _ in range(2))
    second.load_state_dict(first.state_dict())
    images = torch.randn(4, 1, 8, 8)
    assert torch.equal(first.eval()(images), second.eval()(images))


def test_extremes_are_finite():
    for features in (torch.zeros(2, 4), torch.full((2, 4), 1e15), torch.full((2, 4), 1e-15)):
        assert CosineHead(4, 3)(features).isfinite().all()


def test_half_precision_does_not_blur_the_cosines():
    head, features = CosineHead(64, 10), torch.randn(32, 64)
    precise = head(features)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head(features), precise)
        assert head(features.bfloat16()).dtype == torch.float32
    assert head.bfloat16()(features).dtype == torch.bfloat16


def test_the_linear_layer_inside_is_found_and_can_be_replaced():
    model = cosine_classifier(build_backbone("digits", in_channels=1), COUNTS, scale=20.0)
    assert head_path(model) == "head.linear"
    linear, images = head_of(model), torch.randn(4, 1, 8, 8)
    assert linear.weight.norm(dim=1).tolist() == pytest.approx([20.0] * 3, rel=1e-5)
    fresh = torch.nn.Linear(64, 3)
    with torch.no_grad():
        fresh.weight.copy_(linear.weight)
        fresh.bias.zero_()
    plain = with_head(model, fresh)
    torch.testing.assert_close(plain(images), model(images))
    assert type(head_of(plain)) is torch.nn.Linear


@pytest.mark.parametrize("form", ["softmax", "sigmoid", "focal"])
def test_sigmoid_forms_start_every_class_at_the_same_small_probability(form):
    head = head_of(classifier_of_form(build_backbone("digits", in_channels=1), COUNTS, form=form))
    if form == "softmax":
        assert len(set(head.bias.tolist())) == 3
    else:
        assert head.bias.tolist() == pytest.approx([-math.log(2)] * 3)
        assert head.bias.sigmoid().tolist() == pytest.approx([1 / 3] * 3)


class Small(nn.Module):
    """Features 4, hidden 6, three classes."""

    def __init__(self, bias: bool = True):
        super().__init__()
        self.head = nn.Linear(6, 3, bias=bias)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU())

    def forward(self, x):
        return self.head(self.body(x))


def test_wrapped_models_are_unwrapped():
    model = Small()
    assert unwrap(nn.DataParallel(model)) is model
    assert unwrap(torch.compile(model)) is model


@pytest.mark.parametrize("bias", [True, False])
def test_a_copy_gets_the_new_head_and_the_model_keeps_its_own(bias):
    model = Small(bias)
    before = copy.deepcopy(model.state_dict())
    head = nn.Linear(6, 3)
    repaired = with_head(model, head)
    assert type(repaired) is Small
    assert repaired.head is head
    x = torch.randn(5, 4)
    torch.testing.assert_close(repaired(x), head(model.body(x)))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_fingerprints_tell_weights_apart():
    model = Small()
    same = copy.deepcopy(model)
    assert fingerprint(model) == fingerprint(same) == fingerprint(torch.compile(same))
    with torch.no_grad():
        head_of(same).weight[0, 0] += 1e-6
    assert fingerprint(model) != fingerprint(same)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_made_without_random_numbers_and_copies_its_numbers(bias):
    weight, values = torch.randn(3, 2, dtype=torch.float64).T, torch.randn(2) if bias else None
    before = torch.get_rng_state()
    layer = linear_layer(weight, values)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(layer.weight, weight)
    assert layer.weight.is_contiguous()
    assert layer.weight.requires_grad
    assert (layer.in_features, layer.out_features, layer.bias is not None) == (3, 2, bias)
    assert not bias or torch.equal(layer.bias, values.double())
    weight[...] = 0
    assert layer.weight.any()
