"""A data set, methods and seeds: the grid of runs behind a table.

All post-hoc methods on one stage-one method and seed calibrate the same network (softmax's, or that of the
method named before the plus sign: `balanced-softmax+marc`); all stage-one methods
take the same number of optimiser steps, with a full batch per stream of images. Hyper-parameters are chosen on the
validation split, never on the test split. Finished cells are reused if they were made on the same images;
interrupted ones are resumed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Parallel, delayed

from longtail.config import TrainConfig, comparable, differences
from longtail.data.splits import open_splits
from longtail.distributed import find_device
from longtail.errors import UserError, whole_number
from longtail.files.atomic import locked_folder, remove_unfinished, replacing, write_json
from longtail.files.progress import Display, Task
from longtail.files.records import FORMAT, provenance
from longtail.files.text import clock
from longtail.metrics.scores import evaluate
from longtail.metrics.table import SCORES
from longtail.posthoc.base import PostHoc
from longtail.posthoc.inputs import fit_outputs
from longtail.runs.folder import Run
from longtail.runs.record import MODEL_FILE, PASSING_FILES, RUN_FILE, remove_passing
from longtail.tasks.calibrate import views_for
from longtail.tasks.cells import Cell, Entry, Result, image_digests
from longtail.training.defaults import recipe_for
from longtail.training.loop import train
from longtail.training.plan import Plan
from longtail.training.setup import seconds_of, warn_if_slow

UPDATE_SECONDS = 1.0


def compare(
    config: TrainConfig | str,
    methods: Sequence[str | PostHoc],
    out: Path | str,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    views: int = 1,
    jobs: int = 1,
    progress: bool = True,
    display: Display | None = None,
) -> list[Result]:
    """Run a grid of methods and seeds; returns the results of its cells, in order.

    Args:
        config: the stage-one training run, the name of a recipe, or the path of images (see `recipe_for`); its method
            and seed are replaced.
        methods: names, with options as in `marc:solver=sgd`; a post-hoc method calibrates the network of softmax, or
            of the stage-one method before a plus sign: `cbs+marc`. Or post-hoc methods themselves.
        out: folder of the comparison.
        seeds: each seed has another long tail, validation split and initial weights.
        views: augmented passes over the training images for fitting post-hoc methods.
        jobs: number of cells to work on in parallel, through joblib; its backend can be a Ray or Dask cluster.
        progress: show a progress bar, in a terminal or a notebook.
        display: where progress is shown, instead of `progress`.
    """
    entries = _entries(methods)
    _check_numbers(seeds, views, jobs)
    config = recipe_for(config) if isinstance(config, str) else config
    display = display or Display(quiet=not progress)
    digests = {seed: _digests(replace(config, seed=seed)) for seed in seeds}
    cells = [Cell(entry, seed, config, views, Path(out), digests[seed]) for seed in seeds for entry in entries]
    results = [cell.read() for cell in cells]
    waiting = [cell for cell, result in zip(cells, results, strict=True) if result is None]
    for cell in cells:
        for suffix in (".json", ".npz"):  # left by a process that was killed just after it wrote the file
            remove_unfinished(cell.file.with_suffix(suffix))
    display.line(f"{len(cells)} cells (a method with a seed each), {len(cells) - len(waiting)} of them already done")
    if again := sum(cell.file.is_file() for cell in waiting):
        display.line(f"{again} of them are computed again: they are incomplete, or made on other images")
    if unchecked := sum(
        "images" not in result["identity"] or digests[result["seed"]] is None for result in results if result
    ):
        display.line(f"{unchecked} of them could not be checked to be of the same images: the digests are missing")
    # Stage two needs the stage-one models it calibrates, even if they are not in the comparison.
    networks = {cell.run_folder: cell.stage_one for cell in waiting}
    first = [cell for cell in networks.values() if not cell.is_trained]
    then = [cell for cell in waiting if cell not in first]
    if first:
        total, seen = images_to_see(config, entries, first), sum(cell.images_seen() for cell in first)
        seconds = expected_seconds(first, display) * (1 - seen / total) / min(jobs, len(first))
        number = "1 network" if len(first) == 1 else f"{len(first)} networks"
        calibrations = f"then {sum(cell.entry.stage == 2 for cell in then)} calibrations"
        display.line(f"training {number}: about {clock(seconds)} here; {calibrations}")
        with display.task("training", total, done=seen) as task:
            task.note = calibrations
            with watched(first, task):
                _do(first, jobs, display)
    if then:
        with display.task("calibrating", len(then), unit="cells") as task:
            _do(then, jobs, display, task)
    return [result for cell in cells if (result := cell.read()) is not None]


def _entries(methods: Sequence[str | PostHoc]) -> list[Entry]:
    entries = [Entry.of(method) for method in methods]
    labels = [entry.label for entry in entries]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise UserError(f"{', '.join(repeated)} is listed twice")
    if not entries:
        raise UserError("a comparison needs at least one method")
    return entries


def _check_numbers(seeds: Sequence[int], views: int, jobs: int) -> None:
    whole_number("jobs", jobs)
    whole_number("views", views, at_least=0)
    for seed in seeds:
        whole_number("a seed", seed, at_least=0)
    if not seeds:
        raise UserError("a comparison needs at least one seed")
    if len(set(seeds)) < len(seeds):
        raise UserError(f"a seed is listed twice: {', '.join(map(str, seeds))}")


def _digests(config: TrainConfig) -> dict[str, str] | None:
    """Digests of the images; None without data, where finished cells can still be put into a table."""
    try:
        return image_digests(open_splits(config))
    except UserError:
        return None


def images_to_see(config: TrainConfig, entries: Sequence[Entry], cells: Sequence[Cell]) -> int:
    """Number of training images of these stage-one cells; raises if the entries need a split that is missing."""
    splits = open_splits(config)
    splits.split("test")
    if any(entry.needs_validation for entry in entries):
        splits.split("validation")
    plans = [Plan.of(config, len(splits.train), streams=cell.entry.streams) for cell in cells]
    return sum(plan.images_at(plan.steps) for plan in plans)


def expected_seconds(cells: Sequence[Cell], display: Display) -> float:
    """Training time of these stage-one cells from their start, one after the other; a step of each method is tried."""
    labels = [cell.entry.label for cell in cells]
    first = {label: cells[labels.index(label)] for label in labels}
    if cells:  # they differ only in method and seed
        config = cells[0].train_config
        warn_if_slow(config, find_device(config.device), display)
    each = {label: seconds_of(cell.train_config, display) for label, cell in first.items()}
    return sum(each[label] for label in labels)


@contextmanager
def watched(cells: Sequence[Cell], task: Task) -> Iterator[None]:
    """Update a progress bar with the images that the runs of these cells have seen, in whichever process they train."""
    ended = threading.Event()

    def update() -> None:
        while not ended.wait(UPDATE_SECONDS):
            with suppress(UserError):  # a damaged journal is reported by training itself
                task.advance(sum(cell.images_seen() for cell in cells) - task.done)

    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _do(cells: Sequence[Cell], jobs: int, display: Display, task: Task | None = None) -> None:
    balanced = SCORES["balanced"]
    for number, result in enumerate(_workers(jobs)(delayed(run_cell)(cell) for cell in cells), 1):
        if task:
            task.advance(1)
        shown = f"{balanced.heading.lower()} {balanced.show(result['metrics']['balanced'])}"
        display.line(f"{number} of {len(cells)}  {result['method']}, seed {result['seed']}: {shown}")


def _workers(jobs: int) -> Any:
    """Results of joblib's workers with the current backend, one by one if the backend can do that."""
    try:
        return Parallel(n_jobs=jobs, return_as="generator_unordered")
    except ValueError:  # Ray's backend gives them all at the end
        return Parallel(n_jobs=jobs)


def train_cell(cell: Cell) -> Run:
    """The finished stage-one run of a cell: opened, resumed, or trained."""
    folder, config = cell.run_folder, cell.train_config
    exists = (folder / RUN_FILE).is_file()
    if exists:
        run = Run.open(folder)
        if changed := differences(run.config, config):
            raise UserError(f"{folder} is a run of another comparison ({'; '.join(changed)}); choose another --out")
        trained_on = run.record.data.splits["train"].digest
        if cell.images and trained_on not in (None, cell.images["train"]):
            raise UserError(f"{folder} was trained on other images; choose another --out")
    if not cell.is_trained:
        train(config, folder, resume=exists, progress=False)
    else:  # left by a process that was killed right after its last write
        remove_unfinished(folder / MODEL_FILE)
        if any((folder / name).exists() for name in PASSING_FILES):
            with locked_folder(folder):
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
    scores = evaluate(logits, outputs.labels, run.group_counts).to_dict()
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
        # Without the confusion matrix, which the predictions in the file beside it give in less space.
        "metrics": {name: value for name, value in scores.items() if not name.startswith("confusion")},
        "class_counts": run.class_counts.tolist(),
        "class_names": list(run.class_names),
        "model": run.model_identity,
        "origin": {name: value for name, value in provenance().items() if name != "command"},
        "identity": {
            "label": cell.entry.label,
            "views": cell.views,
            "config": comparable(cell.train_config),
            "images": image_digests(run.splits),
        },
    }
    with replacing(cell.file.with_suffix(".npz")) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, predictions=logits.argmax(1).astype(np.int32), labels=outputs.labels)
    write_json(cell.file, dict(result))
    return result
