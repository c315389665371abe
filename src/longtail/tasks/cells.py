"""The cells of a comparison: one method with one seed, computed once and stored.

OUT/runs/METHOD-seedN/                 stage-one runs
OUT/cells/METHOD-seedN.json and .npz   scores, and the predictions on the test split

Cells are small and do not depend on the machine: keep them in a repository without the runs, and add others later.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from longtail.config import TrainConfig, comparable, differences, from_dict
from longtail.core.files import replacing, write_json
from longtail.core.formats import FORMAT, NewerFormat, format_of
from longtail.core.locks import holding
from longtail.core.provenance import provenance
from longtail.core.reading import read_text, reading, require_small_archive
from longtail.core.records import as_typed, read_json
from longtail.errors import UserError
from longtail.extraction.run import Extractor
from longtail.metrics.scores import evaluate_logits, evaluate_predictions
from longtail.outputs.record import Outputs
from longtail.posthoc.fitting import fit_outputs
from longtail.recipes import with_authors_settings
from longtail.runs.folder import METRICS_FILE, MODEL_FILE, PROGRESS_FILE, RUN_FILE, Run
from longtail.runs.own_files import PASSING_FILES, remove_passing
from longtail.runs.record import read_journal, scores_in
from longtail.tasks.entries import Entry
from longtail.training.loop import train
from longtail.training.plan import Plan


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
    """One method with one seed; everything a worker needs, in plain values."""

    entry: Entry
    seed: int
    config: TrainConfig
    views: int
    out: Path

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
        own = replace(self.config, method=trained.name, options=dict(trained.options), seed=self.seed)
        return with_authors_settings(own)

    @property
    def is_trained(self) -> bool:
        return (self.run_folder / MODEL_FILE).is_file()

    def identity(self) -> dict[str, Any]:
        """What the result depends on; places on this machine are not part of it."""
        return {"label": self.entry.label, "views": self.views, "config": comparable(self.train_config)}

    def read(self) -> Result | None:
        """The stored result, None if missing or incomplete; raises if it belongs to another comparison."""
        try:
            values = read_json(self.file)
            if format_of(values, self.file) == 0:
                return None
            # Earlier versions calibrated softmax only, and stored neither the stage-one method nor names of classes.
            values = {"stage_one": self.entry.stage_one.label, "origin": {}, "class_names": [], **values}
            stored: Result = as_typed(Result, values, self.file)
            scores_in(stored["metrics"], self.file)
            found = read_predictions(self.file.with_suffix(".npz"), len(stored["class_counts"]))
            stored["metrics"] |= confusion_of(*found, stored["class_counts"])
            known = stored["identity"]
            before, views = from_dict(known["config"]), known["views"]
        except NewerFormat:
            raise
        except (UserError, KeyError, TypeError):  # an incomplete result is computed again
            return None
        entry = self.entry
        if [stored[name] for name in ("method", "family", "seed")] != [entry.label, entry.family, self.seed]:
            return None
        own = self.identity()
        changed = differences(before, from_dict(own["config"]))
        if views != own["views"]:
            changed.append(f"views: {views} → {own['views']}")
        if changed:
            raise UserError(f"{self.out} holds another comparison ({'; '.join(changed)}); choose another --out")
        return stored

    def images_seen(self) -> int:
        """How many training images the run of a stage-one cell has seen: by its steps, or its last evaluation."""
        folder, found = self.run_folder, 0
        with suppress(OSError, ValueError):  # training has not started, or the file is being written
            found = int(read_text(folder / PROGRESS_FILE, "a number", most=100))
        lines = read_journal(folder / METRICS_FILE)
        return max(found, lines[-1].images) if lines else found


def train_cell(cell: Cell) -> Run:
    """The finished stage-one run of a cell: opened, resumed, or trained."""
    folder, config = cell.run_folder, cell.train_config
    exists = (folder / RUN_FILE).is_file()
    if exists:
        changed = differences(Run.open(folder).config, config)
        if changed:
            raise UserError(f"{folder} is a run of another comparison ({'; '.join(changed)}); choose another --out")
    if not cell.is_trained:
        train(config, folder, resume=exists, progress=False)
    elif any((folder / name).exists() for name in PASSING_FILES):  # killed right after its last write
        with holding(folder):
            remove_passing(folder)
    return Run.open(folder)


def run_cell(cell: Cell) -> Result:
    """Compute one cell: write scores and test predictions, return the scores."""
    run = train_cell(cell)
    extractor = Extractor(run, root=cell.config.root, workers=cell.config.workers)
    outputs = extractor.outputs("test")
    method = None
    if cell.entry.stage == 1:
        logits = outputs.rows().read(slice(None)).numpy()
    else:
        method = cell.entry.build(run)
        fitted_on = None if method.fitted_on_unseen else extractor.outputs("train", views=cell.views)
        validation = extractor.outputs("validation") if "validation" in run.split_sizes else None
        fit_outputs(method, fitted_on, validation)
        logits = np.asarray(method.transform(outputs))
    plan = Plan.of(run.config, run.split_sizes["train"], streams=cell.entry.streams)
    metrics = evaluate_logits(logits, outputs.labels, run.group_counts).to_dict()
    result: Result = {
        "format": FORMAT,
        "method": cell.entry.label,
        "title": cell.entry.title,
        "family": cell.entry.family,
        "stage_one": cell.entry.stage_one.label,
        "seed": cell.seed,
        "steps": plan.steps,
        "images": plan.images_at(plan.steps),
        "parameters": getattr(method, "n_parameters_", None),
        "chosen": method.chosen_ if method else {},
        "fit": vars(method.result_) if method else {},
        "metrics": metrics,
        "class_counts": run.class_counts.tolist(),
        "class_names": list(run.class_names),
        "model": run.model_identity,
        "origin": {name: value for name, value in provenance().items() if name != "command"},
        "identity": cell.identity(),
    }
    _write_predictions(cell.file.with_suffix(".npz"), logits, outputs)
    # The confusion matrix is computed from the predictions beside it; storing it would make the file much larger.
    kept = {name: value for name, value in metrics.items() if not name.startswith("confusion")}
    write_json(cell.file, {**result, "metrics": kept})
    return result


def _write_predictions(path: Path, logits: np.ndarray, outputs: Outputs) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, predictions=logits.argmax(1).astype(np.int32), labels=outputs.labels)


def read_predictions(path: Path, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and true classes (N,) of a cell's test samples."""
    with reading(path, "a file of predictions"):
        require_small_archive(path)
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            found: tuple[np.ndarray, np.ndarray] = file["predictions"], file["labels"]
        for numbers in found:
            if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not 0 < len(numbers) == len(found[0]):
                raise ValueError("it should hold two lists of class numbers, of equal length")
            if numbers.min() < 0 or numbers.max() >= classes:
                raise ValueError(f"a class number is outside 0..{classes - 1}")
    return found


def confusion_of(predictions: np.ndarray, labels: np.ndarray, class_counts: Sequence[int]) -> dict[str, Any]:
    """The confusion matrix of a cell, as `Metrics.to_dict` gives it."""
    scores = evaluate_predictions(predictions, labels, class_counts).to_dict()
    return {name: value for name, value in scores.items() if name.startswith("confusion")}
