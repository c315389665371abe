"""The cells of a comparison: one method with one seed, trained or calibrated, scored, and kept in a file."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch

from longtail.backbones import build_backbone
from longtail.config import TrainConfig, comparable, differences, from_dict
from longtail.data.splits import Splits
from longtail.errors import UserError, choose
from longtail.files.reading import read_text, reading, require_small_archive
from longtail.files.records import NewerFormat, as_typed, format_of, read_json
from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS, PostHocMethod, TrainMethod, build_posthoc, describe_posthoc
from longtail.posthoc.base import PostHoc, unfitted
from longtail.recipes import with_authors_settings
from longtail.runs.folder import Run, build_posthoc_for
from longtail.runs.network import settled
from longtail.runs.record import (
    METRICS_FILE,
    MODEL_FILE,
    PROGRESS_FILE,
    SPLITS,
    read_journal,
    scores_in,
)

PLUS = re.compile(r"\+(?=[a-z])")  # 1e+5 is a number


@dataclass(frozen=True)
class Entry:
    """A method of the comparison with its options: `softmax`, `marc:solver=sgd` or `balanced-softmax+marc`.

    A stage-one method trains a network. A post-hoc method calibrates that of softmax, or of the stage-one method before
    the plus sign.

    Args:
        name: in `longtail methods`, or the name of the class of a user's method.
        options: as text.
        estimator: a post-hoc method given as an object.
        base: the stage-one method whose network a post-hoc method calibrates; None for softmax.
    """

    name: str
    options: tuple[tuple[str, str], ...] = ()
    estimator: PostHoc | None = None
    base: Entry | None = None

    @classmethod
    def of(cls, method: str | PostHoc) -> Entry:
        """Read an entry; invalid names, options and values are refused now, not after hours of training."""
        if not isinstance(method, str):
            method.check_settings()
            defaults = type(method)().get_params()
            changed = {key: value for key, value in method.get_params().items() if value != defaults[key]}
            options = tuple((key, str(value)) for key, value in changed.items())
            return cls(describe_posthoc(method)[1], options, method)
        first, *more = PLUS.split(method)
        entry = cls._of_text(first)
        if not more:
            return entry
        if len(more) > 1 or entry.stage != 1:
            raise UserError(f"{method!r} must be a stage-one method, a plus sign and a post-hoc method: cbs+marc")
        second = cls._of_text(more[0])
        if second.stage != 2:
            raise UserError(f"{second.name} trains a network, so it cannot be applied to that of {entry.name}")
        return second if entry == BASE else cls(second.name, second.options, base=entry)

    @classmethod
    def _of_text(cls, text: str) -> Entry:
        name, _, rest = text.partition(":")
        choose("method", name, (*TRAIN_METHODS, *POSTHOC_METHODS))
        pairs = []
        for item in filter(None, rest.split(",")):
            option, equals, value = item.partition("=")
            if not equals:
                raise UserError(f"options of a method are written name=value, not {item!r} in {text!r}")
            pairs.append((option, value))
        entry = cls(name, tuple(pairs))
        if entry.stage == 2:
            entry.build().check_settings()
        else:
            with torch.random.fork_rng(devices=()):  # fitted on a few samples, so that it checks its settings
                TRAIN_METHODS[name].build(build_backbone("digits", 1), torch.tensor([90, 9, 3]), dict(pairs))
        return entry

    def build(self, run: Run | None = None) -> PostHoc:
        """The post-hoc method, not fitted; with a run, it has the stage-two settings for the data of the run."""
        if self.estimator is not None:
            return unfitted(self.estimator)
        if run is None:
            return build_posthoc(self.name, dict(self.options))
        return build_posthoc_for(run, self.name, dict(self.options))

    @property
    def needs_validation(self) -> bool:
        """Whether held-out images are needed, to choose a setting or to fit the method."""
        return self.stage == 2 and self.build().needs_validation

    @property
    def stage(self) -> int:
        return 1 if self.estimator is None and self.name in TRAIN_METHODS else 2

    @property
    def stage_one(self) -> Entry:
        """The method that trains the network."""
        return self if self.stage == 1 else self.base or BASE

    @property
    def streams(self) -> int:
        """Streams of images that a step of training draws a batch from."""
        return len(TRAIN_METHODS[self.stage_one.name].samplers)

    @property
    def label(self) -> str:
        """Name for files and tables."""
        label = "-".join([self.name, *(f"{name}={value}" for name, value in self.options)])
        return f"{self.base.label}+{label}" if self.base else label

    @property
    def _description(self) -> TrainMethod | PostHocMethod:
        return TRAIN_METHODS[self.name] if self.stage == 1 else describe_posthoc(self.build())[0]

    @property
    def title(self) -> str:
        options = ", ".join(f"{name} {value}" for name, value in self.options)
        title = f"{self._description.title} ({options})" if options else self._description.title
        return f"{self.base.title} + {title}" if self.base else title

    @property
    def family(self) -> str:
        return self._description.family


BASE = Entry("softmax")


class Result(TypedDict):
    """The content of the file of a cell."""

    format: int
    method: str
    title: str
    family: str
    stage_one: str
    seed: int
    steps: int
    images: int
    parameters: int | None
    chosen: dict[str, float]
    fit: dict[str, Any]
    metrics: dict[str, Any]
    class_counts: list[int]
    class_names: list[str]
    model: str
    origin: dict[str, str]
    identity: dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One method with one seed; everything a worker needs, in plain values.

    Args:
        entry: the method.
        seed: of the long tail, the validation split and the initial weights.
        config: of the training run; its method and seed are replaced.
        views: augmented passes over the training images for fitting post-hoc methods.
        out: folder of the comparison.
        images: split → digest of its images (see `image_digests`); None if there are no images, and a stored
            result is taken as it is.
    """

    entry: Entry
    seed: int
    config: TrainConfig
    views: int
    out: Path
    images: dict[str, str] | None = None

    @property
    def file(self) -> Path:
        return self.out / "cells" / f"{self.entry.label}-seed{self.seed}.json"

    @property
    def stage_one(self) -> Cell:
        """The cell of the network that this one calibrates; itself if it trains one."""
        return replace(self, entry=self.entry.stage_one)

    @property
    def run_folder(self) -> Path:
        """Of its stage-one run."""
        return self.out / "runs" / f"{self.entry.stage_one.label}-seed{self.seed}"

    @property
    def train_config(self) -> TrainConfig:
        """Of its stage-one run."""
        trained = self.entry.stage_one
        options = dict(trained.options)
        config = replace(self.config, method=trained.name, options=options, seed=self.seed)
        return settled(with_authors_settings(config))

    @property
    def is_trained(self) -> bool:
        return (self.run_folder / MODEL_FILE).is_file()

    def read(self) -> Result | None:
        """The stored result; None if it is missing, incomplete or of other validation or test images.

        Raises if it belongs to another comparison, or to a network that was trained on other images.
        """
        try:
            values = read_json(self.file)
            if format_of(values, self.file) == 0:
                return None
            # Earlier versions calibrated softmax only, and stored neither the stage-one method nor names of classes.
            values = {"stage_one": self.entry.stage_one.label, "origin": {}, "class_names": [], **values}
            stored: Result = as_typed(Result, values, self.file)
            scores_in(stored["metrics"], self.file)
            read_predictions(self.file.with_suffix(".npz"), len(stored["class_counts"]))  # raises if it is incomplete
            identity = stored["identity"]
            config, views = from_dict(identity["config"]), identity["views"]
        except NewerFormat:
            raise
        except (UserError, KeyError, TypeError):  # an incomplete result is computed again
            return None
        entry = self.entry
        if [stored[name] for name in ("method", "family", "seed")] != [entry.label, entry.family, self.seed]:
            return None
        changed = differences(config, from_dict(comparable(self.train_config)))
        if views != self.views:
            changed.append(f"views: {views} → {self.views}")
        if changed:
            raise UserError(f"{self.out} holds another comparison ({'; '.join(changed)}); choose another --out")
        images = identity.get("images")
        if self.images is None or images is None or images == self.images:
            return stored
        if images.get("train") != self.images["train"]:
            raise UserError(f"{self.file} was made with other training images; choose another --out")
        return None

    def images_seen(self) -> int:
        """How many training images the run of a stage-one cell has seen: by its steps, or its last evaluation."""
        folder, images = self.run_folder, 0
        with suppress(OSError, ValueError):  # training has not started, or the file is being written
            images = int(read_text(folder / PROGRESS_FILE, "a number", max_bytes=100))
        lines = read_journal(folder / METRICS_FILE)
        return max(images, lines[-1].images) if lines else images


def image_digests(splits: Splits) -> dict[str, str]:
    """Split → digest of its images; a cell stores them, so that one table never shows results on different images."""
    every = {name: getattr(splits, name) for name in SPLITS}
    return {name: images.digest for name, images in every.items() if images is not None}


def read_predictions(path: Path, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and true classes (N,) of a cell's test samples."""
    with reading(path, "a file of predictions"):
        require_small_archive(path)
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            predictions, labels = file["predictions"], file["labels"]
        for numbers in (predictions, labels):
            if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not 0 < len(numbers) == len(labels):
                raise ValueError("it should hold two lists of class numbers, of equal length")
            if numbers.min() < 0 or numbers.max() >= classes:
                raise ValueError(f"a class number is outside 0..{classes - 1}")
    return predictions, labels
