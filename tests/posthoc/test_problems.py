"""The problems of the methods: value and gradient compared with their formulas; when a solve ends."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.exceptions import ConvergenceWarning

from longtail.outputs.rows import LogitRows
from longtail.posthoc.inputs import from_arrays
from longtail.posthoc.platt import _OneVersusRest
from longtail.posthoc.scaling import _MatrixProblem
from longtail.posthoc.solver import Problem, minimise
from longtail.posthoc.solver.affine import AffineProblem
from longtail.posthoc.solver.lbfgs import Blocks
from longtail.posthoc.solver.linear import LinearProblem, balanced_weights, class_statistics, plain_penalty

from .conftest import FEATURES, LABELS, LOGITS, RNG, TARGET, check_gradient


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
        return (weights * losses).sum() + 0.15 * weights.sum() * (at - torch.from_numpy(centre)).square().sum()

    point = torch.from_numpy(x).requires_grad_()
    plain(point).backward()
    assert value == pytest.approx(plain(point).item())
    expected = point.grad.numpy() * (1 if shifts else np.repeat([1, 0], 4))
    np.testing.assert_allclose(gradient, expected, rtol=1e-9)
    hessian = torch.autograd.functional.hessian(plain, torch.from_numpy(x)).numpy()
    [same], found = problem.with_blocks(x)
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
    blocks = platt.with_blocks(x)[1]
    for place, block in ((0, blocks.aa), (4, blocks.bb)):
        step = 1e-6 * np.eye(8)[place]
        change = platt.value_and_gradient(x + step)[1] - platt.value_and_gradient(x - step)[1]
        assert block[0] == pytest.approx(change[place] / 2e-6, rel=1e-4)
    step = 1e-6 * np.eye(8)[0]
    change = platt.value_and_gradient(x + step)[1] - platt.value_and_gradient(x - step)[1]
    assert blocks.ab[0] == pytest.approx(change[4] / 2e-6, rel=1e-4)


class Line(Problem):
    """Half a square, which is solved by one step."""

    paired = True

    def with_blocks(self, x):
        return [self.value_and_gradient(x)], Blocks(np.ones(1), np.zeros(1), np.ones(1), reach=np.full(1, np.inf))

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
