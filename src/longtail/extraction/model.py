"""Running a frozen model once and keeping what it says: any model, any loader, or a run of ours.

The input of the model's last linear layer is its features, the output its logits; both are taken
by a hook, so a model needs no changes. Batch-norm is in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import length_hint
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from longtail.backbones.inference import evaluating
from longtail.core.progress import QUIET, Display
from longtail.data.imbalance import Few
from longtail.distributed.world import find_device
from longtail.errors import UserError, choose
from longtail.extraction.batches import as_batches, split_batch
from longtail.extraction.selection import few_of
from longtail.networks.head import find_head, fingerprint, head_of, unwrap
from longtail.networks.head_search import WITHOUT_MODEL, answering_head, require_linear, uncompiled
from longtail.outputs.record import Outputs
from longtail.outputs.writer import Rows

DTYPES = ("float32", "float16")


@dataclass(frozen=True)
class Piece:
    """Outputs of one batch."""

    features: Tensor
    logits: Tensor
    labels: Tensor

    def arrays(self) -> dict[str, np.ndarray]:
        """The three of them, on the CPU."""
        numbers = {"features": self.features.float().cpu().numpy(), "logits": self.logits.float().cpu().numpy()}
        return {**numbers, "labels": self.labels.cpu().numpy().astype(np.int64)}


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
    display: Display = QUIET,
) -> Outputs:
    """Run a model over a loader once and keep features, logits and labels.

    They are kept in memory or, with `path`, written to that file as they come and mapped from it, so that a set
    larger than memory works.

    Args:
        model: any classifier whose last layer is an `nn.Linear`; wrapped or compiled ones too.
        loader: batches (inputs, labels), or dictionaries with `labels` whose other entries the model takes:
            a `DataLoader`, a list, anything that gives them; a data set of torch or of Hugging Face.
        path: file that the outputs are written to; `Outputs.open` reads it.
        dtype: type of the features and logits: float32 or float16.
        head: name of the last linear layer; without, it is the one whose output the model answers with.
        class_counts: (K,) training samples per class, if the loader does not show the training set.
        split: what the loader shows: train, validation or test.
        device: where to run: auto, cpu, cuda, …
        images_per_class: at most so many samples of every class are read and run; the class counts stay those of all.
            The loader must be a data set that knows its labels, or a `DataLoader` of one.
        seed: decides which samples these are.
        display: where progress is shown.
    """
    choose("dtype", dtype, DTYPES)
    few = None if images_per_class == "all" else Few(images_per_class, seed)
    known: dict[str, Any] = {"head": head, "class_counts": class_counts, "split": split, "device": device, "few": few}
    if path is None:
        return extract_with_head(model, loader, Rows(np.dtype(dtype)), display=display, **known)[0]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        spooled = Rows(np.dtype(dtype), Path(folder))
        extract_with_head(model, loader, spooled, display=display, **known)[0].save(path)
    return Outputs.open(path)


def extract_with_head(
    model: nn.Module,
    loader: Any,
    rows: Rows,
    *,
    head: str | None = None,
    class_counts: Any = None,
    split: str = "train",
    device: str = "auto",
    few: Few | None = None,
    display: Display = QUIET,
) -> tuple[Outputs, str]:
    """What `extract` gives, and the name of the layer that was taken for the head."""
    target = find_device(device)
    inner = unwrap(model)
    if head is not None:
        head = find_head(inner, head)
    whole = chosen = None
    if few is not None:
        loader, whole, chosen = few_of(loader, few)
    batches = as_batches(loader)
    total = length_hint(batches)
    with ExitStack() as stack:
        for block in (placed(inner, target), evaluating(inner), uncompiled()):
            stack.enter_context(block)
        task = stack.enter_context(display.task("extracting", total, unit="batches"))
        for batch in batches:
            inputs, named, labels = split_batch(batch, inner, target)
            if head is None:
                head = answering_head(inner, inputs, named)
            linear = head_of(inner, head)
            with watching(linear) as seen:
                piece = run_batch(inner, inputs, named, labels, seen)
            if not rows.arrays:
                require_linear(linear, head, piece.features, piece.logits)
            rows.add(**piece.arrays())
            task.advance(1)
        if head is None:
            raise UserError("the loader gave no batches")
        known = head_arrays(head_of(inner, head))
    arrays = rows.joined()
    truth = arrays["labels"]
    classes = len(known["head_weight"])
    if truth.min() < 0 or truth.max() >= classes:
        raise UserError(f"the loader gives labels {truth.min()}..{truth.max()}, the model has classes 0..{classes - 1}")
    if whole is not None and not np.array_equal(truth, whole[chosen]):
        raise UserError(
            "the labels in the batches are not those the data set says it has; images_per_class cannot be used"
        )
    everything = truth if whole is None else whole
    counts = np.bincount(everything, minlength=classes) if class_counts is None else class_counts
    outputs = Outputs(
        labels=truth,
        features=arrays["features"],
        logits=arrays["logits"],
        class_counts=counts,
        indices=np.arange(len(truth)) if chosen is None else chosen,
        split=split,
        images_per_class=few.most if few else None,
        images_seed=few.seed if few else None,
        model=fingerprint(inner),
        **known,
    )
    return outputs, head


@contextmanager
def placed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model on a device while the block runs, then where it was before."""
    before = next((parameter.device for parameter in model.parameters()), device)
    model.to(device)
    try:
        yield
    finally:
        model.to(before)


def head_arrays(linear: nn.Linear) -> dict[str, Any]:
    """Weight and bias of a head as arrays."""
    arrays = {"head_weight": linear.weight.detach().float().cpu().numpy().copy()}
    if linear.bias is not None:
        arrays["head_bias"] = linear.bias.detach().float().cpu().numpy().copy()
    return arrays


@contextmanager
def watching(linear: nn.Linear) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collect (input, output) of a layer each time it runs."""
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> None:
        # Copies: the model may go on in place, and a view would keep all that it is a view of.
        (features,) = inputs or (named["input"],)
        seen.append((features.detach().clone(), output.detach().clone()))

    handle = linear.register_forward_hook(keep, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def run_batch(
    model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], labels: Tensor, seen: list[tuple[Tensor, Tensor]]
) -> Piece:
    """One batch through the model; its head must run once, on one vector per sample."""
    seen.clear()
    model(*inputs, **named)
    if len(seen) != 1:
        raise UserError(
            f"the head ran {len(seen)} times in one pass of the model; pass head= for the last linear layer, "
            f"or {WITHOUT_MODEL}"
        )
    features, logits = seen[0]
    if features.ndim != 2 or len(features) != len(labels):
        raise UserError(
            f"the head saw {tuple(features.shape)} for {len(labels)} labels; it must see one vector per sample: "
            f"pass head= for the last linear layer, or {WITHOUT_MODEL}"
        )
    return Piece(features, logits, labels)
