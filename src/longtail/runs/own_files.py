"""Replacing a run: only files that longtail commands have written are removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from longtail.errors import UserError
from longtail.files.atomic import LOCK_FILE
from longtail.runs.folder import CALIBRATION_FILE, CHECKPOINT_FILE, METRICS_FILE, MODEL_FILE, PROGRESS_FILE, RUN_FILE

# Files that commands write into the folder of a run or of a calibration.
OWN_FILES = (
    RUN_FILE,
    MODEL_FILE,
    CHECKPOINT_FILE,
    METRICS_FILE,
    PROGRESS_FILE,
    CALIBRATION_FILE,
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
OWN_FOLDERS = ("outputs", "report", "tensorboard", "wandb", ".*.part")


def strangers(folder: Path) -> list[str]:
    """Names in a folder that no longtail command has written there, sorted."""
    content = sorted(folder.iterdir()) if folder.is_dir() else []
    patterns = {path: OWN_FOLDERS if path.is_dir() else OWN_FILES for path in content}
    return [path.name for path in content if not any(path.match(pattern) for pattern in patterns[path])]


def require_only_runs(folder: Path) -> None:
    """Refuse to replace a folder that holds other files than a run and its results."""
    more = [name for name in strangers(folder) if not (folder / name / RUN_FILE).is_file()]  # calibrations are runs
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
