"""Running a frozen model once and keeping what it says: any model, any loader, or a run of ours.

The input of the model's last linear layer is its features, the output its logits; both are taken
by a hook, so a model needs no changes. Batch-norm is in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longtail.data.loading import in_order, load, resident
from longtail.display import Display
from longtail.errors import UserError
from longtail.head import fingerprint, head_of, unwrap
from longtail.outputs import Outputs, header
from longtail.predict import BATCH, evaluating
from longtail.row_files import RowWriter, join_parts, remove_parts
from longtail.runs import Run
from longtail.world import World, find_device

MANY_LOGITS = 1 << 28  # 1 GB in float32
LABEL_NAMES = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True)
class Piece:
    """Outputs of one batch."""

    features: Tensor
    logits: Tensor
    labels: Tensor


def extract(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    head: str | None = None,
    class_counts: Any = None,
    split: str = "train",
    device: str = "auto",
    display: Display | None = None,
) -> Outputs:
    """Run a model over a loader once and keep features, logits and labels in memory.

    Args:
        model: any classifier whose last layer is an `nn.Linear`; wrapped or compiled ones too.
        loader: batches (inputs, labels), or dictionaries with `labels` whose other entries the model takes.
        head: name of the last linear layer, if it is not found by itself (see `find_head`).
        class_counts: (K,) training samples per class, if the loader does not show the training set.
        split: what the loader shows: train, validation or test.
        device: where to run: auto, cpu, cuda, …
        display: where progress is shown.
    """
    target = find_device(device)
    inner = unwrap(model).to(target)
    linear = head_of(inner, head)
    features, logits, labels = [], [], []
    display = display or Display(quiet=True)
    total = len(loader) if isinstance(loader, Sized) else 0
    with evaluating(inner), watching(linear) as seen, display.task("extracting", total, unit="batches") as task:
        for batch in loader:
            piece = run_batch(inner, *split_batch(batch, target), seen)
            features.append(piece.features.float().cpu().numpy())
            logits.append(piece.logits.float().cpu().numpy())
            labels.append(piece.labels.cpu().numpy().astype(np.int64))
            task.advance(1)
    if not labels:
        raise UserError("the loader gave no batches")
    truth = np.concatenate(labels)
    classes = linear.out_features
    if truth.min() < 0 or truth.max() >= classes:
        raise UserError(f"the loader gives labels {truth.min()}..{truth.max()}, the model has classes 0..{classes - 1}")
    counts = np.bincount(truth, minlength=classes) if class_counts is None else np.asarray(class_counts)
    return Outputs(
        labels=truth,
        class_counts=counts.astype(np.int64),
        logits=np.concatenate(logits),
        features=np.concatenate(features),
        indices=np.arange(len(truth)),
        split=split,
        model=fingerprint(inner),
        **head_arrays(linear),
    )


def head_arrays(linear: nn.Linear) -> dict[str, Any]:
    """Weight and bias of a head as arrays."""
    arrays = {"head_weight": linear.weight.detach().float().cpu().numpy().copy()}
    if linear.bias is not None:
        arrays["head_bias"] = linear.bias.detach().float().cpu().numpy().copy()
    return arrays


def split_batch(batch: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """Positional and named inputs of the model, and the labels."""
    if isinstance(batch, Mapping):
        named = {name: _move(value, device) for name, value in batch.items()}
        for name in LABEL_NAMES:
            if name in named:
                return (), {key: value for key, value in named.items() if key != name}, torch.as_tensor(named[name])
        raise UserError(f"a batch has no labels: its entries are {', '.join(named)}; expected one of {LABEL_NAMES}")
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        inputs = _move(batch[0], device)
        if isinstance(inputs, Mapping):
            return (), dict(inputs), torch.as_tensor(batch[1])
        return (inputs,), {}, torch.as_tensor(batch[1])
    raise UserError(f"a batch must be (inputs, labels) or a dictionary with labels, not {type(batch).__name__}")


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: _move(item, device) for name, item in value.items()}
    return value


@contextmanager
def watching(linear: nn.Linear) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collect (input, output) of a layer each time it runs."""
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append((inputs[0].detach(), output.detach()))

    handle = linear.register_forward_hook(keep)
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
            f"the head ran {len(seen)} times in one pass of the model; pass head= for the last linear layer"
        )
    features, logits = seen[0]
    if features.ndim != 2 or len(features) != len(labels):
        raise UserError(
            f"the head saw {tuple(features.shape)} for {len(labels)} labels; it must see one vector per sample: "
            "pass head= for the last linear layer"
        )
    return Piece(features, logits, labels)


def extract_run(
    run: Run,
    split: str,
    world: World,
    *,
    views: int = 0,
    path: Path | None = None,
    dtype: str = "float32",
    keep_logits: bool | None = None,
    data_run: Run | None = None,
    root: str | None = None,
    workers: int = 0,
    display: Display | None = None,
) -> Path:
    """Write the outputs of a finished run on one split; returns the file.

    With `views` > 0 the training augmentation is applied, anew in every pass. The processes of
    `world` share the images batch by batch; the file is the same for any number of them. The images
    are those of the run, or of `data_run`. Logits are kept unless they are many: readers compute
    them from the features, chunk by chunk.
    """
    if views and split != "train":
        raise UserError("augmented views are for the train split; leave out --views")
    path = path or outputs_path(run, split, views)
    model = run.load_model().to(world.device)
    shown = data_run or run
    splits = shown.splits(root)
    images = resident(splits.split(split), world.device)
    augmenting, clean = shown.transforms(splits)
    display = display if display and world.is_main else Display(quiet=True)
    head = head_of(model)
    constant = {"class_counts": shown.class_counts, **head_arrays(head)}
    if keep_logits is None:
        keep_logits = len(images) * max(views, 1) * head.out_features <= MANY_LOGITS
    remove_parts(path, world)
    world.require_alike(
        model=fingerprint(model), split=split, views=views, dtype=dtype, logits=keep_logits, labels=images.labels_hash
    )
    details = header(split, views, fingerprint(model), tuple(shown.class_names))
    size, passes = len(images), max(views, 1)
    plan = [
        draw
        for number in range(passes)
        for draw in in_order(size, BATCH, first=number * size, rank=world.rank, world_size=world.size)
    ]
    widths = {"features": head.in_features, "logits": head.out_features if keep_logits else None}
    rows = sum(len(draw.indices) for draw in plan)
    with ExitStack() as stack:
        writer = stack.enter_context(RowWriter(path, rows, widths, np.dtype(dtype), constant, details, world))
        stack.enter_context(evaluating(model))
        seen = stack.enter_context(watching(head))
        task = stack.enter_context(display.task("extracting", passes * size))
        batches = load(images, augmenting if views else clean, plan, workers=workers, device=world.device)
        for draw, batch in zip(plan, batches, strict=True):
            piece = run_batch(model, (batch.images,), {}, batch.labels, seen)
            # Samples are numbered on through the passes, so that the parts of all processes can be put in order.
            writer.add(piece.features, piece.logits, piece.labels, batch.indices + draw.first - int(draw.indices[0]))
            task.advance(len(draw.indices) * world.size)
    missing = join_parts(path, world, passes * size, size)
    if missing and not getattr(images, "skip_broken", False):
        raise UserError(f"{missing} of {passes * size} samples are missing from {path}")
    if missing:
        display.line(f"left out {missing} images that cannot be read")
    return path


def outputs_path(run: Run, split: str, views: int = 0) -> Path:
    """Where a run keeps its outputs."""
    return run.folder / "outputs" / (f"{split}-views{views}.safetensors" if views else f"{split}.safetensors")
