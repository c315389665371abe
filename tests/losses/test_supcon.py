import numpy as np
import pytest
import torch

from longtail.errors import UserError
from longtail.losses import SupCon


def unit_features(samples=6, views=2, dimensions=4, seed=0):
    features = np.random.default_rng(seed).normal(size=(samples, views, dimensions))
    return features / np.linalg.norm(features, axis=2, keepdims=True)


def settings(case):
    return list(enumerate(zip(case["temperatures"], case["base_temperatures"], strict=True)))


def test_agrees_with_the_authors_code(golden, agree):
    for case in golden("supcon"):
        target = torch.from_numpy(case["target"])
        for number, (temperature, base) in settings(case):
            loss = SupCon(temperature=temperature, base_temperature=base)
            agree(
                lambda features, loss=loss, target=target: loss(features, target),
                case["features"],
                case["loss"][number],
                case["grad_features"][number],
            )


def test_first_views_as_anchors_and_no_labels_agree_with_the_authors_code(golden, agree):
    for case in golden("supcon"):
        target = torch.from_numpy(case["target"])
        for number, (temperature, base) in settings(case):
            first = SupCon(temperature=temperature, base_temperature=base, anchors="first")
            agree(lambda f, loss=first, y=target: loss(f, y), case["features"], case["loss_one"][number])
            alone, unlabelled = SupCon(temperature=temperature, base_temperature=base), torch.arange(len(target))
            agree(lambda f, loss=alone, y=unlabelled: loss(f, y), case["features"], case["loss_unsupervised"][number])


def test_is_the_formula():
    features, target = unit_features(), [0, 1, 0, 2, 1, 0]
    rows = [(features[i, v], target[i], (i, v)) for i in range(6) for v in range(2)]
    losses = []
    for anchor, label, name in rows:
        others = [(np.exp(anchor @ row / 0.2), other) for row, other, key in rows if key != name]
        whole = sum(value for value, _ in others)
        losses.append(-np.mean([np.log(value / whole) for value, other in others if other == label]))
    value = SupCon(temperature=0.2)(torch.from_numpy(features), torch.tensor(target))
    assert value.item() == pytest.approx(np.mean(losses), rel=1e-12)


def test_gradients_are_those_of_the_value():
    features = torch.from_numpy(unit_features()).requires_grad_()
    target = torch.tensor([0, 1, 0, 2, 1, 0])
    assert torch.autograd.gradcheck(lambda leaf: SupCon()(leaf, target), features)


def test_the_base_temperature_is_a_factor_and_1_unless_given():
    features, target = torch.from_numpy(unit_features()), torch.tensor([0, 1, 0, 2, 1, 0])
    plain = SupCon()(features, target).item()
    assert SupCon(base_temperature=0.1)(features, target).item() == plain
    assert SupCon(base_temperature=0.05)(features, target).item() == pytest.approx(2 * plain)


def test_anchors_without_a_positive_count_as_zero():
    features = torch.from_numpy(unit_features(views=1))
    assert SupCon()(features, torch.arange(6)).item() == 0
    pair = torch.tensor([0, 0, 1, 2, 3, 4])
    assert SupCon()(features, pair).item() > 0


@pytest.mark.parametrize("anchors", ["all", "first"])
def test_mean_and_sum_are_those_of_the_anchors(anchors):
    features, target = torch.from_numpy(unit_features(views=3)), torch.tensor([0, 1, 0, 2, 1, 0])
    each = SupCon(anchors=anchors, reduction="none")(features, target)
    assert each.shape == (6, 3 if anchors == "all" else 1)
    assert SupCon(anchors=anchors, reduction="sum")(features, target).item() == pytest.approx(each.sum().item())
    assert SupCon(anchors=anchors)(features, target).item() == pytest.approx(each.mean().item())
    # The loss of one anchor, by the formula: view 1 of sample 3, of which only its own views are positives.
    rows = features.transpose(0, 1).reshape(18, 4)
    similarity = (rows @ features[3, 1] / 0.1).exp()
    own, others = [similarity[3], similarity[15]], similarity.sum() - similarity[9]
    expected = -sum((value / others).log() for value in own) / 2
    if anchors == "all":
        assert each[3, 1].item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("anchors", ["all", "first"])
@pytest.mark.parametrize("ignore_index", [-100, 1, 255])
def test_ignored_samples_are_as_if_they_were_not_there(anchors, ignore_index):
    target = torch.tensor([0, ignore_index, 0, 2, ignore_index, 0])
    kept = target != ignore_index
    for reduction in ("mean", "sum", "none"):
        loss = SupCon(anchors=anchors, reduction=reduction, ignore_index=ignore_index)
        features = torch.from_numpy(unit_features()).requires_grad_()
        value = loss(features, target)
        expected = loss(features[kept], target[kept])
        torch.testing.assert_close(value[kept] if reduction == "none" else value, expected)
        (gradient,) = torch.autograd.grad(value.sum(), features, retain_graph=True)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), features)[0])
        assert (gradient[~kept] == 0).all()


def test_masks_of_bytes_are_class_numbers():
    features, target = torch.from_numpy(unit_features()), torch.tensor([0, 156, 0, 2, 156, 0])
    assert SupCon()(features, target.byte()).item() == SupCon()(features, target).item()


def test_an_anchor_that_is_left_alone_counts_as_zero():
    features = torch.from_numpy(unit_features(views=1)).requires_grad_()
    value = SupCon()(features, torch.tensor([3, -100, -100, -100, -100, -100]))
    value.backward()
    assert value.item() == 0
    assert (features.grad == 0).all()


def test_it_compiles_to_one_graph():
    features, target = torch.from_numpy(unit_features()), torch.tensor([0, 1, 0, -100, 1, 0])
    compiled = torch.compile(SupCon(anchors="first"), fullgraph=True, backend="aot_eager")
    assert compiled(features, target).item() == pytest.approx(SupCon(anchors="first")(features, target).item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extremes_are_finite(dtype):
    for features in (torch.ones(4, 2, 3), torch.zeros(4, 2, 3), 1e3 * torch.eye(4, 3).unsqueeze(1)):
        for target in (torch.zeros(4, dtype=torch.int64), torch.arange(4)):
            leaf = features.to(dtype).requires_grad_()
            value = SupCon(temperature=0.01)(leaf, target)
            value.backward()
            assert value.dtype == torch.float32
            assert value.isfinite()
            assert leaf.grad.isfinite().all()


def test_autocast_does_not_blur_the_similarities():
    features, target = torch.from_numpy(unit_features()).float(), torch.tensor([0, 1, 0, 2, 1, 0])
    with torch.autocast("cpu", torch.bfloat16):
        blurred = SupCon()(features, target).item()
    assert blurred == SupCon()(features, target).item()


def test_nothing_stays_on_the_cpu():
    assert SupCon()(torch.zeros(4, 2, 3, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta")).shape == ()


@pytest.mark.parametrize(
    ("features", "target", "message"),
    [
        (torch.zeros(4, 3), torch.arange(4), r"features must have shape \(samples, views, dimensions\), not \(4, 3\)"),
        (torch.zeros(4, 2, 3), torch.arange(3), "one class number per sample"),
        (torch.zeros(1, 1, 3), torch.arange(1), "one view of one sample; SupCon needs at least two views"),
        (torch.zeros(0, 2, 3), torch.arange(0), "the batch is empty"),
    ],
)
def test_bad_batches_are_named(features, target, message):
    with pytest.raises(UserError, match=message):
        SupCon()(features, target)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0}, "temperature must be a number, above 0, not 0"),
        ({"base_temperature": -1}, "base_temperature must be a number"),
        ({"anchors": "one"}, "unknown anchors 'one'; choose from: all, first"),
        ({"reduction": "avg"}, "unknown reduction 'avg'; choose from: mean, sum, none"),
        ({"ignore_index": 0.5}, "ignore_index must be a whole number, not 0.5"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(UserError, match=f"^{message}"):
        SupCon(**settings)


def test_two_views_are_enough():
    """One sample with two views, and two samples with one, have something to compare."""
    rows = torch.nn.functional.normalize(torch.randn(2, 4), dim=1)
    assert SupCon()(rows.unsqueeze(0), torch.tensor([1])) == 0  # the other view is the only one, and the right one
    assert SupCon()(rows.unsqueeze(1), torch.tensor([1, 1])) == 0
