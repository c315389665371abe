"""Downloads CIFAR: verified by MD5 sum, with a progress bar, resumed after a broken transfer."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from longtail.data.cifar import CIFARS, find_layout
from longtail.errors import UserError
from longtail.files.atomic import NO_SPACE, cache_folder
from longtail.files.progress import Display
from longtail.files.reading import expanded, reading

CHUNK = 1 << 20
ATTEMPTS = 5
MOST_BYTES = 1 << 30  # largest size of an archive, packed or unpacked: CIFAR has 187 MB


@dataclass(frozen=True)
class Archive:
    """A URL and its published MD5 sum."""

    url: str
    md5: str


ARCHIVES = {
    "cifar10": Archive("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
    "cifar100": Archive("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
}


def download_cifar(name: str, root: str | None, display: Display) -> Path:
    """Download a CIFAR data set to `root` unless it is there; returns the folder."""
    if name not in ARCHIVES:
        raise UserError(f"--download knows {' and '.join(ARCHIVES)}, not {name!r}")
    folder = expanded(root) if root else cache_folder()
    try:
        return find_layout(CIFARS[name], folder)[0]
    except UserError:
        pass
    archive = ARCHIVES[name]
    packed = folder / archive.url.rsplit("/", 1)[1]
    fetch(archive.url, packed, archive.md5, display)
    display.line(f"unpacking {packed}")
    unpack(packed, folder)
    return find_layout(CIFARS[name], folder)[0]


def unpack(packed: Path, folder: Path) -> None:
    """Unpack to a temporary folder and rename it, so that an interrupted unpacking leaves no partial folder."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        with reading(packed, "an archive of images"), tarfile.open(packed) as archive:
            unpacked = sum(item.size for item in archive)
            if unpacked > MOST_BYTES:
                raise UserError(f"{packed} would unpack to {unpacked:,} bytes, more than CIFAR has; it is not unpacked")
            archive.extractall(temporary, filter="data")
        for item in Path(temporary).iterdir():
            target = folder / item.name
            if target.is_dir():
                shutil.rmtree(target)
            item.replace(target)


def fetch(url: str, path: Path, md5: str, display: Display, *, pause: float = 1.0) -> None:
    """Download `url` to `path`; a broken transfer is resumed, also in a later call."""
    if path.is_file() and _md5(path) == md5:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _transfer(url, partial, display)
            break
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                raise UserError(f"{url} cannot be fetched: {error}") from error
            if attempt == ATTEMPTS or getattr(error, "errno", None) in NO_SPACE:
                raise UserError(f"{url} cannot be fetched: {error}; run the same command again to continue") from error
            time.sleep(pause * attempt)
    if _md5(partial) != md5:
        partial.unlink()
        raise UserError(f"{url} did not arrive as published (its MD5 sum differs); nothing was kept, try again")
    os.replace(partial, path)


def _transfer(url: str, partial: Path, display: Display) -> None:
    """One attempt: request the missing bytes and append them."""
    done = partial.stat().st_size if partial.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is missing
        raise
    with response:
        if done and response.status != http.client.PARTIAL_CONTENT:
            done = 0  # the server sends everything again
        given = response.headers.get("Content-Length", "0")
        left = int(given) if given.isdecimal() and len(given) < 20 else 0
        if done + left > MOST_BYTES:
            raise UserError(f"{url} has {done + left:,} bytes, more than CIFAR; it is not fetched")
        with (
            partial.open("ab" if done else "wb") as file,
            display.task("fetching", done + left, done=done, unit="bytes") as task,
        ):
            while chunk := response.read(CHUNK):
                file.write(chunk)
                if file.tell() > MOST_BYTES:
                    raise UserError(f"{url} does not end after {MOST_BYTES:,} bytes; delete {partial}")
                task.advance(len(chunk))
                left -= len(chunk)
    if left > 0:
        raise OSError(f"the connection broke with {left} bytes missing")


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
