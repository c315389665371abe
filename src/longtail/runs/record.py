"""The content of `run.json`: configuration, data and versions; format 1.

Also the names of all files that commands write into the folder of a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from longtail.config import TrainConfig, to_dict
from longtail.data.images import MemoryImages
from longtail.data.splits import Splits
from longtail.errors import UserError
from longtail.files.atomic import LOCK_FILE
from longtail.files.provenance import versions
from longtail.files.records import FORMAT, as_record, checked, format_of, read_json, read_lines
from longtail.metrics.table import SCORES

RUN_FILE, MODEL_FILE, CHECKPOINT_FILE, METRICS_FILE, PROGRESS_FILE, CALIBRATION_FILE = (
    "run.json",
    "model.safetensors",
    "checkpoint.safetensors",
    "metrics.jsonl",
    "progress.txt",
    "calibration.json",
)
SPLITS = ("train", "validation", "test")
MOST_CHANNELS = 4
# Settings that may differ where the same run is kept.
OF_THE_MACHINE = ("root", "weights", "train_list", "validation_list", "test_list", "device", "workers", "cache_gb")


@dataclass(frozen=True)
class SplitRecord:
    """The number of images of a split, and the digest of their list; None in runs written before digests existed."""

    images: int
    digest: str | None = None


@dataclass(frozen=True)
class DataRecord:
    """The data of a run.

    Args:
        name: of the data set.
        channels: colour channels of an image.
        class_names: K names.
        class_counts: images per class that the network is trained on.
        group_counts: images per class before validation images were held out.
        splits: the splits that exist.
        validation_from_training: whether the validation images were cut from the training images.
    """

    name: str
    channels: int
    class_names: list[str]
    class_counts: list[int]
    group_counts: list[int]
    splits: dict[str, SplitRecord]
    validation_from_training: bool

    @classmethod
    def of(cls, splits: Splits) -> DataRecord:
        present = {name: images for name in SPLITS if (images := getattr(splits, name)) is not None}
        return cls(
            name=splits.name,
            channels=image_channels(splits),
            class_names=list(splits.train.class_names),
            class_counts=splits.train.class_counts.tolist(),
            group_counts=splits.group_counts.tolist(),
            splits={name: SplitRecord(len(images), images.digest) for name, images in present.items()},
            validation_from_training=splits.validation_from_training,
        )


@dataclass(frozen=True)
class CalibrationRecord:
    """The calibration of a model.

    Args:
        method: name of the post-hoc method.
        title: its name in tables and model cards.
        head: class of the layer that replaces the head.
        run: folder of the run that was calibrated.
        model: identity of the model before calibration.
    """

    method: str
    title: str
    head: str
    run: str
    model: str


@dataclass(frozen=True)
class RunRecord:
    """Everything in `run.json`; `model` is the identity of the weights, once training is done."""

    config: dict[str, Any]
    data: DataRecord
    versions: dict[str, str] = field(default_factory=versions)
    command: list[str] = field(default_factory=lambda: sys.argv[1:])
    started_by: str | None = None
    calibration: CalibrationRecord | None = None
    model: str | None = None
    format: int = FORMAT

    @classmethod
    def of(cls, config: TrainConfig, splits: Splits, started_by: str | None) -> RunRecord:
        return cls(to_dict(config), DataRecord.of(splits), started_by=started_by)

    def to_dict(self) -> dict[str, Any]:
        optional = ("calibration", "model")
        return {key: value for key, value in asdict(self).items() if not (key in optional and value is None)}

    @property
    def digest(self) -> str:
        """A hash of class names, class counts and configuration; the weights of the run carry it."""
        config = {name: value for name, value in self.config.items() if name not in OF_THE_MACHINE}
        described = [self.data.class_names, self.data.class_counts, config]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def read_record(path: Path) -> RunRecord:
    """Read and check a `run.json` of this format or the one before."""
    values = read_json(path)
    if format_of(values, path) == 0:
        values = _from_format_0(values, path)
    record = as_record(RunRecord, values, path)
    data = record.data
    sizes = {len(data.class_names), len(data.class_counts), len(data.group_counts)}
    _require(len(sizes) == 1 and bool(data.class_names), "its class names and class counts differ in number", path)
    counts = (*data.class_counts, *data.group_counts, *(split.images for split in data.splits.values()))
    _require(min(counts) >= 0 and max(data.class_counts) > 0, "a number of images is negative, or all are 0", path)
    _require({"train"} <= data.splits.keys() <= set(SPLITS), "its splits are not those of a run", path)
    _require(1 <= data.channels <= MOST_CHANNELS, f"images have no {data.channels} colour channels", path)
    return record


def _require(sound: bool, otherwise: str, path: Path) -> None:
    if not sound:
        raise UserError(f"{path} is damaged: {otherwise}")


@dataclass(frozen=True)
class JournalLine:
    """The fields of a line of `metrics.jsonl` that are read again."""

    step: int
    images: int
    validation: dict[str, float | None] | None = None


def read_journal(path: Path) -> list[JournalLine]:
    """The evaluations of a run, in order; an empty list if the file does not exist."""
    return [as_record(JournalLine, line, path) for line in read_lines(path)]


def scores_in(values: dict[str, Any], path: Path) -> dict[str, float | None]:
    """The scores in a JSON object; missing scores are None."""
    return {name: checked(float | None, values.get(name), path, name) for name in SCORES}


def _from_format_0(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Convert a run of longtail 0.1: it has no digests, and classes were grouped by the counts after holding out."""
    try:
        data = dict(values["data"])
        data["splits"] = {name: {"images": size} for name, size in data.pop("images").items()}
        data |= {"group_counts": data["class_counts"], "validation_from_training": True}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is damaged: it does not describe a run") from error
    if "calibration" in values:
        raise UserError(f"{path} is a calibration by an older longtail; calibrate its run again")
    return {**values, "data": data}


def image_channels(splits: Splits) -> int:
    """Colour channels of the images: images read from files are converted to RGB."""
    return splits.train.pixels.shape[1] if isinstance(splits.train, MemoryImages) else 3


# Files that commands write into the folder of a run or of a calibration.
RUN_FILES = (
    RUN_FILE,
    MODEL_FILE,
    CHECKPOINT_FILE,
    METRICS_FILE,
    PROGRESS_FILE,
    CALIBRATION_FILE,
    "probe.json",
    "head.safetensors",
    "*-calibrated.safetensors",
    "before-after-*.json",
    "diagnosis-*.json",
    "metrics-*.json",
    "metrics.csv",
    "mlflow-run.txt",
    "wandb-run.txt",
    LOCK_FILE,
    ".*.lock",
    ".*.part",
)
PASSING_FILES = (CHECKPOINT_FILE, PROGRESS_FILE)
RUN_FOLDERS = ("outputs", "report", "tensorboard", "wandb", ".*.part")


def unknown_names(folder: Path) -> list[str]:
    """Names in a folder that no longtail command has written there, sorted."""
    content = sorted(folder.iterdir()) if folder.is_dir() else []
    patterns = {path: RUN_FOLDERS if path.is_dir() else RUN_FILES for path in content}
    return [path.name for path in content if not any(path.match(pattern) for pattern in patterns[path])]


def require_only_runs(folder: Path) -> None:
    """Refuse to replace a folder that holds other files than a run and its results."""
    more = [name for name in unknown_names(folder) if not (folder / name / RUN_FILE).is_file()]  # calibrations are runs
    if more:
        raise UserError(f"{folder} holds more than a run ({more[0]}), so it is not replaced; choose another --out")


def remove_run(folder: Path) -> None:
    """Remove a run, its calibrations and reports; the folder stays."""
    require_only_runs(folder)
    for path in folder.iterdir():
        if path.name == LOCK_FILE:
            continue  # locked by the process that replaces the run
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_passing(folder: Path) -> None:
    """Remove the files that only an unfinished run needs; the caller holds the folder."""
    for name in PASSING_FILES:
        (folder / name).unlink(missing_ok=True)


def require_writable(folder: Path) -> None:
    """Raises if a folder cannot be created or written to."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise UserError(f"{nearest} is a file; choose another --out")
    if not os.access(nearest, os.W_OK):
        raise UserError(f"{nearest} cannot be written to; choose another --out")
