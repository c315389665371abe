"""The data sets that can be named, and which one a path means. Help texts read this file: it imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longtail.config import DataConfig
from longtail.data.tables import is_image, is_table, split_of
from longtail.errors import UserError
from longtail.files.reading import expanded
from longtail.recipes import RECIPES

if TYPE_CHECKING:
    from longtail.data.splits import ReadSplits

Statistics = tuple[tuple[float, ...], tuple[float, ...]]

DIGITS_TEST_PER_CLASS = 60
DIGITS = ((0.3055,), (0.3761,))
CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100 = ((0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Kinds of data that are called by the name of their folder or file.
BY_PATH = ("folder", "csv", "parquet", "lists")
INATURALIST = ((0.466, 0.471, 0.380), (0.195, 0.194, 0.192))


@dataclass(frozen=True)
class Source:
    """Where images come from.

    Args:
        layout: what is on disk, for help texts.
        read: function from configuration and root folder to the splits that exist.
        statistics: mean and standard deviation per channel of the pixels, scaled to 0..1.
        side: side of the square images, where it is fixed; images read from files are resized.
    """

    layout: str
    read: Callable[[DataConfig, Path], ReadSplits]
    statistics: Statistics = IMAGENET
    side: int | None = None


def read_digits(config: DataConfig, root: Path) -> ReadSplits:
    """The 1,797 handwritten digits of scikit-learn, pixels (N, 1, 8, 8) uint8; the test split has 60 of each digit."""
    import torch

    from longtail.data.images import MemoryImages
    from longtail.data.splits import ReadSplits

    # Read from scikit-learn's file, whose rows are 64 values 0..16 and the digit: its import would take seconds.
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    darkness, digits = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1]
    images = MemoryImages(
        labels=torch.from_numpy(digits.astype(np.int64)),
        class_names=tuple(str(digit) for digit in range(10)),
        pixels=torch.from_numpy((darkness * (255 / 16)).round().astype(np.uint8)),
    )
    rng = np.random.default_rng(0)
    of_class = [rng.permutation(np.flatnonzero(digits == digit)) for digit in range(10)]
    test = np.sort(np.concatenate([members[:DIGITS_TEST_PER_CLASS] for members in of_class]))
    return ReadSplits(images.subset(np.setdiff1d(np.arange(len(images)), test)), test=images.subset(test))


def _cifar(config: DataConfig, root: Path) -> ReadSplits:
    from longtail.data.cifar import read_cifar
    from longtail.data.splits import ReadSplits

    train, test = read_cifar(config.data, root)
    return ReadSplits(train, test=test)


def _reader(module: str, function: str, *arguments: Any) -> Callable[[DataConfig, Path], ReadSplits]:
    """A function of `longtail.data.MODULE`, which is imported when it is called."""

    def read(config: DataConfig, root: Path) -> ReadSplits:
        splits: ReadSplits = getattr(import_module(f"longtail.data.{module}"), function)(config, root, *arguments)
        return splits

    return read


def _published(train: str, validation: str | None, test: str, classes: int) -> Callable[[DataConfig, Path], ReadSplits]:
    """A published data set: list files below its root folder, and its number of classes."""
    return _reader("list_files", "read_lists", (train, validation, test), classes)


SOURCES: dict[str, Source] = {
    "digits": Source("handwritten digits, 8x8 grey; part of the installation", read_digits, DIGITS, side=8),
    "cifar10": Source("cifar-10-batches-py or cifar-10-batches-bin (--download fetches it)", _cifar, CIFAR10, side=32),
    "cifar100": Source("cifar-100-python or cifar-100-binary (--download fetches it)", _cifar, CIFAR100, side=32),
    "imagenet-lt": Source(
        "ImageNet_LT_train.txt, ImageNet_LT_val.txt, ImageNet_LT_test.txt and the images they name",
        _published("ImageNet_LT_train.txt", "ImageNet_LT_val.txt", "ImageNet_LT_test.txt", 1000),
    ),
    "places-lt": Source(
        "Places_LT_train.txt, Places_LT_val.txt, Places_LT_test.txt and the images they name",
        _published("Places_LT_train.txt", "Places_LT_val.txt", "Places_LT_test.txt", 365),
    ),
    "inaturalist18": Source(
        "iNaturalist18_train.txt, iNaturalist18_val.txt and the images they name",
        _published("iNaturalist18_train.txt", None, "iNaturalist18_val.txt", 8142),
        INATURALIST,
    ),
    "folder": Source(
        "train/CLASS/IMAGE, and val/, test/ if there are; or CLASS/IMAGE", _reader("list_files", "read_folders")
    ),
    "csv": Source(
        "train.csv with a path and a label per row, and val.csv, test.csv if there are",
        _reader("csv_files", "read_csv_splits"),
    ),
    "parquet": Source(
        "train-*.parquet with columns image (or path) and label, and validation-*.parquet, test-*.parquet if there are",
        _reader("parquet", "read_parquet_splits"),
    ),
    "lists": Source(
        "list files named with --train-list, --validation-list, --test-list", _reader("list_files", "read_lists")
    ),
}


def find_data(name: str, root: str | None = None) -> DataConfig:
    """The configuration of a data set given by the name of a recipe or by a path; nothing is held out of a path."""
    if name in RECIPES:
        return replace(RECIPES[name], root=root)
    # Absolute, so that a run finds its images again from any folder.
    path = expanded(name).absolute()
    if path.is_dir():
        return DataConfig(data=_kind_of_folder(path), root=str(path), validation=0)
    if path.is_file():
        folder = expanded(root).absolute() if root else path.parent
        return DataConfig(data=_kind_of_file(path), root=str(folder), train_list=str(path), validation=0)
    close = get_close_matches(name, RECIPES, n=1, cutoff=0.7)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UserError(f"{name!r} is not a file, folder or recipe{hint}; recipes: {', '.join(RECIPES)}")


def name_of(config: DataConfig) -> str:
    """The name of a data set for people: the name of its kind, or of its folder or file."""
    if config.data not in BY_PATH:
        return config.data
    path = config.train_list or config.root
    return Path(path).name if path else config.data


def _kind_of_folder(folder: Path) -> str:
    if any(folder.glob("*.parquet")) or any((folder / "data").glob("*.parquet")):
        return "parquet"
    has_table = any(is_table(path) and split_of(path.stem) == "train" for path in folder.iterdir())
    return "csv" if has_table else "folder"


def _kind_of_file(path: Path) -> str:
    if is_image(path):
        raise UserError(f"{path} is one image; name the folder that holds a folder per class, or a list of images")
    if path.suffix.lower() == ".parquet":
        return "parquet"
    return "csv" if is_table(path) else "lists"
