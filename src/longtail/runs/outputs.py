"""The outputs of a run: computed once per split, kept in the folder of the run."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from longtail.backbones.inference import folded
from longtail.data.cache import resident
from longtail.data.imbalance import ClassSubsample
from longtail.errors import UserError, whole_number
from longtail.files.atomic import locked
from longtail.files.reading import resolved
from longtail.heads.attach import OutputPath
from longtail.heads.find import Head
from longtail.heads.layers import guess_head, head_of
from longtail.outputs.extract import collect, head_arrays
from longtail.outputs.inference import HeadDetector
from longtail.outputs.loaders import ImageLoader
from longtail.outputs.record import Outputs, header
from longtail.outputs.writer import join_shards, remove_shards, row_store, shard_folders

if TYPE_CHECKING:
    from longtail.runs.folder import Run

MOST_LOGITS = 1 << 28  # 1 GB in float32; more are not stored, but computed from the features


def chosen_few(images_per_class: int | Literal["all"], seed: int) -> ClassSubsample | None:
    """Which training images of every class to take; None for all of them."""
    return None if images_per_class == "all" else ClassSubsample(images_per_class, seed)


def image_loader(run: Run, split: str, views: int = 0, few: ClassSubsample | None = None) -> ImageLoader:
    """The images of a split in order, clean or, with views, augmented anew in every pass."""
    whole_number("views", views, at_least=0)
    if views and split != "train":
        raise UserError("augmented views are for the train split; leave out --views")
    if few and split != "train":
        raise UserError("images per class are chosen of the train split alone; leave out --images-per-class")
    images = run.images(split)
    rows, size = None if few is None else few.rows(images.labels.numpy()), len(images)
    transform = run.transforms()[0 if views else 1]
    images = resident(
        images if rows is None else images.subset(rows),
        transform,
        run.world.device,
        cache_gb=run.config.cache_gb,
        workers=run.workers,
        display=run.display,
    )
    return ImageLoader(images, transform, rows, size, max(views, 1), run.world, run.workers)


def outputs_path(
    run: Run, split: str, views: int = 0, few: ClassSubsample | None = None, images_of: Run | None = None
) -> Path:
    """The file of the outputs on a split, in the folder of the run."""
    name = f"{split}-views{views}" if views else split
    if few:
        name += f"-{few.most}-per-class-seed{few.seed}"
    if images_of and resolved(images_of.folder) != resolved(run.folder):
        name += f"-of-{images_of.data_hash()[:16]}"
    return run.folder / "outputs" / f"{name}.safetensors"


def stored_outputs(run: Run, split: str, views: int, few: ClassSubsample | None, images_of: Run) -> Outputs:
    """The outputs on a split: those on disk if they belong to these weights and images, otherwise new ones."""
    path = outputs_path(run, split, views, few, images_of)
    if images_of is not run:
        images_of = images_of.using(run.world, root=run.root, workers=run.workers, display=run.display)
    digest = images_of.images(split).digest
    known = _open_stored(run, path, views, few, digest)
    if known is None:
        # Cells of a comparison share a run: one computes its outputs, the others wait for them.
        with locked(path) if run.world.is_main else nullcontext():
            known = _open_stored(run, path, views, few, digest)
            if known is None:
                if path.is_file():
                    run.display.line(f"{path} is of other weights or other images: computing it again")
                _write(run, split, path, views, few, images_of)
    return known or Outputs.open(path, model=run.model_identity)


def _open_stored(run: Run, path: Path, views: int, few: ClassSubsample | None, digest: str) -> Outputs | None:
    """The outputs in a file, if it is complete and belongs to this model and these images; rank 0 decides for all."""
    found = None
    if run.world.is_main and path.is_file():
        with suppress(UserError):
            found = Outputs.open(path)
        chosen = (few.most, few.seed) if few else (None, None)
        wanted = (run.model_identity, digest, views, *chosen)
        if found and wanted != (found.model, found.digest, found.views, found.images_per_class, found.images_seed):
            found = None
        if found and shard_folders(path):  # left by processes that were killed when the file was complete
            with suppress(UserError), locked(path, timeout=0):
                remove_shards(path)
    if not run.world.gather(found is not None)[0]:
        return None
    return found or Outputs.open(path, model=run.model_identity)


def write_outputs(
    run: Run,
    split: str,
    path: Path,
    *,
    views: int = 0,
    few: ClassSubsample | None = None,
    dtype: str = "float32",
    keep_logits: bool | None = None,
) -> Path:
    """Write the outputs on one split to a file; one launch at a time writes it, others wait.

    Logits are kept unless they are many: readers compute them from the features, chunk by chunk.
    """
    with locked(path) if run.world.is_main else nullcontext():
        return _write(run, split, path, views, few, run, dtype, keep_logits)


def _write(
    run: Run,
    split: str,
    path: Path,
    views: int,
    few: ClassSubsample | None,
    images_of: Run,
    dtype: str = "float32",
    keep_logits: bool | None = None,
) -> Path:
    origin, world = run.calibration, run.world
    if origin and origin.head != "Linear":
        raise UserError(
            f"{run.folder} does not end in a linear layer: {origin.method} put another head there; "
            f"take the run it came from, {origin.run}"
        )
    loader, digest = image_loader(images_of, split, views, few), images_of.images(split).digest
    model = run.network
    head = Head(OutputPath(), (str(guess_head(model)),), (1.0,), has_features=True)
    rows = loader.passes * len(loader.images)
    if keep_logits is None:
        keep_logits = rows * head_of(model).out_features <= MOST_LOGITS
    world.require_alike(
        model=run.model_identity, split=split, views=views, few=few, dtype=dtype, logits=keep_logits, images=digest
    )
    chosen = (few.most, few.seed) if few else (None, None)
    details = header(split, views, run.model_identity, digest, tuple(images_of.class_names), *chosen)
    network = folded(model).to(world.device)
    with row_store(path, np.dtype(dtype), world, without=() if keep_logits else ("logits",)) as store:
        collect(network, loader, store, HeadDetector(network, head=head), world, world.device, run.display)
        constant = {"class_counts": images_of.class_counts, "group_counts": images_of.group_counts}
        arrays = store.arrays()
        numbers = arrays.pop("indices", np.zeros(0, np.int64))
        constant |= head_arrays(model, head)
        positions = np.arange(len(loader.images)) if loader.rows is None else loader.rows
        missing = rows - join_shards(path, arrays, numbers, constant, details, world, positions)
    if missing and not getattr(loader.images, "skip_broken", False):
        raise UserError(f"{missing} of {rows} samples are missing from {path}")
    if missing:
        run.display.line(f"left out {missing} images that cannot be read")
    return path
