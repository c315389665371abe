"""Trackers, which log the scores of a training run: TensorBoard, MLflow, Weights & Biases, a CSV file,
or an object of the caller.

A tracker has three methods: `start`, once before the first step; `log`, after every evaluation;
`finish`, at the end, also when training is interrupted. Only the first process has one.
"""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from longtail.errors import UserError, choose
from longtail.files.atomic import write_text
from longtail.files.reading import read_text, reading, reason


class Tracker(Protocol):
    """What a training run calls."""

    def start(self, folder: Path, settings: dict[str, Any], step: int) -> None:
        """Training begins at `step` (0, or the step of the checkpoint) in this folder with these settings."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Numbers after a step, such as `train/loss` and `validation/balanced`."""

    def finish(self) -> None:
        """Training has ended."""


def _imported(module: str, title: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(f"{title} is not installed: pip install {package}") from error


class TensorBoardTracker:
    """Event files in RUN/tensorboard."""

    def __init__(self) -> None:
        self._kind = _imported("torch.utils.tensorboard", "TensorBoard", "'longtail[tensorboard]'").SummaryWriter

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
        self._mlflow = _imported("mlflow", "MLflow", "mlflow-skinny")

    def start(self, folder: Path, settings: dict[str, Any], step: int) -> None:
        mlflow, id_file = self._mlflow, folder / "mlflow-run.txt"
        if id_file.is_file():
            mlflow.start_run(run_id=read_text(id_file, "the name of a run of MLflow").strip())
            return
        write_text(id_file, mlflow.start_run(run_name=folder.name).info.run_id + "\n")
        mlflow.log_params({name: value for name, value in settings.items() if value is not None})

    def log(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics(values, step=step)

    def finish(self) -> None:
        self._mlflow.end_run()


class WandbTracker:
    """A run of Weights & Biases in project $WANDB_PROJECT; a resumed run continues the same one.

    With WANDB_MODE=offline the numbers are written to RUN/wandb, and `wandb sync` uploads them later.
    """

    def __init__(self) -> None:
        self._wandb = _imported("wandb", "Weights & Biases", "'longtail[wandb]'")

    def start(self, folder: Path, settings: dict[str, Any], step: int) -> None:
        id_file = folder / "wandb-run.txt"
        run_id = read_text(id_file, "the name of a run of Weights & Biases").strip() if id_file.is_file() else None
        project = os.environ.get("WANDB_PROJECT", "longtail")
        try:
            self._run = self._wandb.init(
                project=project, dir=str(folder), name=folder.name, id=run_id, resume="allow", config=settings
            )
        except self._wandb.errors.Error as error:
            raise UserError(f"Weights & Biases: {error} WANDB_MODE=offline needs no account") from error
        write_text(id_file, self._run.id + "\n")

    def log(self, step: int, values: dict[str, float]) -> None:
        # Steps that are done again have the same numbers, and Weights & Biases ignores the repetition.
        self._run.log(values, step=step)

    def finish(self) -> None:
        self._run.finish()


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
    "wandb": WandbTracker,
    "csv": CsvTracker,
}


class LibraryTracker:
    """A tracker by name. If its library fails, a run does not start, and one that has started goes on without it."""

    def __init__(self, name: str) -> None:
        self._name = choose("tracker", name, TRACKERS)
        self._tracker = TRACKERS[name]()
        self._failed = False

    def start(self, folder: Path, settings: dict[str, Any], step: int) -> None:
        try:
            self._tracker.start(folder, settings, step)
        except UserError:
            raise
        except Exception as error:  # of a server, a connection, an account
            raise UserError(f"--tracker {self._name} cannot start: {reason(error)}") from error

    def log(self, step: int, values: dict[str, float]) -> None:
        self._try(self._tracker.log, step, values)

    def finish(self) -> None:
        self._try(self._tracker.finish)

    def _try(self, call: Callable[..., None], *given: Any) -> None:
        if self._failed:
            return
        try:
            call(*given)
        except Exception as error:
            self._failed = True
            message = f"--tracker {self._name} gets no more numbers ({reason(error)}); training goes on"
            warnings.warn(message, stacklevel=2)


def build_trackers(given: Sequence[str | Tracker]) -> list[Tracker]:
    """Trackers by name, or the objects themselves."""
    return [LibraryTracker(one) if isinstance(one, str) else one for one in given]
