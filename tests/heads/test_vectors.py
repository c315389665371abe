import torch
from torch.autograd import gradcheck

from longtail.heads.kinds import UnitRows, lengths, unit, unit_head
from longtail.heads.layers import guess_head, with_head


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
    model = torch.nn.Sequential(head)
    assert guess_head(model) == "0"
    fresh = torch.nn.Linear(6, 3, bias=False)
    with torch.no_grad():
        fresh.weight.copy_(head.weight)
    plain = with_head(model, fresh)
    x = torch.randn(5, 6)
    torch.testing.assert_close(plain(x), model(x))
    assert type(plain[0]) is torch.nn.Linear
