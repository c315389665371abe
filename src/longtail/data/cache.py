"""Images decoded once: their pixels in one file of the cache folder, mapped into memory.

The file holds the images before any random operation: the resized image, or the whole image if a random window is
cut from it. So training sees the same pixels with or without the file. It is identified by path, size and times of
every image file, and by the decoder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from longtail import __version__
from longtail.data.augment import Resize, Transform
from longtail.data.images import DecodedImages, FileImages, Images, MemoryImages, as_array, require_readable
from longtail.data.loading import run_in_workers
from longtail.errors import UserError
from longtail.files import tensors
from longtail.files.atomic import cache_folder, locked
from longtail.files.progress import QUIET, Display

FORMAT = 1  # of the file; to be increased when decoding changes
MAX_CACHE_BYTES = 20 << 30  # of all such files; the least recently used are removed first
GROUP = 32  # images that a worker process decodes at a time


@dataclass(frozen=True, kw_only=True)
class StoredImages(Images):
    """Images whose decoded pixels are in a file."""

    origin: DecodedImages = field(repr=False)
    file: Path
    rows: np.ndarray = field(repr=False)  # (N,) of the images in the file
    resized: bool  # whether the stored pixels have their final size; if not, whole images are stored

    @property
    def needs_workers(self) -> bool:
        return not self.resized

    def subset(self, indices: np.ndarray) -> StoredImages:
        origin = self.origin.subset(indices)
        return replace(self, labels=origin.labels, origin=origin, rows=self.rows[indices])

    def _samples(self) -> bytes | memoryview:
        return self.origin._samples()

    def read(self, indices: np.ndarray, decode: Resize | None, numbers: np.ndarray) -> tuple[Tensor, np.ndarray]:
        assert decode is not None
        stored = _open(self.file)
        rows = self.rows[indices]
        kept = np.flatnonzero(stored["heights"][rows] > 0)
        if not len(kept):
            raise UserError(f"none of the {len(indices)} images of a batch can be read")
        if self.resized:
            assert decode.columns == 0  # pixels of the final size must not be cropped at random again
            pixels = np.asarray(stored["pixels"].reshape(-1, decode.size, decode.size, 3)[rows[kept]])
        else:
            from PIL import Image

            pictures = []
            for position in kept:
                height, width, start = (int(stored[name][rows[position]]) for name in ("heights", "widths", "starts"))
                whole = stored["pixels"][start : start + height * width * 3].reshape(height, width, 3)
                pictures.append(as_array(decode(Image.fromarray(whole), numbers[position])))
            pixels = np.stack(pictures)
        return torch.from_numpy(pixels).permute(0, 3, 1, 2), kept


@lru_cache(maxsize=8)
def _open(file: Path) -> dict[str, np.ndarray]:
    """Mapped once per process; worker processes map it themselves."""
    return tensors.read(file, check=False)[0]


def _is_readable(file: Path) -> bool:
    try:
        return bool(file.is_file() and _open(file))
    except UserError:  # damaged, or removed this moment by another process
        return False


def resident(
    images: Images,
    transform: Transform,
    device: torch.device,
    *,
    cache_gb: float = 0.0,
    workers: int = 0,
    display: Display = QUIET,
) -> Images:
    """Move images to where they are read fastest: memory of the device, or decoded once in the cache folder.

    Images that take more than `cache_gb` GB there are returned unchanged.
    """
    if isinstance(images, MemoryImages):
        return replace(images, pixels=images.pixels.to(device))
    if isinstance(images, DecodedImages) and transform.decode is not None and cache_gb > 0:
        images = _decoded_once(images, transform.decode, cache_gb * 1e9, workers, display)
    if isinstance(images, FileImages):  # not decoded now, but missing files are reported at once
        require_readable(images, images.missing())
    return images


def _decoded_once(images: DecodedImages, decode: Resize, most_bytes: float, workers: int, display: Display) -> Images:
    """The same images, read from the cache folder; they are decoded now if they take at most `most_bytes`."""
    parent, alone = images.parent or images, images.detached()
    fixed = None if decode.columns else decode  # before a random decoder, whole images are stored
    try:
        for origin, stored_decode in ((parent, fixed), (parent, None), (alone, fixed)):
            file = _file_of(origin, stored_decode)
            if _is_readable(file):
                break
        else:
            # Training and validation images of one set share a file; a small subset has a file alone.
            origin, stored_decode = (parent if 2 * len(images) >= len(parent) else alone), fixed
            file = _file_of(origin, stored_decode)
            total = _stored_bytes(origin, decode, most_bytes)
            file.parent.mkdir(parents=True, exist_ok=True)
            if total > most_bytes or 2 * total > shutil.disk_usage(file.parent).free:
                return images
            with locked(file):
                if not _is_readable(file):
                    _open.cache_clear()
                    _write(file, origin, stored_decode, total, workers, display)
        file.touch()
        _remove_oldest(file)
    except OSError as error:  # training also works without a cache folder
        display.line(f"decoded images are not stored: {error.filename}: {error.strerror}")
        return images
    heights = _open(file)["heights"]
    require_readable(origin, np.flatnonzero(heights == 0).tolist())
    rows = images.rows if origin is parent and images.rows is not None else np.arange(len(images))
    broken = np.flatnonzero(heights[rows] == 0)
    if len(broken):
        first = images.path(int(broken[0]))
        display.line(f"{len(broken):,} of {len(images):,} images cannot be read and are skipped; the first is {first}")
    return StoredImages(
        labels=images.labels,
        class_names=images.class_names,
        origin=images,
        file=file,
        rows=rows,
        resized=stored_decode is not None,
    )


def _stored_bytes(images: DecodedImages, decode: Resize, most_bytes: float) -> int:
    """Bytes of the stored pixels: of the final size or, before a random decoder, of whole images."""
    total = len(images) * decode.size**2 * 3
    if total > most_bytes or not decode.columns:  # whole images are seldom smaller than the windows cut from them
        return total
    sizes = (images.header(index)[:2] for index in range(len(images)))
    return 3 * sum(width * height for width, height in sizes)


def _file_of(images: DecodedImages, decode: Resize | None) -> Path:
    import PIL

    versions = [FORMAT, __version__, PIL.__version__, type(images).__name__, repr(decode)]
    key = hashlib.sha256(json.dumps(versions).encode() + images.state()).hexdigest()[:24]
    return cache_folder() / "decoded" / f"{key}.safetensors"


class _Groups(Dataset[list[np.ndarray | UserError]]):
    """Decoded images in groups; a broken image is the error about it, so that all broken images are listed."""

    def __init__(self, images: DecodedImages, decode: Resize | None) -> None:
        self.images = images
        self.decode = decode

    def __getitem__(self, first: int) -> list[np.ndarray | UserError]:
        group: list[np.ndarray | UserError] = []
        for index in range(first, min(first + GROUP, len(self.images))):
            try:
                group.append(self.images.decoded(index, self.decode, np.zeros(0)))
            except UserError as error:
                group.append(error)
        return group


def _write(
    file: Path, images: DecodedImages, decode: Resize | None, total: int, workers: int, display: Display
) -> None:
    shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {"pixels": ((total,), np.dtype(np.uint8))}
    shapes |= {name: ((len(images),), np.dtype(np.int64)) for name in ("starts", "heights", "widths")}
    size = f"{total / 1e6:,.0f} MB" if total >= 1e6 else f"{total / 1e3:,.0f} kB"
    display.line(f"decoding {len(images):,} images once, {size} in {file}")
    with tensors.create(file, shapes, {"format": FORMAT}) as arrays, display.task("decoding", len(images)) as task:
        row = start = 0
        broken: list[int] = []
        for group in run_in_workers(_Groups(images, decode), range(0, len(images), GROUP), workers):
            for pixels in group:
                arrays["starts"][row] = start
                if isinstance(pixels, UserError):
                    broken.append(row)
                else:
                    arrays["heights"][row], arrays["widths"][row] = pixels.shape[:2]
                    arrays["pixels"][start : start + pixels.size] = pixels.reshape(-1)
                # Images of one size, also broken ones, have equal distances, so that a batch is read in one operation.
                start += decode.size**2 * 3 if decode else (0 if isinstance(pixels, UserError) else pixels.size)
                row += 1
            task.advance(len(group))
        require_readable(images, broken)


def _remove_oldest(kept: Path) -> None:
    files = sorted(kept.parent.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > MAX_CACHE_BYTES and file != kept:
            file.unlink(missing_ok=True)
