"""The outputs of a run, computed once per split and kept in its folder, and the scores of a network."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from torch import nn

from longtail.backbones.inference import folded
from longtail.data.augment import Transform
from longtail.data.cache import resident
from longtail.data.images import Images
from longtail.data.imbalance import ClassSubsample
from longtail.distributed import World
from longtail.errors import UserError, whole_number
from longtail.files.atomic import locked
from longtail.files.progress import QUIET, Display
from longtail.files.reading import resolved
from longtail.heads.attach import OutputPath
from longtail.heads.find import Head
from longtail.heads.layers import guess_head, head_of
from longtail.metrics.confidence import Predictions
from longtail.metrics.scores import Metrics, score_predictions
from longtail.outputs.batches import model_batches
from longtail.outputs.extract import collect, head_arrays
from longtail.outputs.inference import HeadDetector, infer
from longtail.outputs.loaders import ImageLoader
from longtail.outputs.record import Header, Outputs
from longtail.outputs.rows import join_shards, remove_shards, row_store, shard_folders

if TYPE_CHECKING:
    from longtail.runs.folder import Run

MOST_LOGITS = 1 << 28  # 1 GB in float32; more are not stored, but computed from the features


def subsample_of(images_per_class: int | Literal["all"], seed: int) -> ClassSubsample | None:
    """Which training images of every class to take; None for all of them."""
    return None if images_per_class == "all" else ClassSubsample(images_per_class, seed)


def image_loader(run: Run, split: str, views: int = 0, subsample: ClassSubsample | None = None) -> ImageLoader:
    """The images of a split in order, clean or, with views, augmented anew in every pass."""
    whole_number("views", views, at_least=0)
    if views and split != "train":
        raise UserError("augmented views are for the train split; leave out --views")
    if subsample and split != "train":
        raise UserError("images per class are chosen of the train split alone; leave out --images-per-class")
    images = run.images(split)
    rows, size = None if subsample is None else subsample.rows(images.labels.numpy()), len(images)
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
    run: Run, split: str, views: int = 0, subsample: ClassSubsample | None = None, images_of: Run | None = None
) -> Path:
    """The file of the outputs on a split, in the folder of the run."""
    name = f"{split}-views{views}" if views else split
    if subsample:
        name += f"-{subsample.most}-per-class-seed{subsample.seed}"
    if images_of and resolved(images_of.folder) != resolved(run.folder):
        name += f"-of-{images_of.data_hash()[:16]}"
    return run.folder / "outputs" / f"{name}.safetensors"


def stored_outputs(run: Run, split: str, views: int, subsample: ClassSubsample | None, images_of: Run) -> Outputs:
    """The outputs on a split: those on disk if they belong to these weights and images, otherwise new ones."""
    path = outputs_path(run, split, views, subsample, images_of)
    if images_of is not run:
        images_of = images_of.using(run.world, root=run.root, workers=run.workers, display=run.display)
    digest = images_of.images(split).digest
    outputs = _open_stored(run, path, views, subsample, digest)
    if outputs is None:
        # Cells of a comparison share a run: one computes its outputs, the others wait for them.
        with locked(path) if run.world.is_main else nullcontext():
            outputs = _open_stored(run, path, views, subsample, digest)
            if outputs is None:
                if path.is_file():
                    run.display.line(f"{path} is of other weights or other images: computing it again")
                _write(run, split, path, views, subsample, images_of)
    return outputs or Outputs.open(path, model=run.model_identity)


def _open_stored(run: Run, path: Path, views: int, subsample: ClassSubsample | None, digest: str) -> Outputs | None:
    """The outputs in a file, if it is complete and belongs to this model and these images; rank 0 decides for all."""
    outputs = None
    if run.world.is_main and path.is_file():
        with suppress(UserError):
            outputs = Outputs.open(path)
        chosen = (subsample.most, subsample.seed) if subsample else (None, None)
        wanted = (run.model_identity, digest, views, *chosen)
        if outputs and wanted != (
            outputs.model,
            outputs.digest,
            outputs.views,
            outputs.images_per_class,
            outputs.images_seed,
        ):
            outputs = None
        if outputs and shard_folders(path):  # left by processes that were killed when the file was complete
            with suppress(UserError), locked(path, timeout=0):
                remove_shards(path)
    if not run.world.gather(outputs is not None)[0]:
        return None
    return outputs or Outputs.open(path, model=run.model_identity)


def write_outputs(
    run: Run,
    split: str,
    path: Path,
    *,
    views: int = 0,
    subsample: ClassSubsample | None = None,
    dtype: str = "float32",
    keep_logits: bool | None = None,
) -> Path:
    """Write the outputs on one split to a file; one launch at a time writes it, others wait.

    Logits are kept unless they are many: readers compute them from the features, chunk by chunk.
    """
    with locked(path) if run.world.is_main else nullcontext():
        return _write(run, split, path, views, subsample, run, dtype, keep_logits)


def _write(
    run: Run,
    split: str,
    path: Path,
    views: int,
    subsample: ClassSubsample | None,
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
    loader, digest = image_loader(images_of, split, views, subsample), images_of.images(split).digest
    model = run.network
    head = Head(OutputPath(), (str(guess_head(model)),), (1.0,), has_features=True)
    rows = loader.passes * len(loader.images)
    if keep_logits is None:
        keep_logits = rows * head_of(model).out_features <= MOST_LOGITS
    world.require_alike(
        model=run.model_identity,
        split=split,
        views=views,
        subsample=subsample,
        dtype=dtype,
        logits=keep_logits,
        images=digest,
    )
    chosen = (subsample.most, subsample.seed) if subsample else (None, None)
    header = Header(split, views, run.model_identity, digest, tuple(images_of.class_names), *chosen)
    network = folded(model).to(world.device)
    with row_store(path, np.dtype(dtype), world, without=() if keep_logits else ("logits",)) as store:
        collect(network, loader, store, HeadDetector(network, head=head), world, world.device, run.display)
        constant = {"class_counts": images_of.class_counts, "group_counts": images_of.group_counts}
        arrays = store.arrays()
        numbers = arrays.pop("indices", np.zeros(0, np.int64))
        constant |= head_arrays(model, head)
        positions = np.arange(len(loader.images)) if loader.rows is None else loader.rows
        missing = rows - join_shards(path, arrays, numbers, constant, header.to_dict(), world, positions)
    if missing and not getattr(loader.images, "skip_broken", False):
        raise UserError(f"{missing} of {rows} samples are missing from {path}")
    if missing:
        run.display.line(f"left out {missing} images that cannot be read")
    return path


def score(
    model: nn.Module,
    images: Images,
    transform: Transform,
    world: World,
    group_counts: np.ndarray,
    *,
    workers: int = 0,
    display: Display = QUIET,
) -> Metrics:
    """The scores of a network on images; `group_counts` (K,) defines many-, medium- and subsample-shot classes."""
    return score_loader(model, ImageLoader(images, transform, world=world, workers=workers), group_counts, display)


def score_loader(model: nn.Module, loader: ImageLoader, group_counts: np.ndarray, display: Display = QUIET) -> Metrics:
    """The scores of a network on the images of a loader.

    The processes exchange five numbers per image. Images that were skipped as broken are left out.
    """
    world, labels, predictions = loader.world, loader.images.labels.numpy(), []
    network = folded(model).to(world.device)
    with (display if world.is_main else QUIET).task("evaluating", len(loader.images)) as task:
        for batch, outputs in infer(network, model_batches(loader.batches(), loader, network, world.device)):
            assert batch.indices is not None
            indices = batch.indices.numpy()
            logits = outputs.logits.float().cpu().numpy()
            predictions.append((indices, Predictions.of(logits, labels[indices], int(indices[0]))))
            task.advance(len(indices) * world.size)
    gathered = [one for of_process in world.gather(predictions) for one in of_process]
    if not gathered:
        raise UserError("there are no samples to evaluate on")
    order, first = np.unique(np.concatenate([indices for indices, _ in gathered]), return_index=True)
    joined = Predictions.joined([one for _, one in gathered])
    return score_predictions(joined.take(first), labels[order], group_counts)
