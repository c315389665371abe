"""Every batched operation gives the values Pillow gives, image by image."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from longtail.data import autoaugment
from longtail.data.autoaugment import FILL, OPERATIONS

RNG = np.random.default_rng(0)


def pictures() -> np.ndarray:
    """(B, 3, H, W) uint8: noise, smooth ramps, one flat image, one with two values."""
    noise = RNG.integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
    ramp = np.clip(np.add.outer(np.arange(32) * 5, np.arange(32) * 3) // 2 + 7, 0, 255).astype(np.uint8)
    ramps = np.stack([np.stack([ramp, ramp.T, 255 - ramp]), np.stack([ramp // 2, ramp // 3 + 90, ramp])])
    flat = np.full((1, 3, 32, 32), 77, dtype=np.uint8)
    two = np.where(noise[:1] < 128, 10, 11).astype(np.uint8)
    return np.concatenate([noise, ramps, flat, two])


def as_pillow(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image.transpose(1, 2, 0))


def as_array(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture).transpose(2, 0, 1)


def compare(ours: torch.Tensor, images: np.ndarray, reference) -> None:
    for number, image in enumerate(images):
        np.testing.assert_array_equal(ours[number].numpy(), as_array(reference(as_pillow(image), number)))


ENHANCERS = {
    "brightness": ImageEnhance.Brightness,
    "color": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "sharpness": ImageEnhance.Sharpness,
}


@pytest.mark.parametrize("name", ENHANCERS)
@pytest.mark.parametrize("amount", [0.1, 0.4, 1.0, 1.3, 1.9])
def test_enhancements(name, amount):
    images = pictures()
    ours = getattr(autoaugment, name)(torch.from_numpy(images), torch.full((len(images),), amount))
    compare(ours, images, lambda picture, _: ENHANCERS[name](picture).enhance(amount))


@pytest.mark.parametrize(
    ("name", "number", "reference"),
    [
        ("posterize", 5, lambda picture: ImageOps.posterize(picture, 5)),
        ("solarize", 85, lambda picture: ImageOps.solarize(picture, 85)),
        ("solarize", 256, lambda picture: ImageOps.solarize(picture, 256)),
        ("invert", 0, ImageOps.invert),
        ("autocontrast", 0, ImageOps.autocontrast),
        ("equalize", 0, ImageOps.equalize),
    ],
)
def test_tables(name, number, reference):
    images = pictures()
    ours = getattr(autoaugment, name)(torch.from_numpy(images), torch.full((len(images),), float(number)))
    compare(ours, images, lambda picture, _: reference(picture))


def matrix_of(name: str, amount: float) -> tuple[float, ...]:
    if name == "shear_y":
        return (1, 0, 0, amount, 1, 0)
    if name == "translate_x":
        return (1, 0, amount * 32, 0, 1, 0)
    return (1, 0, 0, 0, 1, amount * 32)


@pytest.mark.parametrize("name", ["shear_y", "translate_x", "translate_y"])
def test_moves(name):
    images = pictures()
    amounts = RNG.uniform(-0.45, 0.45, len(images))
    ours = getattr(autoaugment, name)(torch.from_numpy(images), torch.from_numpy(amounts))

    def reference(picture, number):
        matrix = matrix_of(name, amounts[number])
        return picture.transform((32, 32), Image.Transform.AFFINE, matrix, fillcolor=(FILL,) * 3)

    compare(ours, images, reference)


def test_rotation():
    images = pictures()
    degrees = RNG.uniform(-30, 30, len(images))
    ours = autoaugment.rotate(torch.from_numpy(images), torch.from_numpy(degrees))
    compare(ours, images, lambda picture, number: picture.rotate(degrees[number], fillcolor=(FILL,) * 3))


def test_strengths_are_those_of_the_paper():
    strongest = {name: numbers[2] for name, (*numbers,) in OPERATIONS.items()}
    assert strongest["rotate"] == 30
    assert strongest["shear_y"] == 0.3
    assert strongest["translate_x"] == pytest.approx(150 / 331)
    assert strongest["posterize"] == 4
    assert strongest["solarize"] == 0
    assert strongest["color"] == 0.9


def test_grey_images_pass_through_every_operation():
    grey = torch.from_numpy(pictures()[:, :1])
    for operation, weakest, strongest, _ in OPERATIONS.values():
        out = operation(grey, torch.full((len(grey),), (weakest + strongest) / 2))
        assert out.shape == grey.shape
        assert out.dtype == torch.uint8
