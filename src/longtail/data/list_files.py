"""Image sets given by list files or folders, decoded lazily.

A list file has a path and a label per line, as ImageNet-LT, Places-LT and iNaturalist 2018 are
published (`train/n01440764/x.JPEG 0`); paths are relative to a root folder. An image folder has
one folder per class.

Data: Liu et al., Large-Scale Long-Tailed Recognition in an Open World, CVPR 2019 (the first two);
Van Horn et al., The iNaturalist Species Classification and Detection Dataset, CVPR 2018.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from longtail.config import DataConfig
from longtail.core.reading import read_text
from longtail.data.csv_files import DELIMITERS, SUFFIXES, read_csv_splits
from longtail.data.images import FileImages
from longtail.data.labels import from_numbers, is_whole_number, whole_numbers
from longtail.errors import UserError


def read_list(path: Path, root: Path, *, num_classes: int | None = None, skip_broken: bool = False) -> FileImages:
    """Images named by a list file; the number of classes is the largest label + 1 unless given."""
    if not path.is_file():
        raise UserError(f"list file {path} does not exist")
    if not root.is_dir():
        raise UserError(f"root folder {root} does not exist")
    paths, words, lines = [], [], []
    for number, line in enumerate(read_text(path, "a list file").splitlines(), 1):
        if not line.strip():
            continue
        file, *label = line.rsplit(maxsplit=1)
        if not label or not is_whole_number(label[0]) or "\0" in line:
            raise UserError(f"{path}, line {number}: expected 'path label', found {line[:80]!r}")
        paths.append(file)
        words += label
        lines.append(number)
    if not paths:
        raise UserError(f"list file {path} is empty")

    def where(place: int) -> str:
        return f"{path}, line {lines[place]}"

    known = None if num_classes is None else tuple(str(label) for label in range(num_classes))
    labels, names = from_numbers(whole_numbers(words, where), known, where)
    return FileImages(labels=labels, class_names=names, root=root, paths=np.array(paths), skip_broken=skip_broken)


def read_lists(
    config: DataConfig, root: Path, published: tuple[str | None, ...] = (None, None, None), classes: int | None = None
) -> tuple[FileImages, FileImages | None, FileImages | None]:
    """(train, validation, test) of the list files that are named, or `published` below the root folder."""
    if config.train_list and Path(config.train_list).suffix.lower() in DELIMITERS:
        return read_csv_splits(config, root)
    given = (config.train_list, config.validation_list, config.test_list)
    paths = [
        Path(own).expanduser() if own else root / default if default else None
        for own, default in zip(given, published, strict=True)
    ]
    if paths[0] is None:
        raise UserError("data set 'lists' needs --train-list FILE (a path and a label per line) and --root FOLDER")
    train = read_list(paths[0], root, num_classes=classes, skip_broken=config.skip_broken)
    held_out = [
        read_list(path, root, num_classes=train.num_classes, skip_broken=config.skip_broken) if path else None
        for path in paths[1:]
    ]
    return train, held_out[0], held_out[1]


def read_folder(root: Path, *, class_names: tuple[str, ...] | None = None, skip_broken: bool = False) -> FileImages:
    """Images below `root/<class>/…`; classes are the folders in alphabetical order unless named."""
    if not root.is_dir():
        raise UserError(f"image folder {root} does not exist")
    found = tuple(sorted(folder.name for folder in root.iterdir() if folder.is_dir()))
    names = class_names or found
    if not names:
        raise UserError(f"{root} has no folder per class; expected {root}/<class>/<image>")
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise UserError(f"{root} has classes the training set does not: {', '.join(unknown[:5])}")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        files = (file for file in (root / name).rglob("*") if file.suffix.lower() in SUFFIXES)
        of_class = sorted(str(file.relative_to(root)) for file in files)
        paths += of_class
        labels += [label] * len(of_class)
    if not paths:
        raise UserError(f"no images below {root} (looked for {', '.join(sorted(SUFFIXES))})")
    return FileImages(
        labels=torch.tensor(labels), class_names=names, root=root, paths=np.array(paths), skip_broken=skip_broken
    )


def read_folders(config: DataConfig, root: Path) -> tuple[FileImages, FileImages | None, FileImages | None]:
    """(train, validation, test) below a folder; one of classes that nobody has split is a training set."""
    split = not root.is_dir() or any((root / name).is_dir() for name in ("train", "val", "test"))
    train = read_folder(root / "train" if split else root, skip_broken=config.skip_broken)
    held_out = [
        read_folder(root / name, class_names=train.class_names, skip_broken=config.skip_broken)
        if (root / name).is_dir()
        else None
        for name in ("val", "test")
    ]
    return train, held_out[0], held_out[1]
