"""A run folder: the configuration, the data and the trained weights.

    RUN/run.json                configuration, versions, class names and counts, digests of the images
    RUN/metrics.jsonl           one line per evaluation
    RUN/checkpoint.safetensors  to resume from; removed when training is done
    RUN/progress.txt            images seen so far, during training
    RUN/model.safetensors       the trained network

A calibrated model is a run folder too, so every command takes either.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from longtail.config import TrainConfig, from_dict
from longtail.core.files import settle, write_json
from longtail.core.formats import FORMAT, format_of
from longtail.core.tensors import has_digests, read_header, read_tensors, write_tensors
from longtail.data.augment import Transform
from longtail.data.images import Images
from longtail.data.open import open_splits
from longtail.data.splits import Splits
from longtail.errors import UserError
from longtail.methods import build_posthoc
from longtail.networks.head import fingerprint
from longtail.runs.network import build_network, transforms, with_head_of_kind
from longtail.runs.record import CalibrationRecord, RunRecord, SplitRecord, read_record
from longtail.runs.released import find_released, is_released

if TYPE_CHECKING:
    from longtail.posthoc.base import PostHoc

RUN_FILE, MODEL_FILE, CHECKPOINT_FILE, METRICS_FILE, PROGRESS_FILE = (
    "run.json",
    "model.safetensors",
    "checkpoint.safetensors",
    "metrics.jsonl",
    "progress.txt",
)


@dataclass(frozen=True)
class Run:
    """A run folder that exists."""

    folder: Path
    record: RunRecord

    @classmethod
    def open(cls, folder: Path | str) -> Run:
        """Open an existing run, or `released:NAME`; an error says what is missing."""
        folder = find_released(folder) if is_released(folder) else Path(folder)
        settle(folder)
        if not (folder / RUN_FILE).is_file():
            raise UserError(f"{folder} is not a run folder: {_lack(folder)}")
        return cls(folder, read_record(folder / RUN_FILE))

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
        known = json.dumps([self.record.config, asdict(self.record.data)], sort_keys=True)
        return hashlib.sha256(known.encode()).hexdigest()

    @cached_property
    def model_identity(self) -> str:
        """A hash of the weights; every file that belongs to this model stores it."""
        header = read_header(self.model_path)
        return str(header["model"]) if format_of(header, self.model_path) else fingerprint(self.load_model())

    def load_model(self) -> nn.Module:
        """The trained network, in evaluation mode."""
        model, _ = build_network(self.config, torch.from_numpy(self.class_counts), self.channels)
        if self.calibration:
            model = with_head_of_kind(model, self.calibration.head)
        weights, header = read_tensors(self.model_path)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{self.model_path} does not fit the network of {self.folder / RUN_FILE}: {reason}"
            ) from error
        known = has_digests(self.model_path) or format_of(header, self.model_path) == 0
        if not known and fingerprint(model) != header.get("model"):
            raise UserError(f"{self.model_path} is damaged: its weights are not those that were written")
        return model.to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]

    def splits(self, root: str | None = None) -> Splits:
        """Opens the data of the run; `root` is their folder, if it has moved."""
        config = replace(self.config, root=root) if root else self.config
        splits = open_splits(config)
        if splits.train.class_counts.tolist() != self.record.data.class_counts:
            raise UserError(f"the data at hand are not those of {self.folder}: the class counts differ")
        return splits

    def images(self, split: str, splits: Splits) -> Images:
        """The images of a split; raises if the network may have been trained on held-out images.

        Validation images are cut from the training images by their place in the list. If that list has
        changed since training, other images are cut, and it is unknown which images the network has seen.
        """
        found = splits.split(split)
        if split != "test" and self.record.data.validation_from_training:
            for name in ("train", "validation"):
                if self._changed(name, splits):
                    raise UserError(
                        f"the {name} images of {self.folder} have changed since it was trained (added, removed, "
                        "renamed or edited), so held-out images cannot be told from those the network has seen; "
                        "restore them, or train anew"
                    )
        return found

    def _changed(self, name: str, splits: Splits) -> bool:
        known = self.record.data.splits.get(name, SplitRecord(0)).digest
        return known is not None and splits.split(name).digest != known

    def transforms(self, splits: Splits) -> tuple[Transform, Transform]:
        """The transforms (augmenting, clean) of training images and of test images."""
        return transforms(self.config, splits)


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
    if (folder / "calibration.json").is_file():
        return "it holds a calibration of saved logits without their network; `longtail export --format npz` reads it"
    return f"it has no {RUN_FILE}"


def build_posthoc_for(run: Run, name: str, options: dict[str, str]) -> PostHoc:
    """A post-hoc method with the stage-two settings for the data of a run."""
    config = run.config
    known = {"data": config.data, "trained_by": None if config.sampler else config.method}  # a sampler changes both
    return build_posthoc(name, options, train_images=run.split_sizes["train"], **known)


def write_model(path: Path, model: nn.Module, header: dict[str, object]) -> str:
    """Write the weights of a network with its identity; returns the identity."""
    identity = fingerprint(model)
    write_tensors(path, model.state_dict(), {"format": FORMAT, "model": identity, **header})
    return identity
