"""The data sets that can be named, which one a path means, and their splits. Help texts read this file: no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longtail.config import DataConfig, TrainConfig
from longtail.data.imbalance import long_tail_counts, long_tail_indices, validation_indices
from longtail.data.tables import SPLITS, ReadSplits, is_csv, is_image, split_of
from longtail.errors import UserError, choose
from longtail.files.atomic import cache_folder
from longtail.files.reading import expanded
from longtail.recipes import RECIPES

if TYPE_CHECKING:
    from torch import Tensor

    from longtail.data.images import Images

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
DIGITS = ((0.3055,), (0.3761,))
CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100 = ((0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
INATURALIST = ((0.466, 0.471, 0.380), (0.195, 0.194, 0.192))


@dataclass(frozen=True)
class Source:
    """Where images come from."""

    layout: str  # what is on disk, for help texts
    reader: str  # module and function of `longtail.data` that read the splits; imported when it is used
    statistics: Statistics = IMAGENET  # mean and standard deviation per channel of the pixels, scaled to 0..1
    side: int | None = None  # of the square images, where it is fixed; images read from files are resized
    arguments: tuple[Any, ...] = ()  # of the reader, after configuration and root folder


SOURCES: dict[str, Source] = {
    "digits": Source("handwritten digits, 8x8 grey; part of the installation", "cifar.read_digits", DIGITS, side=8),
    "cifar10": Source(
        "cifar-10-batches-py or cifar-10-batches-bin (--download fetches it)", "cifar.read_cifar", CIFAR10, side=32
    ),
    "cifar100": Source(
        "cifar-100-python or cifar-100-binary (--download fetches it)", "cifar.read_cifar", CIFAR100, side=32
    ),
    "imagenet-lt": Source(
        "ImageNet_LT_train.txt, ImageNet_LT_val.txt, ImageNet_LT_test.txt and the images they name",
        "listings.read_lists",
        arguments=(("ImageNet_LT_train.txt", "ImageNet_LT_val.txt", "ImageNet_LT_test.txt"), 1000),
    ),
    "places-lt": Source(
        "Places_LT_train.txt, Places_LT_val.txt, Places_LT_test.txt and the images they name",
        "listings.read_lists",
        arguments=(("Places_LT_train.txt", "Places_LT_val.txt", "Places_LT_test.txt"), 365),
    ),
    "inaturalist18": Source(
        "iNaturalist18_train.txt, iNaturalist18_val.txt and the images they name",
        "listings.read_lists",
        INATURALIST,
        arguments=(("iNaturalist18_train.txt", None, "iNaturalist18_val.txt"), 8142),
    ),
    "folder": Source("train/CLASS/IMAGE, and val/, test/ if there are; or CLASS/IMAGE", "listings.read_folders"),
    "csv": Source(
        "train.csv with a path and a label per row, and val.csv, test.csv if there are", "listings.read_csv_splits"
    ),
    "parquet": Source(
        "train-*.parquet with columns image (or path) and label, and validation-*.parquet, test-*.parquet if there are",
        "parquet.read_parquet_splits",
    ),
    "lists": Source("list files named with --train-list, --validation-list, --test-list", "listings.read_lists"),
}
BY_PATH = ("folder", "csv", "parquet", "lists")  # data sets that are called by the name of their folder or file


def find_data(name: str, root: str | None = None) -> DataConfig:
    """The configuration of a data set given by the name of a recipe or by a path; nothing is held out of a path."""
    if name in RECIPES:
        return replace(RECIPES[name], root=root)
    # Absolute, so that a run finds its images again from any folder.
    path = expanded(name).absolute()
    if path.is_dir():
        has_parquet = any(path.glob("*.parquet")) or any((path / "data").glob("*.parquet"))
        has_csv = any(is_csv(file) and split_of(file.stem) == "train" for file in path.iterdir())
        kind = "parquet" if has_parquet else "csv" if has_csv else "folder"
        return DataConfig(data=kind, root=str(path), validation=0)
    if path.is_file():
        if is_image(path):
            raise UserError(f"{path} is one image; name the folder that holds a folder per class, or a list of images")
        kind = "parquet" if path.suffix.lower() == ".parquet" else "csv" if is_csv(path) else "lists"
        folder = expanded(root).absolute() if root else path.parent
        return DataConfig(data=kind, root=str(folder), train_list=str(path), validation=0)
    close = get_close_matches(name, RECIPES, n=1, cutoff=0.7)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UserError(f"{name!r} is not a file, folder or recipe{hint}; recipes: {', '.join(RECIPES)}")


def name_of(config: DataConfig) -> str:
    """The name of a data set for people: the name of its kind, or of its folder or file."""
    if config.data not in BY_PATH:
        return config.data
    path = config.train_list or config.root
    return Path(path).name if path else config.data


@dataclass(frozen=True, kw_only=True)
class Splits(ReadSplits):
    """The splits of one data set: training, validation and test images."""

    name: str
    group_counts: Tensor
    """(K,) training images per class before validation images were held out."""
    validation_from_training: bool = False
    """Whether the validation images were held out of the training images."""

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
        for name in SPLITS:
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
    name, root = name_of(config), _root(config)
    source = SOURCES[choose("data set", config.data, SOURCES)]
    module, function = source.reader.split(".")
    read = getattr(import_module(f"longtail.data.{module}"), function)
    splits: ReadSplits = read(config, root, *source.arguments)
    whole = train = _cut_tail(splits.train, config)
    validation = splits.validation
    if validation is None and config.validation > 0:
        only_head = config.validation_from == "head"
        kept, held_out = validation_indices(train.labels.numpy(), config.validation, config.seed, only_head=only_head)
        if not len(held_out):
            raise UserError(f"every class of {name} has one image, so none can be held out: --validation 0")
        train, validation = train.subset(kept), train.subset(held_out)
    empty = (train.class_counts == 0).nonzero().flatten().tolist()
    if empty and need_every_class:
        more = f" (nor have {len(empty) - 1} others)" if len(empty) > 1 else ""
        class_name = train.class_names[empty[0]]
        label = f"{empty[0]}" if class_name == str(empty[0]) else f"{empty[0]} ({class_name})"
        raise UserError(f"class {label} of {name} has no training image{more}; add images, or remove the class")
    changed = {"train": train, "validation": validation, "validation_from_training": train is not whole}
    return Splits(**{**vars(splits), **changed}, name=name, group_counts=whole.class_counts)


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
    of_data = SOURCES[config.data].statistics
    if config.mean is None or config.std is None:
        return of_data
    grey = len(of_data[0]) == 1 < len(config.mean)
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
    return train.subset(long_tail_indices(labels, counts, seed)).detached()
