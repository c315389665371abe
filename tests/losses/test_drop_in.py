"""Every loss on logits takes what `nn.CrossEntropyLoss` takes, with the same meaning, or refuses it by name."""

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import longtail
from longtail.errors import UserError

COUNTS = (1000, 200, 30, 5, 1)
SHAPES = [(5,), (12, 5), (4, 5, 3), (2, 5, 3, 2)]  # of logits; the classes are the second dimension
REDUCTIONS = ["mean", "sum", "none"]


def random_logits(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_target(shape, seed=1):
    """Class numbers of logits of this shape."""
    return torch.randint(
        5, shape[:1] + shape[2:] if len(shape) > 1 else (), generator=torch.Generator().manual_seed(seed)
    )


def with_ignored(target, ignore_index):
    """Every third sample ignored."""
    places = torch.arange(target.numel()).reshape(target.shape) % 3 == 2
    return target.masked_fill(places, ignore_index)


def probabilities(shape, seed=2):
    return random_logits(shape, seed).softmax(min(len(shape) - 1, 1))


def one_hot(target):
    return F.one_hot(target, 5).movedim(-1, min(target.ndim, 1)).double()


def value_and_gradient(loss, logits, target):
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, target)
    value.sum().backward()
    return value.detach(), leaf.grad


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def sigmoid_cross_entropy(logits, target, *, reduction, ignore_index):
    """K yes-or-no questions per sample: the limit of the sigmoid forms."""
    ignored = target == ignore_index
    truth = one_hot(target.masked_fill(ignored, 0))
    losses = F.binary_cross_entropy_with_logits(logits, truth, reduction="none").sum(min(target.ndim, 1))
    losses = losses.masked_fill(ignored, 0)
    total = losses.sum()
    return {"none": losses, "sum": total, "mean": total / (~ignored).sum()}[reduction]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_limiting_case_is_cross_entropy(every, reduction):
    reference = sigmoid_cross_entropy if every.settings.get("form", "softmax") != "softmax" else F.cross_entropy
    for shape, ignore_index in product(SHAPES, (-100, 255, 2)):
        logits, target = random_logits(shape), with_ignored(random_target(shape), ignore_index)
        shared = {"reduction": reduction, "ignore_index": ignore_index}
        expected = value_and_gradient(lambda z, y, shared=shared: reference(z, y, **shared), logits, target)
        assert_same(value_and_gradient(every.at_its_limit(**shared), logits, target), expected)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
def test_the_limiting_case_is_cross_entropy_for_soft_targets_and_label_smoothing(soft, reduction, smoothing):
    for shape in SHAPES:
        shared = {"reduction": reduction, "label_smoothing": smoothing}
        for target in (with_ignored(random_target(shape), -100), probabilities(shape)):
            logits = random_logits(shape)
            expected = value_and_gradient(lambda z, y, s=shared: F.cross_entropy(z, y, **s), logits, target)
            assert_same(value_and_gradient(soft.at_its_limit(**shared), logits, target), expected)


def test_samples_of_every_dimension_are_samples(every):
    """Logits (N, K, d1, d2) give what their N x d1 x d2 rows give; "none" has the shape of the target."""
    shape = (4, 5, 3, 2)
    logits, target = random_logits(shape), with_ignored(random_target(shape), -100)
    rows, numbers = logits.permute(0, 2, 3, 1).reshape(-1, 5), target.flatten()
    for reduction in ("mean", "sum"):
        flat = every(COUNTS, reduction=reduction)(rows, numbers)
        torch.testing.assert_close(every(COUNTS, reduction=reduction)(logits, target), flat)
    each = every(COUNTS, reduction="none")(logits, target)
    assert each.shape == target.shape
    torch.testing.assert_close(each.flatten(), every(COUNTS, reduction="none")(rows, numbers))


def test_one_sample_needs_no_batch_dimension(every):
    logits, target = random_logits((5,)), torch.tensor(3)
    for reduction in REDUCTIONS:
        alone = every(COUNTS, reduction=reduction)(logits, target)
        assert alone.shape == ()
        expected = every(COUNTS, reduction=reduction)(logits[None], target[None])
        assert alone.item() == pytest.approx(expected.item(), rel=1e-12)


def test_mean_and_sum_are_those_of_the_samples(every):
    logits, target = random_logits((12, 5)), with_ignored(random_target((12, 5)), -100)
    each = every(COUNTS, reduction="none")(logits, target)
    assert each.shape == (12,)
    assert (each[2::3] == 0).all()
    total = every(COUNTS, reduction="sum")(logits, target).item()
    assert total == pytest.approx(each.sum().item(), rel=1e-12)
    kept = target[target >= 0]
    divisor = len(kept)
    if every.by_weights:
        loss = every(COUNTS)
        weights = loss.class_weights if "class_weights" in every.settings else loss.weights(logits)
        divisor = weights.double()[kept].sum().item()
    assert every(COUNTS)(logits, target).item() == pytest.approx(total / divisor, rel=1e-12)


@pytest.mark.parametrize("ignore_index", [-100, 255, 2])
def test_ignored_samples_are_as_if_they_were_not_there(every, ignore_index):
    logits, target = random_logits((12, 5)), with_ignored(random_target((12, 5)), ignore_index)
    logits[target == ignore_index] = 1e3 * random_logits((5,))
    kept = target != ignore_index
    assert 0 < kept.sum() < 12
    for reduction in REDUCTIONS:
        loss, without = (every(COUNTS, reduction=reduction, ignore_index=ignore_index) for _ in range(2))
        value, gradient = value_and_gradient(loss, logits, target)
        expected, expected_gradient = value_and_gradient(without, logits[kept], target[kept])
        torch.testing.assert_close(value[kept] if reduction == "none" else value, expected)
        torch.testing.assert_close(gradient[kept], expected_gradient)
        assert (gradient[~kept] == 0).all()
        if every.name == "seesaw":
            assert torch.equal(loss.seen_counts, without.seen_counts)


def test_where_all_samples_are_ignored_there_is_no_mean(every):
    """As in torch: 0 / 0 is not a number; sum and single losses are 0, and so are their gradients."""
    logits, target = random_logits((3, 5)), torch.full((3,), -100)
    assert every(COUNTS)(logits, target).isnan()
    for reduction in ("sum", "none"):
        value, gradient = value_and_gradient(every(COUNTS, reduction=reduction), logits, target)
        assert (value == 0).all()
        assert (gradient == 0).all()


def test_an_empty_batch_has_a_sum_but_no_mean(every):
    logits, target = torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)
    assert every(COUNTS, reduction="sum")(logits, target).item() == 0
    assert every(COUNTS, reduction="none")(logits, target).shape == (0,)
    with pytest.raises(UserError, match="the batch is empty: reduction='mean' needs"):
        every(COUNTS)(logits, target)


def test_masks_of_bytes_are_class_numbers(every):
    """255 in a byte is 255, and -100 is not 156."""
    logits, target = random_logits((6, 5)), torch.tensor([0, 1, 255, 3, 4, 255])
    expected = every(COUNTS, ignore_index=255)(logits, target)
    assert torch.equal(every(COUNTS, ignore_index=255)(logits, target.byte()), expected)
    with pytest.raises(UserError, match=r"found 1\.\.156"):
        every(COUNTS)(logits[:2], torch.tensor([1, 156], dtype=torch.uint8))


# Soft targets and label smoothing


def test_probabilities_of_0_and_1_are_class_numbers(soft):
    for shape, reduction, smoothing in product(SHAPES, REDUCTIONS, (0.0, 0.2)):
        logits, target = random_logits(shape), random_target(shape)
        loss = soft(COUNTS, reduction=reduction, label_smoothing=smoothing)
        expected = value_and_gradient(loss, logits, target)
        assert_same(value_and_gradient(loss, logits, one_hot(target)), expected)


def test_mixing_targets_is_mixing_losses(soft):
    """What mixup and cutmix rely on: every sample's loss is linear in its target."""
    logits, first, second = random_logits((12, 5)), random_target((12, 5)), random_target((12, 5), seed=3)
    share = torch.linspace(0, 1, 12, dtype=torch.float64)
    mixed = share[:, None] * one_hot(first) + (1 - share)[:, None] * one_hot(second)
    for smoothing in (0.0, 0.2):
        loss = soft(COUNTS, reduction="none", label_smoothing=smoothing)
        expected = share * loss(logits, first) + (1 - share) * loss(logits, second)
        torch.testing.assert_close(loss(logits, mixed), expected)
    total = soft(COUNTS, reduction="sum")(logits, mixed)
    torch.testing.assert_close(total, (soft(COUNTS, reduction="none")(logits, mixed)).sum())


def test_soft_targets_are_the_formula(soft):
    """The sum of w_c t_c (-log p_c), p with the prior of the loss; its mean divides by the sum of w_c t_c or by N."""
    logits, target = random_logits((6, 5)), probabilities((6, 5))
    loss = soft(COUNTS)
    counts = torch.tensor(COUNTS, dtype=torch.float64)
    prior = counts if soft.name in ("balanced softmax", "logit-adjusted") else torch.ones(5)
    weights = loss.weights(logits) if hasattr(loss, "weights") else torch.ones(5)
    total = divisor = 0.0
    for row, shares in zip(logits, target, strict=True):
        p = prior * row.exp() / (prior * row.exp()).sum()
        for c in range(5):
            total -= (weights[c] * shares[c] * p[c].log()).item()
            divisor += (weights[c] * shares[c]).item() if soft.by_weights else 0.2
    assert loss(logits, target).item() == pytest.approx(total / divisor, rel=1e-12)


def test_label_smoothing_is_a_share_of_the_target_spread_over_all_classes(soft):
    logits, target = random_logits((12, 5)), random_target((12, 5))
    for given in (target, probabilities((12, 5))):
        smoothed = 0.9 * (one_hot(given) if given.ndim == 1 else given) + 0.1 / 5
        value = soft(COUNTS, reduction="none", label_smoothing=0.1)(logits, given)
        torch.testing.assert_close(value, soft(COUNTS, reduction="none")(logits, smoothed))


def test_weights_and_label_smoothing_are_those_of_torch(losses):
    """Where torch has the same loss: class weights, divided by their sum, for class numbers."""
    logits, target = random_logits((12, 5)), with_ignored(random_target((12, 5)), -100)
    for case in (case for case in losses if case.soft and case.by_weights):
        loss = case(COUNTS, label_smoothing=0.1)
        expected = F.cross_entropy(logits, target, loss.weights(logits), label_smoothing=0.1)
        assert loss(logits, target).item() == pytest.approx(expected.item(), rel=1e-12)


def test_half_precision_probabilities_are_probabilities(soft):
    logits, target = random_logits((12, 5)).float(), probabilities((12, 5)).bfloat16()
    value = soft(COUNTS)(logits, target)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(soft(COUNTS)(logits, target.double()).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: 2 * t, r"probabilities: at least 0, with sum 1; those of sample 0 lie between .* and have sum 2"),
        (lambda t: torch.cat([t[:3], 0.5 * t[3:]]), "those of sample 3 lie between .* and have sum 0.5"),
        (
            lambda t: torch.cat([t[:1], t[1:] - 0.2 + 0.2 * F.one_hot(torch.tensor([0] * 11), 5) * 5]),
            "sample 1 lie between -",
        ),
        (lambda t: t / 0, "soft targets must be probabilities"),
        (lambda t: t[:, :4], r"or probabilities of shape \(12, 5\), not \(12, 4\) of torch.float64"),
    ],
)
def test_what_is_no_probability_is_named(soft, change, message):
    with pytest.raises(UserError, match=message):
        soft(COUNTS)(random_logits((12, 5)), change(probabilities((12, 5))))


def test_soft_targets_cannot_be_ignored(soft):
    with pytest.raises(UserError, match="ignore_index 2 is a class number, and soft targets are not"):
        soft(COUNTS, ignore_index=2)(random_logits((12, 5)), probabilities((12, 5)))
    with pytest.raises(UserError, match="ignore_index 0 is a class number"):
        soft(COUNTS, ignore_index=0)(random_logits((12, 5)), probabilities((12, 5)))


def test_a_loss_of_one_true_class_refuses_soft_targets_and_label_smoothing(hard):
    loss = hard(COUNTS)
    name, others = type(loss).__name__, "BalancedSoftmax, LogitAdjusted, WeightedCrossEntropy or ClassBalanced"
    with pytest.raises(UserError, match=f"{name} takes no soft targets: .*Use {others}"):
        loss(random_logits((12, 5)), probabilities((12, 5)))
    with pytest.raises(UserError, match=f"{name} takes no label_smoothing: {loss.one_class[:8]}.*Use {others}"):
        hard(COUNTS, label_smoothing=0.1)
    assert hard(COUNTS, label_smoothing=0).label_smoothing == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reduction": "avg"}, "unknown reduction 'avg'; choose from: mean, sum, none"),
        ({"reduction": None}, "unknown reduction None"),
        ({"ignore_index": 1.5}, "ignore_index must be a whole number, not 1.5"),
        ({"ignore_index": True}, "ignore_index must be a whole number, not True"),
        ({"label_smoothing": -0.1}, "label_smoothing must be a number, at least 0 and at most 1, not -0.1"),
        ({"label_smoothing": 1.1}, "label_smoothing must be a number, at least 0 and at most 1, not 1.1"),
    ],
)
def test_bad_settings_are_named(every, settings, message):
    with pytest.raises(UserError, match=f"^{message}"):
        every(COUNTS, **settings)


def test_the_table_in_the_docs_says_what_is_refused_and_why(losses):
    page = (Path(__file__).resolve().parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in page.splitlines() if row.startswith("| `")]
    assert {row[0].split("`")[1] for row in rows} == set(longtail.losses.__all__)
    for case in losses:
        loss = case(COUNTS)
        form = f'"{loss.form}"' if isinstance(loss, longtail.losses.ClassBalanced) else ""
        (row,) = [row for row in rows if row[0].startswith(f"`{type(loss).__name__}`") and form in row[0]]
        assert row[1].split(":")[0] == ("yes" if case.soft else "no")
        assert loss.one_class.removeprefix(f"in the {getattr(loss, 'form', '')} form ") in row[1]


# torch.compile


class AtOnce(torch.nn.Module):
    """Several losses of one batch, (losses,)."""

    def __init__(self, losses):
        super().__init__()
        self.losses = torch.nn.ModuleList(losses)

    def forward(self, logits, target):
        return torch.stack([loss(logits, target) for loss in self.losses])


def assert_compiles(cases, target_of, shapes, backend="aot_eager"):
    """Values, gradients and counts of the compiled losses are those of the others; there is one graph."""
    eager, compiled = (AtOnce([case() for case in cases]) for _ in range(2))
    graph = torch.compile(compiled, fullgraph=True, backend=backend)
    for shape in shapes:
        logits, target = random_logits(shape).float(), target_of(shape)
        expected, result = (value_and_gradient(losses, logits, target) for losses in (eager, graph))
        for one, other in zip(result, expected, strict=True):
            torch.testing.assert_close(one, other)
    for one, other in zip(compiled.buffers(), eager.buffers(), strict=True):  # what accumulates has gone on
        assert torch.equal(one, other)


def test_every_loss_compiles_to_one_graph(losses):
    assert_compiles(losses, lambda shape: with_ignored(random_target(shape), -100), [(4, 5, 3)] * 2)


def test_soft_targets_and_batches_of_other_sizes_compile_to_one_graph(losses):
    soft = [case for case in losses if case.soft]
    assert_compiles(soft, lambda shape: probabilities(shape).float(), [(12, 5), (7, 5), (9, 5)])


def test_compiled_code_keeps_the_digits_of_the_weights(losses):
    """The compiler's own backend: its expm1 would be off by 2e-4 for a class with one sample."""
    cases = [case for case in losses if case.name in ("class-balanced, weights", "seesaw")]
    assert_compiles(cases, random_target, [(12, 5)] * 2, backend="inductor")
