"""Scores of the samples that HALO is fitted on: by the model and by other heads on its features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from longtail.distributed.world import World
from longtail.outputs.rows import LogitRows
from longtail.posthoc.cross_fit import Fold
from longtail.posthoc.held import BLOCK
from longtail.posthoc.inputs import FitData
from longtail.posthoc.linear import LinearHead, ManyHeads

# Scores (S, K, B) of some samples in a type, the own head's first.
ReadScores = Callable[[torch.dtype], Tensor]
# Goes through this process's share of the unseen samples: their places, and what gives their scores.
Scores = Callable[[], Iterator[tuple[slice, ReadScores]]]


def model_scores(held: FitData, heads: dict[str, LinearHead]) -> Iterator[tuple[slice, ReadScores]]:
    """Scores of the model itself and of the heads on held-out samples."""
    others = ManyHeads(list(heads.values())) if heads else None
    features = LogitRows(held.features)

    def scores(rows: slice, dtype: torch.dtype) -> Tensor:
        own = held.rows.read(rows).to(dtype).T.unsqueeze(0)
        return own if others is None else torch.cat([own, others.scores(features.read(rows), dtype)])

    for rows in parts(*held.world.share(len(held.labels)), held.num_classes):
        yield rows, partial(scores, rows)


def parts(first: int, last: int, classes: int) -> Iterator[slice]:
    """Samples scored at a time: enough for a product that is worth its weights."""
    size = int(np.clip(BLOCK // classes, 256, 2048))
    for start in range(first, last, size):
        yield slice(start, min(start + size, last))


def fold_scores(folds: list[Fold], features: LogitRows, world: World) -> Iterator[tuple[slice, ReadScores]]:
    """Scores of samples by the heads of the fold that left them out, fold by fold."""
    passed = 0
    for fold in folds:
        heads = ManyHeads([fold.own, *fold.heads.values()])
        for rows in parts(*world.share(len(fold.held)), len(fold.own.bias)):
            inputs = features.read(fold.held[rows])
            yield slice(passed + rows.start, passed + rows.stop), partial(heads.scores, inputs)
        passed += len(fold.held)
