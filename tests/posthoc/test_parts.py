"""The parts that methods are made of, each beside its formula on a few samples."""

import inspect
import math
import time
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import approx_fprime
from sklearn.exceptions import ConvergenceWarning

from longtail import CRT, HALO, LWS, MARC, DisAlign, LogitAdjustment, Outputs, TauNorm, TemperatureScaling
from longtail.data.samplers import Sampler
from longtail.errors import UserError
from longtail.outputs.rows import LogitRows
from longtail.posthoc import MatrixScaling, PlattScaling, Tempered, VectorScaling
from longtail.posthoc.affine import AffineProblem
from longtail.posthoc.candidates import (
    Candidate,
    Trial,
    _methods,
    _refitted,
    best_scale,
    stratified,
    target_weights,
)
from longtail.posthoc.class_statistics import ClassStatistics, class_statistics
from longtail.posthoc.cross_fit import _stratified, cross_fit, head_of_loss, mean_loss
from longtail.posthoc.curvature import Blocks
from longtail.posthoc.fitting import chosen_images, fit_outputs, warn_if_all_is_known
from longtail.posthoc.heads import balanced_head, lda_head, spread
from longtail.posthoc.inputs import from_arrays, from_outputs
from longtail.posthoc.linear import LinearHead, LinearProblem, plain_penalty
from longtail.posthoc.lws import balanced_weights
from longtail.posthoc.platt import _OneVersusRest
from longtail.posthoc.scaling import _MatrixProblem
from longtail.posthoc.selection import require_validation
from longtail.posthoc.sgd import learning_rate, train_affine, train_parameters
from longtail.posthoc.solver import Problem, minimise
from longtail.posthoc.stack import PRIORS, Held, Stack, like_training, sample_weights
from longtail.posthoc.target_prior import NEVER, log_target, shifted, shifted_head
from longtail.posthoc.unseen import require_unseen

RNG = np.random.default_rng(7)
LABELS = np.array([0] * 9 + [1] * 5 + [2] * 3 + [3] * 2)
FEATURES = RNG.normal(size=(19, 3)) + np.eye(4)[LABELS][:, :3]
LOGITS = RNG.normal(size=(19, 4)) + np.eye(4)[LABELS]
HEAD = {"head_weight": RNG.normal(size=(4, 3)).astype(np.float32), "head_bias": RNG.normal(size=4).astype(np.float32)}
TARGET = torch.from_numpy(LABELS)


def outputs(split="train", seed=None, **more):
    """The same samples, or others of the same kind."""
    rng = np.random.default_rng(seed)
    features = FEATURES if seed is None else rng.normal(size=(19, 3)) + np.eye(4)[LABELS][:, :3]
    logits = features @ HEAD["head_weight"].T + HEAD["head_bias"]
    given = {"features": features.astype(np.float32), **HEAD, **more}
    return Outputs(LABELS, np.array([90, 50, 30, 20]), logits=logits.astype(np.float32), split=split, **given)


def check_gradient(problem, size, seed=0):
    """The gradient is that of the value, at some point."""
    x = np.random.default_rng(seed).normal(size=size)
    value, gradient = problem.value_and_gradient(x)
    numeric = approx_fprime(x, lambda at: problem.value_and_gradient(at)[0], 1e-6)
    np.testing.assert_allclose(gradient, numeric, atol=2e-5)
    return x, value


def test_class_statistics_are_means_and_a_shrunk_balanced_covariance():
    found = class_statistics(FEATURES, TARGET, 4)
    means = np.stack([FEATURES[label == LABELS].mean(0) for label in range(4)])
    within = sum(np.cov(FEATURES[label == LABELS].T, bias=True) for label in range(4)) / 4
    np.testing.assert_allclose(found.means, means)  # features are read as float32
    np.testing.assert_allclose(found.covariance, 0.9 * within + 0.1 * np.trace(within) / 3 * np.eye(3), rtol=1e-5)
    np.testing.assert_allclose(found.centre, means.mean(0))
    between = means - means.mean(0)
    moments = found.second_moments()
    np.testing.assert_allclose(moments[:3, :3], found.covariance + between.T @ between / 4)
    assert moments[3].tolist() == moments[:, 3].tolist() == [0, 0, 0, 1]


def test_features_that_do_not_vary_within_classes_have_the_plain_metric():
    found = class_statistics(np.eye(4)[LABELS], TARGET, 4)
    np.testing.assert_array_equal(found.covariance, np.eye(4))


def test_the_lda_head_is_that_of_the_formula():
    statistics = ClassStatistics(RNG.normal(size=(4, 3)), np.diag([0.5, 1.0, 2.0]))
    head, centre = lda_head(statistics), statistics.means.mean(0)
    for label, mean in enumerate(statistics.means):
        weight = (mean - centre) / [0.5, 1.0, 2.0]
        np.testing.assert_allclose(head.weight[label], weight)
        assert head.bias[label] == pytest.approx(-0.5 * weight @ (mean + centre))
    centred = head.centred()
    np.testing.assert_allclose(centred.scores(torch.from_numpy(FEATURES)).mean(1), 0, atol=1e-12)
    np.testing.assert_allclose(centred.times(3.0).bias, 3 * centred.bias)
    np.testing.assert_allclose(centred.times(3.0).weight, 3 * centred.weight)


def test_the_balanced_head_minimises_its_loss():
    """At the optimum in whitened features the gradient of loss and ridges is 0."""
    statistics = class_statistics(FEATURES, TARGET, 4)
    head, solution = balanced_head(FEATURES, TARGET, statistics, tolerance=1e-8)
    assert solution.converged
    values, vectors = np.linalg.eigh(statistics.covariance)
    root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    white = torch.from_numpy((FEATURES - statistics.centre) @ inverse)
    weight = torch.from_numpy(head.weight @ root).requires_grad_()
    bias = torch.from_numpy(head.bias + head.weight @ statistics.centre).requires_grad_()
    losses = F.cross_entropy(white @ weight.T + bias, TARGET, reduction="none")
    loss = (losses * balanced_weights(TARGET, 4)).sum() + 0.005 * weight.square().sum() + 0.5e-4 * bias.square().sum()
    loss.backward()
    assert max(weight.grad.abs().max(), bias.grad.abs().max()) < 1e-6  # features are read as float32
    assert solution.value == pytest.approx(loss.item(), rel=1e-5)


def test_the_spread_of_scores_is_their_standard_deviation():
    weights = torch.from_numpy(RNG.uniform(0.5, 2, 19))
    centred = LOGITS - LOGITS.mean(1, keepdims=True)
    share = weights.numpy()[:, None] / (4 * weights.sum().item())
    expected = np.sqrt((share * centred**2).sum() - (share * centred).sum() ** 2)
    assert spread(LogitRows(LOGITS), weights) == pytest.approx(expected, rel=1e-6)
    head = LinearHead(HEAD["head_weight"].astype(np.float64), HEAD["head_bias"].astype(np.float64))
    scores = head.scores(torch.from_numpy(FEATURES)).numpy()
    by_head = spread(LogitRows(FEATURES), weights, head=head)
    assert by_head == pytest.approx(spread(LogitRows(scores), weights), rel=1e-6)


def test_the_stack_has_the_gradient_and_hessian_of_its_value():
    names = ["model", "lda", "prior", "norms"]
    weights = torch.from_numpy(RNG.uniform(0.5, 2, 19))
    scores = [torch.from_numpy(LOGITS), torch.from_numpy(RNG.normal(size=(19, 4)))]
    vectors = torch.from_numpy(RNG.normal(size=(2, 4)))
    parts = [slice(0, 7), slice(7, 19)]
    stacked = torch.stack([scores[0], scores[0] + scores[1]]).transpose(1, 2)  # the second is mixed as a difference
    stack = Stack(names, lambda: (Held.of(TARGET[p], weights[p], stacked[:, :, p]) for p in parts), vectors)
    x = np.array([0.5, 0.3, -0.2, 0.1])
    value, gradient, hessian = stack.evaluate(x)
    logits = x[0] * scores[0] + x[1] * scores[1] + torch.from_numpy(x[2:]) @ vectors
    prior = sum(
        0.5 * ((at - PRIORS[name].mean) / PRIORS[name].deviation) ** 2 for name, at in zip(names, x, strict=True)
    )
    assert value == pytest.approx((weights * F.cross_entropy(logits, TARGET, reduction="none")).sum().item() + prior)
    np.testing.assert_allclose(gradient, approx_fprime(x, lambda at: stack.evaluate(at)[0], 1e-6), atol=1e-4)
    for place in range(4):
        step = 1e-6 * np.eye(4)[place]
        change = (stack.evaluate(x + step)[1] - stack.evaluate(x - step)[1]) / 2e-6
        np.testing.assert_allclose(hessian[place], change, atol=1e-4)
    solution = stack.solve(exact=True)
    assert solution.converged
    assert solution.evaluations < 12
    assert np.abs(stack.evaluate(solution.x)[1]).max() < 1e-6


def test_priors_of_the_numbers_are_frozen():
    told = {name: (prior.mean, prior.deviation) for name, prior in PRIORS.items()}
    assert told == {
        "model": (1 / 1.4, 0.25),
        "lda": (0.1, 0.2),
        "balanced": (0.1, 0.2),
        "prior": (-0.45, 0.2),
        "norms": (0.0, 0.2),
    }


def test_weights_of_held_out_samples_sum_to_their_effective_number():
    counts = np.array([90, 50, 30, 20])
    like = counts[LABELS] ** -0.5
    np.testing.assert_allclose(sample_weights(LABELS, counts), like * like.sum() / np.square(like).sum())
    balanced = np.repeat(np.arange(4), 30)
    other = np.sqrt(counts)[balanced] / 30
    np.testing.assert_allclose(sample_weights(balanced, counts), other * other.sum() / np.square(other).sum())


@pytest.mark.parametrize("shifts", [True, False])
def test_the_affine_problem_is_its_formula(shifts):
    weights, norms = torch.from_numpy(RNG.uniform(0.5, 2, 19)) / 19, torch.from_numpy(RNG.uniform(0.5, 2, 4))
    centre = RNG.normal(size=8)
    problem = AffineProblem(LogitRows(LOGITS), TARGET, weights, norms, ridge=0.3, centre=centre, shifts=shifts)
    x = RNG.normal(size=8)
    value, gradient = problem.value_and_gradient(x)
    stored = problem.rows.read(slice(None)).double()

    def plain(at):
        omega, beta = at.chunk(2)
        losses = F.cross_entropy(stored * omega + beta * norms, TARGET, reduction="none")
        return (weights * losses).sum() + 0.15 * (at - torch.from_numpy(centre)).square().sum()

    point = torch.from_numpy(x).requires_grad_()
    plain(point).backward()
    assert value == pytest.approx(plain(point).item())
    expected = point.grad.numpy() * (1 if shifts else np.repeat([1, 0], 4))
    np.testing.assert_allclose(gradient, expected, rtol=1e-9)
    hessian = torch.autograd.functional.hessian(plain, torch.from_numpy(x)).numpy()
    *same, found = problem.with_blocks(x)
    assert same[0] == pytest.approx(value)
    np.testing.assert_allclose(same[1], gradient)
    aa, ab, bb = found.aa, found.ab, found.bb
    np.testing.assert_allclose(aa, np.diag(hessian)[:4], rtol=1e-6)
    np.testing.assert_allclose(ab, np.diag(hessian[:4, 4:]) if shifts else np.zeros(4), rtol=1e-6)
    np.testing.assert_allclose(bb, np.diag(hessian)[4:] if shifts else np.ones(4), rtol=1e-6)


def test_problems_of_other_methods_have_the_gradient_of_their_value():
    data = from_arrays(LOGITS, LABELS)
    x, value = check_gradient(_MatrixProblem(data, 0.7, 0.3), 20)
    matrix, shift = torch.from_numpy(x[:16]).view(4, 4), torch.from_numpy(x[16:])
    stored = data.rows.read(slice(None)).double()
    off = matrix - torch.diag(matrix.diag())
    ridge = 0.7 / (2 * 4 * 3) * off.square().sum() + 0.3 / (2 * 4) * shift.square().sum()
    assert value == pytest.approx((F.cross_entropy(stored @ matrix.T + shift, TARGET) + ridge).item())

    statistics = class_statistics(FEATURES, TARGET, 4)
    weights = balanced_weights(TARGET, 4)
    linear = LinearProblem(FEATURES, TARGET, weights, statistics, plain_penalty(0.2, statistics))
    x, value = check_gradient(linear, 16)
    head = linear.head(x)
    losses = F.cross_entropy(head.scores(torch.from_numpy(FEATURES)), TARGET, reduction="none") * weights
    ridge = 0.1 * (np.square(head.weight).sum() + np.square(head.bias).sum())
    assert value == pytest.approx(losses.sum().item() + ridge, rel=1e-5)
    np.testing.assert_allclose(linear.variables(linear.matrix(x)), x)

    platt = _OneVersusRest(data.rows, TARGET, 0.2)
    x, value = check_gradient(platt, 8)
    positives = np.bincount(LABELS)
    high, low = (positives + 1) / (positives + 2), 1 / (19 - positives + 2)
    targets = torch.from_numpy(np.where(np.eye(4)[LABELS] > 0, high, low))
    scores = stored * torch.from_numpy(x[:4]) + torch.from_numpy(x[4:])
    identity = np.repeat([1.0, 0.0], 4)
    plain = F.binary_cross_entropy_with_logits(scores, targets, reduction="sum") / 19
    assert value == pytest.approx(plain.item() + 0.1 * (x - identity) @ (x - identity))
    blocks = platt.with_blocks(x)[2]
    for place, block in ((0, blocks.aa), (4, blocks.bb)):
        step = 1e-6 * np.eye(8)[place]
        change = platt.value_and_gradient(x + step)[1] - platt.value_and_gradient(x - step)[1]
        assert block[0] == pytest.approx(change[place] / 2e-6, rel=1e-4)
    step = 1e-6 * np.eye(8)[0]
    change = platt.value_and_gradient(x + step)[1] - platt.value_and_gradient(x - step)[1]
    assert blocks.ab[0] == pytest.approx(change[4] / 2e-6, rel=1e-4)


def test_stage_two_is_sgd_with_momentum_along_a_cosine():
    """Every step beside the optimiser's formula, with the sampler's own batches."""
    start = torch.tensor([0.3, -0.2])
    rates = torch.from_numpy(LOGITS[:, :2]).float()
    trained = start.clone().requires_grad_()

    def loss(rows):
        return (rates[rows] @ trained).square().mean()

    value = train_parameters([trained], loss, LABELS, steps=5, batch_size=4, lr=0.1, warmup=2, weight_decay=0.3, seed=5)
    by_hand, velocity, sampler = start.clone(), torch.zeros(2), Sampler(LABELS, "instance", seed=5)
    schedule = [0.15, 0.2, *(0.1 * (1 + math.cos(math.pi * step / 3)) for step in range(3))]
    for step, rate in enumerate(schedule):
        assert learning_rate(step, 5, 0.1, 2) == pytest.approx(rate)
        rows = rates[torch.from_numpy(sampler.batch(step, 4).indices)]
        last = (rows @ by_hand).square().mean()
        gradient = 2 * rows.T @ (rows @ by_hand) / 4 + 0.3 * by_hand
        velocity = gradient if step == 0 else 0.9 * velocity + gradient
        by_hand = by_hand - rate * velocity
    torch.testing.assert_close(trained.detach(), by_hand)
    assert value == pytest.approx(last.item(), rel=1e-5)
    assert [learning_rate(step, 4, 0.2) for step in (0, 2, 4)] == pytest.approx([0.2, 0.1, 0])
    assert learning_rate(3, 3, 0.2, 3) == pytest.approx(0.4)


@pytest.mark.parametrize("divide_by", ["batch", "weights"])
def test_one_step_of_omega_and_beta(divide_by):
    norms = np.array([0.5, 1.0, 2.0, 3.0])
    data = from_arrays(LOGITS, LABELS, weight_norms=norms)
    weights = torch.tensor([0.5, 0.5, 1.0, 2.0])
    centre = np.zeros(8)
    found = train_affine(
        data,
        weights,
        steps=1,
        batch_size=19,
        lr=0.1,
        warmup=0,
        weight_decay=0.5,
        centre=centre,
        divide_by=divide_by,
        seed=0,
    )
    x = torch.cat([torch.ones(4), torch.zeros(4)]).requires_grad_()
    stored = data.rows.read(slice(None)).float()
    logits = stored * x[:4] + x[4:] * torch.from_numpy(norms).float()
    mean = F.cross_entropy(logits, TARGET, weights, reduction="sum")
    loss = mean / (19 if divide_by == "batch" else weights[TARGET].sum()) + 0.25 * x.square().sum()
    loss.backward()
    np.testing.assert_allclose(found.x, (x - 0.1 * x.grad).detach(), rtol=1e-5)
    assert found.value == pytest.approx(loss.item(), rel=1e-5)
    assert (found.converged, found.evaluations, found.gradient) == (True, 1, None)


FITTED = {
    "crt": (CRT(max_iter=2000), 4 * 3 + 4),
    "crt sgd": (CRT("sgd", max_iter=3), 4 * 3 + 4),
    "disalign": (DisAlign(max_iter=3), 3 + 2 * 4 + 1),
    "marc": (MARC(), 2 * 4),
    "marc sgd": (MARC(solver="sgd", max_iter=3), 2 * 4),
    "lws": (LWS(), 4),
    "tau-norm": (TauNorm(tau=0.5), 0),
    "logit adjustment": (LogitAdjustment(), 0),
    "halo": (HALO(), 5 + 4 * 3 + 4),
    "temperature": (TemperatureScaling(), 1),
    "vector": (VectorScaling(), 2 * 4),
    "matrix": (MatrixScaling(), 4 * 4 + 4),
    "platt": (PlattScaling(), 2 * 4),
}


@pytest.mark.parametrize("name", FITTED)
def test_numbers_seconds_and_the_folded_head(name):
    method, numbers = FITTED[name]
    train, held_out = outputs(), outputs("validation", seed=3)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of so few samples nothing is asked but the numbers
        fit_outputs(method, train, held_out)
    assert 0 <= method.result_.seconds <= time.perf_counter() - began
    assert method.n_parameters_ == numbers
    linear = torch.nn.Linear(3, 4)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(HEAD["head_weight"]))
        linear.bias.copy_(torch.from_numpy(HEAD["head_bias"]))
    features = torch.from_numpy(outputs(seed=5).features)
    expected = method.transform(linear(features).detach(), features)
    torch.testing.assert_close(method.head(linear)(features).detach(), expected, rtol=1e-4, atol=1e-4)


def test_marc_shifts_by_beta_times_the_norms():
    marc = MARC().fit(LOGITS, LABELS, weight_norms=[0.5, 1.0, 2.0, 3.0])
    np.testing.assert_allclose(marc.shift_, marc.beta_ * [0.5, 1.0, 2.0, 3.0])
    np.testing.assert_allclose(marc.scale_, marc.omega_)
    np.testing.assert_allclose(marc.transform(LOGITS), LOGITS * marc.omega_ + marc.shift_, rtol=1e-5)


def test_tau_norm_divides_by_a_power_of_the_norms_and_drops_the_bias():
    fitted = TauNorm(tau=0.5).fit(LOGITS, LABELS, weight_norms=[1.0, 4.0, 9.0, 16.0], head_bias=[1.0, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(fitted.transform(LOGITS), (LOGITS - [1, 2, 3, 4]) / [1, 2, 3, 4], rtol=1e-5)


def test_samples_of_the_training_set_are_no_held_out_samples():
    rows = np.arange(80.0).reshape(40, 2)
    labels = np.arange(40) % 2
    train = from_arrays(rows, labels)
    new = -1 - rows
    for shared, refused in ((0, False), (1, False), (4, False), (5, True), (40, True)):
        held = from_arrays(np.concatenate([rows[:shared], new[shared:]]), labels)
        if refused:
            with pytest.raises(UserError, match=f"{shared} of 40 held-out samples are training samples too"):
                require_unseen(train, held)
        else:
            require_unseen(train, held)
    one = from_arrays(np.concatenate([rows[:1], new[1:4]]), labels[:4])
    require_unseen(train, one)  # a single duplicate is chance, however few samples there are
    with pytest.raises(UserError, match="2 of 4"):
        require_unseen(train, from_arrays(np.concatenate([rows[:2], new[2:4]]), labels[:4]))


def test_equal_logits_of_other_features_are_other_samples():
    rows, labels = np.ones((20, 2)), np.arange(20) % 2
    known, other = (from_arrays(rows, labels, features=RNG.normal(size=(20, 3))) for _ in range(2))
    require_unseen(known, other)
    without = from_arrays(rows, labels)
    for pair in ((known, without), (without, known), (without, without)):
        with pytest.raises(UserError, match="20 of 20"):
            require_unseen(*pair)
    with pytest.raises(UserError, match="training outputs have 3 features per sample, held-out outputs 2"):
        require_unseen(known, from_arrays(rows, labels, features=np.ones((20, 2))))


def test_choosing_needs_samples_of_the_smaller_classes():
    def held(labels):
        made = from_arrays(np.zeros((len(labels), 4)), labels, class_counts=[5, 90, 20, 50], need_every_class=False)
        return require_validation(made, "tau")

    held([1, 3, 2])  # class 2 belongs to the smaller half
    held([1, 0])
    with pytest.raises(UserError, match="larger classes"):
        held([1, 3, 3])


def test_which_images_a_method_is_fitted_on():
    counts = np.array([1000, 300, 60])
    assert MARC().enough_images(4) == 400
    assert MARC().enough_images(1000) == 50
    assert MARC(solver="sgd").enough_images(4) is None
    assert chosen_images("all", MARC(), counts) is None
    assert chosen_images("auto", CRT(), counts) is None
    assert chosen_images("auto", MARC(), counts).most == math.ceil(800 / math.sqrt(3))
    few = chosen_images(7, CRT(), counts, seed=3)
    assert (few.most, few.seed) == (7, 3)
    assert chosen_images(7, CRT(), counts).seed == 0
    assert chosen_images(999, CRT(), counts).most == 999
    assert chosen_images(1000, CRT(), counts) is None  # no class has more
    with pytest.raises(UserError, match="images_per_class"):
        chosen_images("many", CRT(), counts)


def test_a_model_that_knows_its_training_images_is_told():
    labels = np.arange(200) % 2
    logits = np.eye(2)[labels]

    def told(wrong, method, split="train"):
        made = logits.copy()
        made[:wrong] = made[:wrong, ::-1]
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            warn_if_all_is_known(method, Outputs(labels, np.array([100, 100]), logits=made, split=split))
        return [str(one.message) for one in found]

    assert told(2, MARC())[0].startswith("the model classifies 99.0 % of the training images correctly, so MARC")
    assert told(0, MARC())[0].startswith("the model classifies 100.0 %")
    assert told(3, MARC()) == []
    assert told(0, MARC(), split="test") == []
    assert told(0, LogitAdjustment()) == []
    warn_if_all_is_known(MARC(), None)


def test_target_priors():
    log_prior = np.log([0.7, 0.2, 0.1])
    names = ("a", "b", "c")
    np.testing.assert_array_equal(log_target("uniform", log_prior, names), 0)
    np.testing.assert_array_equal(log_target("train", log_prior, names), log_prior)
    np.testing.assert_allclose(log_target(0.5, log_prior, names), 0.5 * log_prior)
    np.testing.assert_allclose(log_target([2, 0, 6], log_prior, names), [np.log(0.25), -np.inf, np.log(0.75)])
    for power in (-10, 10):
        log_target(power, log_prior, names)
    for wrong, message in (
        (10.5, "target_prior"),
        (-10.5, "target_prior"),
        ([1, 2], r"one weight per class: shape \(3,\), not \(2,\)"),
        ([1, -1, 0], r"target_prior\[1\] is -1"),
        ([1, 1, np.inf], r"target_prior\[2\] is inf"),
        ([0, 0, 0], "0 for every class"),
        (True, "target_prior must"),
    ):
        with pytest.raises(UserError, match=message):
            log_target(wrong, log_prior, names)
    shift = np.array([1.0, -np.inf, 2.0])
    moved = shifted(torch.ones(2, 3), shift)
    assert moved.tolist() == [[2.0, NEVER, 3.0]] * 2
    weight, bias = shifted_head(torch.ones(3, 2), torch.ones(3), shift)
    assert weight.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert bias.tolist() == [2.0, NEVER, 3.0]


def test_weights_of_the_target_prior_and_folds():
    held = from_arrays(LOGITS, LABELS)
    weights = target_weights(held, np.log([0.4, 0.3, 0.2, 0.1]))
    of_class = [weights[label == LABELS].sum() for label in range(4)]
    np.testing.assert_allclose(of_class, [0.4, 0.3, 0.2, 0.1])
    assert np.ptp(weights[LABELS == 0]) == 0
    some = from_arrays(LOGITS, np.zeros(19, int) + (np.arange(19) > 9), need_every_class=False)
    with pytest.raises(UserError, match="0 for every class that has held-out samples"):
        target_weights(some, np.array([-np.inf, -np.inf, 0.0, 0.0]))
    with pytest.raises(UserError, match="of 1 class; two classes at least"):
        target_weights(from_arrays(LOGITS, np.zeros(19, int), need_every_class=False), np.zeros(4))
    folds = stratified(LABELS, 3, seed=0)
    assert np.ptp(np.bincount(folds)) <= 1
    for label in range(4):
        assert np.ptp(np.bincount(folds[label == LABELS], minlength=3)) <= 1
    assert (folds != stratified(LABELS, 3, seed=1)).any()


def test_the_best_scale_is_that_of_the_greatest_likelihood():
    weights = RNG.uniform(0.5, 2, 19)
    offset = torch.from_numpy(np.log([0.4, 0.3, 0.2, 0.1]))
    found = best_scale(torch.from_numpy(LOGITS), TARGET, offset, weights)

    def loss(scale):
        losses = F.cross_entropy(scale * torch.from_numpy(LOGITS) + offset, TARGET, reduction="none")
        return float(torch.from_numpy(weights) @ losses)

    assert loss(found) < min(loss(0.98 * found), loss(1.02 * found))
    right, wrong = 30.0 * torch.eye(2), -30.0 * torch.eye(2)
    assert best_scale(right.double(), torch.arange(2), torch.zeros(2), np.ones(2)) <= 20
    assert best_scale(wrong.double(), torch.arange(2), torch.zeros(2), np.ones(2)) == pytest.approx(0.05, rel=0.02)


def trial(*likelihoods):
    """Candidates with these log-likelihoods on equally weighted samples."""
    made = [Candidate(str(n), MARC(), np.zeros(2), np.array(one), np.ones(4)) for n, one in enumerate(likelihoods)]
    return Trial(made, np.full(4, 0.25))


def test_the_model_stays_unless_something_is_surely_better():
    as_it_is = [-1.0, -1.0, -1.0, -1.0]
    assert trial(as_it_is, [-0.5, -0.5, -0.5, -0.4]).chosen.name == "1"
    assert trial(as_it_is, as_it_is).chosen.name == "0"  # better by nothing
    gain, error = trial(as_it_is, [-1.0, 0.0, -1.0, 0.0]).difference(
        *(Candidate("", MARC(), np.zeros(2), np.array(one), np.ones(4)) for one in ([-1.0, 0, -1, 0], as_it_is))
    )
    assert (gain, error) == pytest.approx((0.5, 0.25))
    assert trial(as_it_is, [-1.0, 0.0, -1.0, 0.0]).chosen.name == "0"  # by two errors, not by more
    nearly = [-0.5, -0.5, -0.5, -0.4]
    best = [-0.4, -0.6, -0.5, -0.3]
    assert trial(as_it_is, nearly, best).chosen.name == "1"  # the simplest within one error of the best
    assert trial(as_it_is, nearly, [-0.1, -0.1, -0.1, -0.05]).chosen.name == "2"


def test_candidates_need_features_on_both_sides_for_a_new_classifier():
    plain, full = from_arrays(LOGITS, LABELS), from_arrays(LOGITS, LABELS, features=FEATURES)

    def names(*given):
        return [name for name, _ in _methods(*given)]

    simple = ["softmax", "logit-adjustment", "marc"]
    assert names(full, full) == [*simple, "crt", "halo"]
    assert names(full, plain) == names(plain, full) == names(plain, plain) == [*simple, "halo"]
    assert names(None, full) == simple


def test_a_new_classifier_begins_small():
    """As `nn.Linear` does: within one by the root of the width. One step with a tiny rate leaves it there."""
    fitted = CRT("sgd", max_iter=1, lr=1e-9, ridge=0.0).fit(LOGITS, LABELS, features=np.tile(FEATURES, 8))
    assert 0.15 < np.abs(fitted.weight_).max() <= 1 / math.sqrt(24) + 1e-6
    assert np.abs(fitted.bias_).max() < 1e-6
    other = CRT("sgd", max_iter=1, lr=1e-9, ridge=0.0, seed=1).fit(LOGITS, LABELS, features=np.tile(FEATURES, 8))
    assert (other.weight_ != fitted.weight_).any()


def test_a_temperature_is_one_number_more():
    train, held_out = outputs(), outputs("validation", seed=3)
    tempered = Tempered(LogitAdjustment()).fit(train, validation=held_out)
    assert tempered.n_parameters_ == 1
    assert tempered.chosen_ == {"tau": 1.0, "temperature": tempered.temperature_}
    plain = LogitAdjustment().fit(train).transform(held_out)
    np.testing.assert_allclose(tempered.transform(held_out), plain / tempered.temperature_, rtol=1e-5)


@pytest.mark.parametrize("method", [LogitAdjustment("auto"), TauNorm("auto")], ids=str)
def test_of_equally_good_taus_the_nearest_to_one_is_taken(method):
    """Logits so clear that no tau changes a decision."""
    logits = 1e4 * np.eye(4)[LABELS]
    method.fit(logits, LABELS, weight_norms=[1, 1.1, 1.2, 1.3], validation=(logits, LABELS))
    assert method.tau_ == 1.0


def test_of_equally_good_gammas_the_papers_is_taken():
    logits = 4 * np.eye(4)[LABELS]
    assert MARC("auto").fit(logits, LABELS, validation=(1e3 * logits, LABELS)).gamma_ == 1.2


class Line(Problem):
    """Half a square, which is solved by one step."""

    paired = True

    def with_blocks(self, x):
        return *self.value_and_gradient(x), Blocks(np.ones(1), np.zeros(1), np.ones(1), reach=np.full(1, np.inf))

    def value_and_gradient(self, x):
        return 0.5 * float(x @ x) + 1.0, x.copy()


def test_a_gradient_that_just_reaches_the_goal_is_solved():
    start = np.array([1.0, 0.5])
    exactly = minimise(Line(), start, first=1.0, tolerance=1.0)
    assert exactly.converged
    assert (exactly.evaluations, exactly.gradient) == (1, 1.0)
    solved = minimise(Line(), 4 * start, tolerance=1e-6)
    assert solved.converged
    assert np.abs(solved.x).max() <= 4e-6
    assert solved.evaluations <= 4
    assert minimise(Line(), np.zeros(2)).gradient == 0.0


def test_the_warning_points_at_the_caller():
    with pytest.warns(ConvergenceWarning, match="not solved") as found:
        minimise(Line(), np.ones(2), tolerance=1e-9, max_evaluations=1)
    assert found[0].filename == __file__


def test_settings_of_the_heads():
    told = inspect.signature(balanced_head).parameters
    assert (told["tolerance"].default, told["max_evaluations"].default) == (1e-3, 200)


def test_what_a_sample_counts_for():
    """A set of 12, 4 and 0 samples that stands for training counts of 60, 30 and 10."""
    data = from_arrays(np.zeros((16, 3)), np.repeat([0, 1], [12, 4]), class_counts=[60, 30, 10], need_every_class=False)
    np.testing.assert_allclose(data.frequency, [0.6 / 0.75, 0.3 / 0.25, 0])
    assert data.seen_counts.tolist() == [12, 4, 0]
    part = data.part(np.array([0, 12, 13]))
    assert part.labels.tolist() == [0, 1, 1]
    assert part.rows.shape == (3, 3)
    assert part.features is None


def test_a_closed_form_is_solved_without_a_pass():
    result = LogitAdjustment().fit(LOGITS, LABELS).result_
    assert (result.converged, result.iterations, result.gradient, result.value) == (True, 0, None, None)


def test_the_value_of_a_stack_is_that_of_where_it_stopped():
    held = Held.of(TARGET, torch.ones(19, dtype=torch.float64), torch.from_numpy(LOGITS).T[None])
    stack = Stack(["model", "prior"], lambda: [held], torch.from_numpy(np.log(np.array([[0.4, 0.3, 0.2, 0.1]]))))
    solution = stack.solve(exact=True)
    value, gradient, _ = stack.evaluate(solution.x)
    assert solution.value == pytest.approx(value, abs=1e-8)
    assert np.abs(gradient).max() < 1e-5


def test_few_classes_and_few_images_among_the_held_out():
    counts = np.array([900, 90, 9, 4])
    assert like_training(np.array([90, 9, 1, 1]), counts)  # one image more of the rarest is rounding
    assert like_training(np.array([90, 9, 0, 0]), counts)  # absent classes say nothing
    assert not like_training(np.array([20, 20, 20, 20]), counts)
    labels = np.repeat([0, 1], [30, 30])
    other = np.sqrt(counts[labels]) / 30
    np.testing.assert_allclose(sample_weights(labels, counts), other * other.sum() / np.square(other).sum())
    single = np.repeat([0, 1, 2, 3], [1, 30, 30, 1])  # of one image per class the weight is that of one
    other = np.sqrt(counts[single]) / np.array([1, 30, 30, 1])[single]
    np.testing.assert_allclose(sample_weights(single, counts), other * other.sum() / np.square(other).sum())


def test_a_fit_is_done_again_with_two_classes_and_not_with_one():
    train, held_out = from_outputs(outputs()), from_outputs(outputs("validation", seed=3))
    halo = HALO().fit_checked(train, held_out)
    two = held_out.part(np.flatnonzero(LABELS < 2))
    assert _refitted(halo, train, two).numbers_ != halo.numbers_
    assert _refitted(halo, train, held_out.part(np.flatnonzero(LABELS < 1))) is halo


def test_folds_leave_single_samples_where_they_are():
    labels = np.array([0] * 7 + [1] * 4 + [2] * 2 + [3])
    folds = _stratified(labels, 3, 0)
    held = np.concatenate(folds)
    assert sorted(held) == list(range(13))  # all but the only sample of its class
    for label in range(3):
        assert np.ptp([np.sum(labels[fold] == label) for fold in folds]) <= 1
    assert any(list(one) != list(two) for one, two in zip(folds, _stratified(labels, 3, 1), strict=True))
    features = RNG.normal(size=(14, 3))
    data = from_arrays(RNG.normal(size=(14, 4)), labels, features=features)
    made = cross_fit(data, features, lambda part, inputs, statistics: {})
    assert len(made) == 3  # the smallest class that can be left out has two samples
    full = np.repeat([0, 1], 9)
    many = from_arrays(RNG.normal(size=(18, 2)), full, features=RNG.normal(size=(18, 3)))
    assert len(cross_fit(many, many.features, lambda part, inputs, statistics: {})) == 5
    four = from_arrays(RNG.normal(size=(13, 2)), np.repeat([0, 1], [9, 4]), features=RNG.normal(size=(13, 3)))
    assert len(cross_fit(four, four.features, lambda part, inputs, statistics: {})) == 4
    scarce = from_arrays(RNG.normal(size=(4, 3)), [0, 0, 1, 2], features=RNG.normal(size=(4, 3)))
    with pytest.raises(UserError, match="two classes with at least two samples each"):
        cross_fit(scarce, scarce.features, lambda part, inputs, statistics: {})


@pytest.mark.parametrize("loss", [1.2, 0.8, 0.3])
def test_a_head_is_found_by_its_loss(loss):
    statistics = class_statistics(FEATURES, TARGET, 4)
    head = head_of_loss(FEATURES, TARGET, statistics, loss)
    reached = F.cross_entropy(head.scores(torch.from_numpy(FEATURES)), TARGET).item()
    best = F.cross_entropy(head_of_loss(FEATURES, TARGET, statistics, 0.0).scores(torch.from_numpy(FEATURES)), TARGET)
    assert reached == pytest.approx(max(loss, best.item()), rel=1e-3)


def test_a_loss_of_chance_is_that_of_a_head_without_an_opinion():
    head = head_of_loss(FEATURES, TARGET, class_statistics(FEATURES, TARGET, 4), 2.0)
    assert not head.weight.any()
    assert not head.bias.any()
    assert mean_loss(from_arrays(LOGITS, LABELS)) == pytest.approx(
        F.cross_entropy(torch.from_numpy(LOGITS), TARGET).item(), rel=1e-5
    )


def test_held_out_samples_of_some_classes_are_enough_for_a_temperature():
    """The softmax is over the classes that have held-out samples; a class with one counts."""
    rng = np.random.default_rng(4)
    train = from_arrays(LOGITS, LABELS)
    labels = np.array([0] * 8 + [1] * 5 + [2])
    logits = 3 * (rng.normal(size=(14, 4)) + np.eye(4)[labels])
    held_out = from_arrays(logits, labels, classes=train.classes, need_every_class=False)
    fitted = Tempered(LogitAdjustment()).fit_checked(train, held_out)
    prior = np.bincount(LABELS) / 19
    adjusted = torch.from_numpy(logits - np.log(prior))[:, :3]
    weights = torch.from_numpy(sample_weights(labels, np.bincount(LABELS)))
    half = torch.from_numpy(0.5 * np.log(prior[:3]))

    def loss(scale):
        return float(weights @ F.cross_entropy(scale * adjusted + half, torch.from_numpy(labels), reduction="none"))

    scale = 1 / fitted.temperature_
    assert loss(scale) <= min(loss(0.97 * scale), loss(1.03 * scale))


def test_a_new_classifier_gets_its_passes():
    """1,000 passes unless told otherwise; what is told is obeyed."""
    with pytest.warns(ConvergenceWarning, match="after 3 passes"):
        CRT(max_iter=3, tolerance=1e-9).fit(LOGITS, LABELS, features=FEATURES)
    assert CRT(tolerance=1e-7, ridge=0.1).fit(LOGITS, LABELS, features=FEATURES).result_.converged
    assert CRT("sgd", max_iter=4).fit(LOGITS, LABELS, features=FEATURES).n_iter_ == 4
    assert MARC(solver="sgd", max_iter=5).fit(LOGITS, LABELS).n_iter_ == 5
    with pytest.warns(ConvergenceWarning, match="after 2 passes"):
        MARC(max_iter=2, tolerance=1e-12).fit(LOGITS, LABELS)
