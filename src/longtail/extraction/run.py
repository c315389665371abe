"""The outputs of a run: computed once per split, kept in the folder of the run."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longtail.backbones.folding import folded
from longtail.backbones.inference import BATCH
from longtail.core.files import locked
from longtail.core.progress import Display
from longtail.data.loading import in_order, load, resident
from longtail.distributed.world import World
from longtail.errors import UserError, whole_number
from longtail.extraction.model import head_arrays, run_batch, watching
from longtail.networks.head import fingerprint, head_of
from longtail.outputs.record import Outputs, header
from longtail.outputs.writer import RowWriter, join_parts, remove_parts
from longtail.runs.folder import Run

MANY_LOGITS = 1 << 28  # 1 GB in float32


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
    whole_number("views", views, at_least=0)
    if run.details.get("calibration", {}).get("head", "Linear") != "Linear":
        raise UserError(
            f"{run.folder} does not answer with a linear layer: {run.details['calibration']['method']} put another "
            f"head there; take the run it came from, {run.details['calibration']['from']}"
        )
    if views and split != "train":
        raise UserError("augmented views are for the train split; leave out --views")
    path = path or outputs_path(run, split, views, data_run)
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
    network = folded(model)
    with ExitStack() as stack:
        writer = stack.enter_context(RowWriter(path, rows, widths, np.dtype(dtype), constant, details, world))
        stack.enter_context(torch.no_grad())
        seen = stack.enter_context(watching(head_of(network)))
        task = stack.enter_context(display.task("extracting", passes * size))
        batches = load(images, augmenting if views else clean, plan, workers=workers, device=world.device)
        for draw, batch in zip(plan, batches, strict=True):
            piece = run_batch(network, (batch.images,), {}, batch.labels, seen)
            # Samples are numbered on through the passes, so that the parts of all processes can be put in order.
            writer.add(piece.features, piece.logits, piece.labels, batch.indices + draw.first - int(draw.indices[0]))
            task.advance(len(draw.indices) * world.size)
    missing = join_parts(path, world, passes * size, size)
    if missing and not getattr(images, "skip_broken", False):
        raise UserError(f"{missing} of {passes * size} samples are missing from {path}")
    if missing:
        display.line(f"left out {missing} images that cannot be read")
    return path


def outputs_path(run: Run, split: str, views: int = 0, data_run: Run | None = None) -> Path:
    """Where a run keeps its outputs: on its own images, or on those of `data_run`."""
    name = f"{split}-views{views}" if views else split
    if data_run is not None and data_run.folder.resolve() != run.folder.resolve():
        name += f"-of-{data_run.data_hash()[:16]}"
    return run.folder / "outputs" / f"{name}.safetensors"


def run_outputs(
    run: Run, split: str, world: World, *, views: int = 0, data_run: Run | None = None, **options: Any
) -> Outputs:
    """The outputs of a run on a split (or on that of `data_run`): those on disk if they are the model's, else new."""
    path = outputs_path(run, split, views, data_run)
    # Cells of a comparison share a run: one computes its outputs, the others wait for them.
    with nullcontext() if path.is_file() or not world.is_main else locked(path):
        exists = world.gather(path.is_file())[0]  # what rank 0 finds holds for all
        if not exists:
            extract_run(run, split, world, views=views, data_run=data_run, **options)
    return Outputs.open(path, model=fingerprint(run.load_model()), world=world)
