"""New images without labels, by path: files, folders, and lists of files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from longtail.core.opening import expanded
from longtail.core.reading import read_text
from longtail.data.csv_files import paths_of_table
from longtail.data.file_names import IMAGE_SUFFIXES, is_image, is_table
from longtail.data.images import FileImages, as_paths
from longtail.data.parquet_files import paths_of_parquet
from longtail.errors import UserError


def find_images(
    places: Iterable[Path | str], class_names: tuple[str, ...], *, root: str | None = None, skip_broken: bool = False
) -> FileImages:
    """The images at some paths, in their order; every label is 0.

    Args:
        places: images, folders (with all folders below), and lists: text files with a path per line, CSV or
            Parquet files.
        class_names: names of the possible classes.
        root: folder that the paths of a list are relative to (default: the folder of the list).
        skip_broken: skip images that cannot be read instead of stopping.
    """
    found = [path for place in places for path in _at(expanded(place), root)]
    if not found:
        raise UserError("no images were given: name image files, folders, or a list of files")
    return FileImages(
        labels=torch.zeros(len(found), dtype=torch.int64),
        class_names=class_names,
        root=Path(),
        paths=as_paths([str(path) for path in found]),
        skip_broken=skip_broken,
    )


def _at(place: Path, root: str | None) -> list[Path]:
    if place.is_dir():
        inside = sorted(path for path in place.rglob("*") if is_image(path))
        if not inside:
            raise UserError(f"no images below {place} (looked for {', '.join(sorted(IMAGE_SUFFIXES))})")
        return inside
    if not place.is_file():
        raise UserError(f"{place} is not a file or a folder" if place.exists() else f"{place} does not exist")
    if read := _reader(place):
        folder = expanded(root) if root else place.parent
        return [folder / name for name in read(place)]
    return [place]  # with any suffix: reading it shows whether it is an image


def _reader(place: Path) -> Callable[[Path], list[str]] | None:
    """What reads the paths of a list of images; None for other files."""
    if is_table(place):
        return paths_of_table
    lists = {".parquet": paths_of_parquet, **dict.fromkeys((".txt", ".lst", ".list"), _lines)}
    return lists.get(place.suffix.lower())


def _lines(path: Path) -> list[str]:
    """The paths of a list; a label after a path, as in lists of training images, is ignored."""
    lines = read_text(path, "a list of files").splitlines()
    words = [line.strip() for line in lines if line.strip()]
    if not words:
        raise UserError(f"list file {path} is empty")
    return [_without_label(line) for line in words]


def _without_label(line: str) -> str:
    """The path in a line.

    >>> _without_label("cats/my cat.jpg 3"), _without_label("cats/my cat.jpg")
    ('cats/my cat.jpg', 'cats/my cat.jpg')
    """
    parts = line.rsplit(maxsplit=1)
    return parts[0] if len(parts) == 2 and parts[1].isdigit() and is_image(Path(parts[0])) else line
