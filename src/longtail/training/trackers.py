"""Trackers, which log the scores of a training run: TensorBoard, MLflow, a CSV file, or your own object.

A tracker has three methods: `start`, once before the first step; `log`, after every evaluation;
`finish`, at the end, also when training is interrupted. Only the first process has one.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from longtail.core.files import write_text
from longtail.core.reading import read_text, reading
from longtail.errors import UserError, choose


class Tracker(Protocol):
    """What a training run calls."""

    def start(self, folder: Path, settings: dict[str, Any], step: int) -> None:
        """Training begins at `step` (0, or the step of the checkpoint) in this folder with these settings."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Numbers after a step, such as `train/loss` and `validation/balanced`."""

    def finish(self) -> None:
        """Training has ended."""


class TensorBoardTracker:
    """Event files in RUN/tensorboard."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("TensorBoard is not installed: pip install 'longtail[tensorboard]'") from error
        self._kind = SummaryWriter

    def start(self, folder: Path, settings: dict[str, Any], step: int) -> None:
        # Numbers of steps that are done again replace those of the interrupted run.
        self._writer = self._kind(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class MlflowTracker:
    """A run of MLflow at MLFLOW_TRACKING_URI; a resumed run continues the same MLflow run."""

    def __init__(self) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise UserError("MLflow is not installed: pip install mlflow-skinny") from error
        self._mlflow = mlflow

    def start(self, folder: Path, settings: dict[str, Any], step: int) -> None:
        mlflow, known = self._mlflow, folder / "mlflow-run.txt"
        if known.is_file():
            mlflow.start_run(run_id=read_text(known, "the name of a run of MLflow").strip())
            return
        write_text(known, mlflow.start_run(run_name=folder.name).info.run_id + "\n")
        mlflow.log_params({name: value for name, value in settings.items() if value is not None})

    def log(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics(values, step=step)

    def finish(self) -> None:
        self._mlflow.end_run()


class CsvTracker:
    """One row per evaluation in RUN/metrics.csv."""

    def start(self, folder: Path, settings: dict[str, Any], step: int) -> None:
        self._path = folder / "metrics.csv"
        self._rows: list[dict[str, Any]] = []
        if self._path.is_file():
            with reading(self._path, "a table of longtail"):
                lines = read_text(self._path, "a table of longtail").splitlines()
                self._rows = [row for row in csv.DictReader(lines) if int(row["step"]) <= step]

    def log(self, step: int, values: dict[str, float]) -> None:
        self._rows.append({"step": step, **values})
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        lines = [columns, *([row.get(name, "") for name in columns] for row in self._rows)]
        write_text(self._path, "".join(",".join(map(str, line)) + "\n" for line in lines))

    def finish(self) -> None:
        """Every row is written already."""


TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
    "csv": CsvTracker,
}


def build_trackers(given: Sequence[str | Tracker]) -> list[Tracker]:
    """Trackers by name, or the objects themselves."""
    return [TRACKERS[choose("tracker", one, TRACKERS)]() if isinstance(one, str) else one for one in given]
