"""Scores a frozen network on a split; the result does not depend on the number of processes."""

from __future__ import annotations

import numpy as np
from torch import nn

from longtail.backbones.inference import folded
from longtail.data.augment import Transform
from longtail.data.images import Images
from longtail.distributed import World
from longtail.errors import UserError
from longtail.files.progress import QUIET, Display
from longtail.metrics.confidence import Predictions
from longtail.metrics.scores import Metrics, score_predictions
from longtail.outputs.batches import model_batches
from longtail.outputs.inference import infer
from longtail.outputs.loaders import ImageLoader


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
    """The scores of a network on images; `group_counts` (K,) defines many-, medium- and few-shot classes."""
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
