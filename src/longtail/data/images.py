"""A labelled set of images, in memory or on disk, behind one small interface.

Both kinds know `labels`, `class_names` and `class_counts`, can be cut to a `subset`, and `read`
a batch of indices as one uint8 tensor (B, C, H, W).
"""

from __future__ import annotations

import hashlib
import json
import stat
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from longtail.data.augment import Resize, as_rgb, opened_picture
from longtail.errors import UserError
from longtail.files.reading import reason

if TYPE_CHECKING:
    from PIL import Image

MAX_NAMED = 5  # broken images in an error
MAX_COMPARED = 300  # images of a held-out split that are compared with the training images
MAX_PATH = 4096  # characters
MAX_PATH_BYTES = 1 << 29  # of all paths of a set, if the shortest took as much memory as the longest
SKIP = "(--skip-broken skips such images)"


@dataclass(frozen=True, kw_only=True)
class Images(ABC):
    """What every image set has: labels (N,) int64 in 0..K-1, which its reader has checked, and K class names."""

    labels: Tensor
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def needs_workers(self) -> bool:
        """Whether reading takes so long that worker processes are useful: images are decoded or resized."""
        return False

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @cached_property
    def class_counts(self) -> Tensor:
        """Images per class, (K,) int64."""
        return torch.bincount(self.labels, minlength=self.num_classes)

    @cached_property
    def digest(self) -> str:
        """Equal for equal samples (their paths or content) with equal labels, in the same order."""
        names = "\0".join(self.class_names).encode("utf-8", "backslashreplace")
        digest = hashlib.sha256()
        for content in (names, self.labels.cpu().numpy().tobytes(), self._samples()):
            digest.update(hashlib.sha256(content).digest())
        return digest.hexdigest()

    @abstractmethod
    def _samples(self) -> bytes | memoryview:
        """What identifies the samples: their content, or their paths and sizes."""

    @abstractmethod
    def subset(self, indices: np.ndarray) -> Self:
        """The images at `indices`, in that order."""

    def detached(self) -> Self:
        """The same images as a set that is not a subset of another."""
        return self

    @abstractmethod
    def read(self, indices: np.ndarray, decode: Resize | None, numbers: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Pixels (B, C, H, W) uint8, and the position in `indices` of each image."""


@dataclass(frozen=True, kw_only=True)
class MemoryImages(Images):
    """All images as one uint8 tensor (N, C, H, W)."""

    pixels: Tensor

    def subset(self, indices: np.ndarray) -> MemoryImages:
        kept = torch.from_numpy(indices)
        return replace(self, labels=self.labels[kept], pixels=self.pixels.index_select(0, kept.to(self.pixels.device)))

    def read(self, indices: np.ndarray, decode: Resize | None, numbers: np.ndarray) -> tuple[Tensor, np.ndarray]:
        pixels = self.pixels.index_select(0, torch.from_numpy(indices).to(self.pixels.device))
        if decode:
            from PIL import Image

            squeezed = pixels[:, 0] if pixels.shape[1] == 1 else pixels.permute(0, 2, 3, 1)
            pictures = map(Image.fromarray, squeezed.cpu().numpy())
            arrays = [as_array(decode(picture, row)) for picture, row in zip(pictures, numbers, strict=True)]
            pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
        return pixels, np.arange(len(indices))

    def _samples(self) -> memoryview:
        return self.pixels.cpu().contiguous().numpy().data


@dataclass(frozen=True, kw_only=True)
class DecodedImages(Images):
    """Images decoded from their compressed form when they are needed."""

    per_image: ClassVar[tuple[str, ...]]  # fields that hold one value per image, besides the labels
    needs_workers = True
    skip_broken: bool = False  # skip images that cannot be read instead of stopping
    parent: DecodedImages | None = field(default=None, repr=False)  # the set that this one is a subset of
    rows: np.ndarray | None = field(default=None, repr=False)  # (N,) of the images in that set

    def subset(self, indices: np.ndarray) -> Self:
        rows = indices if self.rows is None else self.rows[indices]
        values = {name: getattr(self, name)[indices] for name in self.per_image}
        labels = self.labels[torch.from_numpy(indices)]
        return replace(self, labels=labels, parent=self.parent or self, rows=rows, **values)

    def detached(self) -> Self:
        return replace(self, parent=None, rows=None)

    @abstractmethod
    def state(self) -> bytes:
        """Paths and modification times of the images: different bytes once a file has different content."""

    @abstractmethod
    def source(self, index: int) -> Path | BytesIO:
        """Where Pillow reads an image from."""

    @abstractmethod
    def path(self, index: int) -> Path:
        """The name of the image in error messages."""

    def read(self, indices: np.ndarray, decode: Resize | None, numbers: np.ndarray) -> tuple[Tensor, np.ndarray]:
        if decode is None:
            raise UserError("images read from files need a size: give --image-size")
        pictures, kept = [], []
        for position, index in enumerate(indices):
            try:
                pictures.append(self.decoded(int(index), decode, numbers[position]))
                kept.append(position)
            except UserError:
                if not self.skip_broken:
                    raise
        if not pictures:
            raise UserError(
                f"none of the {len(indices)} images of a batch can be read, the first is {self.path(int(indices[0]))}"
            )
        return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2), np.array(kept)

    def header(self, index: int) -> tuple[int, int, str]:
        """Width, height and mode from the image's header; zeros if it cannot be read."""
        try:
            with opened_picture(self.source(index)) as picture:
                return *picture.size, picture.mode
        except Exception:
            return 0, 0, ""

    def open(self, index: int) -> Image.Image:
        """Decode one image to RGB; an error names the file."""
        with self._opening(index), opened_picture(self.source(index)) as picture:
            return as_rgb(picture)

    def decoded(self, index: int, decode: Resize | None, numbers: np.ndarray) -> np.ndarray:
        """Pixels (H, W, 3) of one image, resized by `decode` if it is given; an error names the file."""
        picture = self.open(index)
        with self._opening(index):
            return as_array(picture if decode is None else decode(picture, numbers))

    @contextmanager
    def _opening(self, index: int) -> Iterator[None]:
        """Any failure of the block as an error that names the file: the ways to fail cannot be listed."""
        from PIL import UnidentifiedImageError

        try:
            yield
        except FileNotFoundError as error:
            raise UserError(f"image {self.path(index)} is missing {SKIP}") from error
        except UnidentifiedImageError as error:
            raise UserError(f"image {self.path(index)} cannot be read: it is not an image {SKIP}") from error
        except Exception as error:
            raise UserError(f"image {self.path(index)} cannot be read: {reason(error)} {SKIP}") from error


@dataclass(frozen=True, kw_only=True)
class FileImages(DecodedImages):
    """Images in one file each; the paths (N,) are relative to the folder `root`."""

    root: Path
    paths: np.ndarray = field(repr=False)
    per_image: ClassVar[tuple[str, ...]] = ("paths",)

    @classmethod
    def of(
        cls, paths: Sequence[str], labels: np.ndarray, class_names: tuple[str, ...], root: Path, skip_broken: bool
    ) -> FileImages:
        """Images at paths from a file, which are checked."""
        settings = {"class_names": class_names, "skip_broken": skip_broken, "root": root}
        return cls(labels=torch.from_numpy(labels), paths=as_paths(paths), **settings)  # type: ignore[arg-type]

    def path(self, index: int) -> Path:
        return self.root / str(self.paths[index])

    def missing(self) -> list[int]:
        """Images whose files do not exist."""
        return [index for index in range(len(self)) if file_state(self.path(index))[1] < 0]

    def source(self, index: int) -> Path:
        return regular_file(self.path(index))

    def copies_of(self, others: FileImages, rows: np.ndarray) -> int:
        """How many of the images `rows` are copies of other images, byte by byte."""
        sizes = {file_state(self.path(int(row)))[1] for row in rows}
        alike = (path for path in map(others.path, range(len(others))) if file_state(path)[1] in sizes)
        known = {_content(path) for path in alike}
        return sum(_content(self.path(int(row))) in known for row in rows)

    def _samples(self) -> bytes:
        sized = (f"{path} {file_state(self.root / str(path))[1]}" for path in self.paths)
        return "\0".join(sized).encode(errors="replace")

    def state(self) -> bytes:
        return json.dumps([file_state(self.path(index)) for index in range(len(self))]).encode()


def warn_of_copies(train: Images, **held_out: Images | None) -> None:
    """Warn of held-out files that are copies of training images: scores on them say little about new images."""
    for split, images in held_out.items():
        if not isinstance(train, FileImages) or not isinstance(images, FileImages):
            continue
        rows = np.linspace(0, len(images) - 1, min(len(images), MAX_COMPARED)).astype(int)
        if (copies := images.copies_of(train, rows)) > 0.02 * len(rows):
            warnings.warn(
                f"{copies} of {len(rows)} {split} images are copies of training images (equal files): scores on them "
                "are higher than on new images; remove them from one of the two splits",
                stacklevel=2,
            )


def as_paths(paths: Sequence[str]) -> np.ndarray:
    """Paths (N,) as an array; no system has a path with a NUL, or of more than `MAX_PATH` characters."""
    for row, path in enumerate(paths):
        if "\0" in path or len(path) > MAX_PATH:
            raise UserError(f"image {row}, {path[:40]!r}…, cannot be a path: it has a NUL or {len(path):,} characters")
    # Every entry of an array of text takes as much memory as the longest.
    longest = max(map(len, paths), default=0)
    return np.array(paths, object if 4 * longest * len(paths) > MAX_PATH_BYTES else str)


def _content(path: Path) -> bytes:
    """A digest of a file, or its path if it cannot be read, which is reported elsewhere."""
    try:
        return hashlib.sha256(regular_file(path).read_bytes()).digest()
    except OSError:
        return str(path).encode(errors="replace")


def regular_file(path: Path) -> Path:
    """The path, if it is that of a file: opening a pipe would block."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is not a file")
    return path


def file_state(path: Path) -> tuple[str, int, int, int]:
    """Path, size and times of a file; the size of a missing file is -1: reading it raises the error.

    The time of its last change of any kind (ctime) cannot be set by users.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):  # a path with a NUL is the latter
        return str(path.absolute()), -1, 0, 0
    return str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns


def require_readable(images: DecodedImages, broken: Sequence[int]) -> None:
    """Name the first broken images, and how many there are, unless they may be skipped."""
    if not len(broken) or images.skip_broken:
        return
    if len(broken) == 1:
        images.open(int(broken[0]))
    names = ", ".join(str(images.path(int(row))) for row in broken[:MAX_NAMED])
    more = ", …" if len(broken) > MAX_NAMED else ""
    raise UserError(f"{len(broken):,} of {len(images):,} images are missing or cannot be read: {names}{more} {SKIP}")


def as_array(picture: Image.Image) -> np.ndarray:
    """Pixels (H, W, C) uint8."""
    pixels = np.asarray(picture, dtype=np.uint8)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels
