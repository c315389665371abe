"""The splits of a data set: as they are on disk, and as methods use them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from longtail.config import DataConfig, TrainConfig
from longtail.data.images import DecodedImages, Images
from longtail.data.imbalance import long_tail_counts, long_tail_indices, validation_indices
from longtail.data.sources import BY_PATH, SOURCES, Statistics, find_data, name_of
from longtail.errors import UserError, choose
from longtail.files.atomic import cache_folder
from longtail.files.reading import expanded


@dataclass(frozen=True)
class ReadSplits:
    """The splits that a source has on disk.

    Args:
        train: images to train on.
        validation: validation images, if the source has any.
        test: test images.
        names_on_disk: split → the name of its file, folder or column.
        unused: files and folders next to the splits that are not read.
    """

    train: Images
    validation: Images | None = None
    test: Images | None = None
    names_on_disk: dict[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Splits:
    """The splits of one data set: training, validation and test images."""

    name: str
    train: Images
    validation: Images | None
    test: Images | None
    group_counts: Tensor
    """(K,) training images per class before validation images were held out."""
    validation_from_training: bool = False
    """Whether the validation images were held out of the training images."""
    names_on_disk: dict[str, str] = field(default_factory=dict)
    """Split → its name on disk, if the images were given by a path."""
    unused: tuple[str, ...] = ()
    """Files and folders beside the splits that are not read."""

    def split(self, name: str) -> Images:
        """The split train, validation or test; if it is missing, the error says what to do."""
        images: Images | None = getattr(self, name)
        if images is None:
            remedy = "train with --validation 0.1" if name == "validation" else "train with --test-list FILE"
            others = [split for split in ("validation", "test") if getattr(self, split) is not None]
            instead = f", or name another with --split: {', '.join(others)}" if others else ""
            raise UserError(f"{self.name} has no {name} split here; {remedy}{instead}")
        return images

    def summary(self) -> str:
        """Classes and images per split, in one sentence.

        >>> from longtail.data.splits import open_splits
        >>> open_splits("digits-lt").summary()
        'digits: 10 classes; images: 314 train, 36 validation (held out of the training images), 600 test'
        """
        described = []
        for name in ("train", "validation", "test"):
            images: Images | None = getattr(self, name)
            if images is None:
                continue
            cut = name == "validation" and self.validation_from_training
            where = "held out of the training images" if cut else self.names_on_disk.get(name)
            absent = int((images.class_counts == 0).sum())
            lack = f"no image of {absent:,} {'class' if absent == 1 else 'classes'}" if absent else ""
            about = "; ".join(filter(None, (where, lack)))
            described.append(f"{len(images):,} {name}" + (f" ({about})" if about else ""))
        left = f"; not used: {', '.join(self.unused)}" if self.unused else ""
        return f"{self.name}: {self.train.num_classes:,} classes; images: {', '.join(described)}{left}"


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
        group_counts=whole.class_counts,
        validation_from_training=train is not whole,
        names_on_disk=read.names_on_disk,
        unused=read.unused,
    )


def _root(config: DataConfig) -> Path:
    """The folder of the data set: as given, that of a file of images, or the cache folder."""
    if config.root:
        return expanded(config.root)
    if config.data not in BY_PATH:
        return cache_folder()
    if config.train_list:
        return expanded(config.train_list).parent
    file = " or --train-list FILE" if config.data != "folder" else ""
    raise UserError(f"where are the images? --data {config.data} needs --root FOLDER{file}")


def statistics(config: TrainConfig) -> Statistics:
    """Mean and standard deviation per channel that pixels, scaled to 0..1, are normalised with.

    They are those that a pretrained network expects, averaged for grey images; otherwise those of the data set.
    """
    known = SOURCES[config.data].statistics
    if config.mean is None or config.std is None:
        return known
    grey = len(known[0]) == 1 < len(config.mean)
    mean, std = ((sum(values) / len(values),) if grey else values for values in (config.mean, config.std))
    return mean, std


def image_side(config: TrainConfig) -> int:
    """Side of the square images a network of this configuration takes."""
    side = config.image_size or SOURCES[config.data].side
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
    seed = None if config.subset == "standard" else config.seed
    cut = train.subset(long_tail_indices(labels, counts, seed))
    return cut.on_its_own() if isinstance(cut, DecodedImages) else cut


def _require_every_class(train: Images, name: str) -> None:
    empty = (train.class_counts == 0).nonzero().flatten().tolist()
    if empty:
        more = f" (nor have {len(empty) - 1} others)" if len(empty) > 1 else ""
        class_name = train.class_names[empty[0]]
        label = f"{empty[0]}" if class_name == str(empty[0]) else f"{empty[0]} ({class_name})"
        raise UserError(f"class {label} of {name} has no training image{more}; add images, or remove the class")
