"""Opening a data set: read it, cut its tail, hold out validation images, by the seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from longtail.config import DataConfig, TrainConfig
from longtail.core.files import cache_folder
from longtail.data.images import Images, Splits
from longtail.data.imbalance import long_tail_counts, long_tail_indices, validation_indices
from longtail.data.sources import SOURCES, Statistics, find_data
from longtail.errors import UserError, choose


def open_splits(config: DataConfig | str, *, need_every_class: bool = True) -> Splits:
    """Open the data set of a configuration: its tail cut and its validation split held out, by the seed.

    Args:
        config: a configuration, the name of a recipe, or the path of images, of which nothing is held out.
        need_every_class: whether a class without training images is an error.
    """
    if isinstance(config, str):
        config = find_data(config)
    source = SOURCES[choose("data set", config.data, SOURCES)]
    root = Path(config.root).expanduser() if config.root else cache_folder()
    train, validation, test = source.read(config, root)
    train = _cut_tail(train, config)
    whole = train
    if validation is None and config.validation > 0:
        only_head = config.validation_from == "head"
        kept, held_out = validation_indices(train.labels.numpy(), config.validation, config.seed, only_head=only_head)
        train, validation = train.subset(kept), train.subset(held_out)
    if need_every_class:
        _require_every_class(train, config.data)
    cut = train is not whole
    return Splits(config.data, train, validation, test, *source.statistics, whole.class_counts, cut)


def statistics(name: str) -> Statistics:
    """Mean and standard deviation per channel of a data set's pixels, scaled to 0..1."""
    return SOURCES[name].statistics


def image_side(config: TrainConfig) -> int:
    """Side of the square images a network of this configuration takes."""
    side = SOURCES[config.data].side or config.image_size
    if side is None:
        raise UserError("images read from files need a size: give --image-size")
    return side


def _cut_tail(train: Images, config: DataConfig) -> Images:
    if config.profile == "none":
        return train
    labels = train.labels.numpy()
    counts = long_tail_counts(train.num_classes, int(train.class_counts.min()), config.imbalance, config.profile)
    if config.shuffle_classes:
        counts = np.random.default_rng((config.seed, train.num_classes)).permutation(counts)
    return train.subset(long_tail_indices(labels, counts, config.seed))


def _require_every_class(train: Images, name: str) -> None:
    empty = (train.class_counts == 0).nonzero().flatten().tolist()
    if empty:
        raise UserError(f"class {empty[0]} of {name} has no training image ({len(empty)} such classes)")
