"""Pictures of every kind come out as people see them."""

import os
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from longtail.data.augment import Resize
from longtail.data.images import FileImages
from longtail.errors import UserError

SIZE = 4
RAMP = np.linspace(0, 65535, SIZE * SIZE).astype(np.uint16).reshape(SIZE, SIZE)


def read(path) -> np.ndarray:
    """(H, W, 3) of one picture, as training reads it."""
    images = FileImages(labels=torch.tensor([0]), class_names=("0",), root=path.parent, paths=np.array([path.name]))
    pixels, _ = images.read(np.array([0]), Resize(SIZE), np.empty((1, 0)))
    return pixels[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_sixteen_bits_are_scaled(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    Image.fromarray(RAMP).save(path)
    assert np.array_equal(read(path), np.repeat(RAMP[..., None] // 257, 3, axis=2))


def test_sixteen_bits_of_many_rows_are_scaled(tmp_path):
    """They are converted in strips."""
    ramp = np.linspace(0, 65535, 600).astype(np.uint16).reshape(600, 1)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    images = FileImages(labels=torch.tensor([0]), class_names=("0",), root=tmp_path, paths=np.array(["a.png"]))
    assert np.array_equal(np.asarray(images.open(0))[..., 0], ramp // 257)


def test_an_image_that_cannot_be_resized_is_named(tmp_path):
    def decode(picture, numbers):
        raise MemoryError

    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    images = FileImages(labels=torch.tensor([0]), class_names=("0",), root=tmp_path, paths=np.array(["a.png"]))
    with pytest.raises(UserError, match=r"a.png cannot be read: MemoryError"):
        images.read(np.array([0]), decode, np.empty((1, 0)))


def test_a_photo_is_turned_upright(tmp_path):
    pixels = np.zeros((SIZE, SIZE, 3), np.uint8)
    pixels[0] = 255  # the upper row
    picture, exif = Image.fromarray(pixels), Image.Exif()
    exif[0x0112] = 6  # the camera was held so that the left side of the file is the top of the scene
    picture.save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(read(tmp_path / "a.png"), np.rot90(pixels, -1))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr"])
def test_other_modes_keep_their_colours(tmp_path, mode):
    whole = np.zeros((SIZE, SIZE, 3), np.uint8)
    whole[:2] = 255
    path = tmp_path / ("a.jpg" if mode in ("CMYK", "YCbCr") else "a.png")
    Image.fromarray(whole).convert(mode).save(path)
    assert np.abs(read(path).astype(int) - whole).max() <= 3


def test_a_palette_with_transparent_entries_keeps_its_colours(tmp_path):
    picture = Image.new("P", (SIZE, SIZE), 1)
    picture.putpalette([0, 0, 0, 10, 200, 30])
    picture.save(tmp_path / "a.png", transparency=bytes([0, 128]))
    assert (read(tmp_path / "a.png") == [10, 200, 30]).all()


def test_fractions_and_more_than_sixteen_bits_are_refused(tmp_path):
    Image.fromarray(np.full((2, 2), 0.5, np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(UserError, match="its pixels are floating-point numbers"):
        read(tmp_path / "a.tif")
    Image.fromarray(np.full((2, 2), 10**6, np.int32)).save(tmp_path / "b.tif")
    with pytest.raises(UserError, match="more than 16 bits"):
        read(tmp_path / "b.tif")


def test_a_pipe_among_the_images_is_no_image(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"a.png cannot be read: it is not a file"):
        read(tmp_path / "a.png")


def test_cut_and_damaged_images_are_one_line(tmp_path):
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    path, said = tmp_path / "a.png", []
    for place in range(0, len(whole), 97):
        for content in (whole[:place], whole[:place] + b"\xff\x00\xff" + whole[place + 3 :]):
            path.write_bytes(content)
            try:
                read(path)
            except UserError as error:
                said.append(str(error))
    assert len(said) > len(whole) // 97
    assert all(len(line.splitlines()) == 1 for line in said)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(ran) (w) file closefile\nshowpage\n"


def flat_png(width: int, height: int) -> bytes:
    """A PNG of one bit per pixel: a few kB, whatever its size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1 + -(-width // 8)) * min(height, 100), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


PICTURES = {
    "postscript.png": lambda: POSTSCRIPT,  # Pillow would give it to Ghostscript
    "large.png": lambda: flat_png(20_000, 20_000),
    "wide.png": lambda: flat_png(2**31 - 1, 1),
    "thin.png": lambda: flat_png(100_000_000, 1),  # resizing would take 16 bytes per column
    "tall.png": lambda: flat_png(1, 100_000_000),  # and as many rows of the new width
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(tmp_path, monkeypatch, name, refused):
    (tmp_path / name).write_bytes(PICTURES[name]())
    program = tmp_path / "gs"  # stands for every program that a picture might be given to
    program.write_text(f"#!/bin/sh\necho ran > {tmp_path / 'ran'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    images = FileImages(labels=torch.zeros(1).long(), class_names=("a",), root=tmp_path, paths=np.array([name]))
    images.header(0)
    refused(lambda path: images.open(0), tmp_path / name)
    assert not (tmp_path / "ran").exists()
