import numpy as np
import pytest
import torch
from torch.autograd import gradcheck
from torch.func import functional_call

from longtail.networks.oltr import ModulatedAttention

AUTHORS_NAMES = {"query": "theta", "key": "phi", "value": "g", "mask": "conv_mask", "place_scores": "fc_spatial"}


def of_case(case):
    """The attention of a golden case with its parameters."""
    params = case["params"]
    attention = ModulatedAttention(
        params["in_channels"], reduction=params["reduction"], grid=params["spatial"]
    ).double()
    state = {}
    for name in attention.state_dict():
        layer, kind = name.split(".")
        state[name] = torch.from_numpy(case[f"param_{AUTHORS_NAMES[layer]}_{kind}"])
    attention.load_state_dict(state)
    return attention


def test_seven_by_seven_maps_agree_with_the_authors_code(golden):
    for case in golden("oltr_modulated_att"):
        attention = of_case(case)
        x = torch.from_numpy(case["x"]).requires_grad_()
        output = attention(x)
        output.square().mean().backward()
        np.testing.assert_allclose(output.detach(), case["output"], atol=1e-9)
        np.testing.assert_allclose(attention.position_weights(x).detach()[:, 0], case["spatial_attention"], atol=1e-9)
        np.testing.assert_allclose(attention.context(x).detach(), case["mask"], atol=1e-9)
        np.testing.assert_allclose(x.grad, case["grad_x_of_mean_square"], atol=1e-9)


def random_attention(channels=4, grid=3):
    torch.manual_seed(0)
    attention = ModulatedAttention(channels, grid=grid).double()
    torch.nn.init.normal_(attention.mask.weight)
    return attention


def naive(attention, x):
    """The formula place by place, for a map of the grid's size."""

    def layer(module, vector):
        return module.weight[:, :, 0, 0] @ vector + (0 if module.bias is None else module.bias)

    places = [(i, j) for i in range(x.shape[1]) for j in range(x.shape[2])]
    scores = attention.place_scores(x.flatten())
    share = scores.exp() / scores.exp().sum()
    out = x.clone()
    for number, p in enumerate(places):
        query = layer(attention.query, x[:, *p])
        weights = torch.stack([(query @ layer(attention.key, x[:, *q])).exp() for q in places])
        context = sum(
            w * layer(attention.value, x[:, *q]) for w, q in zip(weights / weights.sum(), places, strict=True)
        )
        out[:, *p] += share[number] * layer(attention.mask, context)
    return out


def test_output_is_the_formula():
    attention, x = random_attention(), torch.randn(2, 4, 3, 3, dtype=torch.float64)
    with torch.no_grad():
        for given, output in zip(x, attention(x), strict=True):
            torch.testing.assert_close(output, naive(attention, given))


def test_gradient_is_the_derivative_on_a_map_of_another_size():
    attention = random_attention(channels=2)
    names, values = zip(*attention.named_parameters(), strict=True)
    x = torch.randn(1, 2, 2, 5, dtype=torch.float64).requires_grad_()

    def output(x, *parameters):
        return functional_call(attention, dict(zip(names, parameters, strict=True)), (x,))

    assert gradcheck(output, (x, *values))


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (7, 7), (8, 8), (4, 13)])
def test_any_map_size_with_places_that_share_one(size):
    attention, x = random_attention(grid=7), torch.randn(3, 4, *size, dtype=torch.float64)
    assert attention(x).shape == x.shape
    places = attention.position_weights(x)
    torch.testing.assert_close(places.sum((1, 2, 3)), torch.ones(3, dtype=torch.float64))
    assert (places >= 0).all()


def test_it_starts_as_the_identity():
    x = torch.randn(2, 4, 5, 6)
    assert torch.equal(ModulatedAttention(4)(x), x)


def test_finite_at_extreme_maps():
    attention = random_attention().float()
    x = (1e4 * torch.randn(2, 4, 5, 5)).requires_grad_()
    output = attention(x)
    output.sum().backward()
    assert output.isfinite().all()
    assert x.grad.isfinite().all()
