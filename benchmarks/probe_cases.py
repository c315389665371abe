"""Features and labels that benchmarks/probe.py compares heads on: draws of real data, and drawn features of a size.

    digits      long-tailed digits (scikit-learn), pixels as features
    languages   names of countries and languages (Babel): which of 148 languages; TF-IDF of letters, 256 components
    regions     names of regions (pycountry): which country; a natural tail; TF-IDF of letters, 128 components
    packages    descriptions of Debian packages (apt-cache dumpavail): which section; a natural tail; the mean of
                pretrained token vectors (WordLlama, 256 features)
    docstrings  first paragraphs of docstrings: which of the Python packages installed beside this one; a natural tail;
                TF-IDF of words, 256 components
    frozen      CIFAR-100-LT 100 at 96 px through a pretrained EfficientNet-Lite0 (see halo_cases.py)

The tests of every draw are as good as balanced: the same number of each class, where it has as many.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from common import shared_folder
from halo_cases import frozen_features
from sklearn.datasets import load_digits
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer

Draw = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # training features and labels, test features and labels
Texts = tuple[list[str], np.ndarray]  # texts and their class numbers


def cut(labels: np.ndarray, most: int, fewest: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of a long tail: from `most` samples of a random class to `fewest` of another."""
    classes = rng.permutation(labels.max() + 1)
    sizes = np.geomspace(most, fewest, len(classes)).round().astype(int)
    chosen = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(classes, sizes, strict=True)]
    return np.sort(np.concatenate(chosen))


def natural(labels: np.ndarray, number: int, tested: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """About so many training rows with the frequencies of all rows, and test rows: at most `tested` of a class."""
    rows, test = [], []
    for label in range(labels.max() + 1):
        own = rng.permutation(np.flatnonzero(labels == label))
        size = min(max(round(number / len(labels) * len(own)), 1), len(own) // 2)
        rows.append(own[:size])
        test.append(own[size : size + tested])
    return np.sort(np.concatenate(rows)), np.concatenate(test)


def digits(seed: int) -> Draw:
    images, labels = load_digits(return_X_y=True)
    rows = cut(labels, 120, 3, np.random.default_rng(seed))
    test = np.setdiff1d(np.arange(len(labels)), rows)
    return images[rows] / 16, labels[rows], images[test] / 16, labels[test]


def languages(seed: int) -> Draw:
    words, labels = _names()
    rng = np.random.default_rng(seed)
    rows = cut(labels, 150, 2, rng)
    rest = rng.permutation(np.setdiff1d(np.arange(len(labels)), rows))
    test = np.concatenate([rest[labels[rest] == c][:50] for c in range(labels.max() + 1)])
    return _frequencies(words, labels, rows, test, 256, letters=True)


def regions(seed: int) -> Draw:
    words, labels = _regions()
    return _frequencies(words, labels, *natural(labels, 2 * len(labels) // 3, 999, _rng(seed)), 128, letters=True)


def packages(seed: int) -> Draw:
    labels = _packages()[1]
    rows, test = natural(labels, 4000, 300, _rng(seed))
    vectors = _token_means()
    return vectors[rows], labels[rows], vectors[test], labels[test]


def docstrings(seed: int) -> Draw:
    texts, labels = _docstrings()
    return _frequencies(texts, labels, *natural(labels, 4000, 150, _rng(seed)), 256, letters=False)


def frozen(seed: int) -> Draw:
    return *frozen_features("train", seed), *frozen_features("test", 0)


CASES: dict[str, tuple[Callable[[int], Draw], int]] = {
    "digits": (digits, 20),
    "languages": (languages, 8),
    "regions": (regions, 8),
    "packages": (packages, 8),
    "docstrings": (docstrings, 8),
    "frozen": (frozen, 3),
}


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _frequencies(
    texts: list[str], labels: np.ndarray, rows: np.ndarray, test: np.ndarray, width: int, *, letters: bool
) -> Draw:
    """TF-IDF of letters or words, fitted on the training texts, in so many components."""
    kind = {"analyzer": "char_wb", "ngram_range": (1, 3)} if letters else {}
    terms, components = TfidfVectorizer(min_df=2, sublinear_tf=True, **kind), TruncatedSVD(width, random_state=0)
    train = components.fit_transform(terms.fit_transform([texts[row] for row in rows]))
    return train, labels[rows], components.transform(terms.transform([texts[row] for row in test])), labels[test]


def _unambiguous(pairs: set[tuple[str, str]], fewest: int) -> Texts:
    """Texts of one class only, and class numbers; classes with fewer texts are left out."""
    times = Counter(text for text, _ in pairs)
    single = [(text, name) for text, name in sorted(pairs) if times[text] == 1]
    sizes = Counter(name for _, name in single)
    kept = [(text, name) for text, name in single if sizes[name] >= fewest]
    return [text for text, _ in kept], np.unique([name for _, name in kept], return_inverse=True)[1]


@cache
def _names() -> Texts:
    """Names of countries and languages in every language that has 200 of its own."""
    from babel import Locale, localedata

    pairs = set()
    for code in (code for code in localedata.locale_identifiers() if "_" not in code):
        locale = Locale(code)
        words = (*locale.territories.values(), *locale.languages.values())
        pairs |= {(word, code) for word in words if word and len(word) > 2}
    return _unambiguous(pairs, 200)


@cache
def _regions() -> Texts:
    """Names of the regions of every country with four of them."""
    import pycountry

    return _unambiguous({(region.name, region.country_code) for region in pycountry.subdivisions}, 4)


@cache
def _packages() -> Texts:
    """Descriptions of one line and sections of all packages in Debian's main archive."""
    command = ["apt-cache", "dumpavail"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, errors="ignore").stdout
    pairs = set()
    for entry in text.split("\n\n"):
        section, line = (re.search(pattern, entry, re.M) for pattern in (r"^Section: (.+)", r"^Description.*?: (.+)"))
        if section and line:
            pairs.add((line[1], section[1].split("/")[-1]))
    return _unambiguous(pairs, 4)


@cache
def _token_means() -> np.ndarray:
    """(N, 256): the mean of the pretrained vectors of the tokens of each package's description."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    found = find_spec("wordllama")
    if found is None or found.origin is None:
        sys.exit("packages needs the token vectors of WordLlama: pip install wordllama")
    folder = Path(found.origin).parent
    tokenizer = Tokenizer.from_file(str(folder / "tokenizers" / "l2_supercat_tokenizer_config.json"))
    tokenizer.no_padding()
    vectors = load_file(folder / "weights" / "l2_supercat_256.safetensors")["embedding.weight"].astype(np.float32)
    encoded = tokenizer.encode_batch(_packages()[0], add_special_tokens=False)
    return np.stack([vectors[one.ids].mean(0) for one in encoded])


@cache
def _docstrings() -> Texts:
    root = Path(sysconfig.get_paths()["purelib"])
    opening = re.compile(r'^ *(?:def|class) [^\n]*:\n\s+[rR]?"""\s*(.{20,300}?)(?:"""|\n\s*\n)', re.M | re.S)
    pairs = set()
    for folder in (one for one in root.iterdir() if one.is_dir() and one.name.isidentifier()):
        for file in folder.rglob("*.py"):
            found = opening.findall(file.read_text(encoding="utf-8", errors="ignore"))
            pairs |= {(" ".join(text.split()), folder.name) for text in found}
    return _unambiguous(pairs, 60)


def drawn(counts: np.ndarray, width: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Features (N, D) around class means, some directions wider than others, and labels (N,) with these counts."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(len(counts)), counts)
    spread = np.geomspace(2, 0.5, width, dtype=np.float32)
    means = 0.2 * spread * rng.standard_normal((len(counts), width), dtype=np.float32)
    features = np.empty((len(labels), width), dtype)
    for start in range(0, len(labels), 4096):
        own = labels[start : start + 4096]
        features[start : start + 4096] = means[own] + spread * rng.standard_normal((len(own), width), dtype=np.float32)
    return features, labels


def long_tail(number: int, classes: int) -> np.ndarray:
    """(K,) about so many samples, 100 times as many of the first class as of the last."""
    sizes = np.geomspace(100, 1, classes)
    return np.maximum((sizes / sizes.sum() * number).round(), 1).astype(int)


def imagenet_lt() -> np.ndarray:
    """(1000,) training images per class of ImageNet-LT."""
    path = shared_folder() / "golden" / "class_counts" / "robustlearn_ImageNet_LT.json"
    return np.array(json.loads(path.read_text()))
