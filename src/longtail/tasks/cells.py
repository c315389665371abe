"""The cells of a comparison: one entry with one seed, trained or calibrated, scored, and kept in a file."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from longtail.config import TrainConfig, comparable, differences, from_dict
from longtail.data.splits import Splits
from longtail.errors import UserError
from longtail.files.atomic import holding, remove_unfinished, replacing, write_json
from longtail.files.provenance import provenance
from longtail.files.reading import read_text, reading, require_small_archive
from longtail.files.records import FORMAT, NewerFormat, as_typed, format_of, read_json
from longtail.metrics.scores import evaluate, evaluate_predictions
from longtail.posthoc.inputs import fit_outputs
from longtail.recipes import with_authors_settings
from longtail.runs.folder import Run
from longtail.runs.network import settled
from longtail.runs.record import (
    METRICS_FILE,
    MODEL_FILE,
    PASSING_FILES,
    PROGRESS_FILE,
    RUN_FILE,
    SPLITS,
    read_journal,
    remove_passing,
    scores_in,
)
from longtail.tasks.calibrate_run import views_for
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
    """One method with one seed; everything a worker needs, in plain values.

    Args:
        entry: the method.
        seed: of the long tail, the validation split and the initial weights.
        config: of the training run; its method and seed are replaced.
        views: augmented passes over the training images for fitting post-hoc methods.
        out: folder of the comparison.
        images: split → digest of its images (see `image_digests`); None if the images are not at hand, and a stored
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
            predictions = read_predictions(self.file.with_suffix(".npz"), len(stored["class_counts"]))
            confusion = evaluate_predictions(*predictions, stored["class_counts"]).to_dict()
            stored["metrics"] |= {name: value for name, value in confusion.items() if name.startswith("confusion")}
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
            raise UserError(f"{self.file} was made with other training images than those at hand; choose another --out")
        return None

    def images_seen(self) -> int:
        """How many training images the run of a stage-one cell has seen: by its steps, or its last evaluation."""
        folder, images = self.run_folder, 0
        with suppress(OSError, ValueError):  # training has not started, or the file is being written
            images = int(read_text(folder / PROGRESS_FILE, "a number", most=100))
        lines = read_journal(folder / METRICS_FILE)
        return max(images, lines[-1].images) if lines else images


def image_digests(splits: Splits) -> dict[str, str]:
    """Split → digest of its images; a cell stores them, so that one table never shows results on different images."""
    every = {name: getattr(splits, name) for name in SPLITS}
    return {name: images.digest for name, images in every.items() if images is not None}


def train_cell(cell: Cell) -> Run:
    """The finished stage-one run of a cell: opened, resumed, or trained."""
    folder, config = cell.run_folder, cell.train_config
    exists = (folder / RUN_FILE).is_file()
    if exists:
        changed = differences(Run.open(folder).config, config)
        if changed:
            raise UserError(f"{folder} is a run of another comparison ({'; '.join(changed)}); choose another --out")
        trained_on = Run.open(folder).record.data.splits["train"].digest
        if cell.images and trained_on not in (None, cell.images["train"]):
            raise UserError(f"{folder} was trained on other images than those at hand; choose another --out")
    if not cell.is_trained:
        train(config, folder, resume=exists, progress=False)
    else:  # left by a process that was killed right after its last write
        remove_unfinished(folder / MODEL_FILE)
        if any((folder / name).exists() for name in PASSING_FILES):
            with holding(folder):
                remove_passing(folder)
    return Run.open(folder)


def run_cell(cell: Cell) -> Result:
    """Compute one cell: write scores and test predictions, return the scores."""
    run = train_cell(cell).using(root=cell.config.root, workers=cell.config.workers)
    outputs = run.outputs("test")
    method = None
    if cell.entry.stage == 1:
        logits = outputs.rows().read(slice(None)).numpy()
    else:
        method = cell.entry.build(run)
        fitted_on = None if method.fitted_on_unseen else run.outputs("train", views=views_for(method, run, cell.views))
        validation = run.outputs("validation") if "validation" in run.split_sizes else None
        fit_outputs(method, fitted_on, validation)
        logits = np.asarray(method.transform(outputs))
    plan = Plan.of(run.config, run.split_sizes["train"], streams=cell.entry.streams)
    metrics = evaluate(logits, outputs.labels, run.group_counts).to_dict()
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
        "identity": {
            "label": cell.entry.label,
            "views": cell.views,
            "config": comparable(cell.train_config),
            "images": image_digests(run.splits()),
        },
    }
    with replacing(cell.file.with_suffix(".npz")) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, predictions=logits.argmax(1).astype(np.int32), labels=outputs.labels)
    # The confusion matrix is computed from the predictions beside it; storing it would make the file much larger.
    kept = {name: value for name, value in metrics.items() if not name.startswith("confusion")}
    write_json(cell.file, {**result, "metrics": kept})
    return result


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
