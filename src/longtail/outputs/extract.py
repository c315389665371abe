"""Runs any model over any loader once and keeps its outputs; finds the head of a model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from longtail.data.imbalance import ClassSubsample
from longtail.errors import UserError, choose
from longtail.files.atomic import locked
from longtail.files.progress import QUIET, Display
from longtail.files.tensors import as_array
from longtail.heads.fold import joined_head, with_two_rows
from longtail.outputs.batches import split_batch
from longtail.outputs.gather import common_head, joined, row_numbers, sharing_errors
from longtail.outputs.inference import InferenceSession, inference_session
from longtail.outputs.loaders import ImageLoader, listed_labels, loader_of, sampler_info, training_counts
from longtail.outputs.record import Header, Outputs, fingerprint
from longtail.outputs.rows import RowStore, join_shards, shard_files

DTYPES = ("float32", "float16")


def find_head(model: nn.Module, batch: Any, *, name: str | None = None, device: str = "auto") -> tuple[str, ...]:
    """The paths of the layers that produce the logits of a model, for `model.get_submodule`; several if averaged.

    Args:
        model: any model.
        batch: a batch of a loader, (inputs, labels) or a dictionary with labels; the model is run on it.
        name: the layer, or a module that contains it, if the model returns several outputs.
        device: where to run the model.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> find_head(model, (torch.ones(2, 4), torch.tensor([0, 1])))
    ('2',)
    """
    with inference_session(model, device, name=name, alone=True) as session:
        head = session.detect_head(split_batch(batch, session.model, session.device))
    if head.obstacle:
        raise UserError(f"{type(session.model).__name__} has no head to fold into: {head.obstacle}")
    return head.layers


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
    path = None if path is None else Path(path)
    with (
        inference_session(model, device, name=head, shards=source.info.shards) as session,
        locked(path) if path and session.world.is_main else nullcontext(),
    ):
        return source.outputs(
            session,
            Header(split, model=fingerprint(session.model)),
            class_counts=class_counts,
            path=path,
            dtype=dtype,
            display=display or Display(quiet=not progress),
        )


class Source:
    """A loader as for `extract`, or a subsample of every class of it, and which samples these are."""

    def __init__(self, loader: Any, subsample: ClassSubsample | None = None) -> None:
        self.subsample = subsample
        self.indices: np.ndarray | None = None  # of each sample in its split, if they are not 0, 1, 2 and so on
        if isinstance(loader, ImageLoader):
            self.indices = np.arange(len(loader.images)) if loader.rows is None else loader.rows
        if subsample is not None:  # every process of a group runs all of them
            self.labels = listed_labels(loader)
            self.indices = subsample.rows(self.labels)
            loader = loader_of(loader, self.indices)
        self.loader = loader
        self.info = sampler_info(loader)

    def outputs(
        self,
        session: InferenceSession,
        header: Header,
        *,
        class_counts: Any = None,
        group_counts: np.ndarray | None = None,
        path: Path | None = None,
        dtype: str = "float32",
        keep_logits: bool = True,
        display: Display = QUIET,
    ) -> Outputs:
        """The outputs of a model, in memory or in a file."""
        world, store = session.world, RowStore(np.dtype(dtype))
        with nullcontext() if path is None else shard_files(store, path, world):
            self._run(session, store, display, ("logits", "features") if keep_logits else ("features",))
            assert session.head is not None
            arrays = store.arrays()
            if not session.head.has_features:
                arrays.pop("features", None)
            numbers = arrays.pop("indices", np.arange(len(arrays.get("labels", ()))))
            if world.size > 1 and not isinstance(self.loader, ImageLoader):
                numbers = row_numbers(self.info, arrays, world)
            if class_counts is None or not isinstance(self.loader, ImageLoader):
                labels = arrays if world.size == 1 else joined({"labels": arrays["labels"]}, numbers, world)
                class_counts = self._counts(labels["labels"], arrays["logits"].shape[1], class_counts)
            constant: dict[str, Any] = {"class_counts": as_array(class_counts), **head_arrays(session)}
            if group_counts is not None:
                constant["group_counts"] = group_counts
            if self.subsample is not None:
                header = replace(header, images_per_class=self.subsample.most, images_seed=self.subsample.seed)
            if path is not None:
                join_shards(path, arrays, numbers, constant, header.to_dict(), world, self.indices)
                return Outputs.open(path)
            rows: dict[str, Any] = {**arrays, "indices": numbers} if world.size == 1 else joined(arrays, numbers, world)
            if self.indices is not None:
                rows["indices"] = self.indices[rows["indices"] % len(self.indices)]
            return Outputs(**rows, **constant, **asdict(header))

    def multilabel(self, session: InferenceSession, display: Display = QUIET) -> tuple[np.ndarray, np.ndarray]:
        """Logits (N, K) and labels (N, K) of 0 and 1 of a multi-label model, in memory."""
        if self.info.uneven:
            raise UserError(
                "the loader may show some samples more often than others, which changes the prevalence of the labels; "
                "pass a loader that shows each sample once"
            )
        store = RowStore(np.dtype(np.float32))
        self._run(session, store, display, ("logits",), multilabel=True)
        rows = store.arrays()
        if session.world.size > 1:
            rows = joined(rows, row_numbers(self.info, rows, session.world), session.world)
        return rows["logits"], rows["labels"]

    def _run(
        self,
        session: InferenceSession,
        store: RowStore,
        display: Display,
        kept: tuple[str, ...],
        *,
        multilabel: bool = False,
    ) -> None:
        """Run the model over the loader and store its outputs row by row."""
        world, together = session.world, session.world.size > 1
        with sharing_errors(world) if together and not session.sharding else nullcontext():
            for batch, outputs in session.infer(self.loader, "extracting", display, multilabel=multilabel):
                session.keep_sample(batch, outputs.logits)
                if not batch.repeated:
                    tensors = {name: getattr(outputs, name) for name in kept}
                    rows = {name: one.float().cpu().numpy() for name, one in tensors.items() if one is not None}
                    rows["labels"] = batch.labels.cpu().numpy().astype(np.uint8 if multilabel else np.int64)
                    if batch.indices is not None:
                        rows["indices"] = batch.indices.numpy()
                    store.add(rows)
            if not store.columns and not (together and isinstance(self.loader, ImageLoader)):
                raise UserError("the loader gave no batches")
        if together:
            session.head = common_head(session.model, session.head, world)
            session.check(session.head)

    def _counts(self, labels: np.ndarray, classes: int, given: Any) -> Any:
        """(K,) training samples per class, as given or of the loader, whose labels (N,) are checked."""
        if labels.min() < 0 or labels.max() >= classes:
            raise UserError(
                f"the loader gives labels {labels.min()}..{labels.max()}, the model has classes 0..{classes - 1}"
            )
        if self.subsample is not None and not np.array_equal(labels, self.labels[self.indices]):
            raise UserError(
                "the labels in the batches are not those that the data set lists, by which images per class are "
                "chosen; pass images_per_class='all'"
            )
        if given is not None:
            return given
        if self.subsample is not None:
            return np.bincount(self.labels, minlength=classes)
        return training_counts(self.info, labels, classes)


def head_arrays(session: InferenceSession) -> dict[str, np.ndarray]:
    """Weight and bias of the linear layer that gives the logits, as arrays; none if nothing can be folded into it."""
    head = session.head
    assert head is not None
    if head.obstacle:
        return {}
    linear = joined_head([session.model.get_submodule(path) for path in head.layers], head.gains)
    linear = with_two_rows(linear) if head.single else linear
    arrays = {"head_weight": linear.weight.detach().float().numpy()}
    if linear.bias is not None:
        arrays["head_bias"] = linear.bias.detach().float().numpy()
    return arrays
