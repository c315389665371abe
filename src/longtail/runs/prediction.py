"""Predictions of a trained model for new images, with its own preprocessing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from longtail.backbones import folded
from longtail.data.augment import Resize, Transform, as_rgb
from longtail.data.images import DecodedImages, Images, MemoryImages, as_array
from longtail.data.listings import find_images
from longtail.data.splits import image_side
from longtail.distributed import World, find_device
from longtail.errors import UserError
from longtail.files.progress import Display
from longtail.outputs.inference import InferenceSession
from longtail.outputs.loaders import ImageLoader
from longtail.runs.folder import Run
from longtail.runs.network import transforms

NO_NUMBERS = np.zeros(0)  # random numbers of an image that is not augmented
PRINTED = 20  # images
UPRIGHT = "turn each picture upright, as its EXIF data say"


@dataclass(frozen=True)
class Predicted:
    """Classes of images.

    Args:
        sources: N paths, or numbers in the order given.
        class_names: K names.
        probabilities: (N, K), rows sum to 1.
        left_out: paths of images that could not be read.
        sets: (N, K) of bool, which classes belong to the prediction set of each image; None without one.
    """

    sources: list[str]
    class_names: list[str]
    probabilities: np.ndarray
    left_out: tuple[str, ...] = ()
    sets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.sources)

    def __str__(self) -> str:
        """One line per image, as far as they fit on a screen."""
        best = zip(self.sources[:PRINTED], self.top(1), strict=False)
        lines = [f"{source}: {name} ({100 * probability:.1f} %)" for source, ((name, probability),) in best]
        more = [f"… {len(self) - PRINTED:,} more"] if len(self) > PRINTED else []
        return "\n".join([*lines, *more])

    @property
    def names(self) -> list[str]:
        """The most probable class of each image."""
        return [self.class_names[label] for label in self.probabilities.argmax(1)]

    def set_names(self) -> list[list[str]]:
        """The classes of each prediction set, the most probable first; no lists without sets."""
        order = np.argsort(-self.probabilities, axis=1, kind="stable")
        pairs = zip(order, () if self.sets is None else self.sets, strict=self.sets is not None)
        return [[self.class_names[label] for label in labels if chosen[label]] for labels, chosen in pairs]

    def top(self, count: int) -> list[list[tuple[str, float]]]:
        """For each image the `count` most probable classes, (name, probability), best first."""
        order = np.argsort(-self.probabilities, axis=1, kind="stable")[:, :count]
        return [
            [(self.class_names[label], float(row[label])) for label in labels]
            for row, labels in zip(self.probabilities, order, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Grey(Resize):
    """Resizes an image as another decoder does, after conversion to grey."""

    sized: Resize

    def __call__(self, picture: Image.Image, numbers: np.ndarray) -> Image.Image:
        return self.sized(picture.convert("L"), numbers)


def resizing(run: Run) -> Resize:
    """How a test image is resized for the network of a run."""
    return transforms(run.config)[1].decode or Resize(image_side(run.config))


def preprocessing(run: Run) -> Transform:
    """The transform of test images of any size and mode for the network of a run."""
    decode = resizing(run)
    return replace(
        transforms(run.config)[1], decode=Grey(size=decode.size, sized=decode) if run.channels == 1 else decode
    )


def in_words(run: Run) -> str:
    """How to turn an image into the pixels from 0 to 1 that an exported network takes, in words."""
    colour = "shades of grey" if run.channels == 1 else "RGB"
    return f"{UPRIGHT}; convert to {colour}; {resizing(run)}; divide by 255"


class Predictor:
    """A trained model, plain or calibrated, ready for new images.

    Args:
        run: the finished run.
        device: auto, cpu, cuda, …
    """

    def __init__(self, run: Run, device: str = "auto") -> None:
        self.run = run
        self.device = find_device(device)
        self.network = folded(run.network)
        self.session = InferenceSession.of_network(self.network, World(0, 1, self.device))
        self.transform = preprocessing(run)

    def __repr__(self) -> str:
        how = f", calibrated with {self.run.calibration.title}" if self.run.calibration else ""
        return (
            f"Predictor({str(self.run.folder)!r}: {self.run.config.backbone}, {len(self.class_names):,} classes{how})"
        )

    @property
    def class_names(self) -> list[str]:
        return self.run.class_names

    def predict(
        self,
        images: Any,
        *,
        root: str | None = None,
        skip_broken: bool = False,
        workers: int = 0,
        progress: bool = True,
        display: Display | None = None,
    ) -> Predicted:
        """Classes and probabilities of images.

        Args:
            images: a path or several (images, folders, lists of files); or one or several Pillow images,
                or uint8 arrays (H, W) or (H, W, C), or one array (N, H, W, C).
            root: folder that the paths of a list are relative to.
            skip_broken: skip images that cannot be read instead of stopping.
            workers: processes that decode images read from files.
            progress: show a progress bar, in a terminal or a notebook.
            display: where progress is shown, instead of `progress`.
        """
        source, transform = self._opened(images, root, skip_broken)
        display = display or Display(quiet=not progress)
        loader = ImageLoader(source, transform, world=self.session.world, workers=workers)
        indices, probabilities = [], []
        for batch, outputs in self.session.infer(loader, "predicting", display):
            assert batch.indices is not None
            probabilities.append(outputs.logits.float().softmax(1).cpu().numpy())
            indices.append(batch.indices.numpy())
        read = np.concatenate(indices)
        left_out = np.setdiff1d(np.arange(len(source)), read)
        return Predicted(
            [_name(source, index) for index in read],
            self.class_names,
            np.concatenate(probabilities),
            tuple(_name(source, index) for index in left_out),
        )

    def _opened(self, images: Any, root: str | None, skip_broken: bool) -> tuple[Images, Transform]:
        """The images, and the transform to apply to them."""
        several = _several(images)
        names = tuple(self.class_names)
        if all(isinstance(one, str | Path) for one in several):
            return find_images(several, names, root=root, skip_broken=skip_broken), self.transform
        if path := next((one for one in several if isinstance(one, str | Path)), None):
            raise UserError(f"give either paths or pictures, not both: {str(path)!r} is a path, other images are not")
        decode = self.transform.decode
        assert decode is not None
        squares = [as_array(decode(_picture(one, index), NO_NUMBERS)) for index, one in enumerate(several)]
        pixels = torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2)
        labels = torch.zeros(len(squares), dtype=torch.int64)
        shown = MemoryImages(labels=labels, class_names=names, pixels=pixels.to(self.device))
        return shown, replace(self.transform, decode=None)


def load(folder: Path | str, *, device: str = "auto") -> Predictor:
    """Load a trained model, plain or calibrated, with its preprocessing; `released:NAME` loads a released network.

    >>> run = load("runs/photos/marc")  # doctest: +SKIP
    >>> run.predict("new-photos").names  # doctest: +SKIP
    """
    return Predictor(Run.open(folder), device)


def _several(images: Any) -> Sequence[Any]:
    """One image or several as a sequence of images."""
    single = isinstance(images, str | Path | Image.Image) or (isinstance(images, np.ndarray) and images.ndim < 4)
    several = list(images) if isinstance(images, Iterable) and not single else [images]
    if not several:
        raise UserError("there are no images to predict; give image files, folders, or a list of files")
    return several


def _picture(image: Any, index: int) -> Image.Image:
    """An RGB image from a Pillow image or an array."""
    if isinstance(image, Image.Image):
        return _as_rgb(image, index)
    array = np.asarray(image)
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3)):
        raise UserError(
            f"image {index} is an array {array.shape} of {array.dtype}; give pixels from 0 to 255 as uint8, (H, W) or "
            "(H, W, 3), a Pillow image, or a path"
        )
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array).convert("RGB")


def _as_rgb(picture: Image.Image, index: int) -> Image.Image:
    try:
        return as_rgb(picture)
    except (OSError, ValueError) as error:
        raise UserError(f"image {index} cannot be used: {error}") from error


def _name(images: Images, index: int) -> str:
    return str(images.path(int(index))) if isinstance(images, DecodedImages) else str(index)
