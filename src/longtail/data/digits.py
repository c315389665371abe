"""The 1,797 handwritten digits of scikit-learn, 8x8 grey images; no download is needed.

The test split has 60 images of every digit for every seed; the other images are for training.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from longtail.data.images import MemoryImages

SIDE = 8
TEST_PER_CLASS = 60


def read_digits() -> tuple[MemoryImages, MemoryImages]:
    """(train, test), pixels (N, 1, 8, 8) uint8."""
    table = _read_table()
    darkness, digits = table[:, :-1].reshape(-1, 1, SIDE, SIDE), table[:, -1]
    everything = MemoryImages(
        labels=torch.from_numpy(digits.astype(np.int64)),
        class_names=tuple(str(digit) for digit in range(10)),
        pixels=torch.from_numpy((darkness * (255 / 16)).round().astype(np.uint8)),
    )
    rng = np.random.default_rng(0)
    of_class = [rng.permutation(np.flatnonzero(digits == digit)) for digit in range(10)]
    test = np.sort(np.concatenate([members[:TEST_PER_CLASS] for members in of_class]))
    train = np.setdiff1d(np.arange(len(everything)), test)
    return everything.subset(train), everything.subset(test)


def _read_table() -> np.ndarray:
    """(1797, 65): 64 values 0..16, then the digit. Read from scikit-learn's file: its import would take seconds."""
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    return np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
