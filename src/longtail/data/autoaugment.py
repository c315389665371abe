"""AutoAugment, the policy found for CIFAR-10, on whole batches.

Each image draws one of 25 sub-policies; each of its two operations is applied with its own
probability and strength. Images that drew the same operation are worked on together.

Paper: Cubuk et al., AutoAugment: Learning Augmentation Policies from Data, CVPR 2019 (table 7).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longtail.data import pixel_ops

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


def _matrix(rows: Tensor, **entries: Tensor) -> Tensor:
    """Identity transforms (B, 6) with some of the entries a…f replaced."""
    matrix = torch.tensor([1.0, 0, 0, 0, 1, 0], dtype=torch.float64, device=rows.device).repeat(len(rows), 1)
    for name, value in entries.items():
        matrix[:, "abcdef".index(name)] = value
    return matrix


def shear_y(pixels: Tensor, amount: Tensor) -> Tensor:
    return pixel_ops.affine(pixels, _matrix(amount, d=amount), FILL)


def translate_x(pixels: Tensor, share: Tensor) -> Tensor:
    return pixel_ops.affine(pixels, _matrix(share, c=share * pixels.shape[3]), FILL)


def translate_y(pixels: Tensor, share: Tensor) -> Tensor:
    return pixel_ops.affine(pixels, _matrix(share, f=share * pixels.shape[2]), FILL)


def rotate(pixels: Tensor, degrees: Tensor, fill: int = FILL) -> Tensor:
    """Rotate about the centre, counter-clockwise."""
    angle = torch.deg2rad(degrees.double())
    cosine, sine = angle.cos(), angle.sin()
    x, y = pixels.shape[3] / 2, pixels.shape[2] / 2
    shift_x = x - cosine * x + sine * y
    shift_y = y - sine * x - cosine * y
    return pixel_ops.affine(pixels, _matrix(angle, a=cosine, b=-sine, c=shift_x, d=sine, e=cosine, f=shift_y), fill)


Operation = Callable[[Tensor, Tensor], Tensor]

# Operation, its number at strength 0 and at strength 9, and whether the sign is drawn at random.
OPERATIONS: dict[str, tuple[Operation, float, float, bool]] = {
    "shear_y": (shear_y, 0.0, 0.3, True),
    "translate_x": (translate_x, 0.0, 150 / 331, True),
    "translate_y": (translate_y, 0.0, 150 / 331, True),
    "rotate": (rotate, 0.0, 30.0, True),
    "color": (pixel_ops.color, 0.0, 0.9, True),
    "contrast": (pixel_ops.contrast, 0.0, 0.9, True),
    "brightness": (pixel_ops.brightness, 0.0, 0.9, True),
    "sharpness": (pixel_ops.sharpness, 0.0, 0.9, True),
    "posterize": (pixel_ops.posterize, 8.0, 4.0, False),
    "solarize": (pixel_ops.solarize, 256.0, 0.0, False),
    "autocontrast": (pixel_ops.autocontrast, 0.0, 0.0, False),
    "equalize": (pixel_ops.equalize, 0.0, 0.0, False),
    "invert": (pixel_ops.invert, 0.0, 0.0, False),
}
AROUND_ONE = ("color", "contrast", "brightness", "sharpness")
NAMES = tuple(OPERATIONS)


def _table(column: int) -> Tensor:
    """(25 sub-policies, 2 operations): one column of the policy as numbers."""
    rows = [[(NAMES.index(op[0]), *op[1:])[column] for op in pair] for pair in CIFAR_POLICY]
    return torch.tensor(rows, dtype=torch.float64)


class AutoAugment:
    """The CIFAR-10 policy: pixels (B, 3, H, W) uint8 and numbers (B, 5) in [0, 1) to pixels.

    Numbers: which sub-policy, then for each of its two operations: applied or not, and which sign.
    """

    columns = 5

    def __init__(self) -> None:
        self.operation = _table(0).long()
        self.probability = _table(1)
        self.strength = _table(2)

    def __call__(self, pixels: Tensor, numbers: Tensor) -> Tensor:
        numbers = numbers.cpu()
        policy = (numbers[:, 0] * len(CIFAR_POLICY)).long()
        pixels = pixels.clone()
        for turn in range(2):
            applied = numbers[:, 1 + 2 * turn] < self.probability[policy, turn]
            sign = torch.where(numbers[:, 2 + 2 * turn] < 0.5, -1.0, 1.0)
            drawn = self.operation[policy, turn].masked_fill(~applied, -1)
            for code in drawn.unique().tolist():
                if code >= 0:
                    rows = (drawn == code).nonzero().squeeze(1)
                    self._apply(NAMES[code], pixels, rows, self.strength[policy[rows], turn], sign[rows])
        return pixels

    def _apply(self, name: str, pixels: Tensor, rows: Tensor, strength: Tensor, sign: Tensor) -> None:
        operation, weakest, strongest, signed = OPERATIONS[name]
        number = weakest + (strongest - weakest) * strength / 9
        if signed:
            number = number * sign
        if name in AROUND_ONE:
            number = number + 1
        if name == "posterize":
            number = number.round()
        rows, number = rows.to(pixels.device), number.to(pixels.device)
        pixels[rows] = operation(pixels[rows], number)
