"""Images given by list files or folders, with their labels, and new images without labels.

A list file has a path and a label per line, as ImageNet-LT, Places-LT and iNaturalist 2018 are
published (`train/n01440764/x.JPEG 0`); paths are relative to a root folder. An image folder has
one folder per class.

Data: Liu et al., Large-Scale Long-Tailed Recognition in an Open World, CVPR 2019 (the first two);
Van Horn et al., The iNaturalist Species Classification and Detection Dataset, CVPR 2018.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from longtail.config import DataConfig
from longtail.data.csv_files import paths_of_csv, read_csv_splits
from longtail.data.images import FileImages, as_paths
from longtail.data.parquet import paths_of_parquet
from longtail.data.splits import ReadSplits
from longtail.data.tables import (
    IMAGE_SUFFIXES,
    SPLITS,
    held_out_beside,
    is_image,
    is_table,
    is_whole_number,
    labels_of_words,
    one_each,
    split_of,
)
from longtail.errors import UserError
from longtail.files.reading import expanded, read_text

LIST_SUFFIXES = (".txt", ".lst", ".list")


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
            raise UserError(
                f"{path}, line {number}: expected a path and the number of its class (photos/1.jpg 0), found "
                f"{line[:80]!r}; class names can be given in a CSV file with columns path and label"
            )
        paths.append(file)
        words += label
        lines.append(number)
    if not paths:
        raise UserError(f"list file {path} is empty")

    class_names = None if num_classes is None else tuple(str(label) for label in range(num_classes))
    labels, names = labels_of_words(words, class_names, lambda row: f"{path}, line {lines[row]}")
    return FileImages(
        labels=torch.from_numpy(labels), class_names=names, root=root, paths=as_paths(paths), skip_broken=skip_broken
    )


def read_lists(
    config: DataConfig, root: Path, published: tuple[str | None, ...] = (None, None, None), classes: int | None = None
) -> ReadSplits:
    """The list files that are named, `published` below the root folder, or beside the training list."""
    if config.train_list and is_table(Path(config.train_list)):
        return read_csv_splits(config, root)
    given = (config.train_list, config.validation_list, config.test_list)
    paths: dict[str, Path] = {}
    for name, file, default in zip(SPLITS, given, published, strict=True):
        if file or default:
            paths[name] = expanded(file) if file else root / str(default)
    if "train" not in paths:
        raise UserError("data set 'lists' needs --train-list FILE (a path and a label per line) and --root FOLDER")
    if config.train_list:
        paths = {**held_out_beside(paths["train"]), **paths}
    train = read_list(paths["train"], root, num_classes=classes, skip_broken=config.skip_broken)
    held_out = {
        name: read_list(path, root, num_classes=train.num_classes, skip_broken=config.skip_broken)
        for name, path in paths.items()
        if name != "train"
    }
    names_on_disk = {name: path.name for name, path in paths.items()}
    return ReadSplits(train, held_out.get("validation"), held_out.get("test"), names_on_disk)


def read_folder(root: Path, *, class_names: tuple[str, ...] | None = None, skip_broken: bool = False) -> FileImages:
    """Images below `root/<class>/…`; classes are the folders in alphabetical order unless named."""
    if not root.is_dir():
        raise UserError(f"image folder {root} does not exist")
    folders = tuple(folder.name for folder in _folders(root))
    names = class_names or folders
    if not names:
        raise UserError(f"{root} has no folder per class; expected {root}/<class>/<image>")
    unknown = sorted(set(folders) - set(names))
    if unknown:
        raise UserError(f"{root} has classes the training set does not: {', '.join(unknown[:5])}")
    if len(names) == 1:
        inside = " (its folders may be the classes: try that one)" if _folders(root / names[0]) else ""
        raise UserError(f"{root} has a single class, {names[0]}{inside}; a classifier needs two at least")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        of_class = sorted(str(file.relative_to(root)) for file in (root / name).rglob("*") if is_image(file))
        paths += of_class
        labels += [label] * len(of_class)
    if not paths:
        raise UserError(f"no images below {root} (looked for {', '.join(sorted(IMAGE_SUFFIXES))})")
    return FileImages(
        labels=torch.tensor(labels), class_names=names, root=root, paths=as_paths(paths), skip_broken=skip_broken
    )


def read_folders(config: DataConfig, root: Path) -> ReadSplits:
    """The folders of splits below a folder (Train/, val/, test/, …); without them every folder is a class."""
    if not root.is_dir():
        raise UserError(f"image folder {root} does not exist")
    named = [(split, folder) for folder in _folders(root) if (split := split_of(folder.name))]
    splits = one_each(((split, folder) for split, folder in named if _holds_classes(folder)), root)
    if not splits:
        return ReadSplits(read_folder(root, skip_broken=config.skip_broken))
    if "train" not in splits:
        held_out = ", ".join(folder.name for folder in splits.values())
        raise UserError(f"{root} has {held_out} but no folder of training images; call it train")
    train = read_folder(splits["train"], skip_broken=config.skip_broken)
    others = {
        name: read_folder(folder, class_names=train.class_names, skip_broken=config.skip_broken)
        for name, folder in splits.items()
        if name != "train"
    }
    names_on_disk = {name: f"{folder.name}/" for name, folder in splits.items()}
    unused = tuple(
        f"{folder.name}/{' (no folder per class)' if split_of(folder.name) else ''}"
        for folder in _folders(root)
        if folder not in splits.values()
    )
    return ReadSplits(train, others.get("validation"), others.get("test"), names_on_disk, unused)


def _folders(root: Path) -> list[Path]:
    """Folders in alphabetical order, without hidden and system folders."""
    folders = (path for path in root.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    return sorted(folders, key=lambda path: path.name)


def _holds_classes(folder: Path) -> bool:
    """Whether a folder with the name of a split is a split; a class folder with such a name directly holds images."""
    return bool(_folders(folder)) and not any(is_image(path) for path in folder.iterdir())


def find_images(
    paths: Iterable[Path | str], class_names: tuple[str, ...], *, root: str | None = None, skip_broken: bool = False
) -> FileImages:
    """New images at some paths, in their order; they have no labels, so every label is 0.

    Args:
        paths: images, folders (with all folders below), and lists: text files with a path per line, CSV or
            Parquet files.
        class_names: names of the possible classes.
        root: folder that the paths of a list are relative to (default: the folder of the list).
        skip_broken: skip images that cannot be read instead of stopping.
    """
    images = [str(image) for path in paths for image in _images_at(expanded(path), root)]
    if not images:
        raise UserError("no images were given: name image files, folders, or a list of files")
    labels = torch.zeros(len(images), dtype=torch.int64)
    return FileImages(
        labels=labels, class_names=class_names, root=Path(), paths=as_paths(images), skip_broken=skip_broken
    )


def _images_at(path: Path, root: str | None) -> list[Path]:
    if path.is_dir():
        images = sorted(file for file in path.rglob("*") if is_image(file))
        if not images:
            raise UserError(f"no images below {path} (looked for {', '.join(sorted(IMAGE_SUFFIXES))})")
        return images
    if not path.is_file():
        raise UserError(f"{path} is not a file or a folder" if path.exists() else f"{path} does not exist")
    folder, suffix = expanded(root) if root else path.parent, path.suffix.lower()
    if is_table(path):
        return [folder / name for name in paths_of_csv(path)]
    if suffix == ".parquet":
        return [folder / name for name in paths_of_parquet(path)]
    if suffix in LIST_SUFFIXES:
        return [folder / name for name in _paths_of_list(path)]
    return [path]  # with any suffix: reading it shows whether it is an image


def _paths_of_list(path: Path) -> list[str]:
    """The paths of a list; a label after a path, as in lists of training images, is ignored."""
    lines = [line.strip() for line in read_text(path, "a list of files").splitlines() if line.strip()]
    if not lines:
        raise UserError(f"list file {path} is empty")
    return [strip_label(line) for line in lines]


def strip_label(line: str) -> str:
    """The path in a line of a list.

    >>> strip_label("cats/my cat.jpg 3"), strip_label("cats/my cat.jpg")
    ('cats/my cat.jpg', 'cats/my cat.jpg')
    """
    path, *label = line.rsplit(maxsplit=1)
    return path if label and label[0].isdigit() and is_image(Path(path)) else line
