"""Probe on classes of one sample, classes without samples, odd shapes and invalid input."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, log_loss

from longtail.errors import UserError
from longtail.posthoc.probe.estimator import Probe


def clusters(counts, width=5, seed=0, distance=4.0):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(len(counts)), counts)
    means = distance * rng.normal(size=(len(counts), width))
    return means[y] + rng.normal(size=(len(y), width)), y, means


@given(
    counts=st.lists(st.integers(1, 9), min_size=2, max_size=7),
    width=st.integers(1, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_any_counts_and_width_give_probabilities(counts, width, seed):
    X, y, means = clusters(counts, width, seed)  # noqa: N806
    probe = Probe().fit(X, y)
    probabilities = probe.predict_proba(means)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert np.isfinite(probe.head_.weight).all()
    assert np.isfinite(probe.head_.bias).all()
    assert set(probe.predict(means)) <= set(y)
    if max(counts) == 1:
        assert probe.result_.balanced is None


def test_many_more_features_than_samples_do_not_spoil_the_tail():
    counts = np.array([40, 20, 10, 5, 3, 1])
    rng = np.random.default_rng(0)
    labels, truth = np.repeat(np.arange(6), counts), np.repeat(np.arange(6), 50)
    means = 0.2 * rng.standard_normal((6, 1500))
    features, tests = (means[own] + rng.standard_normal((len(own), 1500)) for own in (labels, truth))
    probe = Probe().fit(features, labels)
    balanced = LogisticRegression(class_weight="balanced").fit(features, labels)
    ours, theirs = (balanced_accuracy_score(truth, model.predict(tests)) for model in (probe, balanced))
    assert ours > theirs
    assert log_loss(truth, probe.predict_proba(tests)) < log_loss(truth, balanced.predict_proba(tests))


def test_one_broken_sample_does_not_spoil_the_others():
    X, y, _ = clusters([60, 20, 6], width=8, distance=1.0)  # noqa: N806
    clean = Probe().fit(X, y)
    broken = X.copy()
    broken[3] = 1e6
    probe = Probe().fit(broken, y)
    assert (clean.result_.far, probe.result_.far) == (0, 1)
    assert np.mean(probe.predict(X[4:]) == clean.predict(X[4:])) > 0.9
    assert "as the median one: 1;" in probe.result_.notes()[0]


def test_copies_of_samples_do_not_flatter_the_estimate():
    images, labels = load_digits(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(labels))[:200]
    X, y = images[rows], labels[rows]  # noqa: N806
    once = Probe().fit(X, y).result_
    for features in (np.repeat(X, 3, 0), csr_matrix(np.repeat(X, 3, 0))):
        thrice = Probe().fit(features, np.repeat(y, 3)).result_
        assert (once.copies, thrice.copies) == (0, 400)
        for one, three in ((once.balanced, thrice.balanced), (once.natural, thrice.natural)):
            assert three.accuracy == pytest.approx(one.accuracy, abs=0.03)
            assert three.high - three.low == pytest.approx(one.high - one.low, rel=0.2)


def test_one_sample_per_class_is_enough_to_predict_with():
    X, y, means = clusters([1, 1, 1, 1], distance=10.0)  # noqa: N806
    probe = Probe().fit(X, y)
    assert (probe.predict(means) == np.arange(4)).all()
    assert probe.result_.held_out == 0


def test_two_samples_among_thousands():
    """Neither their prior nor a ridge of the bias, however small, outweighs what the features say."""
    rng = np.random.default_rng(1)
    y, far = np.repeat([0, 1], [10_000, 2]), np.array([0.0, 6.0])
    new = np.repeat([0, 1], 500)
    probe = Probe().fit(far[y, None] + rng.normal(size=(len(y), 3)), y)
    found = probe.predict(far[new, None] + rng.normal(size=(1000, 3)))
    assert (found == new)[new == 0].mean() > 0.95
    assert (found == new)[new == 1].mean() > 0.95


def test_more_features_than_samples_constant_and_doubled_ones():
    X, y, means = clusters([30, 8, 3], width=80)  # noqa: N806
    assert (Probe().fit(X, y).predict(means) == np.arange(3)).all()
    wide = np.hstack([X, np.full((len(X), 3), 7.0), X])
    assert (Probe().fit(wide, y).predict(np.hstack([means, np.full((3, 3), 7.0), means])) == np.arange(3)).all()
    nothing = Probe().fit(np.ones((len(X), 4)), y).with_target_prior("train")
    np.testing.assert_allclose(nothing.predict_proba(np.ones((1, 4)))[0], [30 / 41, 8 / 41, 3 / 41], atol=0.02)


def test_many_features_use_their_variances(monkeypatch):
    X, y, means = clusters([40, 10, 4], width=30)  # noqa: N806
    full = Probe().fit(X, y)
    monkeypatch.setattr("longtail.posthoc.probe.metric.WIDEST", 10)
    wide, sparse = Probe(tolerance=1e-6).fit(X, y), Probe(tolerance=1e-6).fit(csr_matrix(X), y)
    assert (wide.predict(means) == full.predict(means)).all()
    np.testing.assert_allclose(wide.predict_proba(X), sparse.predict_proba(X), atol=1e-4)


def test_large_data_choose_on_a_subsample(monkeypatch):
    counts = np.geomspace(60, 3, 12).astype(int)
    X, y, means = clusters(counts, distance=2.0)  # noqa: N806
    monkeypatch.setattr("longtail.posthoc.probe.choice.WORK_FOR_CHOICE", len(y) * 5 * 12 // 4)
    monkeypatch.setattr("longtail.posthoc.probe.choice.FEWEST_CLASSES", 4)
    monkeypatch.setattr("longtail.posthoc.probe.fitting.HELD_FOR_CHOICE", 30)
    monkeypatch.setattr("longtail.posthoc.probe.fitting.HELD_FOR_SCALE", 60)
    probe = Probe().fit(X, y)
    assert 60 <= probe.result_.held_out < len(y)
    assert (probe.predict(means) == np.arange(12)).mean() > 0.9


LARGER_THAN_MEMORY = """
import resource, sys
import numpy as np
from longtail import Probe
from longtail.posthoc.probe import choice, inputs

inputs.CHUNK_NUMBERS = 1 << 18
choice.METRICS, choice.POWERS = choice.METRICS[:1], (0.5,)  # fewer passes
features, labels = np.load(sys.argv[1], mmap_mode="r"), np.arange(48_000) % 2
Probe(tolerance=0.5).fit(features[:2000], labels[:2000]).predict(features[:2000])  # imports, and buffers of threads
status = open("/proc/self/status").read()
used = int(status.split("VmData:")[1].split()[0]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + features.nbytes // 2, -1))
try:
    features.astype(features.dtype)
    sys.exit("the limit does not hold")
except MemoryError:
    probe = Probe(tolerance=0.5).fit(features, labels)
print((probe.predict(features) == labels).mean())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are those of Linux")
def test_a_memory_mapped_file_larger_than_memory(tmp_path):
    features = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float16, (48_000, 512))
    features[:, 0] = np.arange(48_000) % 2 + np.random.default_rng(0).normal(0, 0.2, 48_000)
    features.flush()
    run = subprocess.run(
        [sys.executable, "-c", LARGER_THAN_MEMORY, tmp_path / "x.npy"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) > 0.95


def test_a_declared_class_without_samples():
    X, y, means = clusters([20, 6, 4])  # noqa: N806
    names = np.array(["cat", "dog", "owl"])[y]
    declared = ["ant", "cat", "dog", "owl"]
    far = np.zeros((1, 5)) + X.mean(0)
    never = Probe(classes=declared).fit(X, names)
    assert never.classes_.tolist() == declared
    assert (never.predict_proba(X)[:, 0] == 0).all()
    plain = Probe().fit(X, names)
    np.testing.assert_allclose(never.predict_proba(X)[:, 1:], plain.predict_proba(X), atol=1e-9)
    by_prior = Probe(classes=declared, unseen="prior").fit(X, names)
    assert 0 < by_prior.predict_proba(far)[0, 0] < 1
    assert (by_prior.predict(means) == declared[1:]).all()
    expected = by_prior.with_target_prior([9, 1, 1, 1])
    assert expected.predict_proba(far)[0, 0] > by_prior.predict_proba(far)[0, 0]
    assert (by_prior.with_target_prior("train").predict_proba(X)[:, 0] == 0).all()


def with_value(value, row=7, column=2):
    X, y, _ = clusters([9, 5])  # noqa: N806
    X[row, column] = value
    return X, y


X, Y, _ = clusters([9, 5])
INVALID = {
    "X contains NaN in row 7": lambda: Probe().fit(*with_value(np.nan)),
    "X contains infinity .* row 7": lambda: Probe().fit(*with_value(np.inf)),
    "X contains NaN in row 3": lambda: Probe().fit(csr_matrix(with_value(np.nan, 3)[0]), Y),
    "X has 14 rows, y has 13 labels": lambda: Probe().fit(X, Y[1:]),
    "one class only": lambda: Probe().fit(X, np.zeros(14)),
    "y is None": lambda: Probe().fit(X, None),
    "X has 4 features, but Probe is expecting 5": lambda: Probe().fit(X, Y).predict(X[:, :4]),
    "X contains NaN in row 0": lambda: Probe().fit(X, Y).predict(np.full((1, 5), np.nan)),
    "one weight per class": lambda: Probe([1, 2, 3]).fit(X, Y),
    "target_prior must be uniform": lambda: Probe("unifrom").fit(X, Y),
    r"target_prior\[1\] is -1": lambda: Probe([1, -1]).fit(X, Y),
    "0 for every class": lambda: Probe().fit(X, Y).with_target_prior([0, 0]),
    "no weight for class 1": lambda: Probe({0: 1.0}).fit(X, Y),
    "a weight for 5": lambda: Probe({0: 1.0, 1: 1.0, 5: 1.0}).fit(X, Y),
    "y has the class 1, which classes does not list": lambda: Probe(classes=[0, 2]).fit(X, Y),
    "lists a class twice": lambda: Probe(classes=[0, 1, 1]).fit(X, Y),
    "unknown unseen 'maybe'": lambda: Probe(unseen="maybe").fit(X, Y),
    "tolerance must be a number": lambda: Probe(tolerance=0).fit(X, Y),
    "seed must be a whole number": lambda: Probe(seed=-1).fit(X, Y),
}


@pytest.mark.parametrize("message", INVALID)
def test_invalid_input_is_one_line(message):
    with pytest.raises(UserError, match=message) as error:
        INVALID[message]()
    assert len(str(error.value).splitlines()) == 1


def test_before_the_fit():
    with pytest.raises(NotFittedError):
        Probe().predict(X)
    with pytest.raises(NotFittedError):
        Probe().to_linear()
