"""The network of a run: built from its configuration, its outputs computed once per split and kept, its scores."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from longtail.backbones import build_backbone, folded
from longtail.backbones.library import build_library, input_settings, library_of
from longtail.backbones.weights import load_backbone
from longtail.config import TrainConfig
from longtail.data.augment import Transform, build_transform
from longtail.data.cache import resident
from longtail.data.imbalance import ClassSubsample
from longtail.data.splits import image_side, statistics
from longtail.errors import UserError, choose, whole_number
from longtail.files.atomic import locked
from longtail.files.progress import QUIET, Display
from longtail.files.reading import resolved
from longtail.heads.attach import OutputPath
from longtail.heads.find import Head
from longtail.heads.fold import head_path
from longtail.methods import TRAIN_METHODS
from longtail.metrics.confidence import Predictions
from longtail.metrics.scores import Metrics, score_predictions
from longtail.networks.objective import Objective
from longtail.outputs.extract import Source
from longtail.outputs.inference import InferenceSession
from longtail.outputs.loaders import ImageLoader
from longtail.outputs.record import Header, Outputs
from longtail.outputs.rows import remove_shards, shards_folder

if TYPE_CHECKING:
    from longtail.runs.folder import Run

MOST_LOGITS = 1 << 28  # 1 GB in float32; more are not stored, but computed from the features


def settled(config: TrainConfig) -> TrainConfig:
    """The configuration with the input size, normalisation and architecture of a network of timm or Hugging Face.

    Settings that are given stay.
    """
    library = library_of(config.backbone)
    if library is None or (config.image_size and config.mean and (library == "timm" or config.architecture)):
        return config
    given = {name: value for name in ("image_size", "mean", "std") if (value := getattr(config, name))}
    return replace(config, **{**input_settings(config.backbone), **given})


def build_network(
    config: TrainConfig, class_counts: torch.Tensor, channels: int, *, start: bool = False
) -> tuple[nn.Module, Objective]:
    """A new network of a settled configuration, and its objective.

    The weights are random; with `start` they are those that training starts from.
    """
    method = TRAIN_METHODS[choose("method", config.method, TRAIN_METHODS)]
    options = {} if config.train == "head" else config.options  # options of Probe, which fits the head
    weights = Path(config.weights) if start and config.weights else None
    if library_of(config.backbone) is None:
        model, objective = method.build(build_backbone(config.backbone, channels), class_counts, options)
        if weights:
            load_backbone(model.get_submodule("backbone"), weights)
        return model, objective
    pretrained = start and config.pretrained
    backbone = build_library(config.backbone, image_side(config), config.architecture, weights, pretrained)
    return method.build(backbone, class_counts, options)


def transforms(config: TrainConfig, stream: int = 0) -> tuple[Transform, Transform]:
    """(augmenting, clean) transforms of a configuration; streams differ in their random numbers."""
    seed = int(np.random.SeedSequence((config.seed, stream)).generate_state(1, np.uint64)[0])
    sized: dict[str, Any] = {"image_size": config.image_size, "interpolation": config.interpolation}
    augmenting = build_transform(config.augment, *statistics(config), seed=seed, **sized)
    return augmenting, build_transform(config.augment, *statistics(config), **sized)


def image_loader(run: Run, split: str, views: int = 0, subsample: ClassSubsample | None = None) -> ImageLoader:
    """The images of a split in order, clean or, with views, augmented anew in every pass."""
    whole_number("views", views, at_least=0)
    if views and split != "train":
        raise UserError("augmented views are for the train split; leave out --views")
    if subsample and split != "train":
        raise UserError("images per class are chosen of the train split alone; leave out --images-per-class")
    images, transform = run.images(split), run.transforms()[0 if views else 1]
    rows = None if subsample is None else subsample.rows(images.labels.numpy())
    chosen = resident(
        images if rows is None else images.subset(rows),
        transform,
        run.world.device,
        cache_gb=run.config.cache_gb,
        workers=run.workers,
        display=run.display,
    )
    return ImageLoader(chosen, transform, rows, len(images), max(views, 1), run.world, run.workers)


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
    header = _header(run, split, views, subsample, images_of)
    outputs = _open_stored(run, path, header)
    if outputs is None:
        # Cells of a comparison share a run: one computes its outputs, the others wait for them.
        with locked(path) if run.world.is_main else nullcontext():
            outputs = _open_stored(run, path, header)
            if outputs is None:
                if path.is_file():
                    run.display.line(f"{path} is of other weights or other images: computing it again")
                outputs = _write(run, path, header, subsample, images_of)
    return outputs


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
        _write(run, path, _header(run, split, views, subsample, run), subsample, run, dtype, keep_logits)
    return path


def _header(run: Run, split: str, views: int, subsample: ClassSubsample | None, images_of: Run) -> Header:
    chosen = (subsample.most, subsample.seed) if subsample else (None, None)
    digest = images_of.images(split).digest
    return Header(split, views, run.model_identity, digest, tuple(images_of.class_names), *chosen)


def _open_stored(run: Run, path: Path, header: Header) -> Outputs | None:
    """The outputs in a file, if it is complete and has this header; rank 0 decides for all."""
    outputs = None
    if run.world.is_main and path.is_file():
        with suppress(UserError):
            outputs = Outputs.open(path)
        if outputs and any(getattr(outputs, one.name) != getattr(header, one.name) for one in fields(header)):
            outputs = None
        if outputs and shards_folder(path).exists():  # left by processes that were killed when the file was complete
            with suppress(UserError), locked(path, timeout=0):
                remove_shards(path)
    if not run.world.gather(outputs is not None)[0]:
        return None
    return outputs or Outputs.open(path, model=run.model_identity)


def _write(
    run: Run,
    path: Path,
    header: Header,
    subsample: ClassSubsample | None,
    images_of: Run,
    dtype: str = "float32",
    keep_logits: bool | None = None,
) -> Outputs:
    if (origin := run.calibration) and origin.head != "Linear":
        raise UserError(
            f"{run.folder} does not end in a linear layer: {origin.method} put another head there; "
            f"take the run it came from, {origin.run}"
        )
    loader = image_loader(images_of, header.split, header.views, subsample)
    rows = loader.passes * len(loader.images)
    if keep_logits is None:
        keep_logits = rows * len(run.class_names) <= MOST_LOGITS
    run.world.require_alike(dtype=dtype, logits=keep_logits, **vars(header))
    head = Head(OutputPath(), (head_path(run.network),), (1.0,), has_features=True)
    outputs = Source(loader).outputs(
        InferenceSession.of_network(folded(run.network), run.world, head),
        header,
        class_counts=images_of.class_counts,
        group_counts=images_of.group_counts,
        path=path,
        dtype=dtype,
        keep_logits=keep_logits,
        display=run.display,
    )
    missing = rows - len(outputs)
    if missing and not getattr(loader.images, "skip_broken", False):
        raise UserError(f"{missing} of {rows} samples are missing from {path}")
    if missing:
        run.display.line(f"left out {missing} images that cannot be read")
    return outputs


def score(model: nn.Module, loader: ImageLoader, group_counts: np.ndarray, display: Display = QUIET) -> Metrics:
    """The scores of a network on images; `group_counts` (K,) defines many-, medium- and few-shot classes.

    The processes exchange five numbers per image. Images that were skipped as broken are left out.
    """
    labels, predictions = loader.images.labels.numpy(), []
    session = InferenceSession.of_network(folded(model), loader.world)
    for batch, outputs in session.infer(loader, "evaluating", display):
        assert batch.indices is not None
        indices, logits = batch.indices.numpy(), outputs.logits.float().cpu().numpy()
        predictions.append((indices, Predictions.of(logits, labels[indices], int(indices[0]))))
    gathered = [one for of_process in loader.world.gather(predictions) for one in of_process]
    if not gathered:
        raise UserError("there are no samples to evaluate on")
    order, first = np.unique(np.concatenate([indices for indices, _ in gathered]), return_index=True)
    joined = Predictions.joined([one for _, one in gathered])
    return score_predictions(joined.take(first), labels[order], group_counts)
