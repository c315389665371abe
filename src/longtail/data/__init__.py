"""Long-tailed image data: opening a data set by name, cutting its tail, holding out validation images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longtail.data import digits
from longtail.data.cifar import CIFARS, read_cifar
from longtail.data.csvfiles import DELIMITERS, read_csv
from longtail.data.images import FileImages, Images, Splits
from longtail.data.imbalance import long_tail_counts, long_tail_indices, validation_indices
from longtail.data.listfiles import read_folder, read_list
from longtail.data.parquetfiles import ParquetImages, parquet_files, read_parquet
from longtail.errors import UserError, choose
from longtail.files import cache_folder

if TYPE_CHECKING:
    from longtail.config import DataConfig, TrainConfig

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
INATURALIST = ((0.466, 0.471, 0.380), (0.195, 0.194, 0.192))


@dataclass(frozen=True)
class ListSet:
    """A published data set given by list files below its root folder."""

    train: str
    validation: str | None
    test: str
    classes: int
    statistics: tuple[tuple[float, ...], tuple[float, ...]] = IMAGENET


LIST_SETS = {
    "imagenet-lt": ListSet("ImageNet_LT_train.txt", "ImageNet_LT_val.txt", "ImageNet_LT_test.txt", 1000),
    "places-lt": ListSet("Places_LT_train.txt", "Places_LT_val.txt", "Places_LT_test.txt", 365),
    "inaturalist18": ListSet("iNaturalist18_train.txt", None, "iNaturalist18_val.txt", 8142, INATURALIST),
}
DATA_SETS = ("digits", *CIFARS, *LIST_SETS, "lists", "csv", "parquet", "folder")


def open_splits(config: DataConfig | str, *, need_every_class: bool = True) -> Splits:
    """Open the data set of a configuration: its tail cut and its validation split held out, by the seed.

    Args:
        config: a configuration, the name of a recipe, or the path of images, of which nothing is held out.
        need_every_class: whether a class without training images is an error.
    """
    if isinstance(config, str):
        from longtail.data.sources import find_data

        config = find_data(config)
    name = choose("data set", config.data, DATA_SETS)
    root = Path(config.root).expanduser() if config.root else cache_folder()
    train, validation, test = _reader(name)(config, root)
    train = _cut_tail(train, config)
    if validation is None and config.validation > 0:
        kept, held_out = validation_indices(train.labels.numpy(), config.validation, config.seed)
        train, validation = train.subset(kept), train.subset(held_out)
    if need_every_class:
        _require_every_class(train, name)
    return Splits(name, train, validation, test, *statistics(name))


Read = tuple[Images, Images | None, Images | None]
Statistics = tuple[tuple[float, ...], tuple[float, ...]]


def statistics(name: str) -> Statistics:
    """Mean and standard deviation per channel of a data set's pixels, scaled to 0..1."""
    if name == "digits":
        return digits.MEAN, digits.STD
    if name in CIFARS:
        return CIFARS[name].mean, CIFARS[name].std
    return LIST_SETS[name].statistics if name in LIST_SETS else IMAGENET


def image_side(config: TrainConfig) -> int:
    """Side of the square images a network of this configuration takes."""
    side = {"digits": digits.SIDE, **dict.fromkeys(CIFARS, 32)}.get(config.data) or config.image_size
    if side is None:
        raise UserError("images read from files need a size: give --image-size")
    return side


def _reader(name: str) -> Callable[[DataConfig, Path], Read]:
    if name == "digits":
        return lambda config, root: _without_validation(digits.read_digits())
    if name in CIFARS:
        return lambda config, root: _without_validation(read_cifar(name, root))
    return {"folder": _read_folders, "csv": _read_csv, "parquet": _read_parquet}.get(name, _read_lists)


def _without_validation(splits: tuple[Images, Images]) -> Read:
    return splits[0], None, splits[1]


def _read_lists(config: DataConfig, root: Path) -> Read:
    published = LIST_SETS.get(config.data)
    classes = published.classes if published else None

    def read(given: str | None, default: str | None) -> Images | None:
        path = Path(given).expanduser() if given else root / default if default else None
        return read_list(path, root, num_classes=classes, skip_broken=config.skip_broken) if path else None

    if config.train_list and Path(config.train_list).suffix.lower() in DELIMITERS:
        return _read_csv(config, root)

    train = read(config.train_list, published.train if published else None)
    if train is None:
        raise UserError("data set 'lists' needs --train-list FILE (a path and a label per line) and --root FOLDER")
    classes = train.num_classes
    validation = read(config.validation_list, published.validation if published else None)
    test = read(config.test_list, published.test if published else None)
    return train, validation, test


def _read_csv(config: DataConfig, root: Path) -> Read:
    """The files named, or train.csv, validation.csv and test.csv below the root."""

    def read(split: str, class_names: tuple[str, ...] | None = None) -> FileImages | None:
        given: str | None = getattr(config, f"{split}_list")
        path = Path(given).expanduser() if given else root / f"{split}.csv"
        if split != "train" and not given and not path.is_file():
            return None
        return read_csv(path, root, class_names=class_names, skip_broken=config.skip_broken)

    train = read("train")
    assert train is not None
    return train, read("validation", train.class_names), read("test", train.class_names)


def _read_parquet(config: DataConfig, root: Path) -> Read:
    """The files named, or train-*.parquet, validation-*.parquet and test-*.parquet below the root."""

    def read(split: str, class_names: tuple[str, ...] | None = None) -> ParquetImages | None:
        given: str | None = getattr(config, f"{split}_list")
        name = "val" if split == "validation" else split
        files = (Path(given).expanduser(),) if given else parquet_files(root, name)
        return read_parquet(files, class_names=class_names, skip_broken=config.skip_broken) if files else None

    train = read("train")
    if train is None:
        raise UserError(f"no training images in {root}; expected {root}/train-*.parquet, or give --train-list FILE")
    return train, read("validation", train.class_names), read("test", train.class_names)


def _read_folders(config: DataConfig, root: Path) -> Read:
    # A folder of classes that nobody has split is a training set.
    split = not root.is_dir() or any((root / name).is_dir() for name in ("train", "val", "test"))
    train = read_folder(root / "train" if split else root, skip_broken=config.skip_broken)

    def read(name: str) -> Images | None:
        folder = root / name
        known = train.class_names
        return read_folder(folder, class_names=known, skip_broken=config.skip_broken) if folder.is_dir() else None

    return train, read("val"), read("test")


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
