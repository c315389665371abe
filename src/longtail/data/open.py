"""Opens a data set: read it, make the long tail, hold out validation images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from longtail.config import DataConfig, TrainConfig
from longtail.core.files import cache_folder
from longtail.core.opening import expanded
from longtail.data.images import DecodedImages, Images
from longtail.data.imbalance import long_tail_counts, long_tail_indices, validation_indices
from longtail.data.sources import BY_PATH, SOURCES, Statistics, find_data, name_of
from longtail.data.splits import Splits
from longtail.errors import UserError, choose


def open_splits(config: DataConfig | str, *, need_every_class: bool = True) -> Splits:
    """Open a data set: make the long tail and hold out the validation split; the seed selects both.

    Args:
        config: a configuration, the name of a recipe, or the path of images, of which none is held out.
        need_every_class: whether a class without training images is an error.
    """
    if isinstance(config, str):
        config = find_data(config)
    source = SOURCES[choose("data set", config.data, SOURCES)]
    root = _root(config)
    read = source.read(config, root)
    train, validation = _cut_tail(read.train, config), read.validation
    whole = train
    if validation is None and config.validation > 0:
        only_head = config.validation_from == "head"
        kept, held_out = validation_indices(train.labels.numpy(), config.validation, config.seed, only_head=only_head)
        if not len(held_out):
            raise UserError(f"every class of {name_of(config)} has one image, so none can be held out: --validation 0")
        train, validation = train.subset(kept), train.subset(held_out)
    if need_every_class:
        _require_every_class(train, name_of(config))
    return Splits(
        name_of(config),
        train,
        validation,
        read.test,
        *source.statistics,
        group_counts=whole.class_counts,
        validation_from_training=train is not whole,
        places=read.places,
        unused=read.unused,
    )


def _root(config: DataConfig) -> Path:
    """The folder of the data set: as given, that of a file of images, or the folder of known data sets."""
    if config.root:
        return expanded(config.root)
    if config.data not in BY_PATH:
        return cache_folder()
    if config.train_list:
        return expanded(config.train_list).parent
    file = " or --train-list FILE" if config.data != "folder" else ""
    raise UserError(f"where are the images? --data {config.data} needs --root FOLDER{file}")


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
    cut = train.subset(long_tail_indices(labels, counts, config.seed))
    return cut.on_its_own() if isinstance(cut, DecodedImages) else cut


def _require_every_class(train: Images, name: str) -> None:
    empty = (train.class_counts == 0).nonzero().flatten().tolist()
    if empty:
        more = f" (nor have {len(empty) - 1} others)" if len(empty) > 1 else ""
        known = train.class_names[empty[0]]
        label = f"{empty[0]}" if known == str(empty[0]) else f"{empty[0]} ({known})"
        raise UserError(f"class {label} of {name} has no training image{more}; add images, or remove the class")
