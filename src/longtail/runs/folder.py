"""A run folder: its record, its network, its images and their outputs."""

from __future__ import annotations

import hashlib
import json
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import nn

from longtail.config import TrainConfig, from_dict
from longtail.data.augment import Transform
from longtail.data.images import Images
from longtail.data.imbalance import ClassSubsample
from longtail.data.splits import Splits, open_splits
from longtail.distributed import SINGLE_PROCESS, World
from longtail.errors import UserError, choose
from longtail.files.atomic import restore_interrupted, write_json
from longtail.files.progress import QUIET, Display
from longtail.files.records import FORMAT, read_json
from longtail.files.tensors import DIGEST, read_details, read_tensors, write_tensors
from longtail.files.text import some_of
from longtail.heads.fold import head_of, with_head
from longtail.heads.kinds import SAVED_HEADS
from longtail.methods import build_posthoc
from longtail.outputs.loaders import ImageLoader
from longtail.outputs.record import Outputs, fingerprint
from longtail.runs.network import build_network, image_loader, stored_outputs, transforms
from longtail.runs.record import (
    CALIBRATION_FILE,
    MODEL_FILE,
    RELEASED,
    RUN_FILE,
    CalibrationRecord,
    RunRecord,
    find_released,
    read_record,
)

if TYPE_CHECKING:
    from longtail.posthoc.base import PostHoc


@dataclass(frozen=True)
class Run:
    """A run folder that exists, and how its images are read; `using` changes how.

    >>> run = Run.open("runs/digits")  # doctest: +SKIP
    >>> outputs = run.outputs("train", views=1)  # doctest: +SKIP

    Args:
        folder: of the run.
        record: the content of its `run.json`.
        world: processes that share the images, batch by batch.
        root: folder of the data set, if it has moved since training.
        workers: processes that decode images read from files.
        display: where progress is shown.
    """

    folder: Path
    record: RunRecord
    world: World = SINGLE_PROCESS
    root: str | None = None
    workers: int = 0
    display: Display = QUIET

    @classmethod
    def open(cls, folder: Path | str) -> Run:
        """Open an existing run, or `released:NAME`; raises if files are missing or do not belong together."""
        folder = find_released(folder) if str(folder).startswith(RELEASED) else Path(folder)
        restore_interrupted(folder)
        if not (folder / RUN_FILE).is_file():
            raise UserError(f"{folder} is not a run folder: {_lack(folder)}")
        run = cls(folder, read_record(folder / RUN_FILE))
        if (folder / MODEL_FILE).is_file():
            run._require_own_weights()
        return run

    def using(
        self, world: World = SINGLE_PROCESS, *, root: str | None = None, workers: int = 0, display: Display = QUIET
    ) -> Run:
        """The same run with other settings for reading its images."""
        return replace(self, world=world, root=root, workers=workers, display=display if world.is_main else QUIET)

    @classmethod
    def create(cls, folder: Path, config: TrainConfig, splits: Splits, *, started_by: str | None = None) -> Run:
        """Describe a new run and write its `run.json`."""
        record = RunRecord.of(config, splits, started_by)
        write_json(folder / RUN_FILE, record.to_dict())
        return cls(folder, record)

    @cached_property
    def config(self) -> TrainConfig:
        try:
            return from_dict(self.record.config)
        except UserError as error:
            raise UserError(f"{self.folder / RUN_FILE} is damaged: {error}") from error

    @property
    def data_name(self) -> str:
        return self.record.data.name

    @property
    def channels(self) -> int:
        """Colour channels of an image."""
        return self.record.data.channels

    @property
    def class_names(self) -> list[str]:
        return self.record.data.class_names

    @property
    def class_counts(self) -> np.ndarray:
        """Images per class that the network was trained on, (K,) int64."""
        return np.array(self.record.data.class_counts)

    @property
    def group_counts(self) -> np.ndarray:
        """Images per class before validation images were held out, (K,); they define many, medium and few."""
        return np.array(self.record.data.group_counts)

    @property
    def split_sizes(self) -> dict[str, int]:
        """Number of images of each split."""
        return {name: split.images for name, split in self.record.data.splits.items()}

    @property
    def scored_split(self) -> str | None:
        """The default split for scores: test images or, if there are none, validation images."""
        return next((name for name in ("test", "validation") if name in self.split_sizes), None)

    @property
    def calibration(self) -> CalibrationRecord | None:
        """The calibration of a calibrated model; None for a model as it was trained."""
        return self.record.calibration

    @property
    def model_path(self) -> Path:
        """The trained weights; an error says how to finish a run that has none yet."""
        path = self.folder / MODEL_FILE
        if not path.is_file():
            how = f"`longtail train --out {self.folder} --resume`"
            raise UserError(f"{self.folder} is not finished: continue with {how}")
        return path

    def data_hash(self) -> str:
        """An identity of the data; runs with different images have different ones."""
        described = json.dumps([self.record.config, asdict(self.record.data)], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()

    @property
    def is_frozen(self) -> bool:
        """Whether only the head was trained (`--train head`): the backbone has not seen the images."""
        return self.config.train == "head"

    @cached_property
    def model_identity(self) -> str:
        """A hash of the weights; every file that belongs to this model stores it."""
        return str(read_details(self.model_path).get("model"))

    def _require_own_weights(self) -> None:
        """Raise if the weights were written for another `run.json`, or `run.json` for other weights."""
        path, written_for = self.model_path, read_details(self.model_path).get("run")
        if written_for is not None and written_for != self.record.digest:
            raise UserError(
                f"{path} does not belong to {self.folder / RUN_FILE}: it was written for other classes, class counts "
                "or another configuration; restore both files from one run"
            )
        identity, file = self.record.model, RUN_FILE
        calibration = self.folder / CALIBRATION_FILE
        if identity is None and self.calibration and calibration.is_file():
            identity, file = read_json(calibration).get("model"), CALIBRATION_FILE
        if identity is not None and identity != self.model_identity:
            raise UserError(
                f"{path} does not belong to {self.folder / file}: it holds the weights of another model; restore both "
                "files from one run"
            )

    def model(self) -> nn.Module:
        """A copy of the trained network, in evaluation mode."""
        return deepcopy(self.network)

    @cached_property
    def network(self) -> nn.Module:
        """The trained network, loaded once; it is not to be changed."""
        model, _ = build_network(self.config, torch.from_numpy(self.class_counts), self.channels)
        if self.calibration:
            kind, old = choose("head", self.calibration.head, SAVED_HEADS), head_of(model)
            model = with_head(model, SAVED_HEADS[kind](old.in_features, old.out_features))
        weights, header = read_tensors(self.model_path)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{self.model_path} does not fit the network of {self.folder / RUN_FILE}: {reason}"
            ) from error
        if DIGEST not in read_details(self.model_path) and fingerprint(model) != header.get("model"):
            raise UserError(f"{self.model_path} is damaged: its weights are not those that were written")
        return model.to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]

    @cached_property
    def splits(self) -> Splits:
        """The data of the run, opened once."""
        splits = open_splits(replace(self.config, root=self.root) if self.root else self.config)
        if splits.train.class_counts.tolist() != self.record.data.class_counts:
            raise UserError(f"the data at hand are not those of {self.folder}: the class counts differ")
        return splits

    def images(self, split: str) -> Images:
        """The images of a split; raises if the network may have been trained on held-out images.

        Validation images are cut from the training images by their position in the list. If that list has
        changed since training, other images are cut, and it is unknown which images the network has seen.
        """
        if split != "test" and self.record.data.validation_from_training:
            for name, recorded in self.record.data.splits.items():
                if name != "test" and self.splits.split(name).digest != recorded.digest:
                    raise UserError(
                        f"the {name} images of {self.folder} have changed since it was trained (added, removed, "
                        "renamed or edited), so held-out images cannot be told from those the network has seen; "
                        "restore them, or train anew"
                    )
        return self.splits.split(split)

    def transforms(self) -> tuple[Transform, Transform]:
        """The transforms (augmenting, clean) of training images and of test images."""
        return transforms(self.config)

    def loader(
        self, split: str, *, views: int = 0, images_per_class: int | Literal["all"] = "all", seed: int = 0
    ) -> ImageLoader:
        """Batches (images, labels) of a split, as the network takes them.

        Args:
            split: train, validation or test.
            views: augmented passes over the training images; 0 for one pass over clean images.
            images_per_class: at most so many training images of every class.
            seed: random seed that selects them.
        """
        subsample = None if images_per_class == "all" else ClassSubsample(images_per_class, seed)
        return image_loader(self, split, views, subsample)

    def outputs(
        self,
        split: str,
        *,
        views: int = 0,
        images_per_class: int | Literal["all"] = "all",
        seed: int = 0,
        images_of: Run | None = None,
    ) -> Outputs:
        """Features, logits and labels of a split: computed once and kept in the folder of the run.

        The arguments are those of `loader`; `images_of` is another run whose images are used.
        """
        subsample = None if images_per_class == "all" else ClassSubsample(images_per_class, seed)
        return stored_outputs(self, split, views, subsample, images_of or self)


def _lack(folder: Path) -> str:
    """Why something is not a run folder, and what else to do with it."""
    if not folder.exists():
        return "it does not exist"
    if (folder.parent / RUN_FILE).is_file() and folder.is_file():
        return f"it is a file of one; give {folder.parent}"
    if folder.is_file():
        return (
            f"it is a file. Saved logits are scored by `longtail diagnose {folder} --train TRAIN_LOGITS`, or before "
            f"and after calibration by `longtail calibrate TRAIN_LOGITS --test {folder} --out OUT`"
        )
    if (folder / CALIBRATION_FILE).is_file():
        return "it holds a calibration of saved logits without their network; `longtail export --format npz` reads it"
    inside = sorted(str(path.parent) for path in folder.glob(f"*/{RUN_FILE}"))
    hint = f"; the runs in it are {some_of(inside)}" if inside else "; `longtail train` makes one of a folder of images"
    return f"it has no {RUN_FILE}{hint}"


def build_posthoc_for(run: Run, name: str, options: dict[str, str]) -> PostHoc:
    """A post-hoc method with the stage-two settings for the data of a run."""
    config, images = run.config, run.split_sizes["train"]
    method = None if config.sampler else config.method  # a sampler changes both
    return build_posthoc(name, options, data=config.data, train_images=images, trained_by=method, frozen=run.is_frozen)


def write_model(path: Path, model: nn.Module, record: RunRecord, header: dict[str, object]) -> str:
    """Write the weights of a network with their identity and the digest of the record; returns the identity."""
    identity = fingerprint(model)
    write_tensors(path, model.state_dict(), {"format": FORMAT, "model": identity, "run": record.digest, **header})
    return identity


def write_trained(folder: Path, model: nn.Module, step: int) -> None:
    """Write the identity of the trained weights to `run.json`, then the weights: a run that has them is finished."""
    record = read_record(folder / RUN_FILE)
    write_json(folder / RUN_FILE, replace(record, model=fingerprint(model)).to_dict())
    write_model(folder / MODEL_FILE, model, record, {"step": step})
