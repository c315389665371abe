"""Work on images in other processes: results in order, mistakes as one line instead of a traceback."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from longtail.errors import UserError


def in_order_of(
    work: Dataset[Any],
    keys: Iterable[Any],
    workers: int,
    *,
    pin: bool = False,
    collate: Callable[[Any], Any] | None = None,
) -> Iterator[Any]:
    """`work[key]` for every key, computed by `workers` processes (0: by this one).

    `work` returns a `UserError` as a value, which is raised here: raised in a worker it would come back as a traceback.
    """
    with warnings.catch_warnings():
        # Who asks for more workers than cores has a reason: files that are slow to come.
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        loader = DataLoader(
            work,
            batch_size=None,
            sampler=keys,
            num_workers=workers,
            pin_memory=pin,
            collate_fn=collate,
        )
    for result in loader:
        if isinstance(result, UserError):
            raise result
        yield result
