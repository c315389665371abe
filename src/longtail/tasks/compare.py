"""A data set, methods and seeds: the grid of runs behind a table.

All decision-boundary methods of one seed repair the same stage-one model; all stage-one methods see
the same number of images. Settings are chosen on the validation split, never on test. A cell that
is done is not done again; one that was interrupted goes on.

    OUT/runs/METHOD-seedN/     stage-one runs
    OUT/cells/METHOD-seedN.json and .npz   scores, and the predictions on the test split
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from joblib import Parallel, delayed

from longtail.backbones import build_backbone
from longtail.config import TrainConfig, differences, from_dict, to_dict
from longtail.core.files import replacing, write_json
from longtail.core.progress import Display, Task
from longtail.data.open import open_splits
from longtail.distributed.world import SINGLE_PROCESS
from longtail.errors import UserError, choose, whole_number
from longtail.extraction.run import run_outputs
from longtail.methods import POSTHOC_METHODS, TRAIN_METHODS, build_posthoc
from longtail.metrics.scores import evaluate_logits
from longtail.recipes import find_recipe
from longtail.runs.folder import METRICS_FILE, MODEL_FILE, RUN_FILE, Run
from longtail.tasks.tables import read_predictions
from longtail.training.loop import train
from longtail.training.plan import Plan


@dataclass(frozen=True)
class Entry:
    """A method of the comparison: its name and options, as in `marc:solver=sgd,gamma=1.5`."""

    name: str
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Entry:
        """Read an entry; names, options and values that cannot be are refused now, not after hours of training."""
        name, _, rest = text.partition(":")
        choose("method", name, (*TRAIN_METHODS, *POSTHOC_METHODS))
        pairs = []
        for item in filter(None, rest.split(",")):
            option, equals, value = item.partition("=")
            if not equals:
                raise UserError(f"options of a method are written name=value, found {item!r} in {text!r}")
            pairs.append((option, value))
        entry = cls(name, tuple(pairs))
        if entry.stage == 2:
            build_posthoc(name, dict(pairs)).check_settings()
        else:
            with torch.random.fork_rng(devices=()):  # on a toy, for its checks
                TRAIN_METHODS[name].build(build_backbone("digits", 1), torch.tensor([90, 9, 3]), dict(pairs))
        return entry

    @property
    def needs_validation(self) -> bool:
        """Whether a setting is to be chosen on held-out images."""
        return self.stage == 2 and "auto" in build_posthoc(self.name, dict(self.options)).get_params().values()

    @property
    def stage(self) -> int:
        return 1 if self.name in TRAIN_METHODS else 2

    @property
    def label(self) -> str:
        """Name for files and tables."""
        return "-".join([self.name, *(f"{name}={value}" for name, value in self.options)])

    @property
    def title(self) -> str:
        method = (TRAIN_METHODS | POSTHOC_METHODS)[self.name]
        shown = ", ".join(f"{name} {value}" for name, value in self.options)
        return f"{method.title} ({shown})" if shown else str(method.title)

    @property
    def family(self) -> str:
        return str((TRAIN_METHODS | POSTHOC_METHODS)[self.name].family)


BASE = Entry("softmax")
LOOK_SECONDS = 1.0


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
        return replace(self.config, method=entry.name, options=dict(entry.options), seed=self.seed)

    def identity(self) -> dict[str, Any]:
        """What the result depends on."""
        stage_one = self.entry if self.entry.stage == 1 else BASE
        return {"label": self.entry.label, "views": self.views, "config": to_dict(self.train_config(stage_one))}

    def done(self) -> bool:
        """Whether the result is there and whole; an error if it belongs to another comparison."""
        try:
            stored = json.loads(self.file.read_text(encoding="utf-8"))["identity"]
            read_predictions(self.file.with_suffix(".npz"))
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile):
            return False
        own = self.identity()
        changed = differences(from_dict(stored["config"]), from_dict(own["config"]))
        if stored["views"] != own["views"]:
            changed.append(f"views: {stored['views']} → {own['views']}")
        if changed:
            raise UserError(f"{self.out} holds another comparison ({'; '.join(changed)}); choose another --out")
        return True

    def images_seen(self) -> int:
        """Training images that the run of a stage-one cell has seen, by its journal."""
        journal = self.run_folder(self.entry) / METRICS_FILE
        lines = journal.read_text(encoding="utf-8").splitlines() if journal.is_file() else []
        try:
            return int(json.loads(lines[-1])["images"]) if lines else 0
        except ValueError:  # being written
            return 0


def train_cell(cell: Cell, entry: Entry) -> Run:
    """The finished stage-one run of a cell: found, gone on with, or trained."""
    folder, config = cell.run_folder(entry), cell.train_config(entry)
    exists = (folder / RUN_FILE).is_file()
    if exists:
        changed = differences(Run.open(folder).config, config)
        if changed:
            raise UserError(f"{folder} is a run of another comparison ({'; '.join(changed)}); choose another --out")
    if not (folder / MODEL_FILE).is_file():
        train(config, folder, resume=exists)
    return Run.open(folder)


def run_cell(cell: Cell) -> dict[str, Any]:
    """Do one cell: scores and test predictions are written, and the scores returned."""
    if cell.entry.stage == 1:
        run = train_cell(cell, cell.entry)
        outputs = run_outputs(run, "test", SINGLE_PROCESS, root=cell.config.root, workers=cell.config.workers)
        logits = outputs.rows().read(slice(None)).numpy()
        details: dict[str, Any] = {}
    else:
        run = train_cell(cell, BASE)
        where: dict[str, Any] = {"root": cell.config.root, "workers": cell.config.workers}
        fitted_on = run_outputs(run, "train", SINGLE_PROCESS, views=cell.views, **where)
        outputs = run_outputs(run, "test", SINGLE_PROCESS, **where)
        has_validation = "validation" in run.details["data"]["images"]
        validation = run_outputs(run, "validation", SINGLE_PROCESS, **where) if has_validation else None
        method = build_posthoc(cell.entry.name, dict(cell.entry.options))
        method.fit(fitted_on, validation=validation)
        logits = np.asarray(method.transform(outputs))
        chosen = {name: getattr(method, name) for name in ("gamma_", "tau_") if hasattr(method, name)}
        details = {"parameters": method.n_parameters_, "fit": vars(method.result_), **chosen}
    metrics = evaluate_logits(logits, outputs.labels, run.class_counts)
    result = {
        "method": cell.entry.label,
        "title": cell.entry.title,
        "family": cell.entry.family,
        "seed": cell.seed,
        **details,
        "metrics": metrics.to_dict(),
        "class_counts": run.class_counts.tolist(),
        "identity": cell.identity(),
    }
    with replacing(cell.file.with_suffix(".npz")) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, predictions=logits.argmax(1).astype(np.int32), labels=outputs.labels)
    write_json(cell.file, result)
    return result


def _workers(jobs: int) -> Parallel:
    """joblib's workers, of the backend in force; results come one by one where it can hand them out so."""
    try:
        return Parallel(n_jobs=jobs, return_as="generator_unordered")
    except ValueError:  # Ray's backend gives them all at the end
        return Parallel(n_jobs=jobs)


def compare(
    config: TrainConfig | str,
    methods: Sequence[str],
    out: Path | str,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    views: int = 1,
    jobs: int = 1,
    display: Display | None = None,
) -> list[dict[str, Any]]:
    """Run a grid of methods and seeds; returns the results of its cells, in order.

    Args:
        config: the stage-one training run or the name of a recipe; its method and seed are replaced.
        methods: names, with options as in `marc:solver=sgd`.
        out: folder of the comparison.
        seeds: each cuts its own tail and validation split and starts from its own weights.
        views: augmented passes that post-hoc methods are fitted on.
        jobs: cells at a time, through joblib; its backend can be a Ray or Dask cluster.
        display: where progress is shown.
    """
    display = display or Display(quiet=True)
    if not methods or not seeds:
        raise UserError("a comparison needs at least one method and one seed")
    whole_number("jobs", jobs)
    whole_number("views", views, at_least=0)
    for seed in seeds:
        whole_number("a seed", seed, at_least=0)
    entries = [Entry.parse(method) for method in methods]
    repeated = {entry.label for entry in entries if entries.count(entry) > 1}
    if repeated:
        raise UserError(f"{', '.join(sorted(repeated))} is listed twice")
    if len(set(seeds)) < len(seeds):
        raise UserError(f"a seed is listed twice: {', '.join(map(str, seeds))}")
    config = find_recipe(config)
    cells = [Cell(entry, seed, config, views, Path(out)) for seed in seeds for entry in entries]
    waiting = [cell for cell in cells if not cell.done()]
    display.line(f"{len(cells)} cells, {len(cells) - len(waiting)} of them done already")
    # Stage two waits for the stage-one models it repairs.
    needed = {cell.seed for cell in waiting if cell.entry.stage == 2}
    have = {cell.seed for cell in cells if cell.entry == BASE}
    first = [cell for cell in waiting if cell.entry.stage == 1]
    first += [Cell(BASE, seed, config, views, Path(out)) for seed in sorted(needed - have)]
    second = [cell for cell in waiting if cell.entry.stage == 2]
    if first:
        work = len(first) * images_to_see(config, entries)
        with display.task("training", work, done=sum(cell.images_seen() for cell in first)) as task:
            task.note = f"then {len(second)} repairs"
            with watched(first, task):
                _do(first, jobs, display)
    if second:
        with display.task("repairing", len(second), unit="cells") as task:
            _do(second, jobs, display, task)
    return [json.loads(cell.file.read_text(encoding="utf-8")) for cell in cells]


def images_to_see(config: TrainConfig, entries: Sequence[Entry]) -> int:
    """Training images of one run; an error if the splits that the entries need are not there."""
    splits = open_splits(config)
    splits.split("test")
    if any(entry.needs_validation for entry in entries):
        splits.split("validation")
    plan = Plan.of(config, len(splits.train))
    return plan.steps * plan.batch_size


@contextmanager
def watched(cells: Sequence[Cell], task: Task) -> Iterator[None]:
    """Keep a task at the images that the runs of these cells have seen, wherever they are trained."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            task.advance(sum(cell.images_seen() for cell in cells) - task.done)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _do(cells: Sequence[Cell], jobs: int, display: Display, task: Task | None = None) -> None:
    for number, result in enumerate(_workers(jobs)(delayed(run_cell)(cell) for cell in cells), 1):
        if task:
            task.advance(1)
        score = f"{result['method']}, seed {result['seed']}: balanced {100 * result['metrics']['balanced']:.1f}"
        display.line(f"{number} of {len(cells)}  {score}")
