"""The content of `run.json` (configuration, data and versions; format 1), and the files in the folder of a run.

`released:NAME` stands for a run that comes with the repository:

    RELEASED/NAME/   model.safetensors, run.json without paths of a machine, README.md (its card)

RELEASED is the folder `released` of a clone of the repository, or the folder that LONGTAIL_RELEASED names. The
installed package has none.
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

from longtail.config import TrainConfig
from longtail.data.images import MemoryImages
from longtail.data.splits import Splits
from longtail.errors import UserError, choose
from longtail.files.atomic import LOCK_FILE, replacing_folder
from longtail.files.records import FORMAT, as_record, checked, format_of, read_json, read_lines, versions
from longtail.metrics.table import SCORES

RUN_FILE, MODEL_FILE, CHECKPOINT_FILE, METRICS_FILE, PROGRESS_FILE, CALIBRATION_FILE, PROBE_FILE = (
    "run.json",
    "model.safetensors",
    "checkpoint.safetensors",
    "metrics.jsonl",
    "progress.txt",
    "calibration.json",
    "probe.json",
)
SPLITS = ("train", "validation", "test")
RELEASED = "released:"
RELEASED_VARIABLE = "LONGTAIL_RELEASED"
RELEASED_FILES = (RUN_FILE, MODEL_FILE, "README.md")  # of a released network
CLONE = Path(__file__).resolve().parents[3] / "released"
MOST_CHANNELS = 4
# Settings that may differ where the same run is kept.
OF_THE_MACHINE = ("root", "weights", "train_list", "validation_list", "test_list", "device", "workers", "cache_gb")


@dataclass(frozen=True)
class SplitRecord:
    """The number of images of a split, and the digest of their list."""

    images: int
    digest: str


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
        return cls(asdict(config), DataRecord.of(splits), started_by=started_by)

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
    """Read and check a `run.json`."""
    values = read_json(path)
    if format_of(values, path) == 0:
        raise UserError(f"{path} was written by an older longtail; train the run again")
    record = as_record(RunRecord, values, path)
    data = record.data
    counts = (*data.class_counts, *data.group_counts, *(split.images for split in data.splits.values()))
    damage = {
        "its class names and class counts differ in number": not data.class_names
        or {len(data.class_counts), len(data.group_counts)} != {len(data.class_names)},
        "a number of images is negative, or all are 0": min(counts, default=0) < 0 or not any(data.class_counts),
        "its splits are not those of a run": not {"train"} <= data.splits.keys() <= set(SPLITS),
        f"images have no {data.channels} colour channels": not 1 <= data.channels <= MOST_CHANNELS,
    }
    if reasons := [reason for reason, damaged in damage.items() if damaged]:
        raise UserError(f"{path} is damaged: {reasons[0]}")
    return record


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
    PROBE_FILE,
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
PASSING_FILES = (CHECKPOINT_FILE, PROGRESS_FILE)  # of unfinished runs
RUN_FOLDERS = ("outputs", "report", "tensorboard", "wandb", ".*.part")


def require_new_run(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder in which no new run can be written."""
    if (folder / RUN_FILE).is_file():
        if not overwrite:
            raise UserError(
                f"{folder} holds a run already; continue with --resume, replace it with --overwrite or choose "
                "another --out"
            )
        require_only_runs(folder)
    require_writable(folder)


def require_only_runs(folder: Path) -> None:
    """Refuse to replace a folder that holds other files than a run, its calibrations and results."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        written = any(path.match(pattern) for pattern in (RUN_FOLDERS if path.is_dir() else RUN_FILES))
        if not written and not (path / RUN_FILE).is_file():  # calibrations are runs
            raise UserError(
                f"{folder} holds more than a run ({path.name}), so it is not replaced; choose another --out"
            )


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


def released_folder() -> Path:
    """Where released networks are; an error says how to get them."""
    given = os.environ.get(RELEASED_VARIABLE)
    folder = Path(given) if given else CLONE
    if not folder.is_dir():
        where = f"{RELEASED_VARIABLE} names {folder}, which is no folder" if given else f"{folder} does not exist"
        raise UserError(
            f"there are no released networks here: {where}; they are in the folder released of the repository, not in "
            f"the installed package: clone it, or set {RELEASED_VARIABLE} to a copy of that folder"
        )
    return folder


def released_names() -> list[str]:
    """The released networks, sorted by name."""
    return sorted(path.parent.name for path in released_folder().glob(f"*/{RUN_FILE}"))


def find_released(name: Path | str) -> Path:
    """The folder of a released network, `released:NAME`."""
    wanted, names = str(name).removeprefix(RELEASED), released_names()
    if not names:
        raise UserError(f"{released_folder()} holds no released network")
    return released_folder() / choose("released network", wanted, names)


def copy_released(source: Path, target: Path | None = None) -> Path:
    """Copy the folder of a released network to `target` (default: runs/NAME), where commands may write beside it.

    An existing copy is used; any other folder is an error.
    """
    target = target or Path("runs") / source.name
    if all(
        (target / file).is_file() and (target / file).read_bytes() == (source / file).read_bytes()
        for file in RELEASED_FILES[:2]
    ):
        return target
    if target.exists():
        raise UserError(
            f"{target} exists already and is not {RELEASED}{source.name}; move it, or work in another folder"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(target, RELEASED_FILES, "a released network") as folder:
        for file in RELEASED_FILES:
            shutil.copyfile(source / file, folder / file)
    return target
