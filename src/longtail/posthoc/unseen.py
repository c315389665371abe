"""Held-out samples must not be training samples: a check of their rows."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
from torch import Tensor

from longtail.errors import UserError
from longtail.outputs.rows import LogitRows
from longtail.posthoc.inputs import FitData

SHARED = 0.1  # of the held-out rows that may be in the training set by chance: duplicates in a data set


def require_unseen(train: FitData, held_out: FitData) -> None:
    """Refuse held-out samples whose rows (logits, and features where both have them) stand in the training outputs."""
    both = train.features is not None and held_out.features is not None
    if both and train.features.shape[1] != held_out.features.shape[1]:  # type: ignore[union-attr]
        widths = [part.features.shape[1] for part in (train, held_out)]  # type: ignore[union-attr]
        raise UserError(f"training outputs have {widths[0]} features per sample, held-out outputs {widths[1]}")
    known, own = (_digests(part, with_features=both) for part in (train, held_out))
    there = Counter(known)
    shared = sum(digest in there for digest in own)
    # Rows of few digits (two classes, one decimal) are often equal by chance, then within the training set, too.
    by_chance = sum(number for number in there.values() if number > 1) / len(known)
    if shared == len(own) or shared > max(_allowed(train, held_out) + by_chance * len(own), 1):
        raise UserError(
            f"{shared} of {len(own)} held-out samples are training samples too (their rows are equal); "
            "a fit on samples that the network has seen would be overconfident; pass other held-out samples"
        )


def _allowed(train: FitData, held_out: FitData) -> float:
    """How many held-out rows may stand in the training outputs; of a few images per class, only some can be there."""
    share = np.minimum(train.seen_counts / np.maximum(train.class_counts, 1), 1)[held_out.labels.numpy()]
    return float(SHARED * share.sum() + 3 * np.sqrt(SHARED * (share * (1 - share)).sum()))  # and by the draw of them


def _digests(data: FitData, *, with_features: bool) -> list[bytes]:
    features = LogitRows(data.features) if with_features else None
    found: list[bytes] = []
    for where, chunk in data.rows.stored.chunks():
        parts = [_plain(chunk)] if features is None else [_plain(chunk), _plain(features.read(where))]
        for row in zip(*parts, strict=True):
            found.append(hashlib.blake2b(b"".join(part.tobytes() for part in row), digest_size=16).digest())
    return found


def _plain(chunk: Tensor) -> np.ndarray:
    return np.ascontiguousarray(chunk.numpy())
