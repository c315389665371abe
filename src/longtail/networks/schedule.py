"""The schedule of the weight between two branches over the epochs."""

from __future__ import annotations


def parabolic(epoch: int, epochs: float) -> float:
    """1 - (epoch / epochs)²: falls from 1 towards 0; `epoch` counts from 0.

    >>> [parabolic(epoch, 4) for epoch in range(4)]
    [1.0, 0.9375, 0.75, 0.4375]
    """
    return 1 - (epoch / epochs) ** 2
