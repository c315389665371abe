"""Runs a frozen model once and stores its outputs: any model, any loader.

Its answer is its logits; what its head sees, taken by a hook, its features. So a model needs no changes.
Batch-norm is in evaluation mode. In a group of processes each runs the samples it is shown, and all of them
have all rows in the end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from operator import length_hint
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from torch import nn

from longtail.core.arrays import as_array
from longtail.core.progress import QUIET, Display
from longtail.data.imbalance import Few
from longtail.distributed.world import World
from longtail.errors import UserError, choose
from longtail.extraction.batches import Batch, key_for, split_batch
from longtail.extraction.loaders import Order, as_batches, order_of, training_counts
from longtail.extraction.reader import FEW, find, head_arrays, in_step, read, unexplained
from longtail.extraction.running import Running, running
from longtail.extraction.selection import Part, few_of, known_labels
from longtail.extraction.sharing import join_files, joined, row_numbers, sharing_errors
from longtail.networks.head import fingerprint
from longtail.networks.head_search import Head
from longtail.networks.sharded import runs_together
from longtail.outputs.record import Outputs, header
from longtail.outputs.writer import Rows

DTYPES = ("float32", "float16")


def extract(
    model: nn.Module,
    loader: Any,
    path: Path | str | None = None,
    *,
    dtype: str = "float32",
    head: str | None = None,
    class_counts: Any = None,
    split: str = "train",
    device: str = "auto",
    images_per_class: int | Literal["all"] = "all",
    seed: int = 0,
    progress: bool = True,
    display: Display | None = None,
) -> Outputs:
    """Run a model over a loader once and keep features, logits and labels.

    They are kept in memory or, with `path`, written to that file and memory-mapped, so that outputs can be larger than
    memory. Features and head are stored if a linear layer or a convolution, or several together, produce the logits.

    In a process group of `torch.distributed`, make the call on every process: each runs its part, and all get all
    rows. Samples that a distributed sampler repeats to make the parts equal are counted once.

    Args:
        model: any classifier that returns logits (N, K); it may be wrapped or compiled.
        loader: batches (inputs, labels), or dictionaries with `labels` and the inputs of the model: a `DataLoader`,
            a list, or another iterable; or a data set of torch or of Hugging Face.
        path: file that the outputs are written to; `Outputs.open` reads it.
        dtype: type of the features and logits: float32 or float16.
        head: name of the classifier layer, if the model returns several outputs.
        class_counts: (K,) training samples per class, if the loader does not contain the training set.
        split: the split in the loader: train, validation or test.
        device: where to run: auto, cpu, cuda, …
        images_per_class: at most so many samples of every class are read and run; the class counts stay those of all.
            The loader must be a data set with a list of its labels, or a `DataLoader` of one.
        seed: random seed that selects these samples.
        progress: show a progress bar, in a terminal or a notebook.
        display: where progress is shown, instead of `progress`.
    """
    choose("dtype", dtype, DTYPES)
    display = display or Display(quiet=not progress)
    part = None
    if images_per_class != "all":
        if isinstance(images_per_class, str):
            raise UserError(
                f"images_per_class must be a whole number or 'all', not {images_per_class!r}; how many are enough "
                "depends on the method: calibrate(…, images_per_class='auto')"
            )
        loader, part = few_of(loader, Few(images_per_class, seed), known_labels(loader))
    order = order_of(loader)
    with ExitStack() as stack:
        ready = stack.enter_context(running(model, device, shards=order.shards))
        folder = None
        if path is not None:
            path = Path(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            folder = Path(stack.enter_context(TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent)))
        rows = Rows(np.dtype(dtype), folder)
        found = run_over(ready, loader, rows, head=head, display=display).head
        gathered = Gathered(ready, rows.joined(), order, found, class_counts, split, part)
        if path is None:
            return gathered.outputs()
        gathered.save(path)
    return Outputs.open(path)


@dataclass(frozen=True)
class Pass:
    """One pass of a model over a loader: what its answer is made of, the first samples, those with large logits."""

    head: Head
    few: tuple[Batch, ...]


def run_over(
    ready: Running,
    loader: Any,
    rows: Rows,
    *,
    head: str | None = None,
    known: Head | None = None,
    check: Callable[[Head], None] = lambda head: None,
    display: Display = QUIET,
) -> Pass:
    """Run a model over a loader and keep the rows; `check` may refuse what the batches show."""
    model, world = ready.model, ready.world
    together = world.size > 1 and runs_together(model)
    shown = as_batches(loader)
    with sharing_errors(world, off=together), display.task("extracting", length_hint(shown), unit="batches") as task:
        first, few, largest, key = None, tuple[Batch, ...](), 0.0, None
        for raw, is_new in in_step(shown, world) if together else ((batch, True) for batch in shown):
            key = key_for(raw, loader) if key is None else key
            batch = split_batch(raw, model, ready.device, key)
            if not len(batch) and not together:
                continue
            if first is None:
                first = known = find(model, batch, head) if known is None else known
                check(first)
            assert known is not None  # found in the first batch
            said = read(model, known, batch)
            if not said.explained:
                known = unexplained(model, known)
                check(known)
            size = said.logits.abs().amax(1)
            if not few or float(size.max()) > largest:
                largest = float(size.max())
                large = batch.only(size.argsort(descending=True)[:FEW].to(batch.labels.device))
                few = (few[0] if few else batch.only(slice(FEW)), large)
            if is_new:
                rows.add(**said.arrays(), labels=batch.labels.cpu().numpy().astype(np.int64))
            task.advance(1)
        if known is None or first is None:
            raise UserError("the loader gave no batches")
    known = _agreed(known, model, world)
    check(known)
    if not known.has_features:
        rows.arrays.pop("features", None)
    if first.layers and not known.layers and world.is_main:
        warnings.warn(f"features and head of {type(model).__name__} are not kept: {known.obstacle}", stacklevel=3)
    return Pass(known, few)


def _agreed(head: Head, model: nn.Module, world: World) -> Head:
    """The findings of all processes; an obstacle in one process is an obstacle for all."""
    told: list[Head] = world.gather(head)
    if len({(one.layers, one.form) for one in told if one.layers}) > 1:
        return unexplained(model, next(one for one in told if one.layers))
    return next((one for one in told if one.obstacle or not one.has_features), told[0])


@dataclass(frozen=True)
class Gathered:
    """The rows of this process, and what is needed to make outputs of those of all."""

    ready: Running
    arrays: dict[str, np.ndarray]
    order: Order
    head: Head
    class_counts: Any
    split: str
    part: Part | None = None

    def outputs(self) -> Outputs:
        """In memory."""
        numbers = row_numbers(self.order, self.arrays, self.ready.world)
        arrays = joined(self.arrays, numbers, self.ready.world)
        known: dict[str, Any] = {**arrays, **self._constant(arrays["labels"])}
        if self.part is not None:
            known |= self.part.known(arrays["labels"])
        return Outputs(**known, split=self.split, model=fingerprint(self.ready.model))

    def save(self, path: Path) -> None:
        """In a file."""
        world = self.ready.world
        if world.size == 1 or self.part is not None:
            return self.outputs().save(path)
        numbers = row_numbers(self.order, self.arrays, world)
        labels = np.concatenate(world.gather(self.arrays["labels"][numbers >= 0]))
        details = header(self.split, 0, fingerprint(self.ready.model), None, ())
        join_files(path, self.arrays, numbers, self._constant(labels), details, world)
        return None

    def _constant(self, labels: np.ndarray) -> dict[str, np.ndarray]:
        """The parts of the outputs that do not grow with the rows, whose labels (N,) are given."""
        classes = self.arrays["logits"].shape[1]
        if labels.min() < 0 or labels.max() >= classes:
            raise UserError(
                f"the loader gives labels {labels.min()}..{labels.max()}, the model has classes 0..{classes - 1}"
            )
        counts = self.class_counts
        if counts is None and self.part is not None:
            counts = np.bincount(self.part.labels, minlength=classes)
        if counts is None:
            counts = training_counts(self.order, labels, classes)
        return {"class_counts": as_array(counts), **head_arrays(self.ready.model, self.head)}
