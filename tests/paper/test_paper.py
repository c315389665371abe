"""What we say the paper says, held against its source."""

import re
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit, softmax

from longtail import MARC, Outputs
from longtail.metrics import margins
from longtail.paper.items import AFTER_STAGE_ONE, FORMULAS, ITEMS, NUMBERS, SCORES_SHOWN, toy_of
from longtail.posthoc import LWS, DisAlign
from longtail.posthoc.marc import class_weights
from longtail.recipes import RECIPES
from longtail.report.figures import FIGURES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "paper-to-code.md").read_text(encoding="utf-8")
# Name in the paper → ours.
NAMES = {
    "Softmax": "softmax",
    "Class Balanced Sampling (CBS)": "cbs",
    "Class Balanced Weighting (CBW)": "cbw",
    "Class Balanced Loss": "class-balanced",
    "Focal Loss": "focal",
    "LADE": "lade",
    "LDAM": "ldam",
    "Equalization Loss": "equalization",
    "Balanced Softmax": "balanced-softmax",
    "Seesaw": "seesaw",
    "DisAlign": "disalign",
    "Decouple-cRT": "crt",
    "Decouple-LWS": "lws",
    r"Decouple-$\pi$-norm": "tau-norm",
    "BBN": "bbn",
    "Hybrid-SC": "hybrid-sc",
    "OLTR": "oltr",
    "Causal Norm": "causal-norm",
    "Casual Norm": "causal-norm",
    "MARC": "marc",
}
# Label of a table → what its columns are.
TABLES = {
    "tab:cifar_res": ["cifar10-lt-100", "cifar10-lt-200", "cifar100-lt-100", "cifar100-lt-200"],
    "tab:inaturalist_res": ["inaturalist18"],
    "tab:imagenet_res": ["imagenet-lt"] * 4,
    "tab:places_res": ["places-lt"] * 4,
}


@pytest.fixture(scope="module")
def source(shared):
    (file,) = (shared / "paper").glob("*.txt")
    return file.read_text(encoding="utf-8")


def rows_of(source, label):
    """Name → numbers of a table's rows, as they stand in the source."""
    body = source[source.index(rf"\label{{{label}}}") :]
    body = body[: body.index(r"\end{tabular}")]
    found = {}
    for line in body.splitlines():
        name, *cells = re.sub(r"\\(citep|underline|textbf)", "", re.sub(r"~\\citep\{[^}]*\}", "", line)).split("&")
        numbers = [re.findall(r"\d+\.\d+|-", cell.split(r"\\")[0]) for cell in cells]
        if name.strip() in NAMES and all(numbers):
            found[NAMES[name.strip()]] = [None if own[0] == "-" else float(own[0]) for own in numbers]
    return found


@pytest.mark.parametrize("label", TABLES)
def test_the_numbers_are_the_papers(source, label):
    columns, rows = TABLES[label], rows_of(source, label)
    assert len(rows) >= 10
    for recipe in dict.fromkeys(columns):
        places = [place for place, column in enumerate(columns) if column == recipe]
        theirs = {method: tuple(numbers[place] for place in places) for method, numbers in rows.items()}
        assert {method: numbers for method, numbers in theirs.items() if None not in numbers} == NUMBERS[recipe]
        assert all(len(numbers) in SCORES_SHOWN for numbers in NUMBERS[recipe].values())


def test_the_effect_of_stage_one_is_the_papers(source):
    found = re.findall(r"CIFAR-100-LT\((\d+)\) & ([\d.]+)", source)
    assert {f"cifar100-lt-{factor}": float(value) for factor, value in found} == AFTER_STAGE_ONE


def test_every_table_figure_equation_and_algorithm_of_the_paper_is_on_the_page(source):
    tables = source.count(r"\begin{table}") + source.count(r"\@captype{table}")
    figures = len(re.findall(r"\\begin\{(wrap)?figure\*?\}", source))
    equations, algorithms = source.count(r"\begin{equation}"), source.count(r"\begin{algorithm}")
    assert (tables, figures, equations, algorithms) == (7, 6, 12, 2)
    for kind, count in (("Table", tables), ("Figure", figures), ("Equation", equations), ("Algorithm", algorithms)):
        missing = [number for number in range(1, count + 1) if not re.search(rf"^\| {kind} {number}\b", PAGE, re.M)]
        assert not missing, f"{kind} {missing} is not in a row of docs/paper-to-code.md"


def test_every_item_is_on_the_page_and_made_of_what_there_is():
    for name, item in ITEMS.items():
        assert re.search(rf"^\| {re.escape(item.where)} .*`python -m longtail.paper {name}`", PAGE, re.M), name
        assert set(item.recipes) <= set(RECIPES)
        assert set(item.figures) <= {*FIGURES, "disalign-beside-marc", "accuracy-against-gamma"}


@pytest.fixture(scope="module")
def small():
    """Logits, norms and outputs of a small linear head on features."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), (60, 20, 8))
    features = rng.normal(size=(88, 4)) + np.eye(3, 4)[labels]
    weight, bias = rng.normal(size=(3, 4)) + 2 * np.eye(3, 4), rng.normal(size=3)
    outputs = Outputs(labels, np.bincount(labels), features=features, head_weight=weight, head_bias=bias)
    return features @ weight.T + bias, np.linalg.norm(weight, axis=1), outputs


def test_the_formulas_are_what_the_methods_do(small):
    eta, norms, outputs = small
    features = np.asarray(outputs.features)
    marc, lws = MARC().fit(outputs), LWS().fit(outputs)
    disalign = DisAlign(max_iter=50).fit(outputs)
    d = eta / norms
    s = expit(features @ disalign.confidence_weight_ + disalign.confidence_bias_)[:, None]
    expected = {
        "marc": norms * (marc.omega_ * d + marc.beta_),
        "lws": lws.scale_ * eta,
        "disalign": s * (disalign.scale_ * eta + disalign.shift_) + (1 - s) * eta,
    }
    for name, method in (("marc", marc), ("lws", lws), ("disalign", disalign)):
        assert name in FORMULAS
        np.testing.assert_allclose(np.asarray(method.transform(outputs)), expected[name], rtol=1e-4, atol=1e-4)


def test_a_toy_keeps_the_order_of_the_imbalances():
    factors = [toy_of(RECIPES[f"cifar100-lt-{factor}"]).imbalance for factor in (10, 50, 100, 200)]
    assert factors == sorted(set(factors))
    assert toy_of(RECIPES["imagenet-lt"]).imbalance == RECIPES["digits-lt"].imbalance


def test_the_equations_are_what_the_page_says(small):
    eta, norms, outputs = small
    labels, classes = outputs.labels, 3
    np.testing.assert_allclose(outputs.rows().read(slice(None)).numpy(), eta, atol=1e-5)  # 1, from the features
    marc = MARC(gamma=0.7).fit(outputs)
    means = margins(eta, labels, weight_norms=norms)
    for label in range(classes):  # 4 and 7
        assert means.logits[label] == pytest.approx(eta[labels == label, label].mean())
        assert means.margins[label] == pytest.approx((eta / norms)[labels == label, label].mean())
    calibrated = marc.omega_ * eta + marc.beta_ * norms  # 8 and 9
    probabilities = np.exp(calibrated) / np.exp(calibrated).sum(1, keepdims=True)  # 2 and 10
    np.testing.assert_allclose(np.asarray(marc.predict_proba(outputs)), probabilities, atol=1e-5)
    d = eta / norms
    np.testing.assert_allclose(softmax(norms * d, axis=1), softmax(eta, axis=1))  # 5
    boundary = norms[1] / norms[0] * d[:, 1]  # the margin of class 0 at which 0 and 1 are equally probable
    even = softmax(norms * np.column_stack([boundary, d[:, 1], d[:, 2]]), axis=1)
    np.testing.assert_allclose(even[:, 0], even[:, 1])  # 6
    counts = np.bincount(labels)
    weights = classes * (1 / counts) ** 0.7 / ((1 / counts) ** 0.7).sum()  # 12
    np.testing.assert_allclose(class_weights(counts, gamma=0.7), weights)
    loss = np.mean(weights[labels] * -np.log(probabilities[np.arange(len(labels)), labels]))  # 11
    assert marc.result_.value == pytest.approx(loss, rel=0.01)  # with the ridge
