"""Runs any model over any loader once and keeps its outputs; finds the head of a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from operator import length_hint
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from longtail.data.imbalance import ClassSubsample
from longtail.distributed import World
from longtail.errors import UserError, choose
from longtail.files.atomic import locked
from longtail.files.progress import QUIET, Display
from longtail.files.tensors import as_array
from longtail.heads.find import Head
from longtail.heads.fold import joined_head, with_two_rows
from longtail.heads.layers import HeadName, fingerprint, guess_head, runs_together
from longtail.outputs.batches import ModelBatch, model_batches, read_batches, split_batch
from longtail.outputs.gather import joined, row_numbers, sharing_errors
from longtail.outputs.inference import HeadDetector, InferenceSession, detect_head, infer, inference_session
from longtail.outputs.loaders import ImageLoader, SamplerInfo, listed_labels, loader_of, sampler_info, training_counts
from longtail.outputs.record import Header, Outputs
from longtail.outputs.rows import RowStore, join_shards, row_store

DTYPES = ("float32", "float16")


def find_head(model: nn.Module, name: str | None = None, *, batch: Any = None, device: str = "auto") -> HeadName:
    """The name of the layer that produces the logits of a model, for `model.get_submodule`.

    With a batch, the model is run to find the layer. Without one, the result is a guess from names and positions: it
    may be wrong, and its attribute `sure` is False.

    Args:
        model: any model.
        name: the layer, or a part of the model that contains it, if you know it.
        batch: a batch of a loader, (inputs, labels) or a dictionary with labels.
        device: where to run the model.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> found = find_head(model, batch=(torch.ones(2, 4), torch.tensor([0, 1])))
    >>> found, found.sure, found.found_by
    ('2', True, 'a batch')
    >>> guessed = find_head(model)
    >>> guessed, guessed.sure, guessed.found_by
    ('2', False, 'its position: the last linear layer')
    """
    if batch is None:
        return guess_head(model, name)
    with inference_session(model, device, alone=True) as session:
        head = detect_head(session.model, split_batch(batch, session.model, session.device), name)
    if head.obstacle:
        raise UserError(f"{type(session.model).__name__} has no head to fold into: {head.obstacle}")
    return HeadName(head.layers[-1], "a batch", sure=True, layers=head.layers)


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

    In a process group of `torch.distributed`, make the call on every process: each runs its share, and all get all
    rows. Samples that a distributed sampler repeats to make the shares equal are counted once.

    Args:
        model: any classifier that returns logits (N, K), or one logit z per sample, kept as the two logits
            (-z / 2, z / 2); it may be wrapped or compiled.
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
    if isinstance(images_per_class, str) and images_per_class != "all":
        raise UserError(
            f"images_per_class must be a whole number or 'all', not {images_per_class!r}; how many are enough "
            "depends on the method: calibrate(…, images_per_class='auto')"
        )
    source = Source(loader, None if images_per_class == "all" else ClassSubsample(images_per_class, seed))
    display = display or Display(quiet=not progress)
    path = None if path is None else Path(path)
    with (
        inference_session(model, device, shards=source.info.shards) as session,
        locked(path) if path and session.world.is_main else nullcontext(),
    ):
        detector = HeadDetector(session.model, head)
        return source.outputs(session, detector, split, class_counts, display, path, dtype)


class Source:
    """A loader, or some samples of every class of it, and which samples these are.

    Args:
        loader: as for `extract`.
        subsample: at most so many samples of every class; None for all.
    """

    def __init__(self, loader: Any, subsample: ClassSubsample | None = None) -> None:
        self.subsample = subsample
        if subsample is not None:  # every process of a group runs all of them
            self.labels = listed_labels(loader)
            self.rows = subsample.rows(self.labels)
            loader = loader_of(loader, self.rows)
        self.loader = loader
        self.info: SamplerInfo = sampler_info(loader)

    def outputs(
        self,
        session: InferenceSession,
        detector: HeadDetector,
        split: str,
        class_counts: Any = None,
        display: Display = QUIET,
        path: Path | None = None,
        dtype: str = "float32",
    ) -> Outputs:
        """The outputs of a model, in memory or in a file."""
        model, world = session.model, session.world
        with row_store(path, np.dtype(dtype), world) as store:
            head = collect(model, self.loader, store, detector, world, session.device, display)
            arrays = store.arrays()
            if not head.has_features:
                arrays.pop("features", None)
            indices = arrays.pop("indices", None)
            numbers = row_numbers(self.info, arrays, world) if indices is None else indices
            labels = joined({"labels": arrays["labels"]}, numbers, world)["labels"]
            classes = arrays["logits"].shape[1]
            if labels.min() < 0 or labels.max() >= classes:
                raise UserError(
                    f"the loader gives labels {labels.min()}..{labels.max()}, the model has classes 0..{classes - 1}"
                )
            counts = self._counts(labels, classes) if class_counts is None else as_array(class_counts)
            constant = {"class_counts": counts, **head_arrays(model, head)}
            chosen, identity = self._chosen(labels), fingerprint(model)
            if path is None:
                rows = joined(arrays, numbers, world)
                return Outputs(**{**rows, **constant, **chosen}, split=split, model=identity)
            positions = chosen.pop("indices", None)
            header = Header(split, 0, identity, None, (), **chosen)
            join_shards(path, arrays, numbers, constant, header.to_dict(), world, positions)
        return Outputs.open(path)

    def multilabel(
        self, session: InferenceSession, detector: HeadDetector, display: Display = QUIET
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits (N, K) and labels (N, K) of 0 and 1 of a multi-label model, in memory."""
        if self.info.uneven:
            raise UserError(
                "the loader may show some samples more often than others, which changes the prevalence of the labels; "
                "pass a loader that shows each sample once"
            )
        model, world = session.model, session.world
        with row_store(None, np.dtype(np.float32), world, without=("features",)) as store:
            collect(model, self.loader, store, detector, world, session.device, display, multilabel=True)
            arrays = store.arrays()
            rows = joined(arrays, row_numbers(self.info, arrays, world), world)
        return rows["logits"], rows["labels"]

    def _counts(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """(K,) training samples per class, given the labels (N,) of all rows."""
        if self.subsample is not None:
            return np.bincount(self.labels, minlength=classes)
        return training_counts(self.info, labels, classes)

    def _chosen(self, labels: np.ndarray) -> dict[str, Any]:
        """The fields of outputs that say which samples were chosen, given the labels (N,) in the batches."""
        if self.subsample is None:
            return {}
        if not np.array_equal(labels, self.labels[self.rows]):
            raise UserError(
                "the labels in the batches are not those that the data set lists, by which images per class are "
                "chosen; pass images_per_class='all'"
            )
        return {"indices": self.rows, "images_per_class": self.subsample.most, "images_seed": self.subsample.seed}


def collect(
    model: nn.Module,
    loader: Any,
    store: RowStore,
    detector: HeadDetector,
    world: World,
    device: torch.device,
    display: Display = QUIET,
    *,
    multilabel: bool = False,
) -> Head:
    """Run a model over a loader, store its outputs row by row, and return its head."""
    together = world.size > 1 and runs_together(model)
    source = read_batches(loader)
    of_images = isinstance(loader, ImageLoader)
    total, unit = (loader.passes * len(loader.images), "images") if of_images else (length_hint(source), "batches")
    with sharing_errors(world, off=together), display.task("extracting", total, unit=unit) as task:
        batches = model_batches(source, loader, model, device, multilabel=multilabel)
        batches = _in_step(batches, world) if together else (batch for batch in batches if len(batch))
        for batch, outputs in infer(model, batches, detector):
            if not batch.repeated:
                labels = batch.labels.cpu().numpy().astype(np.uint8 if multilabel else np.int64)
                indices = {} if batch.indices is None else {"indices": batch.indices.numpy()}
                store.add(**outputs.arrays(), labels=labels, **indices)
            task.advance(len(batch) * world.size if of_images else 1)
        if detector.first is None and not (of_images and world.size > 1):
            raise UserError("the loader gave no batches")
    head = detector.agree(world)
    if detector.first and detector.first.layers and not head.layers and world.is_main:
        warnings.warn(f"features and head of {type(model).__name__} are not kept: {head.obstacle}", stacklevel=4)
    return head


def _in_step(batches: Iterable[ModelBatch], world: World) -> Iterator[ModelBatch]:
    """Batches until those of all processes have ended; a process that has no more repeats its last."""
    iterator = iter(batches)
    last = None
    while True:
        batch = next(iterator, None)
        if not any(world.gather(batch is not None)):
            return
        if batch is None:
            if last is None:
                raise UserError("the loader gave no batches")
            batch = replace(last, repeated=True)
        last = batch
        yield batch


def head_arrays(model: nn.Module, head: Head) -> dict[str, np.ndarray]:
    """Weight and bias of the linear layer that gives the logits, as arrays; none where nothing folds."""
    if head.obstacle:
        return {}
    linear = joined_head([model.get_submodule(path) for path in head.layers], head.gains)
    linear = with_two_rows(linear) if head.single else linear
    arrays = {"head_weight": linear.weight.detach().float().numpy()}
    if linear.bias is not None:
        arrays["head_bias"] = linear.bias.detach().float().numpy()
    return arrays
