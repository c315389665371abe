"""Parts of the rows, weights of the classes, and float32: the same problem in other forms."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longtail import MARC
from longtail.outputs import rows as logit_rows
from longtail.outputs.rows import LogitRows
from longtail.posthoc.inputs import from_arrays
from longtail.posthoc.solver import affine
from longtail.posthoc.solver.affine import SUBSAMPLING, AffineProblem, largest_subsample

COUNTS = np.array([40, 12, 4])


def repeated_rows(counts=COUNTS):
    """Every class repeats one row: any part of the rows that stands for all of them is the same problem."""
    own = np.random.default_rng(0).normal(size=(len(counts), len(counts))) + 2 * np.eye(len(counts))
    y = np.repeat(np.arange(len(counts)), counts)
    return own[y].astype(np.float32), y


def problem_of(logits, y, **options):
    weights = torch.from_numpy(np.linspace(1, 2, len(np.unique(y)))[y] / len(y))
    norms = torch.linspace(0.5, 1.5, logits.shape[1])
    settings = {"ridge": 0.01, "centre": np.full(2 * logits.shape[1], 0.3), **options}
    return AffineProblem(LogitRows(logits), torch.from_numpy(y), weights, norms, **settings)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 200))
def test_thelargest_subsample_is_the_largest(counts, rows):
    counts = np.array(counts)
    fitting = [m for m in range(counts.max() + 1) if np.minimum(counts, m).sum() <= rows]
    assert largest_subsample(counts, rows) == max(fitting)


def test_a_part_weighs_as_much_as_all_rows(monkeypatch):
    monkeypatch.setattr(affine, "SMALL_PROBLEM", 0)
    logits, y = repeated_rows()
    whole = problem_of(logits, y)
    part = whole.subsampled()
    size = part.rows.shape[0]
    most = largest_subsample(COUNTS, len(y) // SUBSAMPLING)
    assert np.bincount(part.labels.numpy()).tolist() == np.minimum(COUNTS, most).tolist()
    assert size <= len(y) // SUBSAMPLING
    assert part.share == pytest.approx(size / len(y))
    x = np.random.default_rng(1).normal(0.7, 0.3, 6)
    for problem in (whole, part):
        problem.refine()
    ([(value, gradient)], blocks), ([(other, other_gradient)], other_blocks) = (p.with_blocks(x) for p in (whole, part))
    assert other == pytest.approx(value, rel=1e-9)
    np.testing.assert_allclose(other_gradient, gradient, rtol=1e-9)
    np.testing.assert_allclose(other_blocks.aa, blocks.aa, rtol=1e-9)
    np.testing.assert_allclose(blocks.reach, np.sqrt(blocks.bb) / whole.norms.numpy())
    np.testing.assert_allclose(blocks.flat, np.concatenate([np.zeros(3), 1 / whole.norms.numpy()]))
    assert blocks.flat_curvature == pytest.approx(0.01 * whole.sample_weights.sum())


def test_large_problems_are_worked_in_float32_until_they_are_refined(monkeypatch):
    logits, y = repeated_rows()
    small = problem_of(logits, y)
    assert small.rounding == 0
    assert not small.refine()
    monkeypatch.setattr(affine, "SMALL_PROBLEM", 0)
    large = problem_of(logits, y)
    x = np.random.default_rng(1).normal(0.7, 0.3, 6)
    exact, rough = small.value_and_gradient(x)[1], large.value_and_gradient(x)[1]
    assert 0 < np.abs(exact - rough).max() < large.rounding < 1e-5
    assert large.refine()
    assert large.rounding == 0
    np.testing.assert_array_equal(large.value_and_gradient(x)[1], exact)
    assert not large.refine()


def test_without_shifts_beta_stays(monkeypatch):
    logits, y = repeated_rows()
    x = np.random.default_rng(1).normal(0.7, 0.3, 6)
    free, fixed = problem_of(logits, y), problem_of(logits, y, shifts=False)
    [(value, gradient)], blocks = fixed.with_blocks(x)
    assert value == free.value_and_gradient(x)[0]
    np.testing.assert_array_equal(gradient[:3], free.value_and_gradient(x)[1][:3])
    np.testing.assert_array_equal(gradient[3:], 0)
    np.testing.assert_array_equal(blocks.aa, free.with_blocks(x)[1].aa)
    np.testing.assert_array_equal(blocks.ab, 0)
    np.testing.assert_array_equal(blocks.bb, 1)
    assert blocks.flat is None


def test_the_problem_of_marc_weighs_samples_by_class_and_divides_by_their_number():
    logits, y = repeated_rows()
    problem = MARC(ridge=0.3).problem(from_arrays(logits, y), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    np.testing.assert_allclose(problem.sample_weights, (1.0 + y) / len(y))
    assert problem.ridge == pytest.approx(0.3 * 10 / 3 * (1.0 + y).mean())
    heavier = problem.weighing(np.array([5.0, 1.0, 1.0]))
    assert heavier.ridge == pytest.approx(0.3 * 10 / 3 * np.where(y == 0, 5.0, 1.0 + y).mean())


@pytest.mark.parametrize("small", [0, 1 << 22])
@pytest.mark.parametrize("computed", [True, False])
def test_one_pass_at_two_points_is_two_passes(monkeypatch, small, computed):
    """Over several chunks, the last of which is shorter; in float32 and float64, logits stored and computed."""
    monkeypatch.setattr(affine, "SMALL_PROBLEM", small)
    for name, numbers in (("CHUNK_NUMBERS", 21), ("COMPUTED_NUMBERS", 21), ("STEP_ROWS", 7)):
        monkeypatch.setattr(logit_rows, name, numbers)
    rng = np.random.default_rng(0)
    features, weight = rng.normal(size=(31, 5)).astype(np.float32), torch.from_numpy(rng.normal(size=(3, 5))).float()
    bias, y = torch.tensor([0.1, -0.2, 0.3]), torch.from_numpy(rng.integers(0, 3, 31))
    rows = LogitRows(features, weight, bias)
    if not computed:
        rows = LogitRows(rows.read(slice(None)).contiguous())
    settings = {"ridge": 0.01, "centre": np.zeros(6)}
    problem = AffineProblem(rows, y, torch.full((31,), 1 / 31, dtype=torch.float64), torch.ones(3), **settings)
    start, x = rng.normal(1, 0.3, (2, 6))
    ((value, gradient), (other, other_gradient)), blocks = problem.with_blocks(start, x)
    assert value == problem.value_and_gradient(start)[0]
    np.testing.assert_array_equal(gradient, problem.value_and_gradient(start)[1])
    [expected], same_blocks = problem.with_blocks(x)
    assert other == expected[0]
    np.testing.assert_array_equal(other_gradient, expected[1])
    np.testing.assert_array_equal(blocks.aa, same_blocks.aa)
    # In plain words: softmax of the calibrated logits.
    logits = features @ weight.numpy().T + bias.numpy()
    calibrated = logits * x[:3] + x[3:]
    shares = np.exp(calibrated) / np.exp(calibrated).sum(1, keepdims=True)
    assert other == pytest.approx(-np.log(shares[np.arange(31), y]).mean() + 0.005 * x @ x, rel=1e-5)
    bend = shares * (1 - shares) / 31
    np.testing.assert_allclose(blocks.aa, (bend * logits**2).sum(0) + 0.01, rtol=1e-4)
    np.testing.assert_allclose(blocks.bb, bend.sum(0) + 0.01, rtol=1e-4)
