"""Images decoded once: their pixels in one file of the cache folder, mapped into memory.

The file holds the images before any random operation: the resized image, or the whole image if a random window is
cut from it. So training sees the same pixels with or without the file. It is identified by path, size and times of
every image file, and by the decoder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from longtail.core import mapped
from longtail.core.files import cache_folder
from longtail.core.locks import locked
from longtail.core.progress import QUIET, Display
from longtail.core.version import __version__
from longtail.data.images import Decode, DecodedImages, Images, as_array, require_readable
from longtail.data.worker_processes import in_order_of
from longtail.errors import UserError

FORMAT = 1  # of the file; to be increased when decoding changes
KEPT_BYTES = 20 << 30  # of all such files; the least recently used are removed first
TOGETHER = 32  # images that a worker process decodes at a time
NOTHING = np.zeros(0)  # no random numbers


@dataclass(frozen=True, kw_only=True)
class StoredImages(Images):
    """Images whose decoded pixels are in a file.

    Args:
        origin: the images that were decoded.
        file: file with the pixels.
        rows: (N,) row of each image in the file.
        finished: whether the stored pixels have their final size; if not, whole images are stored.
    """

    origin: DecodedImages = field(repr=False)
    file: Path
    rows: np.ndarray = field(repr=False)
    finished: bool

    def subset(self, indices: np.ndarray) -> StoredImages:
        origin = self.origin.subset(indices)
        return replace(self, labels=origin.labels, origin=origin, rows=self.rows[indices])

    def _samples(self) -> bytes | memoryview:
        return self.origin._samples()

    def read(self, indices: np.ndarray, decode: Decode | None, numbers: np.ndarray) -> tuple[Tensor, np.ndarray]:
        assert decode is not None
        stored = _open(self.file)
        rows = self.rows[indices]
        kept = np.flatnonzero(stored["heights"][rows] > 0)
        if not len(kept):
            raise UserError(f"none of the {len(indices)} images of a batch can be read")
        if self.finished:
            assert decode.columns == 0  # pixels of the final size must not be cropped at random again
            pixels = np.asarray(stored["pixels"].reshape(-1, decode.size, decode.size, 3)[rows[kept]])
        else:
            from PIL import Image

            pictures = ((position, Image.fromarray(_picture(stored, int(rows[position])))) for position in kept)
            pixels = np.stack([as_array(decode(picture, numbers[position])) for position, picture in pictures])
        return torch.from_numpy(pixels).permute(0, 3, 1, 2), kept


def _picture(stored: dict[str, np.ndarray], row: int) -> np.ndarray:
    """One image (H, W, 3)."""
    height, width, start = (int(stored[name][row]) for name in ("heights", "widths", "starts"))
    return stored["pixels"][start : start + height * width * 3].reshape(height, width, 3)


@lru_cache(maxsize=8)
def _open(file: Path) -> dict[str, np.ndarray]:
    """Mapped once per process; worker processes map it themselves."""
    return mapped.read(file)[0]


def decoded_once(
    images: Images, decode: Decode | None, *, most_bytes: float, workers: int = 0, display: Display = QUIET
) -> Images:
    """The same images, read from the cache folder; they are decoded now if they take at most `most_bytes`.

    Images in memory, and images that do not fit, are returned unchanged.
    """
    if not isinstance(images, DecodedImages) or decode is None or most_bytes <= 0:
        return images
    whole, alone = images.whole or images, images.on_its_own()
    fixed = None if decode.columns else decode
    try:
        for origin, how in ((whole, fixed), (whole, None), (alone, fixed)):
            if _is_whole(_file_of(origin, how)):
                break
        else:
            # Training and validation images of one set share a file; a small part alone has its own.
            origin, how = (whole if 2 * len(images) >= len(whole) else alone), fixed
            if not _make(_file_of(origin, how), origin, decode, how, most_bytes, workers, display):
                return images
        file = _file_of(origin, how)
        file.touch()
        _forget_oldest(file)
    except OSError as error:  # training also works without a cache folder
        display.line(f"decoded images are not stored: {error.filename}: {error.strerror}")
        return images
    require_readable(origin, np.flatnonzero(_open(file)["heights"] == 0).tolist())
    rows = images.rows if origin is whole and images.rows is not None else np.arange(len(images))
    broken = np.flatnonzero(_open(file)["heights"][rows] == 0)
    if len(broken):
        first = images.path(int(broken[0]))
        display.line(f"{len(broken):,} of {len(images):,} images cannot be read and are skipped; the first is {first}")
    known = {"labels": images.labels, "class_names": images.class_names, "origin": images}
    return StoredImages(**known, file=file, rows=rows, finished=how is not None)  # type: ignore[arg-type]


def _is_whole(file: Path) -> bool:
    try:
        return bool(file.is_file() and _open(file))
    except UserError:  # damaged, or removed this moment by another process
        return False


def _make(
    file: Path,
    images: DecodedImages,
    decode: Decode,
    how: Decode | None,
    most_bytes: float,
    workers: int,
    display: Display,
) -> bool:
    """Write the file, unless the images take too much space; returns whether it exists now."""
    total = len(images) * decode.size**2 * 3
    if total <= most_bytes and how is None:  # stored images are seldom smaller than the windows cut from them
        total = int(_header_sizes(images).prod(1).sum()) * 3
    file.parent.mkdir(parents=True, exist_ok=True)
    if total > most_bytes or 2 * total > shutil.disk_usage(file.parent).free:
        return False
    with locked(file):
        if not _is_whole(file):
            _open.cache_clear()
            _write(file, images, how, total, workers, display)
    return True


def _file_of(images: DecodedImages, decode: Decode | None) -> Path:
    import PIL

    how = [FORMAT, __version__, PIL.__version__, type(images).__name__, repr(decode)]
    key = hashlib.sha256(json.dumps(how).encode() + images.state()).hexdigest()[:24]
    return cache_folder() / "decoded" / f"{key}.safetensors"


def _header_sizes(images: DecodedImages) -> np.ndarray:
    """(N, 2) sizes from the images' headers; 0 if a header cannot be read."""
    return np.array([images.header(index)[:2] for index in range(len(images))], dtype=np.int64)


class _Pieces(Dataset[list[np.ndarray | UserError]]):
    """Decoded images in groups; for a broken image what is wrong with it."""

    def __init__(self, images: DecodedImages, decode: Decode | None) -> None:
        self.images = images
        self.decode = decode

    def __getitem__(self, first: int) -> list[np.ndarray | UserError]:
        return [self._one(index) for index in range(first, min(first + TOGETHER, len(self.images)))]

    def _one(self, index: int) -> np.ndarray | UserError:
        try:
            return self.images.decoded(index, self.decode, NOTHING)
        except UserError as error:
            return error  # as a value, so that all broken images are found


def _decoded(images: DecodedImages, decode: Decode | None, workers: int) -> Iterator[list[np.ndarray | UserError]]:
    firsts = range(0, len(images), TOGETHER)
    pieces = _Pieces(images, decode)
    yield from in_order_of(pieces, firsts, workers, collate=_as_it_is)


def _as_it_is(piece: list[np.ndarray | UserError]) -> list[np.ndarray | UserError]:
    return piece


def _write(
    file: Path, images: DecodedImages, decode: Decode | None, total: int, workers: int, display: Display
) -> None:
    shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {"pixels": ((total,), np.dtype(np.uint8))}
    shapes |= {name: ((len(images),), np.dtype(np.int64)) for name in ("starts", "heights", "widths")}
    size = f"{total / 1e6:,.0f} MB" if total >= 1e6 else f"{total / 1e3:,.0f} kB"
    display.line(f"decoding {len(images):,} images once, {size} in {file}")
    with mapped.create(file, shapes, {"format": FORMAT}) as arrays, display.task("decoding", len(images)) as task:
        row = start = 0
        broken: list[int] = []
        for piece in _decoded(images, decode, workers):
            for pixels in piece:
                arrays["starts"][row] = start
                if isinstance(pixels, UserError):
                    broken.append(row)
                else:
                    arrays["heights"][row], arrays["widths"][row] = pixels.shape[:2]
                    arrays["pixels"][start : start + pixels.size] = pixels.reshape(-1)
                # Images of one size, also broken ones, have equal distances, so that a batch is read in one operation.
                start += decode.size**2 * 3 if decode else (0 if isinstance(pixels, UserError) else pixels.size)
                row += 1
            task.advance(len(piece))
        require_readable(images, broken)


def _forget_oldest(kept: Path) -> None:
    files = sorted(kept.parent.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > KEPT_BYTES and file != kept:
            file.unlink(missing_ok=True)
