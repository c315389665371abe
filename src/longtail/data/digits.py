"""scikit-learn's 1,797 real handwritten digits, 8x8 grey: embedded, no download.

The test split holds 60 images of every digit, whatever the seed; the rest is for training.
"""

from __future__ import annotations

import numpy as np
import torch

from longtail.data.images import MemoryImages

MEAN, STD = (0.3055,), (0.3761,)
SIDE = 8
TEST_PER_CLASS = 60


def read_digits() -> tuple[MemoryImages, MemoryImages]:
    """(train, test), pixels (N, 1, 8, 8) uint8."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    pixels = torch.from_numpy((raw.images * (255 / 16)).round().astype(np.uint8)).unsqueeze(1)
    everything = MemoryImages(
        labels=torch.from_numpy(raw.target.astype(np.int64)),
        class_names=tuple(str(digit) for digit in range(10)),
        pixels=pixels,
    )
    rng = np.random.default_rng(0)
    of_class = [rng.permutation(np.flatnonzero(raw.target == digit)) for digit in range(10)]
    test = np.sort(np.concatenate([members[:TEST_PER_CLASS] for members in of_class]))
    train = np.setdiff1d(np.arange(len(everything)), test)
    return everything.subset(train), everything.subset(test)
