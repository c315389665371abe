"""Text: which module of Python does a docstring belong to? TF-IDF and Probe in a pipeline of scikit-learn.

python examples/text_probe.py
"""

import importlib
import inspect
from collections import Counter
from contextlib import suppress

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import recall_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline

import longtail

NAMES = (
    "os socket ssl math asyncio typing tkinter curses ctypes itertools functools inspect ast tarfile zipfile logging "
    "random statistics shutil subprocess threading pathlib email http.client urllib.request json csv pickle sqlite3 "
    "decimal fractions datetime calendar locale gettext re string textwrap difflib heapq collections weakref"
)


def docstrings(module):
    """What the functions, classes and methods of a module say of themselves."""
    own = [value for value in vars(module).values() if inspect.isclass(value) or callable(value)]
    parts = [part for value in own if inspect.isclass(value) for part in vars(value).values() if callable(part)]
    texts = (inspect.getdoc(value) for value in (*own, *parts))
    return sorted({text.partition("\n\n")[0] for text in texts if text and len(text) > 20})


pairs = []
for name in NAMES.split():
    with suppress(ImportError):  # curses and tkinter are not on every machine
        pairs += [(text, name) for text in docstrings(importlib.import_module(name))]
shared = Counter(text for text, _ in pairs)
sizes = Counter(name for text, name in pairs if shared[text] == 1)
pairs = [(text, name) for text, name in pairs if shared[text] == 1 and sizes[name] >= 6]
texts, labels = (np.array(column) for column in zip(*pairs, strict=True))
train, test, train_labels, truth = train_test_split(texts, labels, test_size=0.3, stratify=labels, random_state=0)
modules, sizes = np.unique(train_labels, return_counts=True)
rare = sizes <= np.quantile(sizes, 1 / 3)
print(f"{len(train)} docstrings of {len(modules)} modules, {sizes.max()} to {sizes.min()} of each")

plain = make_pipeline(TfidfVectorizer(sublinear_tf=True), LogisticRegression(C=10, max_iter=1000))
probe = make_pipeline(TfidfVectorizer(sublinear_tf=True), longtail.Probe())
for title, model in (("logistic regression", plain), ("Probe", probe)):
    recalls = recall_score(truth, model.fit(train, train_labels).predict(test), average=None, labels=modules)
    print(f"{title}: balanced {100 * recalls.mean():.1f}, rarest modules {100 * recalls[rare].mean():.1f}")
estimate = probe[-1].result_.balanced
print(f"estimated from the training texts alone: {100 * estimate.low:.1f} to {100 * estimate.high:.1f}")
