import math

import pytest
import torch
import torch.nn.functional as F

from longtail.backbones import build_backbone
from longtail.errors import UserError
from longtail.heads.kinds import CosineHead
from longtail.heads.layers import guess_head, head_of, with_head
from longtail.networks.objective import classifier_of_form, cosine_classifier

COUNTS = torch.tensor([50, 20, 5])


def test_logits_are_scaled_cosines():
    head, features = CosineHead(4, 3, scale=16.0), torch.randn(6, 4)
    vectors = head.linear.parametrizations.weight.original
    expected = 16 * F.cosine_similarity(features.unsqueeze(1), vectors.unsqueeze(0), dim=2)
    torch.testing.assert_close(head(features), expected)
    torch.testing.assert_close(head(100 * features), expected)


def test_gradients_are_those_of_the_value():
    head = CosineHead(4, 3).double()
    assert torch.autograd.gradcheck(head, torch.randn(5, 4, dtype=torch.float64, requires_grad=True))


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
    assert guess_head(model) == "head.linear"
    linear, images = head_of(model), torch.randn(4, 1, 8, 8)
    assert linear.weight.norm(dim=1).tolist() == pytest.approx([20.0] * 3, rel=1e-5)
    fresh = torch.nn.Linear(64, 3)
    with torch.no_grad():
        fresh.weight.copy_(linear.weight)
        fresh.bias.zero_()
    plain = with_head(model, fresh)
    torch.testing.assert_close(plain(images), model(images))
    assert type(head_of(plain)) is torch.nn.Linear


def test_state_goes_from_one_model_to_another():
    first, second = (cosine_classifier(build_backbone("digits", in_channels=1), COUNTS) for _ in range(2))
    second.load_state_dict(first.state_dict())
    images = torch.randn(4, 1, 8, 8)
    assert torch.equal(first.eval()(images), second.eval()(images))


def test_a_bad_scale_is_named():
    with pytest.raises(UserError, match="scale must be a number, above 0, not 'large'"):
        CosineHead(4, 3, scale="large")


@pytest.mark.parametrize("form", ["softmax", "sigmoid", "focal"])
def test_sigmoid_forms_start_every_class_at_the_same_small_probability(form):
    head = head_of(classifier_of_form(build_backbone("digits", in_channels=1), COUNTS, form=form))
    if form == "softmax":
        assert len(set(head.bias.tolist())) == 3
    else:
        assert head.bias.tolist() == pytest.approx([-math.log(2)] * 3)
        assert head.bias.sigmoid().tolist() == pytest.approx([1 / 3] * 3)
