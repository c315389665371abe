"""The splits of a data set: as they are on disk, and as methods use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from longtail.data.images import Images
from longtail.errors import UserError


@dataclass(frozen=True)
class ReadSplits:
    """The splits that a source has on disk.

    Args:
        train: images to train on.
        validation: validation images, if the source has its own.
        test: test images.
        places: split → its name on disk.
        unused: files and folders next to the splits that are not read.
    """

    train: Images
    validation: Images | None = None
    test: Images | None = None
    places: dict[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Splits:
    """The splits of one data set: training, validation and test images."""

    name: str
    train: Images
    validation: Images | None
    test: Images | None
    mean: Sequence[float]
    std: Sequence[float]
    group_counts: Tensor
    """(K,) training images per class before validation images were held out."""
    validation_from_training: bool = False
    """Whether the validation images were held out of the training images."""
    places: dict[str, str] = field(default_factory=dict)
    """Split → its name on disk, if the images were given by a path."""
    unused: tuple[str, ...] = ()
    """Files and folders beside the splits that are not read."""

    def split(self, name: str) -> Images:
        """The split train, validation or test; if it is missing, the error says what to do."""
        found: Images | None = getattr(self, name)
        if found is None:
            remedy = "train with --validation 0.1" if name == "validation" else "train with --test-list FILE"
            others = [split for split in ("validation", "test") if getattr(self, split) is not None]
            instead = f", or name another with --split: {', '.join(others)}" if others else ""
            raise UserError(f"{self.name} has no {name} split here; {remedy}{instead}")
        return found

    def found(self) -> str:
        """What was found, in one sentence.

        >>> from longtail.data.open import open_splits
        >>> open_splits("digits-lt").found()
        'digits: 10 classes; images: 314 train, 36 validation (held out of the training images), 600 test'
        """
        parts = []
        for name in ("train", "validation", "test"):
            images: Images | None = getattr(self, name)
            if images is None:
                continue
            cut = name == "validation" and self.validation_from_training
            where = "held out of the training images" if cut else self.places.get(name)
            absent = int((images.class_counts == 0).sum())
            lack = f"no image of {absent:,} {'class' if absent == 1 else 'classes'}" if absent else ""
            about = "; ".join(filter(None, (where, lack)))
            parts.append(f"{len(images):,} {name}" + (f" ({about})" if about else ""))
        left = f"; not used: {', '.join(self.unused)}" if self.unused else ""
        return f"{self.name}: {self.train.num_classes:,} classes; images: {', '.join(parts)}{left}"
