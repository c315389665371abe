"""Calibrate a classifier of which only the logits are at hand: arrays on disk, no model, no framework.

The same in the shell: `longtail calibrate train.npz --test test.npz --out calibrated`.

    python examples/saved_logits.py
"""

import tempfile
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression

import longtail

data = longtail.data.open_splits("digits-lt")
counts = data.train.class_counts

# Whatever program wrote these files: logits (N, K) and labels (N,) of the training and of other images.
folder = Path(tempfile.mkdtemp())
flat = {"train": data.train.pixels.flatten(1) / 255, "test": data.test.pixels.flatten(1) / 255}
classifier = LogisticRegression(C=0.1, max_iter=1000).fit(flat["train"], data.train.labels)
for name, images in (("train", data.train), ("test", data.test)):
    np.savez(folder / f"{name}.npz", logits=classifier.decision_function(flat[name]), labels=images.labels)

train, test = np.load(folder / "train.npz"), np.load(folder / "test.npz")
marc = longtail.MARC().fit(train["logits"], train["labels"])
for title, logits in (("before", test["logits"]), ("after", marc.transform(test["logits"]))):
    scores = longtail.evaluate(logits, test["labels"], counts)
    print(f"{title}: balanced {100 * scores.balanced:.1f}, few-shot {100 * scores.few:.1f}")

# For any other framework: new_logit[j] = scale[j] * logit[j] + shift[j].
print("scale", marc.scale_.round(2).tolist())
print("shift", marc.shift_.round(2).tolist())
