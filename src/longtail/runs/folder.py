"""A run's folder: what was trained, on what, and the weights that came out.

    RUN/run.json              configuration, versions, class names and counts
    RUN/metrics.jsonl         one line per evaluation
    RUN/checkpoint.safetensors  to go on from; removed when training is done
    RUN/model.safetensors     the trained network

A calibrated model is a run folder too, so every command takes either.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from longtail.config import TrainConfig, from_dict, to_dict
from longtail.core.files import sha256, write_json
from longtail.core.provenance import versions
from longtail.core.tensors import read_tensors
from longtail.data.augment import Transform
from longtail.data.images import Splits
from longtail.data.open import open_splits
from longtail.errors import UserError
from longtail.runs.network import build_network, image_channels, transforms, with_head_of_kind

RUN_FILE, MODEL_FILE, CHECKPOINT_FILE, METRICS_FILE = (
    "run.json",
    "model.safetensors",
    "checkpoint.safetensors",
    "metrics.jsonl",
)


@dataclass(frozen=True)
class Run:
    """A run folder that exists; `details` is the content of its `run.json`."""

    folder: Path
    details: dict[str, Any]

    @classmethod
    def open(cls, folder: Path | str) -> Run:
        """Open an existing run; an error says what is missing."""
        folder = Path(folder)
        try:
            details = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise UserError(f"{folder} is not a run folder: it has no {RUN_FILE}") from error
        except json.JSONDecodeError as error:
            raise UserError(f"{folder / RUN_FILE} is damaged: {error}") from error
        return cls(folder, details)

    @classmethod
    def create(cls, folder: Path, config: TrainConfig, splits: Splits, *, started_by: str | None = None) -> Run:
        """Describe a new run and write its `run.json`."""
        sizes = {name: len(images) for name in ("train", "validation", "test") if (images := getattr(splits, name))}
        details = {
            "config": to_dict(config),
            "data": {
                "name": splits.name,
                "channels": image_channels(splits),
                "class_names": list(splits.train.class_names),
                "class_counts": splits.train.class_counts.tolist(),
                "images": sizes,
            },
            "versions": versions(),
            "command": sys.argv[1:],
            "started_by": started_by,
        }
        write_json(folder / RUN_FILE, details)
        return cls(folder, details)

    @property
    def config(self) -> TrainConfig:
        return from_dict(self.details["config"])

    @property
    def class_counts(self) -> np.ndarray:
        """Training images per class, (K,) int64."""
        return np.array(self.details["data"]["class_counts"])

    @property
    def class_names(self) -> list[str]:
        return list(self.details["data"]["class_names"])

    @property
    def model_path(self) -> Path:
        """The trained weights; an error says how to finish a run that has none yet."""
        path = self.folder / MODEL_FILE
        if not path.is_file():
            raise UserError(f"{self.folder} is not finished: go on with `longtail train --out {self.folder} --resume`")
        return path

    def data_hash(self) -> str:
        """Unequal for runs that see different images."""
        known = json.dumps([self.details["config"], self.details["data"]], sort_keys=True)
        return hashlib.sha256(known.encode()).hexdigest()

    def model_hash(self) -> str:
        return sha256(self.model_path)

    def load_model(self) -> nn.Module:
        """The trained network, in evaluation mode."""
        counts, channels = torch.from_numpy(self.class_counts), self.details["data"]["channels"]
        model, _ = build_network(self.config, counts, channels)
        if calibration := self.details.get("calibration"):
            model = with_head_of_kind(model, calibration["head"])
        weights, _ = read_tensors(self.model_path)
        model.load_state_dict(weights)
        return model.to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]

    def splits(self, root: str | None = None) -> Splits:
        """The data the run was trained on, found again; `root` if it has moved."""
        config = replace(self.config, root=root) if root else self.config
        splits = open_splits(config)
        if splits.train.class_counts.tolist() != self.details["data"]["class_counts"]:
            raise UserError(f"the data at hand are not those of {self.folder}: the class counts differ")
        return splits

    def transforms(self, splits: Splits) -> tuple[Transform, Transform]:
        """(augmenting, clean): how training saw images, and how test images are shown."""
        return transforms(self.config, splits)
