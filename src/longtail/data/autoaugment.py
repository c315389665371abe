"""AutoAugment, the policy of CIFAR-10, and Pillow's image operations that it uses, on whole batches.

Every operation takes pixels (B, C, H, W) uint8 and one number per image (B,), and gives the same values as Pillow,
which works image by image. In AutoAugment each image draws one of 25 sub-policies; each of its two operations is
applied with a probability and a strength. Images that drew the same operation are processed together.

Paper: Cubuk et al., AutoAugment: Learning Augmentation Policies from Data, CVPR 2019 (table 7).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Two operations per line: name, probability, strength from 0 to 9.
CIFAR_POLICY = (
    (("invert", 0.1, 7), ("contrast", 0.2, 6)),
    (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
    (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
    (("shear_y", 0.5, 8), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.5, 8), ("equalize", 0.9, 2)),
    (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
    (("color", 0.4, 3), ("brightness", 0.6, 7)),
    (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
    (("equalize", 0.6, 5), ("equalize", 0.5, 1)),
    (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
    (("color", 0.7, 7), ("translate_x", 0.5, 8)),
    (("equalize", 0.3, 7), ("autocontrast", 0.4, 8)),
    (("translate_y", 0.4, 3), ("sharpness", 0.2, 6)),
    (("brightness", 0.9, 6), ("color", 0.2, 8)),
    (("solarize", 0.5, 2), ("invert", 0.0, 3)),
    (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
    (("equalize", 0.2, 8), ("equalize", 0.6, 4)),
    (("color", 0.9, 9), ("equalize", 0.6, 6)),
    (("autocontrast", 0.8, 4), ("solarize", 0.2, 8)),
    (("brightness", 0.1, 3), ("color", 0.7, 0)),
    (("solarize", 0.4, 5), ("autocontrast", 0.9, 3)),
    (("translate_y", 0.9, 9), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.9, 2), ("solarize", 0.8, 3)),
    (("equalize", 0.8, 8), ("invert", 0.1, 3)),
    (("translate_y", 0.7, 9), ("autocontrast", 0.9, 1)),
)
FILL = 128


def grey(pixels: Tensor) -> Tensor:
    """Luma as Pillow's mode L, (B, 1, H, W) uint8; grey images are returned as they are."""
    if pixels.shape[1] == 1:
        return pixels
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32, device=pixels.device).view(1, 3, 1, 1)
    return ((pixels.int() * weights).sum(1, keepdim=True).add_(0x8000) >> 16).to(torch.uint8)


def blend(background: Tensor, pixels: Tensor, amount: Tensor) -> Tensor:
    """`background + amount * (pixels - background)`, truncated and clipped to 0..255."""
    low = background.float()
    mixed = low + amount.float().view(-1, 1, 1, 1) * (pixels.float() - low)
    return mixed.clamp_(0, 255).to(torch.uint8)


def brightness(pixels: Tensor, amount: Tensor) -> Tensor:
    return blend(torch.zeros_like(pixels), pixels, amount)


def color(pixels: Tensor, amount: Tensor) -> Tensor:
    return blend(grey(pixels), pixels, amount)


def contrast(pixels: Tensor, amount: Tensor) -> Tensor:
    mean = grey(pixels).double().mean(dim=(1, 2, 3), keepdim=True).add_(0.5).floor_()
    return blend(mean, pixels, amount)


def sharpness(pixels: Tensor, amount: Tensor) -> Tensor:
    """Blend with a 3x3 smoothing (5 in the middle, 1 around, over 13) that leaves the border alone."""
    channels = pixels.shape[1]
    kernel = torch.full((channels, 1, 3, 3), 1.0, device=pixels.device)
    kernel[:, :, 1, 1] = 5.0
    smooth = pixels.float()
    inner = F.conv2d(smooth, kernel, groups=channels)
    smooth[:, :, 1:-1, 1:-1] = (inner / 13 + 0.5).floor_()
    return blend(smooth, pixels, amount)


def posterize(pixels: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` bits of each value."""
    mask = (0xFF << (8 - bits.int())) & 0xFF
    return pixels & mask.to(torch.uint8).view(-1, 1, 1, 1)


def solarize(pixels: Tensor, threshold: Tensor) -> Tensor:
    """Invert the values at or above the threshold."""
    return torch.where(pixels < threshold.view(-1, 1, 1, 1), pixels, 255 - pixels)


def invert(pixels: Tensor, _: Tensor) -> Tensor:
    return 255 - pixels


def autocontrast(pixels: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel so that its darkest value becomes 0 and its brightest 255."""
    low = pixels.amin(dim=(2, 3), keepdim=True).double()
    high = pixels.amax(dim=(2, 3), keepdim=True).double()
    # A true division: torch turns `255 / x` into `255 * (1 / x)`, which rounds otherwise.
    scale = torch.full_like(high, 255.0) / (high - low).clamp_(min=1)
    stretched = (pixels * scale - low * scale).clamp_(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, pixels)


def equalize(pixels: Tensor, _: Tensor) -> Tensor:
    """Flatten the histogram of each channel."""
    batch, channels, height, width = pixels.shape
    flat = pixels.reshape(batch * channels, height * width).long()
    histogram = torch.zeros(batch * channels, 256, dtype=torch.long, device=pixels.device)
    histogram.scatter_add_(1, flat, torch.ones_like(flat))
    brightest = histogram.gather(1, flat.amax(1, keepdim=True))
    step = (height * width - brightest) // 255
    before = histogram.cumsum(1) - histogram
    table = ((before + step // 2) // step.clamp(min=1)).clamp_(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=pixels.device))
    return table.gather(1, flat).to(torch.uint8).view_as(pixels)


def affine(pixels: Tensor, matrix: Tensor, fill: int) -> Tensor:
    """Nearest-neighbour affine transform; `matrix` (B, 6) maps output to input pixels as Pillow's does."""
    batch, channels, height, width = pixels.shape
    # Pillow works in fixed point, 16 bits behind the point; so must we to hit the same pixels.
    x = torch.arange(width, device=pixels.device)
    y = torch.arange(height, device=pixels.device).view(-1, 1)
    a, b, c, d, e, f = matrix.double().view(-1, 6, 1, 1).unbind(1)
    source_x = (_fixed(a) * x + _fixed(b) * y + _fixed(c + 0.5 * (a + b))) >> 16
    source_y = (_fixed(d) * x + _fixed(e) * y + _fixed(f + 0.5 * (d + e))) >> 16
    inside = (source_x >= 0) & (source_x < width) & (source_y >= 0) & (source_y < height)
    source = (source_y * width + source_x).masked_fill_(~inside, 0).view(batch, 1, -1)
    moved = pixels.reshape(batch, channels, -1).gather(2, source.expand(-1, channels, -1))
    return moved.view_as(pixels).masked_fill_(~inside.unsqueeze(1), fill)


def _fixed(values: Tensor) -> Tensor:
    return (values * 65536 + 0.5).floor().long()


def _matrix(rows: Tensor, **entries: Tensor) -> Tensor:
    """Identity transforms (B, 6) with some of the entries a…f replaced."""
    matrix = torch.tensor([1.0, 0, 0, 0, 1, 0], dtype=torch.float64, device=rows.device).repeat(len(rows), 1)
    for name, value in entries.items():
        matrix[:, "abcdef".index(name)] = value
    return matrix


def shear_y(pixels: Tensor, amount: Tensor) -> Tensor:
    return affine(pixels, _matrix(amount, d=amount), FILL)


def translate_x(pixels: Tensor, share: Tensor) -> Tensor:
    return affine(pixels, _matrix(share, c=share * pixels.shape[3]), FILL)


def translate_y(pixels: Tensor, share: Tensor) -> Tensor:
    return affine(pixels, _matrix(share, f=share * pixels.shape[2]), FILL)


def rotate(pixels: Tensor, degrees: Tensor, fill: int = FILL) -> Tensor:
    """Rotate about the centre, counter-clockwise."""
    angle = torch.deg2rad(degrees.double())
    cosine, sine = angle.cos(), angle.sin()
    x, y = pixels.shape[3] / 2, pixels.shape[2] / 2
    shift_x = x - cosine * x + sine * y
    shift_y = y - sine * x - cosine * y
    return affine(pixels, _matrix(angle, a=cosine, b=-sine, c=shift_x, d=sine, e=cosine, f=shift_y), fill)


Operation = Callable[[Tensor, Tensor], Tensor]

# Operation, its number at strength 0 and at strength 9, and whether the sign is drawn at random.
OPERATIONS: dict[str, tuple[Operation, float, float, bool]] = {
    "shear_y": (shear_y, 0.0, 0.3, True),
    "translate_x": (translate_x, 0.0, 150 / 331, True),
    "translate_y": (translate_y, 0.0, 150 / 331, True),
    "rotate": (rotate, 0.0, 30.0, True),
    "color": (color, 0.0, 0.9, True),
    "contrast": (contrast, 0.0, 0.9, True),
    "brightness": (brightness, 0.0, 0.9, True),
    "sharpness": (sharpness, 0.0, 0.9, True),
    "posterize": (posterize, 8.0, 4.0, False),
    "solarize": (solarize, 256.0, 0.0, False),
    "autocontrast": (autocontrast, 0.0, 0.0, False),
    "equalize": (equalize, 0.0, 0.0, False),
    "invert": (invert, 0.0, 0.0, False),
}
AROUND_ONE = ("color", "contrast", "brightness", "sharpness")
NAMES = tuple(OPERATIONS)
# Each (25 sub-policies, 2 operations).
OPERATION = torch.tensor([[NAMES.index(name) for name, _, _ in pair] for pair in CIFAR_POLICY])
PROBABILITY = torch.tensor([[probability for _, probability, _ in pair] for pair in CIFAR_POLICY], dtype=torch.float64)
STRENGTH = torch.tensor([[strength for _, _, strength in pair] for pair in CIFAR_POLICY], dtype=torch.float64)


def autoaugment(pixels: Tensor, numbers: Tensor) -> Tensor:
    """The CIFAR-10 policy: pixels (B, 3, H, W) uint8 and numbers (B, 5) in [0, 1) to pixels.

    Numbers: which sub-policy, then for each of its two operations: applied or not, and which sign.
    """
    numbers = numbers.cpu()
    policy = (numbers[:, 0] * len(CIFAR_POLICY)).long()
    pixels = pixels.clone()
    for turn in range(2):
        applied = numbers[:, 1 + 2 * turn] < PROBABILITY[policy, turn]
        sign = torch.where(numbers[:, 2 + 2 * turn] < 0.5, -1.0, 1.0)
        drawn = OPERATION[policy, turn].masked_fill(~applied, -1)
        for code in drawn[applied].unique().tolist():
            rows = (drawn == code).nonzero().squeeze(1)
            operation, weakest, strongest, signed = OPERATIONS[NAMES[code]]
            number = weakest + (strongest - weakest) * STRENGTH[policy[rows], turn] / 9
            if signed:
                number = number * sign[rows]
            if NAMES[code] in AROUND_ONE:
                number = number + 1
            if NAMES[code] == "posterize":
                number = number.round()
            rows, number = rows.to(pixels.device), number.to(pixels.device)
            pixels[rows] = operation(pixels[rows], number)
    return pixels
