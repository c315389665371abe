"""HALO beside a plain reference, in its limiting cases, and on real features."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from longtail import HALO, MARC, Outputs, evaluate
from longtail.errors import UserError
from longtail.posthoc import LogitAdjustment
from longtail.posthoc.halo.mixture import PRIORS
from longtail.posthoc.halo.unseen import head_of_loss, mean_loss
from longtail.posthoc.inputs import from_outputs
from longtail.posthoc.priors import sample_weights
from longtail.posthoc.solver.linear import class_statistics


def golden_outputs(case, split):
    features = case[f"{split}_features"]
    head = {"head_weight": case["head_weight"], "head_bias": case["head_bias"]}
    logits = features @ case["head_weight"].T + case["head_bias"]
    return Outputs(case[f"{split}_labels"], case["class_counts"], logits=logits, features=features, split=split, **head)


@pytest.fixture(scope="module")
def cases(shared):
    with np.load(shared / "golden" / "halo.npz", allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    found = []
    for number in range(int(arrays["n_cases"])):
        prefix = f"case{number}_"
        found.append({name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)})
    return found


def test_every_step_agrees_with_the_plain_reference(cases):
    for case in cases:
        train, held_out, test = (golden_outputs(case, split) for split in ("train", "validation", "test"))
        labels = torch.from_numpy(case["train_labels"].astype(np.int64))
        statistics = class_statistics(case["train_features"], labels, len(case["class_counts"]))
        np.testing.assert_allclose(statistics.covariance, case["covariance"], atol=1e-7)
        halo = HALO(tolerance=1e-9).fit(train, validation=held_out)
        for name, key in (("lda", "lda"), ("balanced", "q")):
            np.testing.assert_allclose(halo.heads_[name].weight, case[f"{key}_weight"], atol=1e-5)
            np.testing.assert_allclose(halo.heads_[name].bias, case[f"{key}_bias"], atol=1e-5)
        assert list(halo.numbers_) == ["model", "lda", "balanced", "prior", "norms"]
        log_prior = np.log(case["class_counts"] / case["class_counts"].sum())
        vectors = np.stack([log_prior, halo.log_norms_])
        counts = np.bincount(held_out.labels, minlength=len(log_prior))
        weights = (np.sqrt(case["class_counts"]) / np.maximum(counts, 1))[held_out.labels]
        weights *= weights.sum() / np.square(weights).sum()
        scores = [plain_scores(case, outputs) for outputs in (held_out, test)]
        expected = naive_numbers(list(halo.numbers_), scores[0], vectors, held_out.labels, weights)
        np.testing.assert_allclose(list(halo.numbers_.values()), expected, atol=1e-5)
        by_hand = np.einsum("s,snk->nk", expected[:3], scores[1]) + expected[3:] @ vectors - 0.5 * log_prior
        np.testing.assert_allclose(_centred(halo.transform(test)), _centred(by_hand), atol=1e-4)


def _centred(logits):
    return logits - logits.mean(1, keepdims=True)


def plain_scores(case, outputs):
    """The model's logits, and both stored heads minus these, (3, N, K)."""
    heads = [outputs.features @ case[f"{key}_weight"].T + case[f"{key}_bias"] for key in ("lda", "q")]
    return np.stack([outputs.logits, *(head - outputs.logits for head in heads)])


@pytest.fixture(scope="module")
def golden_case(cases):
    return tuple(golden_outputs(cases[1], split) for split in ("train", "validation", "test"))


def test_arrays_give_what_outputs_give(golden_case):
    train, held_out, test = golden_case
    by_outputs = HALO().fit(train, validation=held_out)
    norms = np.linalg.norm(train.head_weight, axis=1)
    by_arrays = HALO().fit(
        train.logits,
        train.labels,
        features=train.features,
        weight_norms=norms,
        validation=(held_out.logits, held_out.labels, held_out.features),
    )
    assert by_arrays.numbers_ == pytest.approx(by_outputs.numbers_, abs=1e-6)
    np.testing.assert_allclose(by_arrays.transform(test.logits, test.features), by_outputs.transform(test), atol=1e-4)


def test_it_folds_into_one_linear_layer(golden_case):
    train, held_out, test = golden_case
    halo = HALO().fit(train, validation=held_out)
    linear = nn.Linear(*reversed(train.head_weight.shape))
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(train.head_weight))
        linear.bias.copy_(torch.from_numpy(train.head_bias))
    for prior in ("uniform", "train", np.arange(12.0)):
        changed = halo.with_target_prior(prior)
        layer = changed.head(linear)
        assert type(layer) is nn.Linear
        folded = layer(torch.from_numpy(test.features).float()).detach().numpy()
        np.testing.assert_allclose(folded, changed.transform(test), atol=1e-3, rtol=1e-4)


def test_a_target_prior_moves_the_logits_by_its_logarithm(golden_case):
    train, held_out, test = golden_case
    uniform = HALO().fit(train, validation=held_out)
    weights = np.arange(1.0, 13.0)
    refitted = HALO(weights).fit(train, validation=held_out)
    changed = uniform.with_target_prior(weights)
    np.testing.assert_allclose(changed.transform(test), refitted.transform(test), atol=1e-6)
    moved = changed.transform(test) - uniform.transform(test)
    np.testing.assert_allclose(moved, np.broadcast_to(np.log(weights / weights.sum()), moved.shape), atol=1e-4)
    as_trained = uniform.with_target_prior("train").transform(test) - uniform.transform(test)
    np.testing.assert_allclose(as_trained[0], np.log(train.class_counts / train.class_counts.sum()), atol=1e-4)
    assert uniform.target_prior == "uniform"


def test_a_class_of_weight_zero_is_never_predicted(golden_case):
    train, held_out, test = golden_case
    weights = np.ones(12)
    weights[:3] = 0
    halo = HALO(weights).fit(train, validation=held_out)
    assert set(halo.predict(test)) <= set(range(3, 12))
    assert np.isfinite(halo.transform(test)).all()
    assert halo.predict_proba(test)[:, :3].max() == 0


def test_without_unseen_samples_it_refuses_and_says_the_ways(golden_case):
    train, held_out, _ = golden_case
    with pytest.raises(UserError, match=r"--validation 0\.1.*--validation-from head.*validation=.*cross-fit"):
        HALO().fit(train)
    with pytest.raises(UserError, match="768 of 768 held-out samples are training samples too"):
        HALO().fit(train, validation=train)
    some = Outputs(
        np.concatenate([held_out.labels, train.labels[:40]]),
        train.class_counts,
        logits=np.concatenate([held_out.logits, train.logits[:40]]),
        features=np.concatenate([held_out.features, train.features[:40]]),
        split="validation",
    )
    with pytest.raises(UserError, match="40 of 115 held-out samples are training samples too"):
        HALO().fit(train, validation=some)


def test_rows_that_are_equal_by_chance_are_no_leak():
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], [400, 100])
    coarse = [np.round(2 * np.eye(2)[y] + rng.normal(size=(500, 2)), 0) for _ in range(2)]
    halo = HALO().fit(coarse[0], y, validation=(coarse[1], y))
    assert halo.held_out_ == "logits alone; 500 held-out samples"
    with pytest.raises(UserError, match="500 of 500 held-out samples are training samples too"):
        HALO().fit(coarse[0], y, validation=(coarse[0], y))


def test_few_held_out_samples_are_said():
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], [40, 10])
    logits = [2 * np.eye(2)[y] + rng.normal(size=(50, 2)) for _ in range(2)]
    assert HALO().fit(logits[0], y, validation=(logits[1], y)).held_out_ == "logits alone; 50 held-out samples"
    few = HALO().fit(logits[0], y, validation=(logits[1][1:], y[1:]))
    usual = "few: the numbers, and so the confidence, stay near those usual for networks"
    assert few.held_out_ == f"logits alone; 49 held-out samples ({usual})"


@pytest.mark.filterwarnings("ignore::longtail.posthoc.gate.FitWarning")
@pytest.mark.parametrize("size", [1e-30, 0.02, 1e4, 1e37])
@pytest.mark.filterwarnings("error")
def test_logits_of_any_size_are_solved(size):
    """The same decisions: the model's own factor takes the size back, whatever it is."""
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1, 2], [200, 60, 20])
    train, held, test = (2 * np.eye(3)[y] + rng.normal(size=(280, 3)) + np.log([20, 6, 2]) for _ in range(3))
    features = [np.concatenate([logits, rng.normal(size=(280, 5))], 1) for logits in (train, held, test)]
    for inputs in ((None,) * 3, features):
        usual = HALO().fit(train, y, features=inputs[0], validation=(held, y, inputs[1]))
        expected = evaluate(usual.transform(test, inputs[2]), y, np.bincount(y))
        halo = HALO().fit(size * train, y, features=inputs[0], validation=(size * held, y, inputs[1]))
        assert halo.result_.converged
        logits = halo.transform(size * test, inputs[2])
        assert np.isfinite(logits).all()
        found = evaluate(logits, y, np.bincount(y))
        assert found.balanced == pytest.approx(expected.balanced, abs=0.04)
        assert found.nll < expected.nll + 0.05


def naive_numbers(names, scores, vectors, labels, weights, of_vectors=1.0):
    """The same fit by plain BFGS on the formula; `of_vectors`: what the last deviations are multiplied by."""
    means = np.array([PRIORS[name].mean for name in names])
    deviations = np.array([PRIORS[name].deviation for name in names])
    deviations[len(scores) :] *= of_vectors

    def value(x):
        logits = sum(number * score for number, score in zip(x, scores, strict=False))
        logits = logits + x[len(scores) :] @ vectors
        highest = logits.max(1)
        log_sum = highest + np.log(np.exp(logits - highest[:, None]).sum(1))
        losses = log_sum - logits[np.arange(len(labels)), labels]
        coupled = x.copy()
        coupled[len(scores)] += x[0] - x[1 : len(scores)].sum()  # the model's factor brings its share of log pi
        return weights @ losses + 0.5 * np.square((coupled - means) / deviations).sum()

    return minimize(value, means, method="BFGS", options={"gtol": 1e-8}).x


def test_logits_alone_are_scaled_and_shifted_by_the_prior(golden_case):
    train, held_out, test = golden_case
    plain, halo = (
        HALO(tolerance=tolerance).fit(train.logits, train.labels, validation=(held_out.logits, held_out.labels))
        for tolerance in (1e-3, 1e-9)
    )
    assert halo.held_out_ == "logits alone; 75 held-out samples"
    assert list(halo.numbers_) == ["model", "prior"]
    assert plain.numbers_ == pytest.approx(halo.numbers_, abs=1e-3)
    log_prior = np.log(train.class_counts / train.class_counts.sum())
    weights = sample_weights(held_out.labels, train.class_counts)
    expected = naive_numbers(["model", "prior"], [held_out.logits], log_prior[None], held_out.labels, weights)
    assert list(halo.numbers_.values()) == pytest.approx(expected, abs=1e-5)
    by_hand = expected[0] * test.logits + (expected[1] - 0.5) * log_prior
    np.testing.assert_allclose(halo.transform(test.logits), by_hand, atol=1e-4)
    norms = np.linalg.norm(train.head_weight, axis=1)
    known = HALO().fit(train.logits, train.labels, weight_norms=norms, validation=(held_out.logits, held_out.labels))
    assert list(known.numbers_) == ["model", "prior", "norms"]


def test_classes_without_unseen_samples_are_left_out_of_its_softmax(golden_case):
    train, held_out, _ = golden_case
    kept = held_out.labels < 6
    head_only = Outputs(
        held_out.labels[kept],
        train.class_counts,
        logits=held_out.logits[kept],
        features=held_out.features[kept],
        split="validation",
    )
    halo = HALO(tolerance=1e-9).fit(train, validation=head_only)
    assert halo.missing_.tolist() == [6, 7, 8, 9, 10, 11]
    assert halo.held_out_ == "a mixture of three heads; 69 held-out samples, none of class 6, 7, 8, 9, 10 and 1 more"
    features = head_only.features
    eta = head_only.logits
    scores = [eta, *((features @ head.weight.T + head.bias) - eta for head in halo.heads_.values())]
    log_prior = np.log(train.class_counts / train.class_counts.sum())
    expected = naive_numbers(
        list(halo.numbers_),
        [score[:, :6] for score in scores],
        np.stack([log_prior, halo.log_norms_])[:, :6],
        head_only.labels,
        sample_weights(head_only.labels, train.class_counts),
        of_vectors=0.1,  # classes that are missing: their biases are extrapolated
    )
    assert list(halo.numbers_.values()) == pytest.approx(expected, abs=1e-4)
    one = kept & (held_out.labels == 0)
    with pytest.raises(UserError, match="held-out samples are of 1 class; HALO needs two classes"):
        HALO().fit(train, validation=(held_out.logits[one], held_out.labels[one], held_out.features[one]))


def test_weights_go_by_the_samples_own_counts():
    counts = np.array([400, 100, 25])
    labels = np.repeat([0, 1, 2], [40, 10, 5])
    weights = sample_weights(labels, counts)
    effective = weights.sum() ** 2 / np.square(weights).sum()
    assert weights.sum() == pytest.approx(effective)
    np.testing.assert_allclose(weights / weights[0], (np.sqrt(counts / 400.0) * 40 / [40, 10, 5])[labels])


@pytest.mark.parametrize("sizes", [[30, 30, 30, 30], [6, 15, 40, 90], [90, 40, 15, 6], [200, 5, 5, 5]])
def test_the_distribution_of_the_held_out_samples_hardly_matters(sizes):
    """Balanced, reversed or otherwise imbalanced: with weights for their own counts the result is about the same."""
    rng = np.random.default_rng(0)
    counts = np.array([800, 200, 60, 15])

    def draw(sizes, noise):
        labels = np.repeat(np.arange(4), sizes)
        return noise * rng.normal(size=(len(labels), 4)) + 2 * np.eye(4)[labels] + np.log(counts), labels

    train, truth = draw(counts, 0.8), draw([3000] * 4, 1.5)
    before = evaluate(*truth, counts).balanced
    halo = HALO().fit(*train, validation=draw(sizes, 1.5))
    best = LogitAdjustment().fit(*train)
    oracle = evaluate(best.transform(truth[0]), truth[1], counts).balanced
    after = evaluate(halo.transform(truth[0]), truth[1], counts).balanced
    assert after > before + 0.5 * (oracle - before)
    assert after > oracle - 0.03


def test_real_features_of_cifar(cifar_features):
    """A tenth of the test images, long-tailed, serve as held-out ones: better than MARC, and honest."""
    data = cifar_features
    counts = np.bincount(data["y"])
    head = {"head_weight": data["weight"], "head_bias": data["bias"]}
    train = Outputs(data["y"], counts, logits=data["views"][0], features=data["view_features"][0], **head)
    marc, gains, errors = MARC().fit(train), [], []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        rows = [rng.permutation(np.flatnonzero(data["test_y"] == c))[: round(counts[c] / 10)] for c in range(10)]
        held, rest = np.concatenate(rows), np.setdiff1d(np.arange(10_000), np.concatenate(rows))
        halo = HALO().fit(train, validation=_rows(data, counts, held))
        test = _rows(data, counts, rest)
        scores = [evaluate(method.transform(test), test.labels, counts) for method in (halo, marc)]
        gains.append(100 * (scores[0].balanced - scores[1].balanced))
        errors.append(100 * scores[0].ece)
    assert np.mean(gains) > 0.2  # 0.45 over many draws: docs/results/halo
    assert np.mean(errors) < 3


def _rows(data, counts, rows):
    head = {"head_weight": data["weight"], "head_bias": data["bias"]}
    logits, features = data["test"][rows], data["test_features"][rows]
    return Outputs(data["test_y"][rows], counts, logits=logits, features=features, split="validation", **head)


@pytest.fixture(scope="module")
def frozen():
    """Features of a frozen backbone, a head that fits its training samples completely, and fresh samples."""
    rng = np.random.default_rng(0)
    counts, width = np.array([120, 60, 30, 15, 8, 5]), 40
    centres = 1.1 * rng.normal(size=(6, width))

    def draw(sizes):
        labels = np.repeat(np.arange(6), sizes)
        return (centres[labels] + 2.2 * rng.normal(size=(len(labels), width))).astype(np.float32), labels

    features, labels = draw(counts)
    torch.manual_seed(0)
    linear = nn.Linear(width, 6)
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=100)

    def loss():
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(linear(torch.from_numpy(features)), torch.from_numpy(labels))
        value.backward()
        return value

    optimizer.step(loss)
    weight, bias = linear.weight.detach().numpy(), linear.bias.detach().numpy()
    head = {"class_counts": counts, "head_weight": weight, "head_bias": bias}

    def outputs(features, labels, split):
        return Outputs(labels, logits=features @ weight.T + bias, features=features, split=split, **head)

    return outputs(features, labels, "train"), outputs(*draw([400] * 6), "test")


def test_cross_fitting_helps_where_the_head_has_fitted_its_samples(frozen):
    train, test = frozen
    assert (train.logits.argmax(1) == train.labels).mean() == 1
    halo = HALO(held_out="cross-fit").fit(train)
    assert halo.held_out_ == "a mixture of three heads; cross-fitted in 5 folds on 238 samples"
    scores = {
        name: evaluate(logits, test.labels, test.class_counts)
        for name, logits in {
            "softmax": test.logits,
            "marc": MARC().fit(train).transform(test),
            "halo": halo.transform(test),
        }.items()
    }
    assert scores["halo"].balanced > scores["softmax"].balanced + 0.05
    assert scores["halo"].balanced > scores["marc"].balanced + 0.05
    assert scores["halo"].ece < 0.5 * scores["softmax"].ece
    again = HALO(held_out="cross-fit").fit(train)
    np.testing.assert_array_equal(again.transform(test), halo.transform(test))


def test_the_own_head_is_fitted_anew_to_the_loss_it_has(frozen):
    train, _ = frozen
    labels = torch.from_numpy(train.labels)
    statistics = class_statistics(train.features, labels, 6)
    for loss in (1.2, 0.5, 0.05, mean_loss(from_outputs(train))):
        head = head_of_loss(train.features, labels, statistics, loss)
        reached = nn.functional.cross_entropy(head.scores(torch.from_numpy(train.features).double()), labels)
        assert float(reached) == pytest.approx(loss, rel=1e-3, abs=1e-9)
    nothing = head_of_loss(train.features, labels, statistics, 5.0)  # worse than chance
    assert np.abs(nothing.weight).max() == 0


def test_cross_fitting_needs_features():
    rng = np.random.default_rng(0)
    with pytest.raises(UserError, match="HALO needs features"):
        HALO(held_out="cross-fit").fit(rng.normal(size=(40, 4)), np.arange(40) % 4)


def test_features_that_say_nothing_leave_the_model_as_it_is():
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(3), [60, 20, 6])
    logits = 2 * np.eye(3)[y] + rng.normal(size=(86, 3))
    held = 2 * np.eye(3)[y] + rng.normal(size=(86, 3))
    halo = HALO().fit(logits, y, features=np.ones((86, 5)), validation=(held, y, np.ones((86, 5))))
    assert np.isfinite(halo.transform(logits, np.ones((86, 5)))).all()
    assert all(np.abs(head.weight).max() == 0 for head in halo.heads_.values())


def test_a_number_is_a_power_of_the_training_prior():
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1, 2], [60, 20, 6])
    logits, held = (2 * np.eye(3)[y] + rng.normal(size=(86, 3)) for _ in range(2))
    halo = HALO().fit(logits, y, validation=(held, y))
    for power, word in ((0, "uniform"), (1.0, "train")):
        same = halo.with_target_prior(power).transform(held) - halo.with_target_prior(word).transform(held)
        np.testing.assert_allclose(same, 0, atol=1e-6)
    moved = halo.with_target_prior(-0.5).transform(held) - halo.transform(held)
    np.testing.assert_allclose(moved - moved[:, :1], [0.5 * np.log(60 / np.array([60, 20, 6]))] * 86, atol=1e-5)
    for wrong in (float("nan"), 11, True):
        with pytest.raises(UserError, match="target_prior"):
            halo.with_target_prior(wrong)
