"""The cells of a comparison: one method with one seed, done once and kept.

OUT/runs/METHOD-seedN/                 stage-one runs
OUT/cells/METHOD-seedN.json and .npz   scores, and the predictions on the test split
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch

from longtail.backbones import build_backbone
from longtail.config import TrainConfig, differences, from_dict, to_dict
from longtail.core.files import replacing, write_json
from longtail.core.formats import FORMAT, format_of
from longtail.core.lines import read_lines
from longtail.core.reading import reading, require_small_archive
from longtail.core.records import read_json
from longtail.errors import UserError, choose, whole_number
from longtail.extraction.run import Extractor
from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS, build_posthoc, describe_posthoc
from longtail.metrics.scores import evaluate_logits
from longtail.outputs.record import Outputs
from longtail.posthoc.base import PostHoc, fit_outputs
from longtail.recipes import with_authors_settings
from longtail.runs.folder import METRICS_FILE, MODEL_FILE, PROGRESS_FILE, RUN_FILE, Run, build_posthoc_for
from longtail.training.loop import train
from longtail.training.plan import Plan


class Result(TypedDict):
    """What the file of a cell holds."""

    format: int
    method: str
    title: str
    family: str
    seed: int
    steps: int
    images: int
    parameters: int | None
    chosen: dict[str, float]
    fit: dict[str, Any]
    metrics: dict[str, Any]
    class_counts: list[int]
    model: str
    identity: dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A method of the comparison: its name and options, as in `marc:solver=sgd,gamma=1.5`.

    Args:
        name: in `longtail methods`, or of the class of somebody's own method.
        options: as text.
        own: a post-hoc method that is not in the table.
    """

    name: str
    options: tuple[tuple[str, str], ...] = ()
    own: PostHoc | None = None

    @classmethod
    def of(cls, method: str | PostHoc) -> Entry:
        """Read an entry; names, options and values that cannot be are refused now, not after hours of training."""
        if not isinstance(method, str):
            method.check_settings()
            return cls._of_object(method)
        name, _, rest = method.partition(":")
        choose("method", name, (*TRAIN_METHODS, *POSTHOC_METHODS))
        pairs = []
        for item in filter(None, rest.split(",")):
            option, equals, value = item.partition("=")
            if not equals:
                raise UserError(f"options of a method are written name=value, found {item!r} in {method!r}")
            pairs.append((option, value))
        entry = cls(name, tuple(pairs))
        if entry.stage == 2:
            entry.build().check_settings()
        else:
            with torch.random.fork_rng(devices=()):  # on a toy, for its checks
                TRAIN_METHODS[name].build(build_backbone("digits", 1), torch.tensor([90, 9, 3]), dict(pairs))
        return entry

    @classmethod
    def _of_object(cls, method: PostHoc) -> Entry:
        _, name = describe_posthoc(method)
        usual = type(method)().get_params()
        changed = tuple((key, str(value)) for key, value in method.get_params().items() if value != usual[key])
        return cls(name, changed, method)

    def build(self, run: Run | None = None) -> PostHoc:
        """The post-hoc method, not fitted; with a run, as stage two is on its data."""
        if self.own is not None:
            from sklearn.base import clone

            return clone(self.own)
        if run is None:
            return build_posthoc(self.name, dict(self.options))
        return build_posthoc_for(run, self.name, dict(self.options))

    @property
    def needs_validation(self) -> bool:
        """Whether a setting is chosen, or the whole method fitted, on held-out images."""
        return self.stage == 2 and self.build().needs_validation

    @property
    def stage(self) -> int:
        return 1 if self.own is None and self.name in TRAIN_METHODS else 2

    @property
    def streams(self) -> int:
        """Streams of images that a step of training draws a batch from."""
        return len(TRAIN_METHODS[self.name].samplers) if self.stage == 1 else 1

    @property
    def label(self) -> str:
        """Name for files and tables."""
        return "-".join([self.name, *(f"{name}={value}" for name, value in self.options)])

    @property
    def title(self) -> str:
        method = TRAIN_METHODS[self.name] if self.stage == 1 else describe_posthoc(self.build())[0]
        shown = ", ".join(f"{name} {value}" for name, value in self.options)
        return f"{method.title} ({shown})" if shown else method.title

    @property
    def family(self) -> str:
        return TRAIN_METHODS[self.name].family if self.stage == 1 else describe_posthoc(self.build())[0].family


BASE = Entry("softmax")


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

    def run_folder(self, entry: Entry) -> Path:
        return self.out / "runs" / f"{entry.label}-seed{self.seed}"

    def train_config(self, entry: Entry) -> TrainConfig:
        own = replace(self.config, method=entry.name, options=dict(entry.options), seed=self.seed)
        return with_authors_settings(own)

    @property
    def stage_one(self) -> Entry:
        """What is trained for this cell."""
        return self.entry if self.entry.stage == 1 else BASE

    def identity(self) -> dict[str, Any]:
        """What the result depends on."""
        return {"label": self.entry.label, "views": self.views, "config": to_dict(self.train_config(self.stage_one))}

    def read(self) -> Result | None:
        """The result, if it is there and whole; an error if it belongs to another comparison."""
        try:
            stored: Result = read_json(self.file)  # type: ignore[assignment]
            read_predictions(self.file.with_suffix(".npz"))
            known = stored["identity"]
            before, views = from_dict(known["config"]), known["views"]
        except (UserError, KeyError, TypeError):  # what is not whole is done again
            return None
        if format_of(stored, self.file) == 0:  # type: ignore[arg-type]
            return None
        own = self.identity()
        changed = differences(before, from_dict(own["config"]))
        if views != own["views"]:
            changed.append(f"views: {views} → {own['views']}")
        if changed:
            raise UserError(f"{self.out} holds another comparison ({'; '.join(changed)}); choose another --out")
        return stored

    def images_seen(self) -> int:
        """Training images that the run of a stage-one cell has seen: by its steps, or its last evaluation."""
        folder = self.run_folder(self.entry)
        found = 0
        with suppress(OSError, ValueError):  # not trained now, or being written
            found = int((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
        lines = read_lines(folder / METRICS_FILE)
        return max(found, whole_number("images in a journal", lines[-1].get("images"))) if lines else found


def train_cell(cell: Cell, entry: Entry) -> Run:
    """The finished stage-one run of a cell: found, gone on with, or trained."""
    folder, config = cell.run_folder(entry), cell.train_config(entry)
    exists = (folder / RUN_FILE).is_file()
    if exists:
        changed = differences(Run.open(folder).config, config)
        if changed:
            raise UserError(f"{folder} is a run of another comparison ({'; '.join(changed)}); choose another --out")
    if not (folder / MODEL_FILE).is_file():
        train(config, folder, resume=exists, progress=False)
    return Run.open(folder)


def run_cell(cell: Cell) -> Result:
    """Do one cell: scores and test predictions are written, and the scores returned."""
    run = train_cell(cell, cell.stage_one)
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
    plan = Plan.of(run.config, run.split_sizes["train"], streams=cell.stage_one.streams)
    result: Result = {
        "format": FORMAT,
        "method": cell.entry.label,
        "title": cell.entry.title,
        "family": cell.entry.family,
        "seed": cell.seed,
        "steps": plan.steps,
        "images": plan.images_at(plan.steps),
        "parameters": getattr(method, "n_parameters_", None),
        "chosen": method.chosen_ if method else {},
        "fit": vars(method.result_) if method else {},
        "metrics": evaluate_logits(logits, outputs.labels, run.group_counts).to_dict(),
        "class_counts": run.class_counts.tolist(),
        "model": run.model_identity,
        "identity": cell.identity(),
    }
    _write_predictions(cell.file.with_suffix(".npz"), logits, outputs)
    write_json(cell.file, result)
    return result


def _write_predictions(path: Path, logits: np.ndarray, outputs: Outputs) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, predictions=logits.argmax(1).astype(np.int32), labels=outputs.labels)


def read_predictions(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and true classes (N,) of a cell's test samples."""
    with reading(path, "a file of predictions"):
        require_small_archive(path)
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return file["predictions"], file["labels"]
